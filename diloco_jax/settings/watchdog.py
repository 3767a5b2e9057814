"""The time that a process may take for what it does, before it counts as hung."""

from dataclasses import dataclass
from math import inf, isfinite


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchdogConfig:
    """The end of a process that hangs, so that whoever supervises it starts it again."""

    least_s: float = 300.0
    """Seconds that a step of an island, or a turn of the syncer, may take in any case; one that takes longer than this
    and than median_factor times the median of the last ones ends its process with the stacks of all threads in its log.
    Time in which the whole process is stopped does not count. 0: nothing is ever ended. Low: ends what is only slow.
    High: a hang is found as late."""
    median_factor: float = 10.0
    """See least_s. Low: 1 ends a step that is a little slow, after least_s. High: start_s is the only bound."""
    start_s: float = 1800.0
    """Seconds for what may take long: everything before the first step, which compiles, taking over a whole state, an
    evaluation, a merge (which may wait for a snapshot), the goodbye, and what a loop of the user's own does between two
    steps. No bound is above it. Low: ends what still compiles. High: a hang in a start is found as late."""

    def __post_init__(self) -> None:
        if not (0 <= self.least_s <= self.start_s and isfinite(self.start_s)):
            raise ValueError(
                f"watchdog.least_s is {self.least_s} and start_s {self.start_s}; use 0 (never) or seconds up to start_s"
            )
        if not 1 <= self.median_factor < inf:
            raise ValueError(f"watchdog.median_factor is {self.median_factor}; it must be at least 1")

    def bound_s(self, median_s: float | None) -> float:
        """Return the seconds that the next step may take, of which the last ones took so many; None before the first.

        It is infinite if nothing is to be ended.
        """
        if not self.least_s:
            return inf
        return self.start_s if median_s is None else min(self.start_s, max(self.least_s, self.median_factor * median_s))
