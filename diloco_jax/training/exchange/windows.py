"""Windows: the part of a fragment's slice that one shard of its tensor holds, with the same shape on every device.

Staging and adoption each run as one program on all devices (`jax.shard_map`), each device with its own shard, so
neither can contain a collective. If a slice cuts its tensor along a sharded axis, shards hold different numbers of the
slice's rows. Then every window has as many rows as any shard may need, and the results of rows outside the slice are
dropped.

The first row of a slice in its tensor is an input of the programs, so that slices of one size share a program.

Slices, windows and values have the axes of the canonical tensor (core/kinds.py). Only `cut` and `paste` read and write
a shard as the loop stores it, so a stack axis at any position costs a transposition of the window and nothing else.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int32, Shaped

from diloco_jax.core.codec import BLOCK
from diloco_jax.core.fragments import Fragment, Slice
from diloco_jax.core.kinds import Order, inverse, with_order
from diloco_jax.training.sharding import put_array

Shape = tuple[int, ...]
Index = tuple[slice, ...]
Axes = tuple[str, ...]
# The orders of a model whose tensors are all stored canonically.
AS_STORED: Mapping[str, Order] = MappingProxyType({})


@dataclass(frozen=True)
class Window:
    """The part of one slice that each shard of its tensor holds."""

    # The slice and its shape.
    part: Slice
    shape: Shape
    # Shape, dtype and sharding of the whole tensor as it is stored; the mesh divides every sharded dimension evenly.
    stored: jax.ShapeDtypeStruct
    # The stored axes in canonical order.
    order: Order

    @cached_property
    def tensor(self) -> Shape:
        """Return the shape of the canonical tensor."""
        return tuple(self.stored.shape[axis] for axis in self.order)

    @cached_property
    def dtype(self) -> jnp.dtype:
        return self.stored.dtype

    @cached_property
    def sharding(self) -> NamedSharding:
        """Return the layout of the canonical tensor; each device holds the same elements as of the stored one."""
        stored: NamedSharding = self.stored.sharding
        if self.order == tuple(range(len(self.order))):
            return stored
        entries = (*stored.spec, *(None,) * (len(self.order) - len(stored.spec)))
        return NamedSharding(stored.mesh, PartitionSpec(*(entries[axis] for axis in self.order)))

    @cached_property
    def spec(self) -> PartitionSpec:
        """Return the spec of the tensor, which is also that of arrays of windows, with an entry per dimension."""
        entries = tuple(self.sharding.spec)
        return PartitionSpec(*entries, *(None,) * (len(self.tensor) - len(entries)))

    @cached_property
    def axes(self) -> Axes:
        """Return the mesh axes that shard the tensor, in the order of the mesh."""
        used = {axis for dim in range(len(self.tensor)) for axis in self._axes_of(dim)}
        return tuple(axis for axis in self.sharding.mesh.axis_names if axis in used)

    @cached_property
    def value_sharding(self) -> NamedSharding:
        """Return the layout of an incoming value: that of the tensor, but whole along a sharded axis that is cut."""
        spec = list(self.spec)
        if self._split:
            spec[self.part.axis] = None
        return NamedSharding(self.sharding.mesh, PartitionSpec(*spec))

    @cached_property
    def local_shape(self) -> Shape:
        """Return the shape of the window that each device holds."""
        if not self._split:
            return tuple(n // self._parts(dim) for dim, n in enumerate(self.shape))
        local = list(self.sharding.shard_shape(self.tensor))
        local[self.part.axis] = min(local[self.part.axis], self.shape[self.part.axis])
        return tuple(local)

    @cached_property
    def global_shape(self) -> Shape:
        """Return the shape of an array of all devices' windows in the tensor's layout."""
        return tuple(n * self._parts(dim) for dim, n in enumerate(self.local_shape))

    @property
    def geometry(self) -> tuple[object, ...]:
        """Return a key; windows with equal keys may share programs."""
        return self.tensor, self.dtype, self.shape, self.part.axis, self.spec, self.order

    def cut(self, tensor: Shaped[Array, "..."], start: Int32[Array, ""]) -> Shaped[Array, "..."]:
        """Return the window of a device's stored shard, inside a program on all devices; `start` is `part.start`."""
        if self.part.axis < 0:
            return with_order(tensor, self.order)
        first, rows = self._first(start), self.local_shape[self.part.axis]
        return with_order(jax.lax.dynamic_slice_in_dim(tensor, first, rows, self.order[self.part.axis]), self.order)

    def of_value(self, value: Shaped[Array, "..."], start: Int32[Array, ""]) -> Shaped[Array, "..."]:
        """Return the window of a value in the layout `value_sharding`; rows outside the slice have any values."""
        if not self._split:
            return value
        rows = jnp.clip(self._rows(start), 0, self.shape[self.part.axis] - 1)
        return jnp.take(value, rows, axis=self.part.axis)

    def paste(
        self, tensor: Shaped[Array, "..."], window: Shaped[Array, "..."], start: Int32[Array, ""]
    ) -> Shaped[Array, "..."]:
        """Return the stored shard with the window's rows replaced, except rows outside the slice."""
        back = inverse(self.order)
        if self.part.axis < 0:
            return with_order(window, back)
        if self._split:
            rows, dim = self._rows(start), self.part.axis
            inside = (rows >= 0) & (rows < self.shape[dim])
            inside = jnp.expand_dims(inside, [d for d in range(len(self.shape)) if d != dim])
            window = jnp.where(inside, window, self.cut(tensor, start))
        rows_axis = self.order[self.part.axis]
        return jax.lax.dynamic_update_slice_in_dim(tensor, with_order(window, back), self._first(start), rows_axis)

    def _first(self, start: Int32[Array, ""]) -> Int32[Array, ""]:
        """Return the shard's row that is the first of the window."""
        if not self._split:
            return start
        dim = self.part.axis
        rows = self.tensor[dim] // self._parts(dim)
        low = jax.lax.axis_index(self._axes_of(dim)) * rows
        return jnp.clip(start - low, 0, rows - self.local_shape[dim])

    def _rows(self, start: Int32[Array, ""]) -> Shaped[Array, "rows"]:
        """Return the window's rows as rows of the slice; rows outside the slice are negative or too large."""
        dim = self.part.axis
        low = jax.lax.axis_index(self._axes_of(dim)) * (self.tensor[dim] // self._parts(dim))
        return jnp.arange(self.local_shape[dim]) + (low + self._first(start) - start)

    @cached_property
    def block_dim(self) -> int | None:
        """Return the last sharded dimension if every window has whole blocks of the flattened slice.

        -1 means that one device holds the whole slice; None means that shards cut blocks.
        """
        dim = max((d for d in range(len(self.shape)) if self._parts(d) > 1), default=-1)
        if dim < 0:
            return -1
        unit = math.prod(self.shape[dim + 1 :])
        run = unit if self._split and dim == self.part.axis else unit * self.local_shape[dim]
        return None if run % BLOCK else dim

    def block_grid(self, shape: Shape) -> Shape:
        """Return the shape of the array of blocks of the slice, or of a window if `shape` is `local_shape`."""
        dim = self.block_dim
        assert dim is not None, "shards cut blocks"
        if dim < 0:
            return (math.ceil(math.prod(shape) / BLOCK),)
        return (*shape[:dim], math.prod(shape[dim:]) // BLOCK)

    def place(self, shard: Index, blocks: bool) -> tuple[Index, Index] | None:
        """Return the place in the slice of a shard's window, and the part of the window that belongs there.

        None means that no part of the window belongs to the slice.

        Args:
            shard: index of the shard in the canonical tensor.
            blocks: whether to count in blocks (`block_grid`) instead of elements.
        """
        bounds = [s.indices(n)[:2] for s, n in zip(shard, self.tensor, strict=True)]
        where, take = [slice(*b) for b in bounds], [slice(0, n) for n in self.local_shape]
        if (dim := self.part.axis) >= 0:
            low, high = bounds[dim]
            start, stop = max(low, self.part.start), min(high, self.part.stop)
            if start >= stop:
                return None
            where[dim] = slice(start - self.part.start, stop - self.part.start)
            first = low + max(0, min(self.part.start - low, high - low - self.local_shape[dim]))
            take[dim] = slice(start - first, stop - first)
        if not blocks:
            # A tensor without axes counts as one with a single element.
            whole = (slice(0, 1),)
            return tuple(where) or whole, tuple(take) or whole
        return self._in_blocks(where), self._in_blocks(take)

    def _in_blocks(self, index: list[slice]) -> Index:
        dim = self.block_dim
        assert dim is not None, "shards cut blocks"
        if dim < 0:
            return (slice(0, self.block_grid(self.local_shape)[0]),)
        unit = math.prod(self.shape[dim + 1 :])
        scaled = slice(index[dim].start * unit // BLOCK, index[dim].stop * unit // BLOCK)
        return (*index[:dim], scaled)

    @cached_property
    def _split(self) -> bool:
        """Return whether the slice cuts its tensor along a sharded dimension."""
        return self.part.axis >= 0 and self._parts(self.part.axis) > 1

    def _axes_of(self, dim: int) -> Axes:
        entry = self.spec[dim]
        names: Axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        return tuple(name for name in names if self.sharding.mesh.shape[name] > 1)

    def _parts(self, dim: int) -> int:
        return math.prod(self.sharding.mesh.shape[name] for name in self._axes_of(dim))


def windows_of(
    fragment: Fragment, tensors: Mapping[str, jax.ShapeDtypeStruct], orders: Mapping[str, Order] = AS_STORED
) -> tuple[Window, ...]:
    """Return the windows of a fragment's slices, in their order.

    Args:
      tensors: shape, dtype and layout of every parameter as it is stored, by path.
      orders: by path, the stored axes in canonical order; tensors that are not listed are stored canonically.
    """
    found = []
    for part, shape in zip(fragment.slices, fragment.shapes, strict=True):
        tensor = tensors[part.path]
        found.append(Window(part, shape, tensor, orders.get(part.path, tuple(range(len(tensor.shape))))))
    return tuple(found)


class FragmentWindows:
    """The windows of one fragment's slices, with the inputs that their programs have in common.

    Attributes:
      windows: one for each slice, in the order of the slices.
      mesh: the island's mesh.
      paths: paths of the slices' tensors, each once.
      tensors: shape, dtype and layout of each of these tensors as it is stored.
      tensor_of: for each slice the position of its tensor in `paths`.
      starts_described: shape, dtype and layout of `starts`.
      geometry: a key; fragments with equal keys may share programs.
    """

    def __init__(self, windows: Sequence[Window]) -> None:
        self.windows = windows
        self.mesh = windows[0].sharding.mesh
        named = {window.part.path: window.stored for window in windows}
        self.paths, self.tensors = tuple(named), list(named.values())
        self.tensor_of = tuple(self.paths.index(window.part.path) for window in windows)
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        self.starts_described = jax.ShapeDtypeStruct((len(windows),), np.int32, sharding=everywhere)
        self.geometry = (self.tensor_of, *(window.geometry for window in windows))

    @cached_property
    def starts(self) -> Int32[Array, "slices"]:
        """Return the first row of each slice in its tensor, replicated on all devices."""
        starts = np.array([window.part.start for window in self.windows], np.int32)
        return put_array(starts, self.starts_described.sharding)

    @property
    def anchors(self) -> list[jax.ShapeDtypeStruct]:
        """Describe the incoming values of the slices."""
        return [floats(window.shape, window.value_sharding) for window in self.windows]


def floats(shape: Shape, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """Describe a float32 array on the devices."""
    return jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)
