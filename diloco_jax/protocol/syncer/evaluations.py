"""Evaluations of the global model: when they are due, which learners get the request, and what their answers lead to.

    due, or every round done --request--> asked --Score--> done; after the last corpus: Evaluated
                                ^           |
                                +-----------+  its score is unusable, it is lost, or it is too slow: another learner

For each corpus one learner evaluates at a time, on the held-out part of the corpus that it reads; so if all learners
share the corpus of the run, one evaluates. At most ATTEMPTS_MAX are asked for a corpus in one evaluation. Among the
learners that keep up, the one that was asked least often is next; among those, the one that is ahead.

At the end of the run one learner of each corpus stays to evaluate the final model, and all others get Stop. If such a
learner is lost, the next one of its corpus that greets gets the request; mostly it is the same one after a restart. If
none greets, the run ends without this evaluation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf, isfinite, nan
from typing import Any, NamedTuple

from diloco_jax.protocol.corpora import RUN
from diloco_jax.protocol.effects import Drop, Effects, Evaluated, Finish, Send
from diloco_jax.protocol.leases import COMMON
from diloco_jax.protocol.member import ACTIVE, JOINING, Member
from diloco_jax.protocol.membership import Membership
from diloco_jax.protocol.messages import RUN_COMPLETE, SCORE_LENGTH_MAX, SCORES_MAX, Evaluate, Metric, Score, Stop
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
class Sitting:
    """The evaluation on one corpus that is under way."""

    # The learner whose answer is expected; "" while there is none.
    asked: str = ""
    # Number of its request.
    number: int = 0
    attempts: int = 0
    # Learners that are not asked: they failed, or got Stop.
    passed: list[str] = field(default_factory=list)
    # Why the newest attempt failed; "" if it did not.
    reason: str = ""
    asked_s: float = 0.0
    # When the wait for an answer ends.
    until_s: float = inf
    resend_s: float = inf
    resend_wait_s: float = 0.0

    def to_plain(self) -> dict[str, Any]:
        plain = asdict(self)
        return plain | {name: None for name in ("until_s", "resend_s") if plain[name] == inf}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Sitting":
        times = {name: inf for name in ("until_s", "resend_s") if plain[name] is None}
        return cls(**{**plain, **times, "passed": list(plain["passed"])})


@dataclass(slots=True)
class Evaluations:
    """The evaluations that are under way, and the turns of the learners."""

    effects: Effects
    plan: EvaluationPlan
    config: ProtocolConfig
    progress: Progress
    membership: Membership
    downstream: Downstream
    # Number of the newest request.
    number: int = 0
    next_step: int = field(init=False)
    # By corpus: the evaluation that is under way.
    sittings: dict[str, Sitting] = field(default_factory=dict)
    # The scores on other corpora in the evaluation that is under way, and why some are missing.
    scores: dict[str, Score] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    # How often each learner was asked.
    turns: dict[str, int] = field(default_factory=dict)
    # Why the newest evaluation lacks a score; "" if it does not.
    reason: str = ""

    def __post_init__(self) -> None:
        self.next_step = self.plan.every

    @property
    def open(self) -> bool:
        """True while an evaluation is under way."""
        return bool(self.sittings)

    @property
    def final(self) -> bool:
        """True while the final model is being evaluated."""
        return self.open and self.progress.finished

    @property
    def asked(self) -> dict[str, float]:
        """Return the learners whose answers are expected, and when each was asked."""
        return {sitting.asked: sitting.asked_s for sitting in self.sittings.values() if sitting.asked}

    def due(self, global_step: int) -> bool:
        """Return whether an evaluation is requested once this step is reached, as far as is known now."""
        return bool(self.plan.every) and global_step >= self.next_step and not (self.open or self.progress.finished)

    def next_asked(self) -> list[str]:
        """Return the learners that would be asked now, the first of each corpus."""
        able = self._able()
        return [self._ranked([m for m in able if m.corpus == corpus])[0] for corpus in self._corpora(able)]

    def on_merged(self, now_s: float) -> None:
        """Request an evaluation after a round, if one is due."""
        step, every = self.progress.global_step, self.plan.every
        if not self.due(step):
            return
        self._begin()
        for corpus in self._corpora(self._able()):
            sitting = Sitting()
            if self._ask(corpus, sitting, now_s):
                self.sittings[corpus] = sitting
        if self.sittings:
            self.next_step = (step // every + 1) * every

    def conclude(self, now_s: float) -> None:
        """Have the final model evaluated after the last round, if any learner can, and stop all other learners."""
        self.effects.append(self.progress.note("finished", -1, (), RUN_COMPLETE))
        busy = [*self.asked]
        self._begin()
        known = [
            m for m in self.membership.members.values() if m.evaluates and m.learner_id not in self.membership.bans
        ]
        if not (self.plan.wait_s and known):
            self._stop_all()
            return
        connected = [m for m in self.membership.connected() if m.evaluates]
        corpora = self._corpora(connected or known)
        # The end of the run does not wait for a corpus whose learners are all away, but names it.
        absent = [corpus for corpus in self._corpora(known) if corpus not in corpora]
        self.missing += [f"no learner with the corpus {corpus or 'of the run'} was connected" for corpus in absent]
        for corpus in corpora:
            sitting = self.sittings[corpus] = Sitting(until_s=now_s + self.plan.wait_s)
            if not self._ask(corpus, sitting, now_s, busy):
                sitting.reason = "no learner was connected"
        asked = self.asked
        for member in self.membership.connected():
            if member.learner_id not in asked:
                for sitting in self.sittings.values():
                    sitting.passed.append(member.learner_id)
                self.stop(member.learner_id)

    def stop(self, learner_id: str) -> None:
        """Send a learner Stop, because the run is complete, unless it is to evaluate the final model."""
        if learner_id not in self.asked:
            self.effects.append(Send(learner_id, Stop(self.progress.global_step, RUN_COMPLETE)))

    def on_hello(self, member: Member, now_s: float) -> None:
        """Ask a learner that greets after the last round to evaluate the final model, because it `needs` this one."""
        sitting = self.sittings[member.corpus]
        if member.learner_id == sitting.asked:
            self._request(sitting)
        else:
            self._ask_one(sitting, member.learner_id, now_s)

    def needs(self, member: Member) -> bool:
        """Return whether a learner that greets after the last round is to evaluate the final model."""
        sitting = self.sittings.get(member.corpus)
        if sitting is None:
            return False
        free = not sitting.asked and member.evaluates and sitting.attempts < ATTEMPTS_MAX
        return free or member.learner_id == sitting.asked

    def on_score(self, score: Score, now_s: float) -> None:
        """Take a learner's answer."""
        name = score.learner_id
        corpus = self._sits(name)
        if corpus is None or score.number != self.sittings[corpus].number:
            self.effects.append(Drop(name, f"score {score.number} came late or was not asked for"))
        elif problem := self._problem(score):
            self._fail(corpus, f"{name}: {problem}", now_s, gone=False)
        else:
            self.scores[corpus] = score
            self._close(corpus, "")

    def _sits(self, name: str) -> str | None:
        """Return the corpus that a learner evaluates with; None if its answer is not expected."""
        return next((corpus for corpus, sitting in self.sittings.items() if sitting.asked == name), None)

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
        if (corpus := self._sits(learner_id)) is not None:
            self._fail(corpus, f"{learner_id} is disconnected: {reason}", now_s, gone=True)

    def restart(self, now_s: float) -> None:
        """Start again after the syncer's process was lost with every link.

        The evaluation of the final model waits for learners to return.
        """
        if self.open and not self.final:
            # The answers were lost with the links, so the next merge repeats the request.
            self.next_step = self.progress.global_step
            self._begin()
        for sitting in self.sittings.values():
            sitting.asked, sitting.resend_s, sitting.until_s = "", inf, now_s + self.plan.wait_s

    def on_tick(self, now_s: float) -> None:
        """Repeat requests without an answer, and finally give them up."""
        for corpus, sitting in list(self.sittings.items()):
            if now_s >= sitting.until_s:
                who = f"{sitting.asked}: no score" if sitting.asked else f"{sitting.reason}; nobody came back"
                self._fail(corpus, f"{who} within {self.plan.wait_s:g} s", now_s, gone=False)
            elif now_s >= sitting.resend_s:
                sitting.resend_wait_s *= 2
                sitting.resend_s = now_s + sitting.resend_wait_s
                self._request(sitting)

    def next_deadline_s(self) -> float:
        """Return when on_tick must be called next."""
        return min([min(sitting.until_s, sitting.resend_s) for sitting in self.sittings.values()], default=inf)

    def _begin(self) -> None:
        self.sittings, self.scores, self.missing, self.reason = {}, {}, [], ""

    def _able(self) -> list[Member]:
        return [m for m in self.membership.connected() if m.state == ACTIVE and m.evaluates]

    @staticmethod
    def _corpora(members: list[Member]) -> list[str]:
        return sorted({member.corpus for member in members})

    def _ask(self, corpus: str, sitting: Sitting, now_s: float, busy: list[str] | None = None) -> bool:
        """Ask the next learner of a corpus; return False if there is none to ask."""
        able = [m for m in self._able() if m.corpus == corpus and m.learner_id not in sitting.passed]
        if not able and self.progress.finished:
            # One that still loads or compiles can evaluate the final model once it holds it.
            joining = [m for m in self.membership.connected() if m.state == JOINING and m.evaluates]
            able = [m for m in joining if m.corpus == corpus and m.learner_id not in sitting.passed]
        ranked = self._ranked(able, busy)
        if ranked and sitting.attempts < ATTEMPTS_MAX:
            self._ask_one(sitting, ranked[0], now_s)
        return bool(sitting.asked)

    def _ranked(self, members: list[Member], busy: list[str] | None = None) -> list[str]:
        """Return the names of members, those first that are asked first."""
        behind = self.progress.global_step - self.config.groups.gap_max

        def rank(member: Member) -> tuple[bool, bool, int, int, str]:
            name, step = member.learner_id, member.global_step
            return name in (busy or ()), step < behind, self.turns.get(name, 0), -step, name

        return [name for *_, name in sorted(map(rank, members))]

    def _ask_one(self, sitting: Sitting, name: str, now_s: float) -> None:
        self.number += 1
        sitting.asked, sitting.number, sitting.attempts = name, self.number, sitting.attempts + 1
        self.turns[name] = self.turns.get(name, 0) + 1
        sitting.asked_s, sitting.until_s = now_s, now_s + self.plan.wait_s
        sitting.resend_wait_s = self.config.resend_s
        sitting.resend_s = now_s + sitting.resend_wait_s
        self._request(sitting)
        what = "the final model" if self.progress.finished else "the global model"
        self.effects.append(self.progress.note("evaluating", -1, (name,), what))

    def _request(self, sitting: Sitting) -> None:
        versions = tuple(self.downstream.versions) if self.progress.finished else ()
        self.effects.append(Send(sitting.asked, Evaluate(sitting.number, versions)))

    def _fail(self, corpus: str, reason: str, now_s: float, *, gone: bool) -> None:
        """Ask another learner, or wait for one: at the end all others got Stop, and a lost one may return."""
        sitting = self.sittings[corpus]
        name, sitting.asked, sitting.resend_s, sitting.reason = sitting.asked, "", inf, reason
        sitting.passed += [name] if name else []
        waits = self.final and gone and sitting.attempts < ATTEMPTS_MAX
        if self._ask(corpus, sitting, now_s) or waits:
            sitting.until_s = now_s + self.plan.wait_s
            return
        self.effects.append(self.progress.note("unevaluated", -1, (name,) if name else (), reason))
        self._close(corpus, reason)

    def _close(self, corpus: str, reason: str) -> None:
        """End the evaluation on a corpus; after the last one give all scores to the driver."""
        del self.sittings[corpus]
        self.missing += [reason] if reason else []
        if self.sittings:
            if self.progress.finished and corpus in self.scores:
                self.stop(self.scores[corpus].learner_id)
            return
        if self.scores:
            self.effects.append(Evaluated(together(self.scores, self.missing)))
        self.reason = "" if self.scores else "; ".join(self.missing)
        if self.progress.finished:
            self._stop_all()

    def _stop_all(self) -> None:
        """Send every learner Stop, and end the run."""
        for member in self.membership.connected():
            self.stop(member.learner_id)
        self.effects.append(Finish(RUN_COMPLETE))

    def state(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "next_step": self.next_step,
            "sittings": {corpus: sitting.to_plain() for corpus, sitting in self.sittings.items()},
            "scores": {corpus: list(score) for corpus, score in self.scores.items()},
            "missing": list(self.missing),
            "turns": dict(self.turns),
            "reason": self.reason,
        }

    def restore(self, state: Any) -> None:
        if isinstance(state, list):
            self._restore_old(state)
            return
        self.number, self.next_step, self.reason = state["number"], state["next_step"], state["reason"]
        self.sittings = {corpus: Sitting.from_plain(plain) for corpus, plain in state["sittings"].items()}
        self.scores = {corpus: _score(plain) for corpus, plain in state["scores"].items()}
        self.missing, self.turns = list(state["missing"]), dict(state["turns"])

    def _restore_old(self, state: list[Any]) -> None:
        """Restore a state of release 0.3.0 and before, which knew one corpus."""
        self.number, self.next_step, is_open, asked, attempts, passed, turns, self.reason, asked_s, *rest = state
        until_s, resend_s = [inf if time_s is None else time_s for time_s in rest[:2]]
        sitting = Sitting(asked, self.number, attempts, list(passed), self.reason, asked_s, until_s, resend_s, rest[2])
        self.sittings, self.turns = {COMMON: sitting} if is_open else {}, dict(turns)


