"""The pace of work in the background that does not slow what runs on the same cores.

An island whose steps run on the host's own cores has little time to spare, one with accelerators has a lot; and others
may use the cores too. So the system is asked how long our cores were idle, and only that, or a small share, is used.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

WINDOW_S = 0.2  # between two looks; the system counts in hundredths of a second
STALE_S = 2.0  # what was seen before such a pause says nothing any more
LEAST = 0.02  # of the cores' time that is used however busy they are
LEFT_OVER = 0.25  # of the cores' time that stays idle: a step that waits a moment is no invitation
BURST_S = 0.02  # that may be used at once: a small state should not take long
THREADS_COST = 2.0  # processor time of the whole process for a second of the thread: others send what it has made
_STAT = Path("/proc/stat")


def idle_time_s() -> float | None:
    """Return the seconds for which the cores of this process were idle since the system started; None if unknown."""
    try:
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        rows = [line.split() for line in _STAT.read_text(encoding="ascii").splitlines() if line.startswith("cpu")]
        return sum(int(row[4]) for row in rows if row[0] in cores) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return None


class SpareTime:
    """The pauses of a thread that works in the background, on the cores of this process if no number is given."""

    def __init__(
        self,
        idle_s: Callable[[], float | None] = idle_time_s,
        now_s: Callable[[], float] = time.monotonic,
        cores: int | None = None,
    ) -> None:
        self._idle_s = idle_s
        self._now_s = now_s
        known = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self._cores = cores or known or 1
        self._least = min(THREADS_COST, LEAST * self._cores)
        self._share = self._least  # in cores
        self._seen: tuple[float, float] | None = None  # when, and how long idle until then
        self._asked_s = now_s()
        self._debt_s = 0.0  # time used that the share has not made good yet

    def rest_s(self, took_s: float) -> float:
        """Return how long to rest after a piece of work, in seconds."""
        now_s, seen = self._now_s(), self._seen
        since_s, self._asked_s = now_s - self._asked_s, now_s
        self._debt_s = max(0.0, self._debt_s - self._share * since_s) + THREADS_COST * took_s
        if seen is None or now_s - seen[0] > STALE_S:
            self._look(now_s)
            self._share = self._least
        elif now_s - seen[0] >= WINDOW_S:
            self._look(now_s)
            if self._seen is not None:
                # Whose time we used cannot be seen, only whether some was left over: then, and only then, use more.
                left = (self._seen[1] - seen[1]) / (now_s - seen[0]) - LEFT_OVER * self._cores
                change = left if left > 0 else -self._share / 2
                self._share = min(THREADS_COST, max(self._least, self._share + change))
        return max(0.0, self._debt_s - BURST_S) / self._share

    def _look(self, now_s: float) -> None:
        idle_s = self._idle_s()
        self._seen = None if idle_s is None else (now_s, idle_s)
