"""Evaluations of the global model: when they are due, which learner gets the request, and what its answer leads to.

    due, or every round done --request--> asked --Score--> Evaluated
                                ^           |
                                +-----------+  its score is unusable, it is lost, or it is too slow: another learner

One learner evaluates at a time, and at most ATTEMPTS_MAX are asked in one evaluation. Among the learners that keep up,
the one that was asked least often is next; among those, the one that is ahead.

At the end of the run one learner stays to evaluate the final model, and all others get Stop. If that learner is lost,
the next learner that greets gets the request; mostly it is the same one after a restart. If none greets, the run ends
without an evaluation.
"""

from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any, NamedTuple

from diloco_jax.protocol.effects import Drop, Effects, Evaluated, Finish, Send
from diloco_jax.protocol.member import ACTIVE, Member
from diloco_jax.protocol.membership import Membership
from diloco_jax.protocol.messages import RUN_COMPLETE, SCORE_LENGTH_MAX, SCORES_MAX, Evaluate, Score, Stop
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.progress import Downstream, Progress

ATTEMPTS_MAX = 3
# Characters of a learner's reason that a note repeats.
NAMED_MAX = 200


class EvaluationPlan(NamedTuple):
    """The times of a run's evaluations."""

    # Seconds to wait for one learner's answer before another is asked; 0 if the model is not evaluated.
    wait_s: float = 0.0
    # Global steps between two evaluations; 0 for one at the end only.
    every: int = 0


NEVER = EvaluationPlan()


