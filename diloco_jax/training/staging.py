"""Where an island's whole state crosses the border between device and host: `stage_leaves` out, `put_leaves` in.

Both work shard by shard on the layout that training uses, so that neither ever needs a collective: each unique shard is
copied from its own device to pinned host memory. The copies are queued behind the step that is running and before the
next one, which donates the state; the host waits for neither. What crosses is the canonical, unsharded content of every
leaf in its own dtype. Fragments have a way of their own (exchange.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jaxtyping import Array, Shaped

from diloco_jax.training.state_bytes import HostState, StateLayout

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Part of a leaf that one shard held: where it goes in the assembled array, and its copy on the host."""

    key: str
    where: Index
    copy: Shaped[Array, "..."]


class StagedState:
    """An island's whole state on its way to, or in, host memory, as it was after the step before `stage_state`.

    Its methods may be called from any thread, but from one at a time, while the island trains on.
    """

    def __init__(self, layout: StateLayout, pieces: Sequence[_Piece]) -> None:
        self.layout = layout
        self._pieces: dict[str, list[_Piece]] = {}
        for piece in pieces:
            self._pieces.setdefault(piece.key, []).append(piece)
        self._shapes = {leaf.name: leaf.shape for leaf in layout.leaves}
        self._assembled: tuple[str, Shaped[np.ndarray, "..."]] | None = None  # parts are asked for in their order

    def value(self) -> HostState:
        """Wait for the copies and return {leaf name: array of its own dtype}, not to be written to."""
        return {name: self._array(name) for name in self._shapes}

    def part(self, index: int, part_bytes: int) -> list[memoryview]:
        """Wait for what part `index` needs and return its bytes in pieces; holds one assembled leaf, not the state.

        Args:
          index: from 0, below `count(part_bytes)`.
          part_bytes: size of every part but the last, which may be shorter.
        """
        assert 0 <= index < self.count(part_bytes), f"part {index} of {self.count(part_bytes)}"
        start = index * part_bytes
        return self.layout.slices(start, min(start + part_bytes, self.layout.num_bytes), self._array)

    def count(self, part_bytes: int) -> int:
        """How many parts of this size the state has."""
        return -(-self.layout.num_bytes // part_bytes)

    def serialize(self) -> bytes:
        """Wait for the copies and return the whole state as bytes (state_bytes.py)."""
        return b"".join(self.layout.slices(0, self.layout.num_bytes, self._array))

    def _array(self, name: str) -> Shaped[np.ndarray, "..."]:
        pieces, shape = self._pieces[name], self._shapes[name]
        if len(pieces) == 1:
            return np.asarray(pieces[0].copy)
        if self._assembled is None or self._assembled[0] != name:
            array = np.empty(shape, pieces[0].copy.dtype)
            for piece in pieces:
                array[piece.where] = np.asarray(piece.copy)
            self._assembled = (name, array)
        return self._assembled[1]


def _bounds(index: Index, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    return [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]


def _shards(path: str, array: Shaped[Array, "..."]) -> Iterator[tuple[list[tuple[int, int]], Shaped[Array, "..."]]]:
    """Bounds and data of each part of an array, once however many devices hold it."""
    assert array.is_fully_addressable, f"{path} has shards on another host"
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            yield _bounds(shard.index, array.shape), shard.data


def _copy_out(plan: list[tuple[str, Index]], sources: list[Shaped[Array, "..."]]) -> tuple[_Piece, ...]:
    hosts = [SingleDeviceSharding(next(iter(x.devices())), memory_kind="pinned_host") for x in sources]
    copies = jax.device_put(sources, hosts, may_alias=False)
    return tuple(_Piece(key, where, copy) for (key, where), copy in zip(plan, copies, strict=True))


def stage_leaves(arrays: Mapping[str, Shaped[Array, "..."]], layout: StateLayout) -> StagedState:
    """Queue copies of whole arrays to pinned host memory; returns at once.

    Must be called between two steps, before the next one donates them. Needs all shards to be addressable.
    """
    plan: list[tuple[str, Index]] = []
    sources: list[Shaped[Array, "..."]] = []
    for name, array in arrays.items():
        for bounds, data in _shards(name, array):
            plan.append((name, tuple(slice(a, b) for a, b in bounds)))
            sources.append(data)
    return StagedState(layout, _copy_out(plan, sources))


def put_leaves(
    values: Sequence[Shaped[np.ndarray, "..."]], shardings: Sequence[NamedSharding]
) -> list[Shaped[Array, "..."]]:
    """Copy whole arrays to the devices, each laid out as its sharding says."""
    # Copies of our own: on CPU device_put goes on reading NumPy's memory, may_alias=False or not; steps write to it.
    placed: list[Shaped[Array, "..."]] = jax.device_put([np.array(value) for value in values], list(shardings))
    return placed
