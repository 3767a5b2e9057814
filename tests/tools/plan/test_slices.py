"""Islands of several slices in `diloco plan`, against arithmetic by hand."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple
from unittest.mock import Mock

import jax
import numpy as np
import pytest

from diloco_jax.settings.islands import IslandsConfig
from diloco_jax.settings.text import parse
from diloco_jax.sim.goodput.bandwidth import GBIT, exchange_bytes, exchange_gbit_per_s
from diloco_jax.sim.goodput.settings import Assumptions
from diloco_jax.tools.budget.memory import gradient_copies, held_elements
from diloco_jax.tools.plan.advice import advise
from diloco_jax.tools.plan.case import Case, case_of
from diloco_jax.tools.plan.forecast import expected_goodput, forecast
from diloco_jax.tools.plan.report import describe
from diloco_jax.tools.plan.slices import slices_rows
from diloco_jax.tools.stage.gates import StageGate, gates
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.island import Island
from diloco_jax.training.parts import PartSteps

SETTINGS: dict[str, Any] = {
    "name": "small",
    "islands": {"count": 2, "devices": 4, "mesh": {"fsdp": 4}, "batch_size": 16, "slices": 4},
    "train": {"seq_len": 32},
    "model": {"args": {"dim": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "mlp_dim": 130,
                       "seq_len_max": 32}},
    "protocol": {"sync_every": 8, "num_fragments": 4, "overlap_steps": 2, "quorum": 1},
}  # fmt: skip
QUIET = Assumptions(step_s=1.0)
pytestmark = pytest.mark.usefixtures("few_failures")


def small(given: Assumptions = QUIET, **islands: Any) -> Case:
    """Return a case of the small config with changed settings of islands."""
    return case_of(parse({**SETTINGS, "islands": {**SETTINGS["islands"], **islands}}, "test"), given)


def rate_for(case: Case, exchange_s: float) -> float:
    """Return the rate in Gbit/s that lets four slices exchange their gradients in this time."""
    return 2 * 3 / 4 * 4 * case.parameters * 8e-9 / exchange_s


def test_a_slice_sends_what_a_ring_all_reduce_sends() -> None:
    # Of 8 numbers each of 2 slices sends half of its part, and half of the mean: 2 x 4 numbers of 4 bytes.
    assert exchange_bytes(8, 2) == 32
    assert exchange_bytes(8, 4) == 2 * 6 * 4
    # A slice that computes both parts sends two chunks and its mean; a slice alone sends nothing.
    assert exchange_bytes(8, 2, parts=2) == 48
    assert exchange_bytes(8, 1, parts=2) == 0


class OneHost(NamedTuple):
    """A sharding as the host with some of its devices finds it."""

    sharding: jax.sharding.NamedSharding
    devices: set[jax.Device]

    def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> dict[jax.Device, Any]:
        """Return the indices of the shards on this host's devices."""
        return {each: index for each, index in self.sharding.devices_indices_map(shape).items() if each in self.devices}


def part_size(blueprint: Blueprint, host: int, hosts: int) -> int:
    """Return the elements that one of several hosts exchanges for each part, as its `PartSteps` counts them."""
    devices = np.array(jax.devices()[: blueprint.mesh.size])
    mesh = jax.sharding.Mesh(devices.reshape(tuple(blueprint.mesh.shape.values())), blueprint.mesh.axis_names)
    own = {*np.split(devices, hosts)[host]}
    tensors = {
        path: SimpleNamespace(shape=leaf.shape, sharding=OneHost(jax.NamedSharding(mesh, leaf.sharding.spec), own))
        for path, leaf in blueprint.tensors.items()
    }
    described = Mock(spec=Blueprint, tensors=tensors, state_shapes=blueprint.state_shapes)
    return PartSteps(Mock(spec=Island, blueprint=described)).size


