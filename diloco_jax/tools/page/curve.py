"""Curves of a run in memory that does not grow with the run."""

from collections.abc import Sequence
from itertools import pairwise

# Points that are kept of a curve.
POINTS_KEPT = 500
# Breaks of a curve that are shown, the longest ones.
BREAKS_MAX = 60


def few(points: Sequence[Sequence[float]], most: int, breaks: Sequence[int] = ()) -> list[list[float | None]]:
    """Return a curve as the means of about `most` groups of successive points, with a point of None at each break.

    Args:
        points: (time, value, ...) each.
        breaks: index of each point that no line connects with the one before it. No group crosses a break.
    """
    size = max(1, -(-len(points) // most))
    longest = sorted(breaks, key=lambda at: points[at][0] - points[at - 1][0])[-BREAKS_MAX:]
    found: list[list[float | None]] = []
    for first, end in pairwise([0, *sorted(longest), len(points)]):
        found += [[None] * len(points[first])] if first else []
        groups = [points[start : min(start + size, end)] for start in range(first, end, size)]
        found += [[float(f"{sum(column) / len(group):.5g}") for column in zip(*group, strict=True)] for group in groups]
    return found


class Curve:
    """A curve that keeps at most `most` points at equal distances, and the newest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: list[tuple[float, ...]] = []
        self._at: list[int] = []
        self._every = 1
        self._seen = 0
        # The number of breaks before each kept point, before the newest one, and so far.
        self._cuts: list[int] = []
        self._last_cut = self._cut = 0
        self.last: tuple[float, ...] | None = None

    def cut(self) -> None:
        """Break the curve: no line connects the next point with the one before it."""
        self._cut += 1

    def add(self, *point: float, count: int = 1) -> None:
        """Take the next point, which stands for `count` points; all kept points are equally far apart."""
        self._every = max(self._every, count)
        if not self._at or self._seen >= self._at[-1] + self._every:
            self._kept.append(point)
            self._at.append(self._seen)
            self._cuts.append(self._cut)
            if len(self._kept) > self._most:
                del self._kept[1::2], self._at[1::2], self._cuts[1::2]
                self._every *= 2
        self._seen += count
        self.last, self._last_cut = point, self._cut

    @property
    def points(self) -> list[tuple[float, ...]]:
        """Return the points, the oldest first."""
        return self._kept if not self._kept or self._kept[-1] == self.last else [*self._kept, self.last or ()]

    def few(self, most: int) -> list[list[float | None]]:
        """Return the curve as the means of about `most` groups, with a point of None at each break."""
        cuts = [*self._cuts, self._last_cut][: len(self.points)] if self._kept else []
        return few(self.points, most, [at for at in range(1, len(cuts)) if cuts[at] != cuts[at - 1]])
