"""Where parameters and optimizer state cross the border between device and host: `stage_...` out, `put_...` in.

Both work shard by shard on the layout that training uses, so that neither ever needs a collective:
  out  each unique shard is cut on its own device and copied to pinned host memory. The copies are queued behind the
       step that is running and before the next one, which donates the parameters; the host waits for neither.
  in   a new value is laid out like the tensor that it goes into and blended elementwise, in place.
What crosses is the canonical, unsharded content: float32 of `Slice`s (leaf path, index range along one axis), or, for
a whole state, of every leaf in its own dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array, Float, Shaped

from diloco_jax.core.fragments import Fragment, Slice
from diloco_jax.training.models.protocol import Params
from diloco_jax.training.state_bytes import HostState, StateLayout

AdoptMode = Literal["overwrite", "blend", "rebase"]
HostValues = dict[str, Float[np.ndarray, "..."]]  # Slice.key -> float32
AdoptProgram = Callable[[Params, Mapping[str, Array], Mapping[str, Array], Float[Array, ""]], Params]
Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Part of a slice or leaf that one shard held: where it goes in the assembled array, and its copy on the host."""

    key: str
    where: Index
    copy: Shaped[Array, "..."]


@dataclass(frozen=True, slots=True)
class StagedFragment:
    """A fragment on its way to, or in, host memory, as it was after the step before `stage`."""

    fragment_id: int
    shapes: Mapping[str, tuple[int, ...]]
    pieces: tuple[_Piece, ...]

    def value(self) -> HostValues:
        """Wait for the copies and assemble {slice key: float32 array}; the arrays are the caller's own.

        May be called from any thread, while the island trains on.
        """
        values = {key: np.empty(shape, np.float32) for key, shape in self.shapes.items()}
        for piece in self.pieces:
            values[piece.key][piece.where] = np.asarray(piece.copy)
        return values


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


@partial(jax.jit, static_argnums=(1, 2, 3))
def _cut(x: Shaped[Array, "..."], axis: int, start: int, stop: int) -> Shaped[Array, "..."]:
    return jax.lax.slice_in_dim(x, start, stop, axis=axis)


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


def stage_fragment(params: Params, fragment: Fragment) -> StagedFragment:
    """Queue copies of a fragment to pinned host memory; returns at once.

    Must be called between two steps, before the next one donates the parameters. Needs all shards to be addressable.
    """
    plan: list[tuple[str, Index]] = []
    sources: list[Shaped[Array, "..."]] = []
    for part in fragment.slices:
        for bounds, data in _shards(part.path, params[part.path]):
            if part.axis >= 0:
                low, high = bounds[part.axis]
                start, stop = max(low, part.start), min(high, part.stop)
                if start >= stop:
                    continue
                if (start, stop) != (low, high):
                    data = _cut(data, part.axis, start - low, stop - low)
                bounds[part.axis] = (start - part.start, stop - part.start)
            plan.append((part.key, tuple(slice(a, b) for a, b in bounds)))
            sources.append(data)
    shapes = {part.key: shape for part, shape in zip(fragment.slices, fragment.shapes, strict=True)}
    return StagedFragment(fragment.fragment_id, shapes, _copy_out(plan, sources))


def stage_leaves(arrays: Mapping[str, Shaped[Array, "..."]], layout: StateLayout) -> StagedState:
    """Queue copies of whole arrays to pinned host memory; returns at once. As `stage_fragment` in all else."""
    plan: list[tuple[str, Index]] = []
    sources: list[Shaped[Array, "..."]] = []
    for name, array in arrays.items():
        for bounds, data in _shards(name, array):
            plan.append((name, tuple(slice(a, b) for a, b in bounds)))
            sources.append(data)
    return StagedState(layout, _copy_out(plan, sources))


def _split_dim(part: Slice, sharding: NamedSharding) -> bool:
    """Whether the slice cuts its tensor along a dimension that is sharded."""
    return part.axis >= 0 and part.axis < len(sharding.spec) and bool(sharding.spec[part.axis])


