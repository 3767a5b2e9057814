"""The drift of islands over rounds: averages of its two numbers (core/drift.py), and when they are a sign of trouble.

No rule reads them, and no island is excluded because of them. They are not on the tape, so they start again with each
process of the syncer.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import median

from diloco_jax.core.drift import Drift
from diloco_jax.protocol.exclusion import VOTERS_MIN
from diloco_jax.protocol.pacing import ema

# Decay of the averages, which then cover about the last 20 rounds that merged the island. Rounds take turns among
# fragments, so one round alone shows little.
DECAY = 0.95
# An average must be beyond its bound for so many rounds in a row. An average with this decay forgets one odd round in
# that time.
ROUNDS_MIN = 20
# An averaged norm ratio above this is a sign of trouble. Islands that make twice as many steps in a round, or have a
# batch of half the size, stay far below it.
NORM_RATIO_MAX = 4.0
# Below this averaged cosine, the island's work undoes that of the others. Islands with different data are near 0, but
# not below it.
COSINE_MIN = 0.0


@dataclass(slots=True)
class _Averages:
    """The averages of one island, and for how many rounds in a row each has been beyond its bound."""

    norm_ratio: float | None = None
    cosine: float | None = None
    long: int = 0
    apart: int = 0
    # Median of the others' averaged cosines at the newest round.
    others: float = 0.0

    def add(self, drift: Drift) -> None:
        if drift.norm_ratio is not None:
            self.norm_ratio = ema(self.norm_ratio, drift.norm_ratio, DECAY)
        if drift.cosine is not None:
            self.cosine = ema(self.cosine, drift.cosine, DECAY)

    def judge(self, others: Collection[float]) -> None:
        """Count a round; `others` are the averaged cosines of the other islands in it."""
        self.long = self.long + 1 if self.norm_ratio is not None and self.norm_ratio > NORM_RATIO_MAX else 0
        self.others = median(others) if others else 0.0
        apart = self.cosine is not None and self.cosine < COSINE_MIN < self.others
        self.apart = self.apart + 1 if apart else 0


class DriftWatch:
    """The averaged drift of each island."""

    def __init__(self) -> None:
        self._averages: dict[str, _Averages] = {}

    def on_round(self, drifts: Mapping[str, Drift]) -> None:
        """Add a merged round: the drift of each contribution, by learner."""
        for name, drift in drifts.items():
            self._averages.setdefault(name, _Averages()).add(drift)
        # Of two contributions that differ, nobody can tell which one is odd.
        if len(drifts) < VOTERS_MIN:
            return
        for name in drifts:
            cosines = [self._averages[other].cosine for other in drifts if other != name]
            self._averages[name].judge([each for each in cosines if each is not None])

    def of(self, learner_id: str) -> Drift:
        """Return the averages of an island; None where there is no number yet."""
        averages = self._averages.get(learner_id, _Averages())
        return Drift(*(None if each is None else round(each, 4) for each in (averages.norm_ratio, averages.cosine)))

    def trouble(self, learner_id: str) -> str:
        """Return how an island's contributions differ from the others for many rounds; "" if they do not."""
        own, found = self._averages.get(learner_id, _Averages()), []
        if own.long >= ROUNDS_MIN:
            found.append(f"its contributions are {own.norm_ratio:.3g} times as long as the median of their rounds")
        if own.apart >= ROUNDS_MIN:
            found.append(
                f"its contributions point against those of the others: their cosine is {own.cosine:.2g}, where "
                f"{own.others:.2g} is usual"
            )
        return "; ".join(found)
