"""Slices, rates of links and methods against exact small numbers, distributions, and what was measured."""

import json
import math
import re
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from diloco_jax.protocol.messages import SyncerMessage
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.goodput.bandwidth import (
    UTILISATIONS,
    Rounds,
    data_parallel_gbit_per_s,
    data_parallel_utilisation,
    ring_factor,
)
from diloco_jax.sim.goodput.hardware import Gap, Hardware, Slices, cluster, goodput, poisson, uptime
from diloco_jax.sim.goodput.methods import METHODS, Cell, Row, Wan, expected, simulate
from diloco_jax.sim.goodput.settings import Assumptions
from diloco_jax.sim.node import Effects, LearnerProcess, Observer
from diloco_jax.sim.scenario import Scenario

HARDWARE = Hardware()
NEVER = Hardware(mtbi_chip_s=math.inf)


@pytest.mark.parametrize(("learners", "chips"), [(1, 2.4e6), (3, 150e3), (8, 2.4e6)])
def test_a_decoupled_learner_never_waits(learners: int, chips: float) -> None:
    """Both draw the same numbers, so they differ by the start, and by what a lost state costs to bring back."""
    ours = simulate(Cell(HARDWARE, "decoupled", learners, chips, hours=2, seed=3))
    fast = expected(Cell(HARDWARE, "decoupled", learners, chips, hours=2, seed=3))
    assert abs(ours.learner_steps - fast.learner_steps) <= learners
    assert ours.goodput == pytest.approx(fast.goodput, abs=0.001)
    assert ours.uptime == pytest.approx(fast.uptime, abs=0.002)


@pytest.mark.parametrize("chips", [300e3, 2.4e6])
def test_a_synchronous_learner_waits_for_the_slowest(chips: float) -> None:
    hardware = replace(HARDWARE, speed_gap=0.2, step_noise=0.05)
    ours = simulate(Cell(hardware, "sync", 4, chips, hours=4, seed=5))
    fast = expected(Cell(hardware, "sync", 4, chips, hours=4, seed=5))
    assert ours.goodput == pytest.approx(fast.goodput, abs=0.01)
    assert abs(ours.rounds - fast.rounds) <= 2
    assert ours.contributors_per_round == 4.0


def test_slices_that_keep_the_batch_take_longer_and_lose_no_part_of_it() -> None:
    hardware = replace(NEVER, step_s=2.0, slices=4, keep_batch=True, down_s=0.0)
    (part,) = cluster(hardware, 1, 4.0, 0)
    part._absent = [math.inf]
    # Three slices compute four parts: two take two turns, and the step is worth a whole one.
    assert part.takes_s() == 4.0
    part.ended(0.0, 4.0)
    assert part.useful_s == 2.0
    (part,) = cluster(replace(hardware, keep_batch=False), 1, 4.0, 0)
    part._absent = [math.inf]
    assert part.takes_s() == 2.0
    part.ended(0.0, 2.0)
    assert part.useful_s == 1.5


def test_without_failures_nothing_is_lost() -> None:
    for method in METHODS:
        row = expected(Cell(NEVER, method, 4, 1e3, hours=1, seed=0, wan=Wan(delay_s=0.0, merge_s=0.0)))
        assert 1.0 - row.goodput < 2 * NEVER.step_s / 3600
    row = simulate(Cell(NEVER, "decoupled", 4, 1e3, hours=1, seed=0))
    assert row.goodput == pytest.approx(1.0, abs=0.002) and row.contributors_per_round == pytest.approx(4.0, abs=0.1)


def test_synchronous_rounds_cost_what_the_wide_area_takes() -> None:
    wan = Wan(delay_s=1.0, merge_s=2.0, fragment_bytes=100.0, bytes_per_s=50.0)
    assert wan.round_s == 4 * 1.0 + 2 * 2.0 + 2.0
    every = replace(ProtocolConfig(), sync_every=10, num_fragments=1)
    row = simulate(Cell(NEVER, "sync", 2, 1e3, hours=2, seed=0, wan=wan, protocol=every))
    assert row.goodput == pytest.approx(46.0 / (46.0 + wan.round_s), abs=0.01)
    waits = replace(every, wait_steps=0.5)
    assert simulate(Cell(NEVER, "sync", 2, 1e3, hours=2, seed=0, wan=wan, protocol=waits)) == row


