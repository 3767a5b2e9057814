"""Tests of single contributions: who is tested, who judges, what a judge gets, and when there is an alarm."""

from dataclasses import dataclass, field
from math import inf, nan
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from diloco_jax.protocol.effects import Contribution, Merge
from diloco_jax.protocol.messages import WITHOUT, Evaluate, EvaluateWithout, Hello, Metric, Score
from diloco_jax.runtime.model.global_model import Subtracted
from diloco_jax.runtime.syncer.subtraction import HARM_MIN, LOSSES_MIN, Subtraction

CHANGE = np.array([0.5, -1.0], np.float32)
EVERYBODY = "abc"
# Evaluations are due from this step on, and rounds are two steps in flight.
DUE = 10


@dataclass
class Evaluations:
    """What is asked of the machine's evaluations."""

    asked: list[str]
    open: bool = False

    def due(self, global_step: int) -> bool:
        return global_step >= DUE and not self.open

    def next_asked(self) -> list[str]:
        return self.asked


@dataclass
class Run:
    """A machine with three learners, and the tests of their contributions."""

    asked: list[str] = field(default_factory=lambda: ["a"])
    corpora: dict[str, str] = field(default_factory=dict)
    on: bool = True

    def __post_init__(self) -> None:
        members = {name: SimpleNamespace(corpus=self.corpora.get(name, "")) for name in EVERYBODY}
        known = dict.fromkeys(self.corpora.values()) or {"": None}
        self.machine = SimpleNamespace(
            evaluations=Evaluations(self.asked),
            config=SimpleNamespace(overlap_steps=2),
            progress=SimpleNamespace(global_step=0),
            membership=SimpleNamespace(members=members, corpora=SimpleNamespace(known=known)),
        )
        self.tests = Subtraction(self.on, cast(Any, self.machine))
        for name in EVERYBODY:
            self.tests.on_message(Hello(name, 1, (), (), (), 0, 1, 0, judges=True))

    def tested(self, name: str, *losses: tuple[float, float], total: float = 2.0) -> dict[str, float]:
        """Test a learner; each other one answers with the losses with and without it. Returns the scores by name."""
        self.tests.on_merged(Subtracted(name, 1, CHANGE))
        scores: list[Metric] = []
        judges = [each for each in EVERYBODY if each != name]
        for number, (judge, (loss, without)) in enumerate(zip(judges, losses, strict=False)):
            assert self.tests.request(judge, Evaluate(number, ()))[0] == EvaluateWithout(number, 1, 8)
            answer = score(judge, number, loss, Metric(WITHOUT, without))
            self.tests.on_message(answer)
            of = self.corpora.get(judge, "")
            scores += [Metric(f"{of} loss", loss)] * bool(of) + [Metric(f"{of} {WITHOUT}" if of else WITHOUT, without)]
        return dict(self.tests.on_score(score("a", 0, total, *scores, Metric("size", 3.0))).scores)

    def alarms(self, active: str = EVERYBODY) -> list[str]:
        return [f"{alarm.kind} {alarm.who}: {alarm.text}" for alarm in self.tests.alarms(active)]


def order(step: int, names: str = EVERYBODY) -> Merge:
    return Merge(step, 1, tuple(Contribution(name, step, 1, 64, 0, 4) for name in names))


def score(name: str, number: int, loss: float, *scores: Metric) -> Score:
    return Score(name, 1, number, 1, (), loss, nan, 64, scores, 0.5, "")


def test_each_learner_is_tested_in_turn_and_the_only_judge_if_nobody_else_can_be() -> None:
    run, chosen = Run(["b"]), []
    for step in range(DUE, DUE + 4):
        chosen.append(run.tests.choose(order(step)))
        run.tested(chosen[-1], (2.0, 2.0))
    assert chosen == ["a", "c", "a", "c"]
    run = Run([*EVERYBODY])
    assert run.tests.choose(order(DUE)) == "a", "somebody else judges it"
    assert run.tests.choose(order(DUE)) == "a", "the first was not tested"
    assert run.tests.choose(order(DUE, "a")) == "", "one contribution has nothing to be compared with"
    assert Run(on=False).tests.choose(order(DUE)) == ""


def test_a_merge_is_asked_if_an_evaluation_may_follow_it() -> None:
    run = Run()
    assert [step for step in range(1, DUE + 1) if run.tests.choose(order(step))] == [DUE - 1, DUE]
    run.machine.progress.global_step = DUE - 1
    assert run.tests.choose(order(DUE - 3)), "more rounds may close while it is merged"
    run.machine.evaluations.open = True
    assert run.tests.choose(order(DUE)) == ""


