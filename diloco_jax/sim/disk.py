"""The disk of a syncer: the tape and the snapshots outlive its process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from diloco_jax.sim.holdings import Value

SNAPSHOTS_KEPT = 3


class SyncerSnapshot(NamedTuple):
    """The run at one moment."""

    global_step: int
    machine: str  # JSON of the machine's state
    values: tuple[Value, ...]
    tape_lines: int  # where on the tape the inputs begin that came later

    def state(self) -> Mapping[str, Any]:
        """Return the machine's state."""
        plain: Mapping[str, Any] = json.loads(self.machine)
        return plain


class Disk:
    """Files of the syncer."""

    def __init__(self) -> None:
        self.tape: list[str] = []
        self.snapshots: list[SyncerSnapshot] = []  # oldest first
        self.broken: set[int] = set()  # global steps of those that cannot be read
        self.final: tuple[Value, ...] = ()  # the model of the end

    def keep(self, snapshot: SyncerSnapshot) -> None:
        """Write a snapshot; old ones go."""
        self.snapshots = [s for s in self.snapshots if s.global_step != snapshot.global_step] + [snapshot]
        self.broken.discard(snapshot.global_step)
        del self.snapshots[:-SNAPSHOTS_KEPT]

    def newest_readable(self) -> SyncerSnapshot | None:
        """Return the snapshot from which a process goes on."""
        return next((s for s in reversed(self.snapshots) if s.global_step not in self.broken), None)