@pytest.mark.parametrize("mesh", [{"fsdp": 4}, {"data": 2, "fsdp": 2}, {"fsdp": 2, "tensor": 2}])
def test_a_host_exchanges_its_shards_of_the_gradient(mesh: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """With 24 fragments, tensors are cut along sharded axes, so a host holds more of values than of gradients."""
    monkeypatch.setitem(SETTINGS, "protocol", {**SETTINGS["protocol"], "sync_every": 24, "num_fragments": 24})
    for hosts in (2, 4):
        case = small(mesh=mesh, hosts=hosts)
        blueprint = case.kinds[0].outline.blueprint
        elements = max(part_size(blueprint, host, hosts) for host in range(hosts))
        (row,) = slices_rows(case)
        assert row["exchange_bytes"] == 2 * 3 / 4 * 4 * elements
        assert case.kinds[0].outline.needs.host.gradients_between_slices == 6 * 4 * elements
        values = sum(held_elements(blueprint, each, hosts).on_host for each in case.run.fragments)
        assert row["adopted_bytes"] == 4 * values / 24
        assert values > elements or "data" in mesh


def test_steps_and_rates_of_four_slices() -> None:
    case = small()
    (row,) = slices_rows(case)
    assert (row["islands"], row["slices"], row["part_size"]) == (["island-0", "island-1"], 4, 4)
    assert row["exchange_bytes"] == 2 * 3 / 4 * 4 * case.parameters
    assert row["gbit_per_s_needed"] == pytest.approx(rate_for(case, 0.05))
    # Without a rate nothing is added to a step, and nothing is judged.
    assert (row["step_s"], row["exchange_s"], row["step_times"]) == (1.0, 0.0, None)
    # Three slices compute four parts in two turns, or three parts of 12 sequences in one.
    assert row["one_lost"] == {
        "keep": {"step_s": 2.0, "batch_size": 16},
        "shrink": {"step_s": 1.0, "batch_size": 12},
    }
    assert slices_rows(small(slices=1)) == []


def test_a_known_network_makes_steps_longer_and_is_judged() -> None:
    rate = rate_for(small(), 0.1)
    case = small(replace(QUIET, slices_gbit_per_s=rate))
    (row,) = slices_rows(case)
    assert row["step_times"] == pytest.approx(1.1)
    assert case.step_s == pytest.approx(1.1)
    # Three slices: 2 x 2/3 instead of 2 x 3/4 of a gradient.
    assert row["one_lost"]["shrink"]["step_s"] == pytest.approx(1 + 0.1 * (2 / 3) / (3 / 4))
    assert row["one_lost"]["keep"]["step_s"] == pytest.approx(2 + 0.1 * (2 / 3) / (3 / 4))
    result = forecast(case, advise(case))
    assert result["verdict"]["slices_enough"] is False
    # Twice the batch doubles the computation: the exchange takes 0.1 s of 2.1 s, 5 % of the rest.
    assert result["verdict"]["change"]["islands.batch_size"] == 32
    assert "1.10 times" in describe(result)
    fast = small(replace(QUIET, slices_gbit_per_s=2.1 * rate))
    assert forecast(fast, advise(fast))["verdict"]["slices_enough"] is True
    slow = small(replace(QUIET, slices_gbit_per_s=rate / 100))
    assert {each["setting"]: each["value"] for each in advise(slow) if each["change"]}["islands.slices"] == 1


def test_the_verdict_names_the_rate_that_is_not_judged() -> None:
    case = small()
    verdict = forecast(case, advise(case))["verdict"]
    assert verdict["slices_enough"] is None
    assert verdict["slices_need"] == slices_rows(case)[0]["gbit_per_s_needed"]
    alone = small(slices=1)
    assert forecast(alone, advise(alone))["verdict"]["slices_need"] is None


def test_memory_and_chips_of_several_slices() -> None:
    one, four = small(slices=1), small()
    assert (one.chips, four.chips) == (8, 32)
    (before, after) = (case.kinds[0].outline.needs for case in (one, four))
    # Four parts, their mean and sum, and a copy of the parameters and AdamW's two moments, on the slice's only host.
    assert after.host.gradients_between_slices == 6 * 4 * four.parameters
    assert after.host.state_of_a_slice == pytest.approx(3 * 4 * four.parameters, rel=1e-3)
    assert before.host.gradients_between_slices == before.host.state_of_a_slice == 0
    # On each chip, its shard of the mean gradient in float32.
    assert (before.hbm.mean_gradient, after.hbm.mean_gradient) == (0, after.hbm.parameters)


@pytest.mark.parametrize(
    ("slices", "least", "batch", "copies"),
    [
        # A slice alone: all parts, their mean and their sum.
        (4, 1, "keep", 4 + 1 + 1),
        # Two slices: two parts, the mean, and halves of the other two parts and of the sum.
        (4, 2, "keep", 2 + 1 + 3 / 2),
        # One part, the mean, and quarters of the other three parts and of the sum.
        (4, 4, "keep", 3),
        (4, 1, "shrink", 3),
    ],
)
def test_gradients_in_memory_while_slices_are_missing(
    slices: int, least: int, batch: Literal["keep", "shrink"], copies: float
) -> None:
    assert gradient_copies(IslandsConfig(slices=slices, slices_least=least, slices_batch=batch)) == copies


def test_a_lost_slice_costs_a_pause_and_its_share_until_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare goodput with the loss of one failure by hand: pause, and share of a slice for the mean absence."""
    monkeypatch.setattr("diloco_jax.tools.plan.forecast.FAILURES", 2000)
    found = {}
    for way in ("keep", "shrink"):
        case = small(replace(QUIET, chips=1000), slices_batch=way)
        found[way] = 1 - expected_goodput(case, 60.0)["goodput"]
    # A learner of 500 chips loses one of four slices 500 times a year: 3 + 1.2 s of pause, 64.5 s with three.
    rate = 500 / 31_536_000
    assert found["shrink"] == pytest.approx(rate * (4.2 + 0.25 * 67), rel=0.15)
    assert found["keep"] == pytest.approx(rate * (4.2 + 0.5 * 67), rel=0.15)


def test_a_stage_asks_for_the_rate_between_slices() -> None:
    def gate(case: Case) -> StageGate | None:
        found = gates(case, "small", "RUN", 1.0, link_given=False)
        return next((each for each in found if each.name == "slices"), None)

    needed = slices_rows(small())[0]["gbit_per_s_needed"]
    asked = gate(small())
    assert asked is not None and asked.given is None and f"at least {needed:.3g} Gbit/s" in asked.bar
    for rate, passed in ((1.01 * needed, True), (0.99 * needed, False)):
        told = gate(small(replace(QUIET, slices_gbit_per_s=rate)))
        assert told is not None and told.given == (f"{rate:.3g} Gbit/s", passed)
    assert gate(small(slices=1)) is None


def test_the_page_on_slices_computes_as_plan_does() -> None:
    """A billion parameters, four slices, and steps of 5 s."""
    text = " ".join((Path(__file__).parents[3] / "docs" / "slices.md").read_text(encoding="utf-8").split())
    size = exchange_bytes(1e9, 4)
    assert f"these are {size / 1e9:.0f} GB each way" in text
    assert 9 < 5 + size / (10 * GBIT) < 10 and "with 10 Gbit/s a step of 5 seconds takes nearly 10," in text
    assert f"1.05 times its computation needs {exchange_gbit_per_s(1e9, 4, 5.0):.0f} Gbit/s" in text
