"""A share's values of one moment, held while a snapshot of them is written, with a bound on what that costs.

What is replaced while it is held takes memory of its own. So a merge that would replace a fragment of a bounded capture
waits until that is written; those that are due next are written first. A disk that is slower than the rounds thereby
slows them down while it writes, and learners train on meanwhile. To give the snapshot up instead would leave a run
whose disk is always slower without any. Only if nothing was let go of for PATIENCE_S it is given up: the run goes on.
"""

import threading
from collections.abc import Mapping

from diloco_jax.core.outer import NOTHING
from diloco_jax.core.passes import State

PATIENCE_S = 120.0  # for a disk from which nothing is heard


class HeldStates:
    """The states of a share's fragments at one moment, by number, for nobody to write to; any thread."""

    def __init__(self, states: Mapping[int, State]) -> None:
        self._states = dict(states)
        self._changed = threading.Condition()
        self._given_up = False

    def read(self, fragment_id: int, value_only: bool = False) -> State:
        """Return a fragment's state, or a state of nothing but its value; ValueError if the capture was given up."""
        with self._changed:
            if self._given_up:
                raise ValueError(
                    f"rounds waited {PATIENCE_S:g} s for it and no fragment was written; the disk is too slow, or hangs"
                )
            state = self._states[fragment_id]
        return State(state.value, {}, NOTHING) if value_only else state

    def release(self, fragment_id: int | None = None) -> None:
        """Let go of a fragment that is not needed any more, or of all."""
        with self._changed:
            for number in [*self._states] if fragment_id is None else [fragment_id]:
                self._states.pop(number, None)
            self._changed.notify_all()

    def admit(self, fragment_id: int) -> None:
        """Wait until a fragment may be replaced."""
        with self._changed:
            while fragment_id in self._states:
                if not self._changed.wait(PATIENCE_S):
                    self._given_up = True
                    self._states.clear()
