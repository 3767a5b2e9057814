"""The protocol's machines against the model without them, and both against numbers that are known."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from diloco_jax.protocol.messages import SyncerMessage
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.goodput.hardware import Hardware, cluster
from diloco_jax.sim.goodput.methods import METHODS, Cell, Row, Wan, expected, simulate
from diloco_jax.sim.node import Effects, LearnerProcess, Observer
from diloco_jax.sim.scenario import Scenario

HARDWARE = Hardware()
NEVER = Hardware(mtbi_chip_s=math.inf)


@pytest.mark.parametrize("learners", [1, 3, 8])
@pytest.mark.parametrize("chips", [150e3, 2.4e6])
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
    row = simulate(Cell(NEVER, "sync", 2, 1e3, hours=4, seed=0, wan=wan, protocol=every))
    assert row.goodput == pytest.approx(46.0 / (46.0 + wan.round_s), abs=0.01)


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
        return simulate(Cell(HARDWARE, "decoupled", 4, 1.2e6, hours=1, seed=seed))

    assert row(7) == row(7) != row(8)


def test_tapes_of_a_run_end_and_say_what_happened(tmp_path: Path) -> None:
    fragile = replace(HARDWARE, slices=8)
    row = simulate(Cell(fragile, "decoupled", 4, 2.4e6, hours=0.1, seed=0, tapes=tmp_path))
    scenario = json.loads((tmp_path / "scenario.json").read_text())
    assert scenario["learners"] == 4 and scenario["total_steps"] == int(360 / HARDWARE.step_s) == row.rounds
    lives = sorted(path.name for path in (tmp_path / "tapes").iterdir())
    assert len(lives) > 4, "somebody lost all slices"
    assert 0.3 < row.goodput < 0.9


def test_what_cannot_be_simulated_is_refused() -> None:
    with pytest.raises(ValueError, match="the method 'gossip' is unknown; choose from rigid"):
        expected(Cell(HARDWARE, "gossip", 2, 1e6, hours=1, seed=0))
    with pytest.raises(ValueError, match="0 hours"):
        simulate(Cell(HARDWARE, "decoupled", 2, 1e6, hours=0, seed=0))
    with pytest.raises(ValueError, match=r"--wan\.delay-s is -1"):
        Wan(delay_s=-1)
