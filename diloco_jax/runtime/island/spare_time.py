"""The pace of background work that must not slow other work on the same cores.

An island whose steps run on the machine's cores has little spare time, an island with accelerators has much, and other
processes may use the cores too. So this module reads how long our cores were idle. The background work uses only that
time, or a small share of the cores.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

# Time between two readings, in seconds; the system counts in hundredths of a second.
WINDOW_S = 0.2
# A reading before a pause of this length is too old, in seconds.
STALE_S = 2.0
# The least share of the cores' time, however busy they are.
LEAST = 0.02
# This share of the cores' time stays idle, because a step that waits for a moment does not leave time to spare.
LEFT_OVER = 0.25
# This much time may be used at once, in seconds, so that a small state is quick.
BURST_S = 0.02
# One second of the thread costs this much processor time, because other threads send its results.
THREADS_COST = 2.0
_STAT = Path("/proc/stat")


def idle_time_s() -> float | None:
    """Return the idle seconds of this process's cores since the system started; None if unknown."""
    try:
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        rows = [line.split() for line in _STAT.read_text(encoding="ascii").splitlines() if line.startswith("cpu")]
        return sum(int(row[4]) for row in rows if row[0] in cores) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return None


class SpareTime:
    """The pauses of a background thread; `cores` are those of this process by default."""

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
        self._share = self._least  # cores
        # (when, idle seconds until then)
        self._seen: tuple[float, float] | None = None
        self._asked_s = now_s()
        # Processor seconds that work has used and that `_share` has not paid back yet.
        self._debt_s = 0.0

    def rest_s(self, took_s: float) -> float:
        """Return the pause after a piece of work that took `took_s` of processor time, in seconds."""
        now_s, seen = self._now_s(), self._seen
        since_s, self._asked_s = now_s - self._asked_s, now_s
        self._debt_s = max(0.0, self._debt_s - self._share * since_s) + THREADS_COST * took_s
        if seen is None or now_s - seen[0] > STALE_S:
            self._look(now_s)
            self._share = self._least
        elif now_s - seen[0] >= WINDOW_S:
            self._look(now_s)
            if self._seen is not None:
                # The readings show whether time was left over, but not whose time we used. Use more only if
                # some was left.
                left = (self._seen[1] - seen[1]) / (now_s - seen[0]) - LEFT_OVER * self._cores
                change = left if left > 0 else -self._share / 2
                self._share = min(THREADS_COST, max(self._least, self._share + change))
        return max(0.0, self._debt_s - BURST_S) / self._share

    def _look(self, now_s: float) -> None:
        idle_s = self._idle_s()
        self._seen = None if idle_s is None else (now_s, idle_s)
