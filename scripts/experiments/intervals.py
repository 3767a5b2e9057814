"""Intervals of 95 % for shares of right answers, and for differences of two arms over seeds."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from scipy.special import stdtrit

# The chance that a value above the interval is the true one; as much is below it.
TAIL = 0.025


class Interval(NamedTuple):
    """A value with the ends of its interval."""

    value: float
    low: float
    high: float

    @property
    def has_zero(self) -> bool:
        """Return whether the value could be zero."""
        return self.low <= 0 <= self.high


def wilson(right: int, count: int) -> Interval:
    """Return the share of right answers with Wilson's interval for a binomial share."""
    z, share = statistics.NormalDist().inv_cdf(1 - TAIL), right / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return Interval(share, max(0.0, middle - half), min(1.0, middle + half))


def over_seeds(values: Sequence[float]) -> Interval | None:
    """Return the mean of the values of at least two seeds with Student's interval; None if there are fewer."""
    if len(values) < 2:
        return None
    mean, degrees = statistics.fmean(values), len(values) - 1
    half = float(stdtrit(degrees, 1 - TAIL)) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)