def test_the_judge_gets_the_change_once_and_without_the_name() -> None:
    run = Run()
    tests = run.tests
    assert tests.request("a", Evaluate(4, ())) == (Evaluate(4, ()), b"")
    tests.on_merged(Subtracted("c", 1, CHANGE))
    message, payload = tests.request("a", Evaluate(5, ()))
    assert message == EvaluateWithout(5, 1, 8) and bytes(payload) == CHANGE.tobytes()
    assert tests.request("a", Evaluate(5, ())) == (None, b""), "a repetition"
    assert tests.request("c", Evaluate(6, ())) == (Evaluate(6, ()), b""), "nobody judges for himself"
    assert tests.request("b", Evaluate(8, (1, 1)))[0] == Evaluate(8, (1, 1)), "the final model"
    tests.on_message(Hello("b", 2, (), (), (), 0, 1, 0))
    assert tests.request("b", Evaluate(7, ()))[0] == Evaluate(7, ()), "it does not know the message"


def test_what_an_evaluation_tests_stays_the_same_while_it_lasts() -> None:
    run = Run()
    run.tests.on_merged(Subtracted("c", 1, CHANGE))
    run.tests.request("a", Evaluate(5, ()))
    run.machine.evaluations.open = True
    run.tests.on_merged(Subtracted("b", 0, CHANGE))
    assert run.tests.request("b", Evaluate(6, ()))[0] == EvaluateWithout(6, 1, 8), "a is lost, so another one is asked"
    run.tests.on_message(score("b", 6, 2.0, Metric(WITHOUT, 2.5)))
    assert run.tests.on_score(score("b", 6, 2.0, Metric(WITHOUT, 2.5))).scores == (Metric("gain of c", 0.5),)


def test_what_no_evaluation_tested_is_dropped() -> None:
    run = Run()
    run.tests.on_merged(Subtracted("c", 1, CHANGE))
    run.tests.on_merged(None)
    assert run.tests.request("a", Evaluate(5, ()))[0] == Evaluate(5, ())


@pytest.mark.parametrize(
    ("losses", "gains"),
    [
        ([(2.0, 2.25)], {"gain of c": 0.25}),
        ([(2.0, 1.75)], {"gain of c": -0.25}),
        ([(2.0, nan)], {}),
        ([(2.0, inf)], {}),
        ([(0.0, 1.7e308)], {}),
        ([], {}),
    ],
)
def test_the_gain_is_how_much_worse_the_model_is_without_the_contribution(
    losses: list[tuple[float, float]], gains: dict[str, float]
) -> None:
    run = Run()
    assert run.tested("c", *losses) == gains | {"size": 3.0}
    assert run.tests.on_score(score("a", 1, 2.0, Metric(WITHOUT, 9.0))).scores == (Metric(WITHOUT, 9.0),), "a user's"


def test_each_corpus_has_a_gain_and_a_judge_speaks_only_for_its_own() -> None:
    run = Run(corpora={"a": "x", "b": "y", "c": "z"})
    found = run.tested("c", (1.0, 1.5), (2.0, 2.0))
    assert found["gain of c"] == 0.25 and found["x gain of c"] == 0.5 and found["y gain of c"] == 0.0
    assert not [name for name in found if name.endswith(WITHOUT)]
    run.tests.on_merged(Subtracted("c", 1, CHANGE))
    run.tests.request("a", Evaluate(1, ()))
    for liar, number in (("c", 1), ("c", 2), ("b", 1)):
        run.tests.on_message(score(liar, number, 1.0, Metric(WITHOUT, 9.0)))
    assert run.tests.on_score(score("a", 1, 1.0, Metric("x loss", 1.0))).scores == (Metric("x loss", 1.0),)


def test_losses_in_a_row_are_an_alarm_and_a_gain_ends_it() -> None:
    run = Run()

    def tested(without: float, name: str = "c") -> list[str]:
        run.tested(name, (2.0, without))
        return run.alarms()

    assert tested(1.0, "b") == [] and [tested(1.5) for _ in range(LOSSES_MIN - 1)] == [[]] * (LOSSES_MIN - 1)
    (alarm,) = tested(1.5)
    assert alarm.startswith("harm c: ") and "by 25.00% on average" in alarm
    assert run.alarms("ab") == [], "it was banned"
    assert len(tested(1.0, "b")) == 1 and tested(2.5) == []


def test_small_losses_in_a_row_are_no_alarm() -> None:
    run = Run()
    for _ in range(LOSSES_MIN):
        run.tested("c", (2.0, 2.0 - 1.9 * HARM_MIN))
    assert not run.alarms()
    run.tested("c", (2.0, 2.0 - 10 * HARM_MIN))
    assert run.alarms()


def test_one_corpus_that_gains_is_enough_against_the_alarm() -> None:
    run = Run(corpora={"a": "x", "b": "y", "c": "z"})
    for _ in range(LOSSES_MIN):
        run.tested("c", (1.0, 0.5), (2.0, 2.1))
    assert not run.alarms()
