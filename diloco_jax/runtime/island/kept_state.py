"""The state of an island that is in memory, and goes before those on its disk."""

from concurrent.futures import Future
from typing import NamedTuple

from diloco_jax.runtime.island.saved_states import Leaves, SavedState, SavedStates, StateName
from diloco_jax.training.whole_state.staging import StagedShards


class KeptState(NamedTuple):
    """A state in CPU memory that an earlier incarnation of this learner had."""

    name: StateName
    leaves: Leaves


class StatesWithKept(SavedStates):
    """The states on disk, and before them one in memory, which can be read once."""

    def __init__(self, on_disk: SavedStates, kept: KeptState) -> None:
        self._on_disk = on_disk
        self._kept: KeptState | None = kept

    def names(self) -> list[StateName]:
        on_disk = self._on_disk.names()
        return on_disk if self._kept is None else [self._kept.name, *(n for n in on_disk if n != self._kept.name)]

    def read(self, name: StateName) -> SavedState:
        kept = self._kept
        if kept is None or name != kept.name:
            return self._on_disk.read(name)
        self._kept = None
        return SavedState(kept.leaves)

    def save(self, staged: StagedShards, name: StateName, keep: int, loader: bytes | None = None) -> Future[str]:
        return self._on_disk.save(staged, name, keep, loader)

    def close(self) -> None:
        self._on_disk.close()