def test_equal_shares_of_a_cluster_have_equal_goodput() -> None:
    """The paper's rule of thumb: goodput(M, N) is about goodput(kM, kN); slices too must be k times as many."""
    few = expected(Cell(replace(HARDWARE, slices=24), "decoupled", 2, 300e3, hours=48, seed=1))
    many = expected(Cell(replace(HARDWARE, slices=96), "decoupled", 8, 1.2e6, hours=48, seed=1))
    assert few.goodput == pytest.approx(many.goodput, abs=0.01)


def test_a_learner_that_loses_its_last_slice_comes_back_with_the_state_of_another() -> None:
    fragile = replace(HARDWARE, slices=4)
    row = simulate(Cell(fragile, "decoupled", 4, 1.2e6, hours=2, seed=2))
    fast = expected(Cell(fragile, "decoupled", 4, 1.2e6, hours=2, seed=2))
    assert row.goodput == pytest.approx(fast.goodput, abs=0.05)
    assert row.goodput < fast.goodput, "to bring a state back takes time"


def test_what_came_during_a_stall_is_taken_before_the_next_step() -> None:
    class Watch(Observer):
        steps = came = 0

        def on_step(self, process: LearnerProcess, began: bool, now_s: float) -> None:
            assert not (began and process.mailbox), f"{process.name} begins a step at {now_s} s, and mail waits"
            self.steps += began

        def on_learner(
            self, process: LearnerProcess, given: SyncerMessage | None, effects: Effects, now_s: float
        ) -> None:
            self.came += given is not None and process.loading

    scenario = Scenario(learners=3, total_steps=300, step_s=HARDWARE.step_s)
    paces = dict(zip(scenario.names, cluster(HARDWARE, 3, 1.2e6, 0), strict=True))
    run, watch = Cluster(scenario, taped=False, paces=paces), Watch()
    run.watch(watch)
    run.run(3600.0)
    assert watch.steps > 600 and watch.came > 0


def test_equal_seeds_give_equal_rows_and_others_do_not() -> None:
    def row(seed: int) -> Row:
        return simulate(Cell(HARDWARE, "decoupled", 4, 1.2e6, hours=0.25, seed=seed))

    assert row(7) == row(7) != row(8)


def test_tapes_of_a_run_end_and_say_what_happened(tmp_path: Path) -> None:
    fragile = replace(HARDWARE, slices=8)
    row = simulate(Cell(fragile, "decoupled", 4, 2.4e6, hours=0.1, seed=0, tapes=tmp_path))
    scenario = json.loads((tmp_path / "scenario.json").read_text())
    assert scenario["learners"] == 4 and scenario["total_steps"] == int(360 / HARDWARE.step_s) == row.rounds
    tapes = sorted(path.name for path in (tmp_path / "tapes").iterdir())
    assert len(tapes) > 4, "somebody lost all slices"
    assert 0.3 < row.goodput < 0.9


