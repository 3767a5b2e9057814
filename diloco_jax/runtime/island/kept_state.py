"""The state of an island that is in memory, and goes before those on its disk."""

from concurrent.futures import Future
from typing import NamedTuple

from diloco_jax.runtime.island.saved_states import Leaves, OwnStates, SavedState, StateName
from diloco_jax.training.whole_state.staging import StagedShards


class KeptState(NamedTuple):
    """A state in CPU memory that an earlier incarnation of this learner had."""

    name: StateName
    leaves: Leaves


class StatesWithKept:
    """The states on disk, and before them one in memory, which can be read once."""

    def __init__(self, on_disk: OwnStates, kept: KeptState) -> None:
        self._on_disk = on_disk
        self._kept: KeptState | None = kept
        # The global step of the state in memory, until one of this step is written to the disk.
        self._unwritten: int | None = kept.name.global_step
        # The global step of the newest state on disk.
        self._newest = -1

    def names(self) -> list[StateName]:
        on_disk = self._on_disk.names()
        self._newest = max((name.global_step for name in on_disk), default=-1)
        return on_disk if self._kept is None else [self._kept.name, *(n for n in on_disk if n != self._kept.name)]

    def read(self, name: StateName) -> SavedState:
        kept = self._kept
        if kept is None or name != kept.name:
            return self._on_disk.read(name)
        self._kept = None
        return SavedState(kept.leaves)

    def save(self, staged: StagedShards, name: StateName, keep: int, loader: bytes | None = None) -> Future[str]:
        # The caller keeps the state that it loaded, and that one is not on the disk.
        if keep == self._unwritten:
            keep = self._newest
        if name.global_step == self._unwritten:
            self._unwritten = None
        return self._on_disk.save(staged, name, keep, loader)

    def close(self) -> None:
        self._on_disk.close()
