"""The auditor repeats exclusions from the evidence on a tape, and knows where it cannot."""

from typing import Any

from diloco_jax.protocol.effects import Contribution, Merge
from diloco_jax.protocol.exclusion import RATES_MIN
from diloco_jax.protocol.releases import STAMP
from diloco_jax.protocol.watch.exclusion_auditor import ExclusionAuditor


class Tape:
    """A tape of rounds of learner a, and the auditor that reads it."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.auditor = ExclusionAuditor(1, self.problems.append)
        self._step = 0

    def round(self, norm: float | None, excluded: bool = False, recorded: bool = True) -> None:
        self._step += 1
        order = Merge(self._step, 0, (Contribution("a", self._step, 1, 64, self._step - 1, 4),))
        self.auditor.take(["tick", 1.0], [order])
        evidence = {"norms": {"a": norm}, "length": 1.0, "elsewhere": 0.0, "outlier_factor": 100.0}
        evidence |= {"overflows": 0, "reasons": {"a": "why"} if excluded else {}}
        line: list[Any] = ["merged", 1.0, self._step, 7, ["a"] if excluded else []]
        self.auditor.take([*line, evidence] if recorded else line, [])

    def settle(self) -> None:
        for _ in range(RATES_MIN):
            self.round(1.0)

    def snapshot(self) -> None:
        self.auditor.take(["snapshot", 1.0, 5, "head"], [])

    def restart(self, loaded: int, *head: str, stamp: tuple[int, str, int] = STAMP) -> None:
        self.auditor.take(["restart", 1.0, [0], [7], loaded, stamp, *head], [])

    def rewind(self, global_step: int, *head: str) -> None:
        self.auditor.take(["rewind", 1.0, global_step, 2, STAMP, *head], [])


def test_decisions_that_the_rule_repeats_are_no_problem() -> None:
    tape = Tape()
    tape.settle()
    tape.round(101.0, excluded=True)
    tape.round(None, excluded=True)
    assert not tape.problems and tape.auditor.repeated == RATES_MIN + 2


def test_a_wrong_decision_is_named() -> None:
    tape = Tape()
    tape.settle()
    tape.round(101.0)
    tape.round(1.0, excluded=True)
    assert tape.problems == [
        "round 9 excluded nobody, but by its norms the rule excludes a",
        "round 10 excluded a, but by its norms the rule excludes nobody",
    ]


def test_a_round_without_evidence_makes_the_history_unknown() -> None:
    tape = Tape()
    tape.settle()
    tape.round(1.0, recorded=False)
    tape.round(101.0)
    assert not tape.problems and tape.auditor.repeated == RATES_MIN
    tape.round(None)
    assert tape.problems == ["round 11 merged the value of a, which holds NaN or infinity"]


def test_a_rewind_goes_back_to_the_history_of_its_snapshot() -> None:
    tape = Tape()
    tape.settle()
    tape.snapshot()
    tape.round(99.0)
    tape.round(99.0)
    tape.rewind(5, "head")
    tape.round(101.0, excluded=True)
    assert not tape.problems, "the two rates of 99 are of a history that the model does not have any more"
    repeated = tape.auditor.repeated
    tape.rewind(5, "of another history")
    tape.round(1e9)
    assert not tape.problems and tape.auditor.repeated == repeated, "nothing is known of that snapshot"


def test_a_restart_forgets_nothing_that_is_usual() -> None:
    """Neither of the rounds after its snapshot, nor without a snapshot."""
    tape = Tape()
    tape.settle()
    tape.snapshot()
    tape.round(99.0)
    tape.round(99.0)
    tape.restart(5, "head")
    tape.round(101.0)
    tape.restart(-1)
    tape.round(1e9, excluded=True)
    assert not tape.problems and tape.auditor.repeated == RATES_MIN + 4


def test_a_restart_of_an_older_release_had_forgotten_the_rounds_after_its_snapshot() -> None:
    tape = Tape()
    tape.settle()
    tape.restart(-1, stamp=(2, "0.3.0", 2))
    tape.round(1e9)
    assert not tape.problems and tape.auditor.repeated == RATES_MIN