def _score(plain: list[Any]) -> Score:
    score = Score(*plain)
    return score._replace(versions=tuple(score.versions), scores=tuple([Metric(*each) for each in score.scores]))


def together(scores: Mapping[str, Score], missing: list[str]) -> Score:
    """Return the scores on several corpora as one: the loss is the mean of the corpora, and each has its own scores.

    Args:
        scores: score by corpus, at least one; the score of the run's corpus alone is returned as it is.
        missing: why a corpus has no score.
    """
    if [*scores] == [COMMON]:
        return scores[COMMON]
    first, named = next(iter(scores.values())), dict[str, float]()
    for corpus, score in scores.items():
        of = corpus or RUN
        named |= {f"{of} loss": score.loss, f"{of} bits_per_byte": score.bits_per_byte}
    for corpus, score in scores.items():
        named |= {f"{corpus or RUN} {name}"[:SCORE_LENGTH_MAX]: value for name, value in score.scores}
    bits = [score.bits_per_byte for score in scores.values()]
    return first._replace(
        global_step=min(score.global_step for score in scores.values()),
        loss=_mean([score.loss for score in scores.values()]),
        bits_per_byte=_mean(bits) if all(map(isfinite, bits)) else nan,
        tokens=sum(score.tokens for score in scores.values()),
        scores=tuple([Metric(*each) for each in named.items()][:SCORES_MAX]),
        took_s=max(score.took_s for score in scores.values()),
        reason="; ".join([*filter(None, [score.reason for score in scores.values()]), *missing]),
    )


def _mean(values: Sequence[float]) -> float:
    # A learner may state any number. `fsum` raises an error where the sum of finite numbers is not finite.
    return sum([value / len(values) for value in values])
