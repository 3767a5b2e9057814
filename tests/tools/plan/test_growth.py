"""The islands that the syncer's link serves, the law of loss, and prices island by island."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diloco_jax.core.codec import FORMATS
from diloco_jax.settings.providers import IslandPlace, Provider
from diloco_jax.sim.goodput.bandwidth import Rounds
from diloco_jax.sim.goodput.settings import Assumptions
from diloco_jax.tools.plan.case import Case
from diloco_jax.tools.plan.growth import MANY, SyncerRates, growth
from diloco_jax.tools.plan.law import distance, is_extrapolated
from diloco_jax.tools.plan.prices import prices

# Evaluation losses of the source (arXiv 2503.09799): data parallel, then M = 1, 2, 4, 8.
PUBLISHED = {
    35e6: (3.485, 3.482, 3.508, 3.554, 3.621),
    335e6: (2.784, 2.777, 2.788, 2.808, 2.841),
    2.4e9: (2.326, 2.317, 2.323, 2.332, 2.351),
}


@pytest.mark.parametrize("parameters", PUBLISHED)
def test_the_law_is_near_the_losses_that_it_was_fitted_to(parameters: float) -> None:
    reference, *losses = PUBLISHED[parameters]
    for learners, loss in zip((1, 2, 4, 8), losses, strict=True):
        assert distance(learners, parameters) == pytest.approx(loss / reference - 1, abs=0.0035)


def test_the_law_between_fits_and_outside_of_them() -> None:
    at = {learners: distance(learners, 1e6) for learners in (4, 6, 8, 16)}
    # At 1M parameters the extended fits give 3.3 and 6.1 % (docs/simulate.md).
    assert at[4] == pytest.approx(0.033, abs=5e-4) and at[8] == pytest.approx(0.061, abs=1e-3)
    assert at[6] == pytest.approx(at[4] + 0.585 * (at[8] - at[4]), rel=1e-3)
    assert at[16] == pytest.approx(2 * at[8] - at[4])
    assert is_extrapolated(4, 1e6) and is_extrapolated(16, 1e9) and not is_extrapolated(8, 1e9)


def ten_steps(up: float, down: float) -> Rounds:
    """Return rounds that move these bytes in H = 10 steps of 1 s."""
    return Rounds(
        step_s=1.0,
        sync_every=10,
        num_fragments=10,
        overlap_steps=2,
        up_bytes=up / 10,
        down_bytes=down / 10,
        up_total_bytes=up,
        down_total_bytes=down,
    )


def case(learners: int, up: float, down: float, address: str = "127.0.0.1:0", **assumed: float) -> Case:
    """Return a stand-in for a case whose rounds move `up` and `down` bytes, half as much in each narrower format."""

    def rounds(up_way: str | None = None, down_way: str | None = None) -> Rounds:
        less = 0.5 ** (FORMATS.index(up_way) - FORMATS.index("int4")) if up_way else 1.0
        return ten_steps(up * less, down * less)

    wire, transport = SimpleNamespace(up="int4", down="int4"), SimpleNamespace(address=address)
    found = SimpleNamespace(
        learners=learners,
        rounds=rounds,
        config=SimpleNamespace(wire=wire, transport=transport),
        assumed=Assumptions(**cast("Any", assumed)),
    )
    return cast("Case", found)


def test_most_islands_by_hand() -> None:
    # 1.25e9 bytes in 10 s are 1 Gbit/s up, and half of it down; 70 % of 92 % of 10 Gbit/s are 6.44.
    found = growth(case(4, 1.25e9, 0.625e9, syncer_link_gbit_per_s=10.0))
    assert (found["from_each_gbit_per_s"], found["to_each_gbit_per_s"]) == pytest.approx((1.0, 0.5))
    assert found["share"] == pytest.approx(4 / 9.2) and found["given"]
    assert found["learners_max"] == found["link_learners_max"] == 6 and found["limit"] == "link"
    # 70 % of 4.3 GB/s.
    assert found["process_learners_max"] == 24
    bucket = "a bucket as transport"
    assert found["remedies"] == {bucket: 6, "every H doubled": 12, "int2 both ways": 12, "ternary both ways": 25}
    # Where broadcasts are the larger part, a bucket that stores each once serves more.
    assert growth(case(4, 0.625e9, 1.25e9, syncer_link_gbit_per_s=10.0))["remedies"][bucket] == 12
    stored = growth(case(4, 0.625e9, 1.25e9, "s3://bucket/run", syncer_link_gbit_per_s=10.0))
    assert stored["link_learners_max"] == 12 and bucket not in stored["remedies"]
    # Broadcasts take 1 and contributions 4 x 0.5 Gbit/s.
    assert stored["share"] == pytest.approx(2 / 9.2)
    # The links of sites are the default.
    assert growth(case(4, 1.25e9, 1.25e9, link_gbit_per_s=2.0))["link_learners_max"] == 1


def test_broadcasts_that_alone_overload_the_link_serve_nobody() -> None:
    assert SyncerRates(0.001, 8.0).learners_max(10.0, stored_once=True) == 0
    assert SyncerRates(1e-9, 1e-9).learners_max(10.0) == MANY


def test_prices_by_hand() -> None:
    def place(price: float | None, provider: Provider | None = None) -> IslandPlace:
        return IslandPlace(provider, "H100", "", "spot", "", price)

    places = {"a": place(2.0), "b": place(2.0), "c": place(None, "slurm"), "d": place(0.0, "slurm")}
    config = SimpleNamespace(place=places.get, island=lambda name: SimpleNamespace(zone=""))

    def kind(names: tuple[str, ...], chips: int) -> SimpleNamespace:
        of = SimpleNamespace(names=names, topology=None, chips=chips, island=SimpleNamespace(accelerator="H100"))
        return SimpleNamespace(outline=SimpleNamespace(chips=chips * len(names), kind=of))

    def found(common: float) -> dict[str, Any]:
        kinds, assumed = (kind(("a", "b"), 4), kind(("c", "d"), 8)), Assumptions(price_per_chip_hour=common)
        return prices(cast("Case", SimpleNamespace(kinds=kinds, config=config, assumed=assumed, chips=24)))

    result = found(1.0)
    assert [each["islands"] for each in result["islands"]] == [["a", "b"], ["c"], ["d"]]
    assert [each["per_day"] for each in result["islands"]] == [24 * 8 * 2.0, 24 * 8 * 1.0, 0.0]
    assert result["chips_per_day"] == 24 * (16 + 8)
    assert found(0.0)["islands"][1]["price_per_chip_hour"] is None and found(0.0)["chips_per_day"] == 24 * 16
    places |= dict.fromkeys(places, place(None))
    assert found(0.0) == {}, "nothing has a price"


def test_link_of_the_syncer_counts_if_it_is_given() -> None:
    there = SimpleNamespace(
        learners=4, rounds=lambda: ten_steps(1e9, 1e9), assumed=Assumptions(syncer_link_gbit_per_s=2.0)
    )
    busy = cast("property", Case.syncer_link_busy).fget
    assert busy is not None and busy(there) == pytest.approx(4 * 0.8 / (2 * 0.92))
    there.assumed = replace(there.assumed, syncer_link_gbit_per_s=0.0)
    assert busy(there) == 0.0
