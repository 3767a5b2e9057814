"""Evaluations of the global model: when they are due, which learner is asked, and what becomes of its answer.

    due, or every round done --ask--> asked --Score--> Evaluated
                               ^        |
                               +--------+  its score is of no use, it is gone, or too slow: another learner

One is asked at a time, and at most ATTEMPTS_MAX for one evaluation. Of those that keep up, whose turn it is: the one
that was asked least often, then the one that is ahead.

At the end of the run one learner stays to evaluate the final model, and all others are told to stop. If it dies, the
next that greets is asked, mostly itself in its next life; without anybody the run ends unevaluated.
"""

from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any, NamedTuple

from diloco_jax.protocol.effects import Drop, Effect, Evaluated, Finish, Send
from diloco_jax.protocol.member import ACTIVE, Member
from diloco_jax.protocol.membership import Membership
from diloco_jax.protocol.messages import SCORE_LENGTH_MAX, SCORES_MAX, Evaluate, Score, Stop
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.downstream import Downstream
from diloco_jax.protocol.syncer.progress import Progress

ATTEMPTS_MAX = 3
NAMED_MAX = 200  # characters of a learner's reason


class EvaluationPlan(NamedTuple):
    """The times of a run's evaluations."""

    wait_s: float = 0.0  # for one learner's answer, before another is asked; 0: the model is not evaluated
    every: int = 0  # global steps between two; 0: at the end only


NEVER = EvaluationPlan()