@dataclass(slots=True)
class Evaluations:
    """The evaluation that is under way, and the turns of the learners."""

    effects: Effects
    plan: EvaluationPlan
    config: ProtocolConfig
    progress: Progress
    membership: Membership
    downstream: Downstream
    # Number of the newest request.
    number: int = 0
    next_step: int = field(init=False)
    # Whether an evaluation is under way.
    open: bool = False
    # The learner whose answer is expected; "" while there is none.
    asked: str = ""
    attempts: int = 0
    # Learners that this evaluation does not ask: they failed, or got Stop.
    passed: list[str] = field(default_factory=list)
    # How often each learner was asked.
    turns: dict[str, int] = field(default_factory=dict)
    # Why the newest attempt failed; "" if it did not.
    reason: str = ""
    asked_s: float = 0.0
    # When the wait for an answer ends.
    until_s: float = inf
    resend_s: float = inf
    resend_wait_s: float = 0.0

    def __post_init__(self) -> None:
        self.next_step = self.plan.every

    @property
    def final(self) -> bool:
        """True while the final model is being evaluated."""
        return self.open and self.progress.finished

    def on_merged(self, now_s: float) -> None:
        """Request an evaluation after a round, if one is due."""
        step, every = self.progress.global_step, self.plan.every
        if not every or step < self.next_step or self.open or self.progress.finished:
            return
        self._open()
        self.open = self._ask(now_s)
        if self.open:
            self.next_step = (step // every + 1) * every

    def conclude(self, now_s: float) -> None:
        """Have the final model evaluated after the last round, if any learner can, and stop all other learners."""
        self.effects.append(self.progress.note("finished", -1, (), RUN_COMPLETE))
        busy = [self.asked] if self.open else []
        self._open()
        if not (self.plan.wait_s and any(m.evaluates for m in self.membership.members.values())):
            self._stop_all()
            return
        self.open = True
        self.until_s = now_s + self.plan.wait_s
        if not self._ask(now_s, busy):
            self.reason = "no learner was connected"
        for member in self.membership.connected():
            if member.learner_id != self.asked:
                self.passed.append(member.learner_id)
                self.stop(member.learner_id)

    def stop(self, learner_id: str) -> None:
        """Send a learner Stop, because the run is complete, unless it is to evaluate the final model."""
        if learner_id != self.asked:
            self.effects.append(Send(learner_id, Stop(self.progress.global_step, RUN_COMPLETE)))

    def on_hello(self, member: Member, now_s: float) -> None:
        """Ask a learner that greets after the last round to evaluate the final model, because it `needs` this one."""
        name = member.learner_id
        if name == self.asked:
            self._request(name)
        else:
            self._ask_one(name, now_s)

    def needs(self, member: Member) -> bool:
        """Return whether a learner that greets after the last round is to evaluate the final model."""
        free = not self.asked and member.evaluates and self.attempts < ATTEMPTS_MAX
        return self.open and (free or member.learner_id == self.asked)

    def on_score(self, score: Score, now_s: float) -> None:
        """Take a learner's answer."""
        name = score.learner_id
        if not self.open or (name, score.number) != (self.asked, self.number):
            self.effects.append(Drop(name, f"score {score.number} came late or was not asked for"))
        elif problem := self._problem(score):
            self._fail(f"{name}: {problem}", now_s, gone=False)
        else:
            self.effects.append(Evaluated(score))
            self._close("")

    def _problem(self, score: Score) -> str:
        """Return what is wrong with a score; "" if nothing is."""
        versions, names = tuple(self.downstream.versions), [name for name, _ in score.scores]
        if not isfinite(score.loss):
            return score.reason[:NAMED_MAX] or "its loss is not finite"
        if len(score.versions) != len(versions) or (self.progress.finished and score.versions != versions):
            return "it holds other versions than the final ones"
        # The loss itself has no limit: that of a user's own model may be negative.
        if score.tokens < 1:
            return f"a loss of {score.loss} over {score.tokens} tokens is impossible"
        if len(names) > SCORES_MAX or any(not 0 < len(name) <= SCORE_LENGTH_MAX for name in names):
            return f"{len(names)} scores, or the length of a name, is more than is allowed"
        return ""

    def lose(self, learner_id: str, reason: str, now_s: float) -> None:
        """Ask another learner if the lost one was to answer."""
        if self.open and learner_id == self.asked:
            self._fail(f"{learner_id} is disconnected: {reason}", now_s, gone=True)

    def restart(self, now_s: float) -> None:
        """Start again after the syncer's process was lost with every link.

        The evaluation of the final model waits for a learner to return.
        """
        if self.open and not self.final:
            # The answer was lost with the links, so the next merge repeats the request.
            self.next_step = self.progress.global_step
        self.asked, self.resend_s, self.open = "", inf, self.final
        self.until_s = now_s + self.plan.wait_s if self.open else inf

    def on_tick(self, now_s: float) -> None:
        """Repeat a request without an answer, and finally give it up."""
        if now_s >= self.until_s:
            who = f"{self.asked}: no score" if self.asked else f"{self.reason}; nobody came back"
            self._fail(f"{who} within {self.plan.wait_s:g} s", now_s, gone=False)
        elif now_s >= self.resend_s:
            self.resend_wait_s *= 2
            self.resend_s = now_s + self.resend_wait_s
            self._request(self.asked)

    def next_deadline_s(self) -> float:
        """Return when on_tick must be called next."""
        return self.until_s if self.until_s < self.resend_s else self.resend_s

    def _open(self) -> None:
        self.open, self.asked, self.attempts, self.passed, self.reason = False, "", 0, [], ""
        self.until_s = self.resend_s = inf

    def _ask(self, now_s: float, busy: list[str] | None = None) -> bool:
        """Ask the next learner; return False if there is none to ask."""
        behind = self.progress.global_step - self.config.groups.gap_max

        def rank(member: Member) -> tuple[bool, bool, int, int, str]:
            name, step = member.learner_id, member.global_step
            return name in (busy or ()), step < behind, self.turns.get(name, 0), -step, name

        live = [m for m in self.membership.connected() if m.state == ACTIVE and m.evaluates]
        ranked = sorted([rank(member) for member in live if member.learner_id not in self.passed])
        if ranked and self.attempts < ATTEMPTS_MAX:
            self._ask_one(ranked[0][-1], now_s)
        return bool(self.asked)

    def _ask_one(self, name: str, now_s: float) -> None:
        self.asked, self.number, self.attempts = name, self.number + 1, self.attempts + 1
        self.turns[name] = self.turns.get(name, 0) + 1
        self.asked_s, self.until_s = now_s, now_s + self.plan.wait_s
        self.resend_wait_s = self.config.resend_s
        self.resend_s = now_s + self.resend_wait_s
        self._request(name)
        what = "the final model" if self.progress.finished else "the global model"
        self.effects.append(self.progress.note("evaluating", -1, (name,), what))

    def _request(self, name: str) -> None:
        versions = tuple(self.downstream.versions) if self.progress.finished else ()
        self.effects.append(Send(name, Evaluate(self.number, versions)))

    def _fail(self, reason: str, now_s: float, *, gone: bool) -> None:
        """Ask another learner, or wait for one: at the end all others got Stop, and a lost one may return."""
        name, self.asked, self.resend_s, self.reason = self.asked, "", inf, reason
        self.passed += [name] if name else []
        if self._ask(now_s) or (self.final and gone and self.attempts < ATTEMPTS_MAX):
            self.until_s = now_s + self.plan.wait_s
            return
        self.effects.append(self.progress.note("unevaluated", -1, (name,) if name else (), self.reason))
        self._close(self.reason)

    def _close(self, reason: str) -> None:
        self._open()
        self.reason = reason
        if self.progress.finished:
            self._stop_all()

    def _stop_all(self) -> None:
        """Send every learner Stop, and end the run."""
        for member in self.membership.connected():
            self.stop(member.learner_id)
        self.effects.append(Finish(RUN_COMPLETE))

    def state(self) -> list[Any]:
        times_s = [None if time_s == inf else time_s for time_s in (self.until_s, self.resend_s)]
        now = [self.number, self.next_step, self.open, self.asked, self.attempts, list(self.passed)]
        return [*now, dict(self.turns), self.reason, self.asked_s, *times_s, self.resend_wait_s]

    def restore(self, state: list[Any]) -> None:
        self.number, self.next_step, self.open, self.asked, self.attempts, passed, *rest = state
        turns, self.reason, self.asked_s, *times_s, self.resend_wait_s = rest
        self.until_s, self.resend_s = [inf if time_s is None else time_s for time_s in times_s]
        self.passed, self.turns = list(passed), dict(turns)
