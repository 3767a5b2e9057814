"""Curves of a run in memory that does not grow with the run."""

from collections.abc import Sequence

# Points that are kept of a curve.
POINTS_KEPT = 500


def few(points: Sequence[Sequence[float]], most: int) -> list[list[float]]:
    """Return a curve as the means of at most so many groups of successive points."""
    size = max(1, -(-len(points) // most))
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [[float(f"{sum(column) / len(group):.5g}") for column in zip(*group, strict=True)] for group in groups]


class Curve:
    """A curve that keeps at most `most` points at equal distances, and the newest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: list[tuple[float, ...]] = []
        self._at: list[int] = []
        self._every = 1
        self._seen = 0
        self.last: tuple[float, ...] | None = None

    def add(self, *point: float, count: int = 1) -> None:
        """Take the next point, which stands for `count` points; all kept points are equally far apart."""
        self._every = max(self._every, count)
        if not self._at or self._seen >= self._at[-1] + self._every:
            self._kept.append(point)
            self._at.append(self._seen)
            if len(self._kept) > self._most:
                del self._kept[1::2], self._at[1::2]
                self._every *= 2
        self._seen += count
        self.last = point

    @property
    def points(self) -> list[tuple[float, ...]]:
        """Return the points, the oldest first."""
        return self._kept if not self._kept or self._kept[-1] == self.last else [*self._kept, self.last or ()]