def value_sharding(part: Slice, sharding: NamedSharding) -> NamedSharding:
    """Layout of a slice's value on its way in: that of the tensor, whole along the axis that the slice cuts."""
    spec = list(sharding.spec)
    if _split_dim(part, sharding):
        spec[part.axis] = None
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def _blend(
    mode: AdoptMode,
    alpha: Float[Array, ""],
    local: Float[Array, "..."],
    new: Float[Array, "..."],
    staged: Float[Array, "..."] | None,
) -> Float[Array, "..."]:
    if mode == "overwrite":
        return new.astype(local.dtype)
    if mode == "blend":
        return (alpha * local + (1 - alpha) * new).astype(local.dtype)
    assert staged is not None
    return (new + (local - staged)).astype(local.dtype)


def make_adopt(fragment: Fragment, shardings: Mapping[str, NamedSharding], mode: AdoptMode) -> AdoptProgram:
    """Compile-once program (tensors of the fragment, new values, staged values, alpha) -> tensors, donated.

    overwrite: new.   blend: alpha local + (1 - alpha) new.   rebase: new + (local - staged).

    Args:
      fragment: what is adopted.
      shardings: layout of every parameter.
      mode: how the new value meets the local one.
    """
    assert mode in get_args(AdoptMode)

    def adopt(
        tensors: Params, new: Mapping[str, Array], staged: Mapping[str, Array], alpha: Float[Array, ""]
    ) -> Params:
        out = dict(tensors)
        for part in fragment.slices:
            local, value, base = out[part.path], new[part.key], staged.get(part.key)
            if part.axis < 0:
                out[part.path] = _blend(mode, alpha, local, value, base)
            elif not _split_dim(part, shardings[part.path]):
                kept = jax.lax.slice_in_dim(local, part.start, part.stop, axis=part.axis)
                at = (slice(None),) * part.axis + (slice(part.start, part.stop),)
                out[part.path] = local.at[at].set(_blend(mode, alpha, kept, value, base))
            else:
                # An update in place along a sharded axis would gather the tensor; a masked one touches local rows only.
                position = jnp.arange(local.shape[part.axis]) - part.start
                row = jnp.clip(position, 0, part.stop - part.start - 1)
                new_rows = jnp.take(value, row, axis=part.axis)
                base_rows = None if base is None else jnp.take(base, row, axis=part.axis)
                inside = (position >= 0) & (position < part.stop - part.start)
                inside = jnp.expand_dims(inside, [d for d in range(local.ndim) if d != part.axis])
                out[part.path] = jnp.where(inside, _blend(mode, alpha, local, new_rows, base_rows), local)
        return out

    paths = {part.path for part in fragment.slices}
    return jax.jit(adopt, donate_argnums=0, out_shardings={path: shardings[path] for path in paths})


def put_values(
    values: Mapping[str, Float[np.ndarray, "..."]], fragment: Fragment, shardings: Mapping[str, NamedSharding]
) -> dict[str, Float[Array, "..."]]:
    """Copy {slice key: array} of a fragment to the devices.

    Raises:
      ValueError: a slice is missing, or has another shape.
    """
    for part, shape in zip(fragment.slices, fragment.shapes, strict=True):
        got = values[part.key].shape if part.key in values else None
        if got != tuple(shape):
            raise ValueError(
                f"fragment {fragment.fragment_id}: '{part.key}' has shape {got}, expected {tuple(shape)}; "
                "do both sides use the same model and fragment plan?"
            )
    # Copies of our own: on CPU device_put goes on reading NumPy's memory, may_alias=False or not.
    host = [np.array(values[part.key], np.float32) for part in fragment.slices]
    put = jax.device_put(host, [value_sharding(p, shardings[p.path]) for p in fragment.slices])
    return {part.key: array for part, array in zip(fragment.slices, put, strict=True)}


def put_leaves(
    values: Sequence[Shaped[np.ndarray, "..."]], shardings: Sequence[NamedSharding]
) -> list[Shaped[Array, "..."]]:
    """Copy whole arrays to the devices, each laid out as its sharding says."""
    # Copies of our own, for the same reason as above: the next step writes to this memory.
    placed: list[Shaped[Array, "..."]] = jax.device_put([np.array(value) for value in values], list(shardings))
    return placed
