"""Drawn norms of the learners' values, and the syncer's side of them: the rule that excludes values from a merge.

A simulated value has no bytes, so its norm is drawn. An inner step moves a fragment by about the usual rate, and the
norm of a value is the sum over its inner steps. Events change the rate of single steps; so damage shows in each value
that covers its step, until its learner adopts a newer version. Norms depend on
learner, local step, round, time and seed only.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, NamedTuple

from diloco_jax.protocol.effects import Contribution, Merge
from diloco_jax.protocol.exclusion import (
    Evidence,
    MeasuredValue,
    RateHistory,
    decide,
    evidence_of,
    exclude_largest,
    next_history,
    recall,
    usual_elsewhere,
)
from diloco_jax.protocol.messages import StepReport

# The rate of a step is at most this factor above or below the usual rate.
SPREAD = 1.2
# The merge of a value with a larger norm is not finite: the largest float32.
NORM_MAX = 3.4e38

EventKind = Literal["damage", "nan", "diverge", "louder", "hostile"]


class NormEvent(NamedTuple):
    """A change of one learner's rates for some inner steps.

    damage: each step moves `factor` times as far; with one step this is a damaged memory.
    nan: the steps make the value non-finite.
    diverge: each step moves `factor` times as far as the step before.
    louder: as damage, but a lasting change of honest work.
    hostile: the norms of all values are arbitrary.
    """

    learner_id: str
    kind: EventKind
    first_step: int
    steps: int
    factor: float = 1.0

    def covers(self, local_step: int) -> bool:
        return self.first_step <= local_step < self.first_step + self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSettings:
    """The settings of drawn norms."""

    rate: float = 1e-4
    """Usual norm per inner step."""
    length: float = 1.0
    """Norm of each fragment's initial value."""
    outlier_factor: float = 100.0
    """As merge.outlier_factor."""
    events: tuple[NormEvent, ...] = ()
    """Changes of single learners' rates."""
    ends_s: float = math.inf
    """Merges after this time see no event any more."""


class DrawnNorms:
    """The norms of a simulated run, and the rate histories that the syncer's process keeps with its model."""

    def __init__(self, settings: NormSettings, seed: int, num_fragments: int) -> None:
        self.settings = settings
        self.histories: tuple[RateHistory, ...] = (RateHistory(),) * num_fragments
        self._initial = self.histories
        self._seed = seed
        self._rates: dict[str, list[float]] = {}
        self._random: dict[str, Random] = {}

    def begin(self, histories: tuple[RateHistory, ...] | None) -> None:
        """Start a process of the syncer with the histories of its snapshot, or without one."""
        self.histories = self._initial if histories is None else histories

    def on_report(self, report: StepReport, now_s: float) -> None:
        """Do nothing: norms do not depend on reports."""

    def on_merged(self, fragment_id: int, evidence: Evidence, parts: Sequence[Contribution]) -> None:
        """Put a round of the tape into its fragment's history, as a syncer does that restarts."""
        after = list(self.histories)
        after[fragment_id] = recall(after, (1,) * len(after), fragment_id, evidence, parts)
        self.histories = tuple(after)

    def state(self) -> tuple[RateHistory, ...]:
        return self.histories

    def restore(self, state: tuple[RateHistory, ...]) -> None:
        self.histories = state

    def measure(self, order: Merge, useless: Collection[str], now_s: float) -> list[MeasuredValue]:
        """Return the values of a round with their norms; the values of `useless` learners are not finite."""
        return [
            MeasuredValue(each, math.nan if each.learner_id in useless else self._norm(each, order.global_step, now_s))
            for each in order.contributions
        ]

    def merge(self, order: Merge, useless: Collection[str], now_s: float) -> tuple[tuple[str, ...], Evidence]:
        """Decide who is excluded from a round, and keep what the fragment's history needs."""
        settings, fragment_id = self.settings, order.fragment_id
        values, history = self.measure(order, useless, now_s), self.histories[fragment_id]
        decision, overflows = decide(values, history, settings.length, settings.outlier_factor), 0
        while any(values[i].norm > NORM_MAX for i in decision.merged):
            decision, overflows = exclude_largest(decision, values), overflows + 1
        after = list(self.histories)
        elsewhere = usual_elsewhere(after, (1,) * len(after), fragment_id)
        after[fragment_id] = next_history(history, decision, values)._replace(elsewhere=elsewhere)
        self.histories = tuple(after)
        evidence = evidence_of(values, history, settings.length, settings.outlier_factor, overflows, decision.excluded)
        return tuple(sorted(decision.excluded)), evidence

    def events_of(self, learner_id: str) -> tuple[NormEvent, ...]:
        return tuple(event for event in self.settings.events if event.learner_id == learner_id)

    def _norm(self, part: Contribution, global_step: int, now_s: float) -> float:
        events = self.events_of(part.learner_id) if now_s < self.settings.ends_s else ()
        if any(event.kind == "hostile" for event in events):
            return self._arbitrary(part, global_step)
        first = max(1, part.local_step - part.steps + 1)
        moves = [self._move(part.learner_id, step, events) for step in range(first, part.local_step + 1)]
        # A hostile learner may report fewer local steps than inner steps.
        moves += [self.settings.rate] * max(0, part.steps - len(moves))
        norm = sum(moves)
        return norm if math.isfinite(norm) else math.nan

    def _move(self, learner_id: str, local_step: int, events: tuple[NormEvent, ...]) -> float:
        """Return the norm of the fragment's change in one inner step."""
        move = self.settings.rate * self._spread(learner_id, local_step)
        for event in events:
            if not event.covers(local_step):
                continue
            if event.kind == "nan":
                return math.nan
            grown = local_step - event.first_step + 1 if event.kind == "diverge" else 1
            move *= math.exp(min(700.0, grown * math.log(event.factor)))
        return move

    def _spread(self, learner_id: str, local_step: int) -> float:
        random = self._random.setdefault(learner_id, Random(f"norms of {learner_id} in {self._seed}"))
        drawn = self._rates.setdefault(learner_id, [])
        while len(drawn) < local_step:
            drawn.append(math.pow(SPREAD, random.uniform(-1.0, 1.0)))
        return drawn[local_step - 1]

    def _arbitrary(self, part: Contribution, global_step: int) -> float:
        random = Random(f"norm of {part.learner_id} in {global_step} of {self._seed}")
        usual = self.settings.rate * part.steps
        if random.random() < 0.5:
            return usual * math.pow(10.0, random.uniform(-12.0, 12.0))
        numbers: tuple[float, ...] = (0.0, 5e-324, usual, 99.0 * usual, 1e30, 1e300, math.inf, math.nan)
        return random.choice(numbers)
