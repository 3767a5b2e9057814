"""Rates that links need: the formulas against references of a few lines, and against what was measured."""

from __future__ import annotations

import math
from typing import Any

import pytest

from diloco_jax.sim.goodput.assumptions import Assumptions
from diloco_jax.sim.goodput.bandwidth import (
    UTILISATIONS,
    Rounds,
    data_parallel_gbit_per_s,
    data_parallel_utilisation,
    ring_factor,
)

MB = 1e6


def rounds(**changes: Any) -> Rounds:
    """Fragments of 125 MB, a Gbit, in each direction; one due in every step of 1 s."""
    sizes = {"up_bytes": 125 * MB, "down_bytes": 125 * MB, "up_total_bytes": 500 * MB, "down_total_bytes": 500 * MB}
    schedule = {"step_s": 1.0, "sync_every": 4, "num_fragments": 4, "overlap_steps": 2}
    return Rounds(**{**schedule, **sizes, **changes})


def test_data_parallel_by_hand() -> None:
    assert [ring_factor(n) for n in (1, 2, 8)] == [0, 1, 1.75]
    # 1 s of compute at 50 %: 2 s in all, 1/3 s before the backward pass, so 5/3 s for 10 Gbit
    assert data_parallel_gbit_per_s(1250 * MB, 1.0, 2, 0.5) == pytest.approx(6.0)
    # all of it hidden: 2/3 s
    assert data_parallel_gbit_per_s(1250 * MB, 1.0, 2, 1.0) == pytest.approx(15.0)
    assert data_parallel_utilisation(1250 * MB, 1.0, 2, 6.0) == pytest.approx(0.5)
    assert data_parallel_utilisation(1250 * MB, 1.0, 2, 1000.0) == pytest.approx(1.0)


def test_a_round_by_hand() -> None:
    # half a step until reports are in, 1.5 round trips, the merge, and a Gbit up and down
    own = rounds(round_trip_s=0.1, merge_s=0.25)
    assert own.round_s(4.0) == pytest.approx(0.5 + 0.15 + 0.25 + 0.5)
    assert own.planned_gbit_per_s == pytest.approx(1.0)
    assert own.utilisation(4.0) == 1.0
    assert rounds().utilisation(1.0) == pytest.approx(2 / 2.5)  # two in flight, for 2.5 s each
    assert rounds(overlap_steps=9).utilisation(0.5) == pytest.approx(0.5)  # the link carries no more
    late = rounds(overlap_steps=99, round_trip_s=20.0)
    assert late.utilisation(1e9) == pytest.approx(late.sync_every / 30.5), "never two rounds of a fragment at once"
    assert late.utilisation(late.gbit_per_s(0.1)) == pytest.approx(0.1)
    assert rounds(up_total_bytes=250 * MB).planned_gbit_per_s == pytest.approx(1.0)  # the busier direction


@pytest.mark.parametrize("changes", [{}, {"overlap_steps": 0, "num_fragments": 1}, {"overlap_steps": 3}])
@pytest.mark.parametrize("share", UTILISATIONS)
def test_rate_and_utilisation_are_inverse(changes: dict[str, Any], share: float) -> None:
    own = rounds(round_trip_s=0.02, merge_s=0.01, **changes)
    assert own.utilisation(own.gbit_per_s(share)) == pytest.approx(share)
    assert own.utilisation(0.99 * own.gbit_per_s(share)) < share


def test_lockstep_waits() -> None:
    own = rounds(overlap_steps=0, num_fragments=1, sync_every=8)
    # 8 s of steps, then a round of 2 s; nobody reports half a step late
    assert own.utilisation(1.0) == pytest.approx(0.8)


def test_no_rate_is_enough_where_waiting_alone_takes_too_long() -> None:
    slow = rounds(round_trip_s=1.0)  # 0.5 + 1.5 of 2 steps
    assert slow.gbit_per_s(1.0) == math.inf
    assert slow.overlap_needed(math.inf) == 2 and slow.overlap_needed(1.0) == 4
    assert rounds().overlap_needed(math.inf) == 1
    assert rounds(round_trip_s=0.4).overlap_needed(math.inf) == 2


def test_rounds_over_measured_links() -> None:
    """docs/log.md, 2026-11-21, `wan utilisation`: rounds per inner step at multiples of the planned rate."""
    fragment = 0.90e6 / 8 * 0.2
    own = rounds(
        step_s=0.2,
        sync_every=24,
        num_fragments=24,
        **{f"{way}_bytes": fragment for way in ("up", "down")},
        **{f"{way}_total_bytes": 24 * fragment for way in ("up", "down")},
    )
    assert own.planned_gbit_per_s == pytest.approx(0.9e-3)
    for times, measured in ((50, 1.01), (5, 1.01), (2, 1.0), (1.33, 1.05), (1, 0.90)):
        assert own.utilisation(times * own.planned_gbit_per_s) == pytest.approx(measured, abs=0.11)
    assert own.gbit_per_s(1.0) == pytest.approx(1.20e-3, rel=0.01)  # "one round within tau steps 1.20 Mbit/s"


def test_shares_that_make_no_sense() -> None:
    for share in (0.0, -1.0, 1.01, math.nan):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            rounds().gbit_per_s(share)
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            data_parallel_gbit_per_s(1.0, 1.0, 2, share)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("link_gbit_per_s", 0.0, "--link-gbit-per-s is 0.0; use a number above 0"),
        ("round_trip_ms", -1.0, "--round-trip-ms is -1.0; use a number of at least 0"),
        ("price_per_egress_gb", math.inf, "--price-per-egress-gb is inf"),
        ("mfu", 1.5, "--mfu is 1.5; use a share"),
        ("sites", 1, "use at least 2"),
    ],
)
def test_assumptions_that_make_no_sense(name: str, value: float, words: str) -> None:
    changes: dict[str, Any] = {name: value}
    with pytest.raises(ValueError) as error:
        Assumptions(**changes)
    assert words in str(error.value)
