"""Notice when islands make steps much faster than rounds close: what they learn is not merged, and tokens are used up.

Counted in windows of STEPS_MIN steps per island, or of as many as take SECONDS_MIN. An episode is a row of windows in
which islands made at least FACTOR steps per round; the clock of rounds follows the fastest islands, so in a healthy run
it is about one. No rule reads it.
"""

from collections.abc import Mapping
from math import inf
from typing import Any, NamedTuple

STEPS_MIN = 16
SECONDS_MIN = 3.0  # where steps are short, a snapshot alone holds rounds up for 16 of them
FACTOR = 2.0
EPISODES_MAX = 8  # that are told apart; later ones count as part of the last


class Episode(NamedTuple):
    """A stretch of a run in which islands outran rounds."""

    from_step: int  # global step at which it began
    rounds: int  # that closed meanwhile
    steps: float  # of a mean island meanwhile
    later: int = 0  # stretches after it that count as part of it

    def __str__(self) -> str:
        closed = f"{self.rounds} round{'s' if self.rounds != 1 else ''} closed"
        when = f"from global step {self.from_step}" + f", and {self.later} times later" * (self.later > 0)
        return f"islands outran rounds: {self.steps:.0f} steps each while {closed}, {when}"


class Outrun:
    """Compares steps with rounds."""

    def __init__(self) -> None:
        self.episodes: list[Episode] = []  # in which islands outran rounds, oldest first
        self.current = False  # whether the last of them goes on
        self._names: set[str] = set()  # who has made steps in this window
        self._steps = 0  # all of them together
        self._since = 0  # global step at which the window began

    def on_steps(self, learner_id: str, steps: int, global_step: int, step_s: float = inf) -> None:
        """Count steps that a learner has made; the last of them took `step_s` seconds."""
        if global_step < self._since:  # back to a snapshot
            self._begin(global_step)
            self.current = False
        self._names.add(learner_id)
        self._steps += steps
        mean = self._steps / len(self._names)
        if mean < STEPS_MIN or mean * step_s < SECONDS_MIN:
            return
        rounds = global_step - self._since
        before, self.current = self.current, mean >= FACTOR * rounds
        if self.current:
            if not before and len(self.episodes) < EPISODES_MAX:
                self.episodes.append(Episode(self._since, 0, 0.0))
                before = True
            from_step, closed, made, later = self.episodes[-1]
            self.episodes[-1] = Episode(from_step, closed + rounds, made + mean, later + (not before))
        self._begin(global_step)

    def _begin(self, global_step: int) -> None:
        self._names, self._steps, self._since = set(), 0, global_step

    def state(self) -> dict[str, Any]:
        """Everything, as plain values; `restore` takes them back."""
        window = [sorted(self._names), self._steps, self._since]
        return {"episodes": [list(episode) for episode in self.episodes], "current": self.current, "window": window}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self.episodes = [Episode(*episode) for episode in state["episodes"]]
        self.current = state["current"]
        names, self._steps, self._since = state["window"]
        self._names = set(names)