@dataclass(slots=True)
class Evaluations:
    """The evaluation that is under way, and whose turn is next."""

    plan: EvaluationPlan
    config: ProtocolConfig
    progress: Progress
    membership: Membership
    downstream: Downstream  # the versions that the final model has
    number: int = 0  # of the newest request
    next_step: int = field(init=False)
    open: bool = False  # an evaluation is under way
    asked: str = ""  # who is to answer; "" while nobody is there
    attempts: int = 0
    passed: list[str] = field(default_factory=list)  # not to be asked in this evaluation: failed, or told to stop
    turns: dict[str, int] = field(default_factory=dict)  # how often each was asked
    reason: str = ""  # why the newest attempt failed; "" if it did not
    asked_s: float = 0.0
    until_s: float = inf  # when to wait no longer
    resend_s: float = inf
    resend_wait_s: float = 0.0

    def __post_init__(self) -> None:
        self.next_step = self.plan.every

    @property
    def final(self) -> bool:
        """True while the final model is being evaluated."""
        return self.open and self.progress.finished

    def on_merged(self, effects: list[Effect], now_s: float) -> None:
        """A round has ended: ask somebody if it is time."""
        step, every = self.progress.global_step, self.plan.every
        if not every or step < self.next_step or self.open or self.progress.finished:
            return
        self._open()
        self.open = self._ask(effects, now_s)
        if self.open:
            self.next_step = (step // every + 1) * every

    def conclude(self, effects: list[Effect], now_s: float) -> None:
        """Every round is done: have the final model evaluated, if anybody can, and let all others stop."""
        effects.append(self.progress.note("finished", -1, (), "run complete"))
        busy = [self.asked] if self.open else []
        self._open()
        if not (self.plan.wait_s and any(m.evaluates for m in self.membership.members.values())):
            return self._stop(effects)
        self.open = True
        self.until_s = now_s + self.plan.wait_s
        if not self._ask(effects, now_s, busy):
            self.reason = "no learner was connected"
        for member in self.membership.connected():
            if member.learner_id != self.asked:
                self.passed.append(member.learner_id)
                effects += self.stop(member.learner_id)
        return None

    def stop(self, learner_id: str) -> list[Effect]:
        """Tell a learner that the run is complete, unless it is to evaluate the final model."""
        if learner_id == self.asked:
            return []
        return [Send(learner_id, Stop(self.progress.global_step, "run complete"))]

    def on_hello(self, member: Member, now_s: float) -> list[Effect]:
        """A learner greets when every round is done: it may be the one that is missing."""
        name, effects = member.learner_id, list[Effect]()
        if self.open and name == self.asked:
            return [self._request(name)]
        if not self.open or self.asked or not member.evaluates or self.attempts >= ATTEMPTS_MAX:
            return self.stop(name)
        self._ask_one(name, effects, now_s)
        return effects

    def on_score(self, score: Score, now_s: float) -> list[Effect]:
        """A learner answers."""
        name, effects = score.learner_id, list[Effect]()
        if not self.open or (name, score.number) != (self.asked, self.number):
            return [Drop(name, f"score {score.number} came late or was not asked for")]
        problem = self._problem(score)
        if problem:
            self._fail(f"{name}: {problem}", effects, now_s, gone=False)
        else:
            effects.append(Evaluated(score))
            self._close("", effects)
        return effects

    def _problem(self, score: Score) -> str:
        """Say what is wrong with a score; "" if nothing is."""
        versions, names = tuple(self.downstream.versions), [name for name, _ in score.scores]
        if not isfinite(score.loss):
            return score.reason[:NAMED_MAX] or "its loss is not finite"
        if len(score.versions) != len(versions) or (self.progress.finished and score.versions != versions):
            return "it holds other versions than the final ones"
        if score.tokens < 1:  # a loss of a model of the user's own may be negative
            return f"a loss of {score.loss} over {score.tokens} tokens is impossible"
        if len(names) > SCORES_MAX or any(not 0 < len(name) <= SCORE_LENGTH_MAX for name in names):
            return f"{len(names)} scores, or the length of a name, is more than is allowed"
        return ""

    def lose(self, learner_id: str, reason: str, effects: list[Effect], now_s: float) -> None:
        """A learner is gone."""
        if self.open and learner_id == self.asked:
            self._fail(f"{learner_id} is gone: {reason}", effects, now_s, gone=True)

    def restart(self, now_s: float) -> None:
        """The syncer's process died: every link is gone. The final model's evaluation waits for somebody to come."""
        if self.open and not self.final:  # its answer has nobody to come to: ask again after the next merge
            self.next_step = self.progress.global_step
        self.asked, self.resend_s, self.open = "", inf, self.final
        self.until_s = now_s + self.plan.wait_s if self.open else inf

    def on_tick(self, effects: list[Effect], now_s: float) -> None:
        """Repeat an unanswered request, and give it up in the end."""
        if now_s >= self.until_s:
            who = f"{self.asked}: no score" if self.asked else f"{self.reason}; nobody came back"
            self._fail(f"{who} within {self.plan.wait_s:g} s", effects, now_s, gone=False)
        elif now_s >= self.resend_s:
            self.resend_wait_s *= 2
            self.resend_s = now_s + self.resend_wait_s
            effects.append(self._request(self.asked))

    def next_deadline_s(self) -> float:
        """Return the time at which on_tick must be called next."""
        return self.until_s if self.until_s < self.resend_s else self.resend_s

    def _open(self) -> None:
        self.open, self.asked, self.attempts, self.passed, self.reason = False, "", 0, [], ""
        self.until_s = self.resend_s = inf

    def _ask(self, effects: list[Effect], now_s: float, busy: list[str] | None = None) -> bool:
        """Ask whose turn it is; False if nobody can be asked."""
        behind = self.progress.global_step - self.config.groups.gap_max

        def rank(member: Member) -> tuple[bool, bool, int, int, str]:
            name, step = member.learner_id, member.global_step
            return name in (busy or ()), step < behind, self.turns.get(name, 0), -step, name

        live = [m for m in self.membership.connected() if m.state == ACTIVE and m.evaluates]
        ranked = sorted([rank(member) for member in live if member.learner_id not in self.passed])
        if ranked and self.attempts < ATTEMPTS_MAX:
            self._ask_one(ranked[0][-1], effects, now_s)
        return bool(self.asked)

    def _ask_one(self, name: str, effects: list[Effect], now_s: float) -> None:
        self.asked, self.number, self.attempts = name, self.number + 1, self.attempts + 1
        self.turns[name] = self.turns.get(name, 0) + 1
        self.asked_s, self.until_s = now_s, now_s + self.plan.wait_s
        self.resend_wait_s = self.config.resend_s
        self.resend_s = now_s + self.resend_wait_s
        what = "the final model" if self.progress.finished else "the global model"
        effects += [self._request(name), self.progress.note("evaluating", -1, (name,), what)]

    def _request(self, name: str) -> Send:
        return Send(name, Evaluate(self.number, tuple(self.downstream.versions) if self.progress.finished else ()))

    def _fail(self, reason: str, effects: list[Effect], now_s: float, *, gone: bool) -> None:
        """Ask somebody else. At the end of a run one that is gone may come back, and all others were told to stop."""
        name, self.asked, self.resend_s, self.reason = self.asked, "", inf, reason
        self.passed += [name] if name else []
        if self._ask(effects, now_s) or (self.final and gone and self.attempts < ATTEMPTS_MAX):
            self.until_s = now_s + self.plan.wait_s
            return
        effects.append(self.progress.note("unevaluated", -1, (name,) if name else (), self.reason))
        self._close(self.reason, effects)

    def _close(self, reason: str, effects: list[Effect]) -> None:
        self._open()
        self.reason = reason
        if self.progress.finished:
            self._stop(effects)

    def _stop(self, effects: list[Effect]) -> None:
        """Tell everybody that the run is complete."""
        for member in self.membership.connected():
            effects += self.stop(member.learner_id)
        effects.append(Finish("run complete"))

    def state(self) -> list[Any]:
        times_s = [None if time_s == inf else time_s for time_s in (self.until_s, self.resend_s)]
        now = [self.number, self.next_step, self.open, self.asked, self.attempts, list(self.passed)]
        return [*now, dict(self.turns), self.reason, self.asked_s, *times_s, self.resend_wait_s]

    def restore(self, state: list[Any]) -> None:
        self.number, self.next_step, self.open, self.asked, self.attempts, passed, *rest = state
        turns, self.reason, self.asked_s, *times_s, self.resend_wait_s = rest
        self.until_s, self.resend_s = [inf if time_s is None else time_s for time_s in times_s]
        self.passed, self.turns = list(passed), dict(turns)
