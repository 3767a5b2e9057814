"""An island's whole state on its way from the devices to the host: to a file of each process, or to another island.

It goes shard by shard in the layout that training uses, so that no collective is ever needed. Copies to pinned host
memory are queued behind the step that is running and before the next one, which donates the state; the host waits for
neither. Fragments have a way of their own (exchange.py).

To a file of its own (`stage_shards`) every process copies each shard that its devices hold once, also those that other
processes hold too, so that it never needs them to come back. A leaf is read as far as shards here hold it, which on the
same mesh is what the devices of this process need; a process that has all of a state may come back on any mesh.

To another island (`stage_leaves`) goes the canonical, unsharded content of every leaf in its own dtype, each unique
shard from one device. With devices on several processes each copies its own; one of them asks the others for theirs,
leaf by leaf.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import Array, Shaped

from diloco_jax.core.codec import Bytes, as_bytes
from diloco_jax.core.parts import Buffer
from diloco_jax.training.whole_state.layout import HostState, StateLayout

Index = tuple[slice, ...]
Spans = tuple[tuple[int, int], ...]  # along each axis from start up to, but without, stop
Copies = Sequence[tuple[Spans, Shaped[Array, "..."]]]  # of parts of a leaf, on their way to the host


class Shard(NamedTuple):
    """Part of a leaf."""

    name: str  # of the leaf
    dtype: str
    shape: tuple[int, ...]  # of the leaf
    spans: Spans

    @property
    def size(self) -> tuple[int, ...]:
        """Return its own shape."""
        return lengths(self.spans)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.size) * np.dtype(self.dtype).itemsize


class StagedShards(NamedTuple):
    """Copies of this process's shards, on their way to or in host memory."""

    shards: Sequence[Shard]
    copies: Sequence[Shaped[Array, "..."]]


def copy_out(sources: list[Shaped[Array, "..."]]) -> list[Shaped[Array, "..."]]:
    """Queue copies of arrays, each of one device, to pinned host memory."""
    hosts = [SingleDeviceSharding(next(iter(x.devices())), memory_kind="pinned_host") for x in sources]
    return jax.device_put(sources, hosts, may_alias=False)


def stage_shards(arrays: Mapping[str, Shaped[Array, "..."]]) -> StagedShards:
    """Queue copies of what this process's devices hold to pinned host memory, between two steps; returns at once."""
    found: dict[Shard, Shaped[Array, "..."]] = {}
    for name, array in arrays.items():
        for shard in array.addressable_shards:
            spans = spans_of(shard.index, array.shape)
            found.setdefault(Shard(name, array.dtype.name, tuple(array.shape), spans), shard.data)
    return StagedShards(tuple(found), copy_out(list(found.values())))


class PartialLeaf:
    """A leaf as far as shards hold it; indexed as an array, and an array where they hold all of it."""

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self.dtype = np.dtype(dtype)
        self.shape = shape
        self._pieces: list[tuple[Spans, Shaped[np.ndarray, "..."]]] = []

    def add(self, spans: Spans, piece: Shaped[np.ndarray, "..."]) -> None:
        """Hold this piece too; pieces do not overlap."""
        self._pieces.append((spans, piece))

    def holds(self, index: Index) -> bool:
        """Tell whether pieces here have all of this part."""
        wanted = spans_of(index, self.shape)
        held = sum(math.prod(lengths(_common(wanted, spans))) for spans, _ in self._pieces)
        return held == math.prod(lengths(wanted))

    def __getitem__(self, index: Index) -> Shaped[np.ndarray, "..."]:
        wanted = spans_of(index, self.shape)
        for spans, piece in self._pieces:
            if spans == wanted:
                return piece
        assert self.holds(index), f"no shards here hold {index}"
        part = np.empty(lengths(wanted), self.dtype)
        for spans, piece in self._pieces:
            common = _common(wanted, spans)
            part[_within(common, wanted)] = piece[_within(common, spans)]
        return part

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Shaped[np.ndarray, "..."]:
        whole = self[(slice(None),) * len(self.shape)]
        return whole.copy() if copy else whole


def read_shards(shards: Iterable[Shard], buffer: Bytes) -> dict[str, PartialLeaf]:
    """Return leaves by name, views of bytes in which their shards follow each other; ValueError for another size."""
    shards = list(shards)
    if (expected := sum(shard.num_bytes for shard in shards)) != memoryview(buffer).nbytes:
        raise ValueError(f"{memoryview(buffer).nbytes} bytes are there instead of {expected}")
    leaves: dict[str, PartialLeaf] = {}
    offset = 0
    for shard in shards:
        leaf = leaves.setdefault(shard.name, PartialLeaf(shard.dtype, shard.shape))
        leaf.add(shard.spans, np.ndarray(shard.size, shard.dtype, buffer, offset))
        offset += shard.num_bytes
    return leaves


def check_fits(
    leaves: Mapping[str, PartialLeaf], layouts: Mapping[str, Sharding], described: Mapping[str, Any]
) -> None:
    """Check that leaves have all that this process's devices need.

    Args:
      layouts: the layout of every leaf, by name.
      described: anything with the `dtype` and `shape` of every leaf, by name.

    Raises:
      ValueError: they are of another model or optimizer, or of another mesh; says which leaf.
    """
    for name in sorted(leaves.keys() | layouts.keys()):
        mine, theirs = described.get(name), leaves.get(name)
        if mine is None or theirs is None or (np.dtype(mine.dtype), tuple(mine.shape)) != (theirs.dtype, theirs.shape):
            raise ValueError(f"it is of another model or optimizer, which differs in '{name}'")
        indices = layouts[name].addressable_devices_indices_map(theirs.shape).values()
        if not all(theirs.holds(index) for index in indices if index is not None):
            raise ValueError(f"it is of another mesh or other hosts: it lacks a part of '{name}' that is needed here")


def spans_of(index: Index, shape: tuple[int, ...]) -> Spans:
    """Return an index as a start and a stop along every axis."""
    return tuple(part.indices(extent)[:2] for part, extent in zip(index, shape, strict=True))


def lengths(spans: Spans) -> tuple[int, ...]:
    """Return the shape of what lies there."""
    return tuple(stop - start for start, stop in spans)


def _common(one: Spans, other: Spans) -> Spans:
    pairs = zip(one, other, strict=True)
    return tuple((max(a, c), max(a, c, min(b, d))) for (a, b), (c, d) in pairs)


def _within(part: Spans, whole: Spans) -> Index:
    """Return where a part lies in an array that begins where the whole does."""
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(part, whole, strict=True))


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
