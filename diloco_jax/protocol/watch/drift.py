"""The drift of islands over rounds: averages of its two numbers, and when they are a sign of trouble.

The driver measures the two numbers of each contribution: norm ratio and cosine (core/drift.py). No rule reads them, and
no island is excluded because of them. They are not on the tape, so they start again with each process of the syncer.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from diloco_jax.protocol.exclusion import VOTERS_MIN
from diloco_jax.protocol.pacing import ema

# Decay of the averages, which then cover about the last 20 rounds that merged the island. Rounds take turns among
# fragments, so one round alone shows little.
DECAY = 0.95
# An average must be beyond its bound for so many rounds in a row. An average with this decay forgets one odd round in
# that time.
ROUNDS_MIN = 20
# An averaged norm ratio above this is a sign of trouble. Twice the steps in a round make a contribution at most about
# twice as long, and ordinary islands differ less than that.
NORM_RATIO_MAX = 4.0
# Below this averaged cosine, an island's work undoes that of the others. It is a little below 0, because the average of
# unrelated contributions scatters around 0: by 0.005 for a fragment of a thousand parameters, and less for larger ones.
COSINE_MIN = -0.02

# Norm ratio and cosine of one contribution; None where a number is not known.
Numbers = tuple[float | None, float | None]


class MeanDrift(NamedTuple):
    """The averages of one island; None where there is no number yet."""

    norm_ratio: float | None
    cosine: float | None


@dataclass(slots=True)
class _Averages:
    """The averages of one island, and for how many rounds in a row each has been beyond its bound."""

    norm_ratio: float | None = None
    cosine: float | None = None
    long: int = 0
    apart: int = 0
    # Median of the others' averaged cosines at the newest round.
    others: float = 0.0

    def add(self, norm_ratio: float | None, cosine: float | None) -> None:
        if norm_ratio is not None:
            self.norm_ratio = ema(self.norm_ratio, norm_ratio, DECAY)
        if cosine is not None:
            self.cosine = ema(self.cosine, cosine, DECAY)

    def judge(self, cosines: Sequence[float]) -> None:
        """Count a round; `cosines` are the averaged ones of all islands in it, sorted."""
        self.long = self.long + 1 if self.norm_ratio is not None and self.norm_ratio > NORM_RATIO_MAX else 0
        self.others = _median_of_others(cosines, self.cosine)
        apart = self.cosine is not None and self.cosine < COSINE_MIN and self.others > 0
        self.apart = self.apart + 1 if apart else 0


def _median_of_others(ordered: Sequence[float], own: float | None) -> float:
    """Return the median of sorted numbers without `own`, which is one of them unless it is None; 0 for none."""
    count, skipped = len(ordered), len(ordered)
    if own is not None:
        count, skipped = count - 1, bisect_left(ordered, own)
    if not count:
        return 0.0
    # The two middle numbers of those that are left; they are the same one if their number is odd.
    low, high = [ordered[at + (at >= skipped)] for at in ((count - 1) // 2, count // 2)]
    return low if low == high else (low + high) / 2


class DriftWatch:
    """The averaged drift of each island."""

    def __init__(self) -> None:
        self._averages: dict[str, _Averages] = {}

    def on_round(self, drifts: Mapping[str, Numbers]) -> None:
        """Add a merged round: the numbers of each contribution, by learner."""
        for name, numbers in drifts.items():
            self._averages.setdefault(name, _Averages()).add(*numbers)
        # Of two contributions that differ, nobody can tell which one is odd.
        if len(drifts) < VOTERS_MIN:
            return
        averages = [self._averages[name] for name in drifts]
        cosines = sorted([each.cosine for each in averages if each.cosine is not None])
        for each in averages:
            each.judge(cosines)

    def of(self, learner_id: str) -> MeanDrift:
        """Return the averages of an island."""
        averages = self._averages.get(learner_id, _Averages())
        return MeanDrift(*(None if each is None else round(each, 4) for each in (averages.norm_ratio, averages.cosine)))

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
