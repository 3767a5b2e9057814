"""Copies of an island's whole state from the devices to CPU memory, for a file of each process or for another island.

The copies are made shard by shard in the layout of training, so no collective is needed. Copies to pinned CPU memory
are queued behind the running step and before the next one, which donates the state. The host waits for neither.
Fragments are copied by exchange.py.

For its own file (`stage_shards`), every process copies each shard on its devices once, even if other processes hold the
shard too. So it never needs the other processes to restore it. A leaf can be read as far as the file's shards hold it;
on the same mesh this is what the process's devices need. A process with a whole state may restore it on any mesh.

For another island (`stage_leaves`), the copies are the canonical, unsharded content of every leaf in its own dtype; one
device copies each unique shard. If the devices belong to several processes, each copies its own shards. One process
then requests the others' shards, leaf by leaf.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import Array, Shaped

from diloco_jax.core.codec import Bytes, as_bytes
from diloco_jax.core.host_bytes import Buffer
from diloco_jax.training.whole_state.layout import StateArrays, StateLayout

Index = tuple[slice, ...]
# For each axis (start, stop), without stop.
Spans = tuple[tuple[int, int], ...]


@runtime_checkable
class CpuCopy(Protocol):
    """An array in CPU memory, or on its way there; a NumPy array is one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the type of the elements."""

    def __array__(self, dtype: Any = None, /, *, copy: bool | None = None) -> Shaped[np.ndarray, "..."]:
        """Wait until the array is in CPU memory, and return it; any thread may call this."""


# Pieces of a leaf that are being copied to CPU memory.
Copies = Sequence[tuple[Spans, CpuCopy]]


class Shard(NamedTuple):
    """The description of a shard of a leaf."""

    # Name, dtype and shape of the leaf.
    name: str
    dtype: str
    shape: tuple[int, ...]
    # The shard's place in the leaf.
    spans: Spans

    @property
    def size(self) -> tuple[int, ...]:
        """Return the shape of the shard."""
        return lengths(self.spans)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.size) * np.dtype(self.dtype).itemsize


class StagedShards(NamedTuple):
    """This process's shards, which are being copied or have been copied to CPU memory."""

    shards: Sequence[Shard]
    copies: Sequence[CpuCopy]


def copy_out(sources: list[Shaped[Array, "..."]]) -> list[CpuCopy]:
    """Queue copies of arrays to pinned CPU memory; each array is on one device."""
    hosts = [SingleDeviceSharding(next(iter(x.devices())), memory_kind="pinned_host") for x in sources]
    copies: Any = jax.device_put(sources, hosts, may_alias=False)
    return list[CpuCopy](copies)


def own_shards(arrays: Mapping[str, Shaped[Array, "..."]]) -> dict[Shard, Shaped[Array, "..."]]:
    """Return the shards on this process's devices, each once; processes with equal meshes have them in one order."""
    found: dict[Shard, Shaped[Array, "..."]] = {}
    for name, array in arrays.items():
        for shard in array.addressable_shards:
            spans = spans_of(shard.index, array.shape)
            found.setdefault(Shard(name, array.dtype.name, tuple(array.shape), spans), shard.data)
    return found


def stage_shards(arrays: Mapping[str, Shaped[Array, "..."]]) -> StagedShards:
    """Queue copies of all shards on this process's devices to pinned CPU memory; call this between two steps."""
    found = own_shards(arrays)
    return StagedShards(tuple(found), copy_out(list(found.values())))


class PartialLeaf:
    """The pieces of a leaf that are there; it can be indexed like an array, and is one if no piece is missing."""

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self.dtype = np.dtype(dtype)
        self.shape = shape
        self._pieces: list[tuple[Spans, Shaped[np.ndarray, "..."]]] = []

    def add(self, spans: Spans, piece: Shaped[np.ndarray, "..."]) -> None:
        """Add a piece, which must not overlap another one."""
        self._pieces.append((spans, piece))

    @property
    def pieces(self) -> Sequence[Shaped[np.ndarray, "..."]]:
        """Return the pieces that are there."""
        return [piece for _, piece in self._pieces]

    def holds(self, index: Index) -> bool:
        """Return whether the pieces cover this part of the leaf."""
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
    """Return leaves by name, as views of a buffer of consecutive shards; ValueError if the size is wrong."""
    shards = list(shards)
    if (expected := sum(shard.num_bytes for shard in shards)) != memoryview(buffer).nbytes:
        raise ValueError(f"it has {memoryview(buffer).nbytes} bytes instead of {expected}")
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
    """Check that leaves have every piece that this process's devices need.

    Args:
      layouts: the layout of every leaf on the devices, by name.
      described: anything with the `dtype` and `shape` of every leaf, by name.

    Raises:
      ValueError: the leaves belong to another model, optimizer or mesh; the message names the leaf.
    """
    for name in sorted(leaves.keys() | layouts.keys()):
        mine, theirs = described.get(name), leaves.get(name)
        if mine is None or theirs is None or (np.dtype(mine.dtype), tuple(mine.shape)) != (theirs.dtype, theirs.shape):
            raise ValueError(f"it belongs to another model or optimizer, which differs in '{name}'")
        indices = layouts[name].addressable_devices_indices_map(theirs.shape).values()
        if not all(theirs.holds(index) for index in indices if index is not None):
            raise ValueError(f"it belongs to another mesh or other hosts: it lacks a part of '{name}' that is needed")