class Scripted(Random):
    """Random source with scripted numbers."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.values = list(values)

    def random(self) -> float:
        return self.values.pop(0)


def half_back(hardware: Hardware) -> float:
    """The median time until a slice is back, from the inverse written out."""
    return hardware.return_scale_s * (-math.log(1 - 0.5 ** (1 / hardware.return_a))) ** (1 / hardware.return_c)


def test_one_failure_takes_a_slice_a_stall_a_return_and_another_stall() -> None:
    hardware = Hardware(step_s=10.0, down_s=3.0, up_s=5.0, mtbi_chip_s=1000.0)
    # Expected failures in a step of all 100 chips.
    mean = 100 * 10 / 1000.0
    # It is below P(0) + P(1) = 2 exp(-1) and above P(0) = exp(-1).
    one = math.exp(-mean) * 1.5
    # It is below exp(-0.75), P(0) of the 75 chips that are left, and above exp(-1).
    none = 0.42
    part = Slices(hardware, 100, 4, Scripted(one, 0.5, none))
    assert part.begins_s(0.0) == 0.0
    part.ended(0.0, 10.0)
    assert part.useful_s == 10.0 and not part.lost
    assert part.begins_s(10.0) == 13.0, "it stands still for down_s"
    part.ended(13.0, 23.0)
    assert part.useful_s == pytest.approx(10.0 + 7.5), "three of four slices"
    back_s = 10.0 + half_back(hardware)
    assert part.begins_s(23.0) == 23.0 < back_s
    assert part.begins_s(back_s + 1.0) == pytest.approx(back_s + 1.0 + 5.0), "up_s, between two steps"
    assert part.begins_s(back_s + 7.0) == pytest.approx(back_s + 7.0), "once"
    part.finish(100.0)
    assert part.gaps == [Gap(10.0, 13.0), Gap(23.0, 100.0)]


def test_a_rigid_learner_waits_for_the_last_slice() -> None:
    hardware = Hardware(step_s=10.0, down_s=3.0, up_s=5.0, mtbi_chip_s=1000.0)
    # It is between P(0) + P(1) and P(0) + P(1) + P(2).
    two = math.exp(-1.0) * 2.2
    part = Slices(hardware, 100, 4, Scripted(two, 0.1, 0.9), elastic=False)
    part.ended(0.0, 10.0)
    last_s = 10.0 + hardware.return_s(0.9)
    assert last_s > 13.0
    assert part.begins_s(10.0) == pytest.approx(last_s + 5.0)


def test_a_learner_without_slices_is_lost_and_waits_for_the_first() -> None:
    hardware = Hardware(step_s=10.0, up_s=5.0, mtbi_chip_s=1.0)
    part = Slices(hardware, 1e4, 2, Random(0))
    part.ended(0.0, 10.0)
    assert part.lost
    assert part.begins_s(10.0) > 15.0
    assert not part.lost


def test_the_return_time_has_the_distribution_that_it_says() -> None:
    hardware = Hardware(return_a=2.0, return_c=1.3, return_scale_s=40.0)
    random = Random(1)
    drawn = [hardware.return_s(random.random()) for _ in range(20_000)]
    for at_s in (10.0, 40.0, 90.0):
        share = sum(each <= at_s for each in drawn) / len(drawn)
        assert share == pytest.approx((1 - math.exp(-((at_s / 40.0) ** 1.3))) ** 2.0, abs=0.01)
    assert hardware.return_s(0.0) == 0.0


@pytest.mark.parametrize("mean", [0.02, 0.8, 30.0, 2000.0])
def test_poisson_has_its_mean_and_its_variance(mean: float) -> None:
    random = Random(2)
    drawn = [poisson(random, mean, 10**9) for _ in range(20_000)]
    assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.1 if mean < 0.1 else 0.03)
    assert statistics.pvariance(drawn) == pytest.approx(mean, rel=0.1)
    assert max(poisson(random, mean, 3) for _ in range(1000)) <= 3


def test_a_step_takes_as_long_as_its_slowest_chip() -> None:
    """The mean of the largest of 100 standard normals is 2.5076 (tables of normal order statistics)."""
    part = Slices(Hardware(step_s=1.0, chip_noise=0.1), 100, 4, Random(3))
    drawn = [part.takes_s() for _ in range(20_000)]
    assert statistics.fmean(drawn) == pytest.approx(1.25076, abs=0.002)
    many = Slices(Hardware(step_s=1.0, chip_noise=0.1), 2.4e6, 4, Random(3))
    assert 1.4 < statistics.fmean(many.takes_s() for _ in range(1000)) < 1.6, "5.1 standard deviations"


def test_generations_split_the_learners_and_the_gap_is_the_slowest() -> None:
    two, all_different = Hardware(speed_gap=0.18), Hardware(speed_gap=0.18, generations=99)
    assert [two.slowdown(m, 8) for m in range(8)] == [1.0] * 4 + [1.18] * 4
    assert [all_different.slowdown(m, 3) for m in range(3)] == pytest.approx([1.0, 1.09, 1.18])
    assert Hardware(speed_gap=0.18).slowdown(0, 1) == 1.0


def test_slices_and_chips_are_all_given_out() -> None:
    parts = cluster(Hardware(slices=10), 4, 1000, 0)
    assert [part.chips for part in parts] == [200, 300, 200, 300]
    assert sum(part.chips for part in parts) == 1000


def test_uptime_counts_the_time_in_which_anybody_steps() -> None:
    parts = cluster(NEVER, 2, 1e3, 0)
    parts[0].gaps, parts[1].gaps = [Gap(0, 3), Gap(5, 9)], [Gap(2, 4), Gap(6, 7), Gap(8, 20)]
    assert uptime(parts, 20.0) == pytest.approx(1 - (1 + 1 + 1) / 20)
    parts[0].useful_s, parts[1].useful_s = 10.0, 5.0
    assert goodput(parts, 20.0) == pytest.approx(15 / 40)


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
    # A step until reports are in, 1.5 round trips, the merge, and a Gbit up and down. A copy waits half a step less.
    own = rounds(round_trip_s=0.1, merge_s=0.25)
    assert own.round_s(4.0) == pytest.approx(1.0 + 0.15 + 0.25 + 0.5)
    assert own.age_s(4.0) == pytest.approx(0.5 + 0.15 + 0.25 + 0.5)
    assert own.planned_gbit_per_s == pytest.approx(1.0)
    assert own.utilisation(4.0) == 1.0
    # A version takes a second, and gamma of the time between two rounds is for it; so rounds are open for longer.
    assert rounds().utilisation(1.0) == pytest.approx(0.9)
    assert rounds().round_s(1.0) == pytest.approx(1 / 0.9 + 2.0)
    # A round trip is the way of a version and of the report about it, at any rate and with any overlap.
    assert rounds(round_trip_s=1.8, overlap_steps=9).utilisation(1e9) == pytest.approx(0.5)
    # Two rounds are in flight until they are merged, for 8 s each.
    assert rounds(merge_s=7.0).utilisation(1.0) == pytest.approx(2 / 8)
    # The link carries no more than this.
    assert rounds(overlap_steps=9, down_bytes=MB).utilisation(0.5) == pytest.approx(0.5)
    late = rounds(overlap_steps=99, merge_s=20.0)
    assert late.utilisation(1e9) == pytest.approx(late.sync_every / 20), "never two rounds of a fragment at once"
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
    # A version and the report about it take 1 of 0.9 steps, and a copy 0.5 + 1.5 of 2 steps.
    slow = rounds(round_trip_s=1.0)
    assert slow.gbit_per_s(1.0) == math.inf
    assert slow.utilisation(slow.gbit_per_s(0.85)) == pytest.approx(0.85)
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
        assert own.utilisation(times * own.planned_gbit_per_s) == pytest.approx(measured, abs=0.06)


def assumed(**changes: Any) -> Callable[[], object]:
    return lambda: Assumptions(**changes)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: expected(Cell(HARDWARE, "gossip", 2, 1e6, hours=1, seed=0)), "'gossip' is unknown; choose from rigid"),
        (lambda: simulate(Cell(HARDWARE, "decoupled", 2, 1e6, hours=0, seed=0)), "0 hours"),
        (lambda: Wan(delay_s=-1), "--wan.delay-s is -1"),
        (lambda: Hardware(slices=-1), "--hardware.slices is -1"),
        (lambda: Hardware(down_s=-1), "--hardware.down-s is -1"),
        (lambda: Hardware(generations=-1), "--hardware.generations is -1"),
        (assumed(link_gbit_per_s=0.0), "--link-gbit-per-s is 0.0; use a number above 0"),
        (assumed(round_trip_ms=-1.0), "--round-trip-ms is -1.0; use a number of at least 0"),
        (assumed(price_per_egress_gb=math.inf), "--price-per-egress-gb is inf"),
        (assumed(mfu=1.5), "--mfu is 1.5; use a share"),
        (assumed(sites=1), "use at least 2"),
        *((lambda share=share: rounds().gbit_per_s(share), "above 0 and at most 1") for share in (0.0, -1.0, math.nan)),
        *((lambda share=share: data_parallel_gbit_per_s(1, 1, 2, share), "above 0 and") for share in (1.01, math.nan)),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        call()
