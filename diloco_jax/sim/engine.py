"""Virtual time: a clock, a heap of events and one seeded source of randomness, independent of the protocol."""

from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any

NEVER_S = float("inf")
Action = Callable[[Any], None]


class Engine:
    """Runs actions in the order of their times, and actions of equal times in the order of the calls of `at`.

    An event is a tuple (time_s, number, action, argument) with bound methods and plain arguments instead of closures.
    It cannot be cancelled: the action itself must recognise that it is void.
    """

    __slots__ = ("_heap", "_number", "_stopped", "now_s", "random")

    def __init__(self, seed: int) -> None:
        self.now_s = 0.0
        self.random = Random(seed)
        self._heap: list[tuple[float, int, Action, Any]] = []
        # Number of events planned so far.
        self._number = 0
        self._stopped = False

    @property
    def events(self) -> int:
        """Number of events that have happened."""
        return self._number - len(self._heap)

    def at(self, time_s: float, action: Action, argument: Any = None) -> None:
        """Call `action(argument)` at that time, which must not be in the past."""
        self._number = number = self._number + 1
        heappush(self._heap, (time_s, number, action, argument))

    def stop(self) -> None:
        """End `run` after the current event."""
        self._stopped = True

    def run(self, until_s: float) -> None:
        """Handle events until none is left, `stop` is called, or the next one is later than `until_s`."""
        heap, pop = self._heap, heappop
        self._stopped = False
        while heap and not self._stopped:
            event = time_s, _, action, argument = pop(heap)
            if time_s > until_s:
                heappush(heap, event)
                break
            assert time_s >= self.now_s, f"an event for {time_s} s was planned at {self.now_s} s"
            self.now_s = time_s
            action(argument)