def spans_of(index: Index, shape: tuple[int, ...]) -> Spans:
    """Convert an index of slices to a start and a stop along every axis."""
    return tuple(part.indices(extent)[:2] for part, extent in zip(index, shape, strict=True))


def lengths(spans: Spans) -> tuple[int, ...]:
    """Return the shape of the part within these spans."""
    return tuple(stop - start for start, stop in spans)


def _common(one: Spans, other: Spans) -> Spans:
    pairs = zip(one, other, strict=True)
    return tuple((max(a, c), max(a, c, min(b, d))) for (a, b), (c, d) in pairs)


def _within(part: Spans, whole: Spans) -> Index:
    """Return the index of `part` in an array whose first element is the start of `whole`."""
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(part, whole, strict=True))


class CopyGone(Exception):
    """Another process has freed its copy of this state."""


class StagedState:
    """A copy of an island's whole state in CPU memory, or on the way to it, as of the step before `stage_state`.

    Its methods may be called from any thread, by one thread at a time, while the island keeps training.

    Args:
      layout: layout of the whole state.
      copies: the pieces of each leaf that this process copies, by name.
      elsewhere: the places of the other processes' pieces, by leaf and process.
    """

    def __init__(
        self, layout: StateLayout, copies: Mapping[str, Copies], elsewhere: Mapping[str, Mapping[int, Sequence[Spans]]]
    ) -> None:
        self.layout = layout
        # This function takes a leaf's name, waits for the results of `loose` on the other processes, and returns them
        # by process. The owner sets it on the process that needs whole leaves. It may raise CopyGone.
        self.of_others: Callable[[str], Mapping[int, Bytes]] = lambda name: {}
        self._elsewhere = elsewhere
        self._copies = copies
        self._assembled: tuple[str, Shaped[np.ndarray, "..."]] | None = None

    def value(self) -> StateArrays:
        """Wait for all copies and return {leaf name: array}; the caller must not change the arrays."""
        return {name: self.leaf(name) for name in self.layout.by_name}

    def loose(self, name: str) -> list[Buffer]:
        """Wait for this process's pieces of a leaf and return their bytes; an empty list if it has none."""
        return [as_bytes(np.asarray(copy)) for _, copy in self._copies.get(name, ())]

    def leaf(self, name: str) -> Shaped[np.ndarray, "..."]:
        """Wait for the pieces of a leaf and return it whole; the caller must not change it.

        The last assembled leaf is kept for further calls.
        """
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
                        f"a host sent {flat.nbytes} bytes of '{name}', but its shards of {leaf.shape} have "
                        f"{sum(sizes)} elements; do all hosts use the same version?"
                    )
                for spans, part in zip(places, np.split(flat, np.cumsum(sizes)[:-1]), strict=True):
                    whole.add(spans, part.reshape(lengths(spans)))
            self._assembled = (name, np.asarray(whole))
        return self._assembled[1]


def _elsewhere(array: Shaped[Array, "..."]) -> dict[int, list[Spans]]:
    """Return the places of the other processes' pieces of an array, in the order of `StagedState.loose`."""
    found: dict[int, list[Spans]] = {}
    if not array.is_fully_addressable:
        for shard in _in_order(array.global_shards):
            process = shard.device.process_index
            if shard.replica_id == 0 and process != jax.process_index():
                found.setdefault(process, []).append(spans_of(shard.index, array.shape))
    return found


def _in_order(shards: Sequence[jax.Shard]) -> list[jax.Shard]:
    """Sort shards in the same order on every process, because JAX's two lists of shards have different orders."""
    return sorted(shards, key=lambda shard: [index.start or 0 for index in shard.index])


def stage_leaves(arrays: Mapping[str, Shaped[Array, "..."]], layout: StateLayout) -> StagedState:
    """Queue copies of whole arrays to pinned CPU memory; return at once.

    Call this between two steps, before the next step donates the arrays.
    """
    # Each shard is copied once, even if several devices hold it.
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
