"""An island's whole state on its way from the devices to the host.

It goes shard by shard in the layout that training uses, so that no collective is ever needed: each unique shard is
copied from its own device to pinned host memory. The copies are queued behind the step that is running and before the
next one, which donates the state; the host waits for neither. What crosses is the canonical, unsharded content of every
leaf in its own dtype. Fragments have a way of their own (exchange.py).

With devices on several processes each copies its own shards. One of them asks the others for theirs, leaf by leaf.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Shaped

from diloco_jax.core.codec import Bytes
from diloco_jax.core.parts import Buffer
from diloco_jax.training.whole_state.layout import HostState, StateLayout

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Part of a leaf that one shard held: where it goes in the assembled array, and its copy on the host."""

    key: str
    where: Index
    copy: Shaped[Array, "..."]


class CopyGone(Exception):
    """Another process has no copy of this state any more."""


class StagedState:
    """An island's whole state on its way to, or in, host memory, as it was after the step before `stage_state`.

    Its methods may be called from any thread, but from one at a time, while the island trains on.

    Args:
      elsewhere: where the pieces of the other processes belong, by leaf and process.
    """

    def __init__(
        self, layout: StateLayout, pieces: Sequence[_Piece], elsewhere: Mapping[str, Mapping[int, Sequence[Index]]]
    ) -> None:
        self.layout = layout  # of the whole state
        # given a leaf's name, waits for what `loose` gives on the other processes, by process; the owner sets it on the
        # one that wants whole leaves. It may raise CopyGone.
        self.of_others: Callable[[str], Mapping[int, Bytes]] = lambda name: {}
        self._elsewhere = elsewhere
        self._pieces: dict[str, list[_Piece]] = {}
        for piece in pieces:
            self._pieces.setdefault(piece.key, []).append(piece)
        self._assembled: tuple[str, Shaped[np.ndarray, "..."]] | None = None

    def value(self) -> HostState:
        """Wait for the copies and return {leaf name: array of its own dtype}, not to be written to."""
        return {name: self.leaf(name) for name in self.layout.by_name}

    def loose(self, name: str) -> list[Buffer]:
        """Wait for the copies of a leaf that this process has and return their bytes; nothing if it has none."""
        copies = [np.asarray(piece.copy) for piece in self._pieces.get(name, ())]
        return [np.ascontiguousarray(copy).reshape(-1).view(np.uint8).data for copy in copies]

    def leaf(self, name: str) -> Shaped[np.ndarray, "..."]:
        """Wait for what a leaf needs and return it, not to be written to; one assembled leaf is held."""
        pieces, elsewhere = self._pieces.get(name, []), self._elsewhere.get(name, {})
        if len(pieces) == 1 and not elsewhere:
            return np.asarray(pieces[0].copy)
        if self._assembled is None or self._assembled[0] != name:
            leaf = self.layout.by_name[name]
            array = np.empty(leaf.shape, np.dtype(leaf.dtype))
            for piece in pieces:
                array[piece.where] = np.asarray(piece.copy)
            received = self.of_others(name) if elsewhere else {}
            for process, places in elsewhere.items():
                _fill(array, places, received[process])
            self._assembled = (name, array)
        return self._assembled[1]


def bounds_of(index: Index, shape: tuple[int, ...]) -> Index:
    """Return an index with a start and a stop along every axis."""
    return tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True))


def _elsewhere(array: Shaped[Array, "..."]) -> dict[int, list[Index]]:
    """Return where the other processes' parts of an array belong, in the order of `StagedState.loose`."""
    found: dict[int, list[Index]] = {}
    if not array.is_fully_addressable:
        for shard in _in_order(array.global_shards):
            process = shard.device.process_index
            if shard.replica_id == 0 and process != jax.process_index():
                found.setdefault(process, []).append(bounds_of(shard.index, array.shape))
    return found


def _in_order(shards: Sequence[jax.Shard]) -> list[jax.Shard]:
    """Sort shards equally on every process; JAX lists its own and all shards in different orders."""
    return sorted(shards, key=lambda shard: [index.start or 0 for index in shard.index])


def _fill(array: Shaped[np.ndarray, "..."], places: Sequence[Index], received: Bytes) -> None:
    flat, at = np.frombuffer(received, array.dtype), 0
    if flat.size != sum(array[where].size for where in places):
        raise ValueError(f"a host sent {flat.nbytes} bytes of a leaf, which are not its shards of {array.shape}")
    for where in places:
        part = array[where]
        array[where] = flat[at : at + part.size].reshape(part.shape)
        at += part.size


def copy_out(sources: list[Shaped[Array, "..."]]) -> list[Shaped[Array, "..."]]:
    """Queue copies of arrays, each of one device, to pinned host memory."""
    hosts = [SingleDeviceSharding(next(iter(x.devices())), memory_kind="pinned_host") for x in sources]
    copies: list[Shaped[Array, "..."]] = jax.device_put(sources, hosts, may_alias=False)
    return copies


def stage_leaves(arrays: Mapping[str, Shaped[Array, "..."]], layout: StateLayout) -> StagedState:
    """Queue copies of whole arrays to pinned host memory; returns at once.

    Must be called between two steps, before the next one donates them.
    """
    plan: list[tuple[str, Index]] = []
    sources: list[Shaped[Array, "..."]] = []
    for name, array in arrays.items():
        for shard in _in_order(array.addressable_shards):
            if shard.replica_id == 0:  # once, however many devices hold it
                plan.append((name, bounds_of(shard.index, array.shape)))
                sources.append(shard.data)
    elsewhere = {name: found for name, array in arrays.items() if (found := _elsewhere(array))}
    pieces = [_Piece(*where, copy) for where, copy in zip(plan, copy_out(sources), strict=True)]
    return StagedState(layout, pieces, elsewhere)
