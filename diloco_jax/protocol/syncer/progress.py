"""The progress of a run: the clock that all parts of the syncer's machine share, and notes that bear its time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diloco_jax.protocol.effects import Note


class Progress:
    """The syncer's life, and what the run has come to in it.

    Args:
        total_steps: global steps after which the run is complete.
    """

    __slots__ = ("epoch", "finished", "global_step", "merged_parts", "merged_rounds", "rewound", "total_steps")

    def __init__(self, total_steps: int) -> None:
        if total_steps < 1:
            raise ValueError(f"total_steps is {total_steps}, but a run needs at least 1 global step")
        self.total_steps = total_steps
        self.epoch = 1  # which life of the syncer this is
        self.rewound = 0  # the life in which the run was last put back to a snapshot
        self.global_step = 0  # closed rounds
        self.merged_rounds = 0
        self.merged_parts = 0  # values in them
        self.finished = False

    def state(self) -> dict[str, Any]:
        """Everything, as plain values."""
        counts = [self.global_step, self.merged_rounds, self.merged_parts, self.finished]
        return {"epoch": [self.epoch, self.rewound], "counts": counts}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Become what `state()` described."""
        self.epoch, self.rewound = state["epoch"]
        self.global_step, self.merged_rounds, self.merged_parts, self.finished = state["counts"]

    def note(
        self, kind: str, fragment_id: int, members: tuple[str, ...], reason: str, global_step: int | None = None
    ) -> Note:
        """Make a note of this moment, or of the round of `global_step`."""
        return Note(kind, self.global_step if global_step is None else global_step, fragment_id, members, reason)
