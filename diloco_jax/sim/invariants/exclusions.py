"""The checker of who is excluded from merges, in runs with drawn norms."""

import math
from collections import defaultdict
from collections.abc import Sequence

from diloco_jax.protocol.effects import Merge
from diloco_jax.protocol.exclusion import (
    EARLIER_MIN,
    GROWTH,
    HARMLESS,
    OUTLIERS_KEPT,
    RATES_KEPT,
    RATES_MIN,
    VOTERS_MIN,
    MeasuredValue,
)
from diloco_jax.protocol.messages import LearnerMessage
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.invariants.checker import Checker
from diloco_jax.sim.node import Effects
from diloco_jax.sim.norms import NORM_MAX, DrawnNorms, NormSettings

# A value is of a lasting change if this fraction of its inner steps is.
LASTING_SHARE = 0.5


class ExclusionsHold(Checker):
    """Merges exclude each non-finite value and each single outlier, and honest work at most twice in a row.

    A value is honest if its norm is usual, or if it is of a lasting change. While no learner is hostile, a usual value
    is never excluded. What the rule remembers is bounded.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._drawn = cluster.world.norms is not None
        self._norms = cluster.world.norms or DrawnNorms(NormSettings(), 0, self.config.num_fragments)
        self._any_hostile = any(event.kind == "hostile" for event in self._norms.settings.events)
        self._orders: dict[int, Merge] = {}
        # The highest rate that was ever merged, in all fragments and histories of the run.
        self._highest = 0.0
        # Fragment -> values that moved and were merged, since the start or the last rewind.
        self._known: dict[int, int] = defaultdict(int)
        # Fragment and learner -> exclusions.
        self._exclusions: dict[tuple[int, str], int] = defaultdict(int)
        # Fragment and learner -> exclusions in a row in rounds with few voters.
        self._in_a_row: dict[tuple[int, str], int] = defaultdict(int)
        # Fragment and learner -> values of others since the last exclusion, which push it out of the rule's memory.
        self._others: dict[tuple[int, str], int] = defaultdict(int)

    def on_syncer_back(self, machine: Syncer, rewound_to: int, now_s: float) -> None:
        super().on_syncer_back(machine, rewound_to, now_s)
        self._in_a_row.clear()
        if rewound_to >= 0:
            self._known.clear()

    def on_syncer(self, message: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        if self._drawn:
            self._orders |= {effect.global_step: effect for effect in effects if isinstance(effect, Merge)}

    def on_merged(self, global_step: int, excluded: tuple[str, ...], now_s: float) -> None:
        if not self._drawn:
            return
        order = self._orders.pop(global_step)
        useless = {name for name, number in self.cluster.world.useless if number == global_step}
        values = self._norms.measure(order, useless, now_s)
        for value in values:
            unmergeable = not value.norm <= NORM_MAX
            merged = value.contribution.learner_id not in excluded
            self.check(not (unmergeable and merged), f"round {global_step} merges {value}, which is not finite")
        finite = [value for value in values if math.isfinite(value.norm)]
        self._check_outliers(order, finite, excluded)
        self._check_honest(order, finite, excluded, now_s)
        rates = [value.rate for value in finite if value.contribution.learner_id not in excluded]
        self._highest = max([self._highest, *rates])
        self._known[order.fragment_id] += sum(rate > 0 for rate in rates)
        for name in excluded:
            self._exclusions[order.fragment_id, name] += 1
        for history in self._norms.histories:
            bounded = len(history.rates) <= RATES_KEPT and len(history.peaks) <= EARLIER_MIN
            self.check(bounded and len(history.outliers) <= OUTLIERS_KEPT, f"the memory has grown to {history}")

    def _check_outliers(self, order: Merge, finite: Sequence[MeasuredValue], excluded: tuple[str, ...]) -> None:
        """Check that a value far above all others, of this round and before, is excluded.

        With few voters it is excluded if the fragment knows what is usual, whatever process of the syncer learnt it,
        and the learner had too few exclusions for a lasting change.
        """
        settings, step = self._norms.settings, order.global_step
        voted = sum(value.rate > 0 for value in finite) >= VOTERS_MIN
        if not settings.outlier_factor or not (voted or self._known[order.fragment_id] >= RATES_MIN):
            return
        for value in finite:
            name = value.contribution.learner_id
            if not voted and self._exclusions[order.fragment_id, name] >= EARLIER_MIN:
                continue
            highest = max([self._highest, *(other.rate for other in finite if voted and other is not value)])
            limit = max(settings.outlier_factor * highest, GROWTH * highest, HARMLESS * settings.length)
            holds = value.rate <= limit or name in excluded
            self.check(holds, f"round {step} merges {value}, a single outlier: others are below {highest}")

    def _check_honest(
        self, order: Merge, finite: Sequence[MeasuredValue], excluded: tuple[str, ...], now_s: float
    ) -> None:
        voted = sum(value.rate > 0 for value in finite) >= VOTERS_MIN
        for value in finite:
            name, what = value.contribution.learner_id, (order.fragment_id, value.contribution.learner_id)
            usual, lasting = self._is_usual(name, now_s), self._is_lasting(value, now_s)
            is_excluded = name in excluded
            told = f"round {order.global_step} excludes {value}"
            if usual and not self._any_hostile:
                self.check(not is_excluded, f"{told}, whose norm is usual")
            if voted:
                # One hostile learner is outvoted, so that nobody else is excluded because of it.
                self.check(not (usual and is_excluded), f"{told}, whose norm is usual in a round of {len(finite)}")
                self._in_a_row[what] = 0
            elif (usual or lasting) and is_excluded and self._others[what] < OUTLIERS_KEPT // 2:
                self._in_a_row[what] += 1
                self.check(self._in_a_row[what] <= EARLIER_MIN, f"{told}, for the third time in a row")
            else:
                self._in_a_row[what] = int((usual or lasting) and is_excluded)
            self._others[what] = 0
        for fragment_id, name in list(self._others):
            if fragment_id == order.fragment_id:
                self._others[fragment_id, name] += sum(value.contribution.learner_id != name for value in finite)

    def _is_usual(self, learner_id: str, now_s: float) -> bool:
        return now_s >= self._norms.settings.ends_s or not self._norms.events_of(learner_id)

    def _is_lasting(self, value: MeasuredValue, now_s: float) -> bool:
        """Return whether at least LASTING_SHARE of the value's steps are of a lasting change, without other events."""
        part, events = value.contribution, self._norms.events_of(value.contribution.learner_id)
        if len(events) != 1 or events[0].kind != "louder" or now_s >= self._norms.settings.ends_s:
            return False
        steps = range(part.local_step - part.steps + 1, part.local_step + 1)
        return events[0].covers(steps[-1]) and sum(map(events[0].covers, steps)) >= LASTING_SHARE * len(steps)
