"""An island's whole state on its way from the devices to the host.

It goes shard by shard in the layout that training uses, so that no collective is ever needed: each unique shard is
copied from its own device to pinned host memory. The copies are queued behind the step that is running and before the
next one, which donates the state; the host waits for neither. What crosses is the canonical, unsharded content of every
leaf in its own dtype. Fragments have a way of their own (exchange.py).

With devices on several processes each copies its own shards. One of them asks the others for theirs, leaf by leaf.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Array, Shaped

from diloco_jax.core.codec import Bytes, as_bytes
from diloco_jax.core.parts import Buffer
from diloco_jax.training.whole_state.layout import HostState, StateLayout
from diloco_jax.training.whole_state.shards import PartialLeaf, Spans, copy_out, lengths, spans_of

Copies = Sequence[tuple[Spans, Shaped[Array, "..."]]]  # of parts of a leaf, on their way to the host


class CopyGone(Exception):
    """Another process has no copy of this state any more."""


class StagedState:
    """An island's whole state on its way to, or in, host memory, as it was after the step before `stage_state`.

    Its methods may be called from any thread, but from one at a time, while the island trains on.

    Args:
      elsewhere: where the pieces of the other processes belong, by leaf and process.
    """

    def __init__(
        self, layout: StateLayout, copies: Mapping[str, Copies], elsewhere: Mapping[str, Mapping[int, Sequence[Spans]]]
    ) -> None:
        self.layout = layout  # of the whole state
        # given a leaf's name, waits for what `loose` gives on the other processes, by process; the owner sets it on the
        # one that wants whole leaves. It may raise CopyGone.
        self.of_others: Callable[[str], Mapping[int, Bytes]] = lambda name: {}
        self._elsewhere = elsewhere
        self._copies = copies
        self._assembled: tuple[str, Shaped[np.ndarray, "..."]] | None = None

    def value(self) -> HostState:
        """Wait for the copies and return {leaf name: array of its own dtype}, not to be written to."""
        return {name: self.leaf(name) for name in self.layout.by_name}

    def loose(self, name: str) -> list[Buffer]:
        """Wait for the copies of a leaf that this process has and return their bytes; nothing if it has none."""
        return [as_bytes(np.asarray(copy)) for _, copy in self._copies.get(name, ())]

    def leaf(self, name: str) -> Shaped[np.ndarray, "..."]:
        """Wait for what a leaf needs and return it, not to be written to; one assembled leaf is held."""
        copies, elsewhere = self._copies.get(name, ()), self._elsewhere.get(name, {})
        if len(copies) == 1 and not elsewhere:
            return np.asarray(copies[0][1])
        if self._assembled is None or self._assembled[0] != name:
            leaf = self.layout.by_name[name]
            whole = PartialLeaf(leaf.dtype, leaf.shape)
            for spans, copy in copies:
                whole.add(spans, np.asarray(copy))
            received = self.of_others(name) if elsewhere else {}
            for process, places in elsewhere.items():
                sizes = [math.prod(lengths(spans)) for spans in places]
                flat = np.frombuffer(received[process], whole.dtype)
                if flat.size != sum(sizes):
                    raise ValueError(
                        f"a host sent {flat.nbytes} bytes of a leaf, which are not its shards of {leaf.shape}"
                    )
                for spans, part in zip(places, np.split(flat, np.cumsum(sizes)[:-1]), strict=True):
                    whole.add(spans, part.reshape(lengths(spans)))
            self._assembled = (name, np.asarray(whole))
        return self._assembled[1]


def _elsewhere(array: Shaped[Array, "..."]) -> dict[int, list[Spans]]:
    """Return where the other processes' parts of an array belong, in the order of `StagedState.loose`."""
    found: dict[int, list[Spans]] = {}
    if not array.is_fully_addressable:
        for shard in _in_order(array.global_shards):
            process = shard.device.process_index
            if shard.replica_id == 0 and process != jax.process_index():
                found.setdefault(process, []).append(spans_of(shard.index, array.shape))
    return found


def _in_order(shards: Sequence[jax.Shard]) -> list[jax.Shard]:
    """Sort shards equally on every process; JAX lists its own and all shards in different orders."""
    return sorted(shards, key=lambda shard: [index.start or 0 for index in shard.index])


def stage_leaves(arrays: Mapping[str, Shaped[Array, "..."]], layout: StateLayout) -> StagedState:
    """Queue copies of whole arrays to pinned host memory; returns at once.

    Must be called between two steps, before the next one donates them.
    """
    # each shard once, however many devices hold it
    found = {
        name: [x for x in _in_order(array.addressable_shards) if x.replica_id == 0] for name, array in arrays.items()
    }
    copies = iter(copy_out([shard.data for shards in found.values() for shard in shards]))
    held = {
        name: [(spans_of(shard.index, arrays[name].shape), next(copies)) for shard in shards]
        for name, shards in found.items()
    }
    elsewhere = {name: places for name, array in arrays.items() if (places := _elsewhere(array))}
    return StagedState(layout, held, elsewhere)
