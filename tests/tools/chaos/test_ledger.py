"""The ledger of a chaos run after invented records."""

from pathlib import Path
from typing import Any

import pytest

from diloco_jax.tools.chaos.ledger import SETTLE_S, Ledger, by_kind, judge, table
from diloco_jax.tools.chaos.schedule import ChaosFault

SILENCE_S = 3.0


def fault(kind: str, target: str = "a", duration_s: float = 0.0, number: int = 1) -> ChaosFault:
    return ChaosFault(number=number, kind=kind, target=target, at_step=0, duration_s=duration_s)


class Run:
    """Feeds records to a ledger of the islands a, b and c, who are all well and merged until 10 s."""

    def __init__(self) -> None:
        self.ledger = Ledger(SILENCE_S)
        self.round = 0
        self.steps(9.0, a=1, b=1, c=1)
        self.merged(10.0, "a", "b", "c")

    def steps(self, t: float, **incarnations: int) -> None:
        for name, incarnation in incarnations.items():
            self.feed("step", t, learner=name, incarnation=incarnation)

    def merged(self, t: float, *members: str) -> None:
        self.round += 1
        self.feed("merged", t, global_step=self.round, members=list(members))

    def note(self, t: float, kind: str, *members: str) -> None:
        self.feed(kind, t, members=list(members))

    def feed(self, kind: str, t: float, **fields: Any) -> None:
        self.ledger.feed({"kind": kind, "t": t, **fields})

    def settle(self, t: float) -> None:
        self.note(t + SILENCE_S + 2 * SETTLE_S, "closed")

    def seconds(self) -> float | None:
        return self.ledger.recoveries[0].seconds


def test_killed_island_recovers_when_its_new_incarnation_is_merged() -> None:
    run = Run()
    run.ledger.begin(fault("kill"), "a", 10.0, killed=True)
    # This step was on its way.
    run.steps(10.01, a=1)
    run.merged(10.02, "a", "b", "c")
    assert run.ledger.unwell == {"a"}
    run.merged(12.0, "b", "c")
    run.steps(13.0, a=2)
    run.merged(13.1, "b")
    run.merged(13.5, "a", "b")
    assert run.ledger.unwell == {"a"}, "it may still turn out otherwise"
    run.settle(13.5)
    assert run.ledger.unwell == set() and run.seconds() == 3.5


def test_what_lasts_is_measured_from_its_end() -> None:
    run = Run()
    stop = fault("stop", duration_s=5.0)
    run.ledger.begin(stop, "a", 10.0, killed=False)
    run.steps(11.0, a=1)
    run.merged(11.0, "a")
    run.ledger.end(stop, 15.0)
    run.steps(15.5, a=1)
    run.merged(16.0, "a")
    run.settle(16.0)
    assert run.seconds() == 1.0


def test_a_late_disruption_takes_a_recovery_back() -> None:
    """The corrupted byte left a stream that stands still, which the lease finds."""
    run = Run()
    run.ledger.begin(fault("corrupt"), "a", 10.0, killed=False)
    run.steps(10.1, a=1)
    run.merged(10.2, "a", "b")
    run.merged(10.2 + SILENCE_S, "b")
    run.note(10.3 + SILENCE_S, "silent", "a")
    run.settle(10.9)
    assert run.ledger.unwell == {"a"}
    run.steps(14.0, a=1)
    run.merged(14.1, "a", "b")
    run.settle(14.1)
    assert run.seconds() == pytest.approx(4.1)


def test_syncer_recovers_with_the_next_round_of_anybody() -> None:
    run = Run()
    run.ledger.begin(fault("kill-syncer", "syncer"), "syncer", 10.0, killed=True)
    run.merged(14.0, "c")
    run.settle(14.0)
    assert run.seconds() == 4.0
    assert run.ledger.survivor_gaps_s == [] and run.ledger.longest_pause_s == 0.0, "nobody is to blame for that pause"
    run.merged(16.5, "c")
    assert run.ledger.longest_pause_s == 2.5


def test_survivors_gap_is_between_the_rounds_around_a_death() -> None:
    run = Run()
    run.ledger.begin(fault("kill"), "a", 10.5, killed=True)
    # The record of this merge comes late.
    run.merged(10.25, "a", "b", "c")
    run.merged(11.0, "b", "c")
    run.merged(19.0, "b", "c")
    assert run.ledger.survivor_gaps_s == [0.75]
    assert run.ledger.longest_pause_s == 8.0


def test_who_never_comes_back_is_a_problem(tmp_path: Path) -> None:
    run = Run()
    run.ledger.begin(fault("kill"), "a", 10.0, killed=True)
    run.ledger.begin(fault("cut", "b", number=2), "b", 10.0, killed=False)
    run.steps(11.0, b=1)
    run.merged(11.0, "b")
    run.merged(11.1, "b", "c")
    run.ledger.close()
    samples = {"leased": 4, "merged": 2, "overwritten": 1, "released": 0, "out": 1, "undone": 0, "violations": 1}
    summary = {"complete": True, "goodput": 0.5, "learners": {"b": {"participation": 1.0}}}
    found = samples | {"first_violations": ["position 3 was leased twice"]}
    result = judge(run.ledger, tmp_path, 2, 3, summary, found)
    assert result["problems"] == ["#1 kill: a did not come back", "data: position 3 was leased twice"]
    assert (result["faults"], result["recoveries"], result["recovered"], result["skipped"]) == (2, 2, 1, 3)
    assert result["samples"] == samples
    assert result["rejoin_s"] == {"median": None, "max": None}
    assert result["participation"] == {"b": 1.0}
    text = table(result)
    assert "PROBLEM  #1 kill" in text and "3 more faults did not fit" in text and "b 1.00" in text


def test_two_victims_of_one_fault_count_once_as_a_fault() -> None:
    run = Run()
    both = fault("kill-donor")
    run.ledger.begin(both, "a", 10.0, killed=True)
    run.ledger.begin(both, "b", 11.0, killed=True)
    run.steps(12.0, a=2, b=2)
    run.merged(13.0, "a", "c")
    run.merged(15.0, "b", "c")
    run.settle(15.0)
    counts = {"faults": 1, "recoveries": 2, "recovered": 2, "recovery_s": {"median": 3.5, "max": 4.0}}
    assert by_kind(run.ledger.recoveries) == {"kill-donor": counts}


def test_pace_is_that_of_the_last_seconds() -> None:
    run = Run()
    assert run.ledger.steps_per_s() == 0.0
    for index in range(1, 101):
        run.merged(10.0 + index / 10, "b")
    assert abs(run.ledger.steps_per_s() - 10.0) < 0.3
