"""Whole states of a slice in CPU memory: what a new leader goes back to, and what a slice returns with.

A state has no file and no checkpoint: it goes from the devices to memory, and from there to the devices of this slice,
or in parts to those of another one.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from diloco_jax.core.codec import as_bytes
from diloco_jax.runtime.island.saved_states import Leaves
from diloco_jax.runtime.slices.messages import StatePart
from diloco_jax.training.exchanged import ExchangedState
from diloco_jax.training.whole_state.staging import PartialLeaf, Shard, StagedShards, read_shards

# A part is small beside a step's gradient, so that it delays no step.
PART_BYTES = 1 << 22


def copy_of(island: ExchangedState) -> Leaves:
    """Return a copy of the whole state in CPU memory; wait for it."""
    staged, leaves = island.stage_shards(), Leaves()
    for shard, copy in zip(staged.shards, staged.copies, strict=True):
        leaf = leaves.setdefault(shard.name, PartialLeaf(shard.dtype, shard.shape))
        leaf.add(shard.spans, np.asarray(copy))
    return leaves


def parts_of_state(staged: StagedShards, term: int, change: int) -> Iterator[tuple[StatePart, memoryview]]:
    """Yield a copied state in parts, shard by shard; any thread."""
    start, total = 0, sum(shard.num_bytes for shard in staged.shards)
    for copy in staged.copies:
        content = memoryview(as_bytes(np.ascontiguousarray(copy)))
        for at in range(0, len(content), PART_BYTES):
            piece = content[at : at + PART_BYTES]
            yield StatePart(term, change, start + at, total), piece
        start += len(content)


class ReceivedCopy:
    """The parts of another slice's state as they arrive; ValueError for a part that cannot belong to it."""

    def __init__(self, shards: Sequence[Shard], term: int, change: int) -> None:
        self.term, self.change = term, change
        self._shards = shards
        self._buffer = np.empty(sum(shard.num_bytes for shard in shards), np.uint8)
        self._filled = 0

    @property
    def complete(self) -> bool:
        return self._filled == self._buffer.size

    @property
    def started(self) -> bool:
        return self._filled > 0

    def is_of(self, term: int, change: int) -> bool:
        """Tell whether this is the state after a change."""
        return (term, change) == (self.term, self.change)

    def add(self, part: StatePart, payload: Any) -> None:
        """Take the next part; the first one again is the start of another donor's copy of the same state."""
        content = np.frombuffer(payload, np.uint8)
        if part.start == 0 and not self.complete:
            self._filled = 0
        if (part.total, part.start) != (self._buffer.size, self._filled) or part.start + content.size > part.total:
            raise ValueError(
                f"a part of a state begins at byte {part.start} of {part.total}, expected {self._filled} of "
                f"{self._buffer.size}: do all slices have the same config?"
            )
        self._buffer[part.start : part.start + content.size] = content
        self._filled += content.size

    def leaves(self) -> Leaves:
        """Return the leaves of a complete state, as views of what arrived."""
        return read_shards(self._shards, self._buffer.data)
