"""The disk of the syncer: the snapshots that a new process can continue."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from diloco_jax.protocol.exclusion import RateHistory
from diloco_jax.sim.holdings import Value

SNAPSHOTS_KEPT = 3


class SyncerSnapshot(NamedTuple):
    """The run at one moment.

    `machine` is the JSON of the machine's state. `tape_lines` is the number of inputs on the tape before this moment.
    `histories` has the history of rates of each fragment; None if the simulation draws no norms.
    """

    global_step: int
    machine: str
    values: tuple[Value, ...]
    tape_lines: int
    histories: tuple[RateHistory, ...] | None

    def state(self) -> Mapping[str, Any]:
        """Return the machine's state."""
        plain: Mapping[str, Any] = json.loads(self.machine)
        return plain


class Disk:
    """Snapshots of the syncer, oldest first, and the final model.

    `broken` holds the global steps of unreadable snapshots.
    """

    def __init__(self) -> None:
        self.snapshots: list[SyncerSnapshot] = []
        self.broken: set[int] = set()
        self.final: tuple[Value, ...] = ()

    def keep(self, snapshot: SyncerSnapshot) -> None:
        """Write a snapshot, and delete the oldest one if there are too many."""
        self.snapshots = [s for s in self.snapshots if s.global_step != snapshot.global_step] + [snapshot]
        self.broken.discard(snapshot.global_step)
        del self.snapshots[:-SNAPSHOTS_KEPT]

    def newest_readable(self) -> SyncerSnapshot | None:
        """Return the newest readable snapshot, which a new process continues; None if there is none."""
        return next((s for s in reversed(self.snapshots) if s.global_step not in self.broken), None)

    def break_newest(self) -> None:
        """Make the newest readable snapshot unreadable, if there is another one."""
        readable = [each.global_step for each in self.snapshots if each.global_step not in self.broken]
        if len(readable) > 1:
            self.broken.add(readable[-1])

    def drop_after(self, global_step: int) -> None:
        """Delete the snapshots of later steps, so that none of them counts as the newest."""
        self.snapshots = [each for each in self.snapshots if each.global_step <= global_step]
