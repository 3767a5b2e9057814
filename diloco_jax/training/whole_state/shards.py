"""The shards of an island's whole state that one process has: from its devices to a file of its own, and back.

Nothing is gathered and nobody is asked: every process copies each shard that its devices hold once, also those that
other processes hold too, so that it never needs them to come back. A leaf is read as far as shards here hold it, which
on the same mesh is what the devices of this process need; a process that has all of a state may come back on any mesh.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import Array, Shaped

from diloco_jax.core.codec import Bytes

Index = tuple[slice, ...]
Spans = tuple[tuple[int, int], ...]  # along each axis from start up to, but without, stop


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


def check_fits(leaves: Mapping[str, PartialLeaf], lies: Mapping[str, Sharding], described: Mapping[str, Any]) -> None:
    """Check that leaves have all that this process's devices need.

    Args:
      lies: the layout of every leaf, by name.
      described: anything with the `dtype` and `shape` of every leaf, by name.

    Raises:
      ValueError: they are of another model or optimizer, or of another mesh; says which leaf.
    """
    for name in sorted(leaves.keys() | lies.keys()):
        mine, theirs = described.get(name), leaves.get(name)
        if mine is None or theirs is None or (np.dtype(mine.dtype), tuple(mine.shape)) != (theirs.dtype, theirs.shape):
            raise ValueError(f"it is of another model or optimizer, which differs in '{name}'")
        indices = lies[name].addressable_devices_indices_map(theirs.shape).values()
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
