"""Payloads of staged fragments: the host builds them from what each device sent.

With one process, the island's payload is built here as a whole. With several processes, each builds its part of the
payload (core/host_bytes.py) from its own devices, and nothing is gathered. The exception is tensors whose shards cut
the format's blocks (small or odd ones): their float32 values go to the first process, which encodes them in its part.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Float32, Int32, Shaped

from diloco_jax.core import codec
from diloco_jax.core.codec import Bytes
from diloco_jax.core.host_bytes import Buffer, Runs, concat, pack_host_bytes, runs_of_box
from diloco_jax.training.exchange.windows import Axes, Index, Shape, Window

CpuArrays = Mapping[str, Shaped[np.ndarray, "..."]]
Kind = Literal["codes", "scales", "floats"]
# One array from the devices has values of one kind, of all tensors that are sharded over the same mesh axes.
Stream = tuple[Kind, Axes]
# Stream, position in the mesh of the device that sent it, flat array.
Copies = Sequence[tuple[Stream, int, Array]]
# The process that encodes the tensors that the devices cannot encode.
LEADER = 0


class _Item(NamedTuple):
    """The place of a part of a stream: `stream[start:stop].reshape(grid)[take]` goes to `result[where]`."""

    key: str
    start: int
    stop: int
    grid: Shape
    take: Index
    where: Index

    def piece(self, flat: Shaped[np.ndarray, "n"]) -> Shaped[np.ndarray, "..."]:
        """Return this part of a stream."""
        # asarray, because an index may give a scalar.
        return np.asarray(flat[self.start : self.stop].reshape(self.grid)[self.take])

    @property
    def shape(self) -> Shape:
        """Return the shape of the piece, if it counts in elements."""
        return tuple(index.stop - index.start for index in self.where)


class Share(NamedTuple):
    """The part of a window that each of its holders encodes.

    Holders are the devices that hold the same window. Their shares have equally many rows, so the last may overlap.
    """

    # Rows of the window; blocks if one device holds the whole slice.
    rows: int
    # Rows of a share.
    size: int
    # Blocks in a row, or elements in formats without blocks.
    row_units: int

    @property
    def units(self) -> int:
        """Return the number of blocks in a share, or of elements in formats without blocks."""
        return self.size * self.row_units

    def cut(self, update: Shaped[Array, "..."], holder: Int32[Array, ""] | int) -> Shaped[Array, "..."]:
        """Return the share of the n-th holder from the window as an array of units; call this inside a program."""
        if self.size == self.rows:
            return update
        first = jnp.minimum(holder * self.size, self.rows - self.size) * self.row_units
        return jax.lax.dynamic_slice_in_dim(update, first, self.units)

    def place(self, where: Index, take: Index, holder: int) -> tuple[Index, Index] | None:
        """Return the part of a window's place that only this holder sends; None if there is none."""
        low, high = max(take[0].start, holder * self.size), min(take[0].stop, (holder + 1) * self.size)
        if low >= high:
            return None
        moved, first = where[0].start - take[0].start, min(holder * self.size, self.rows - self.size)
        return (slice(low + moved, high + moved), *where[1:]), (slice(low - first, high - first), *take[1:])


class OutgoingBytes:
    """The contents of one fragment's streams, and the functions that turn them into a payload."""

    def __init__(self, windows: Sequence[Window], format: codec.Format) -> None:
        # The windows of the fragment's slices, by key.
        self.windows = {window.part.key: window for window in windows}
        self._format = format
        self._integer = codec.is_integer(format)
        # The keys of the tensors that the host encodes.
        self.on_cpu = {key for key, window in self.windows.items() if self._integer and window.block_dim is None}
        # The windows that the devices encode, by key.
        self.rounded = {key: w for key, w in self.windows.items() if format != "float32" and key not in self.on_cpu}
        # The streams that the devices send.
        self.streams = sorted(
            {(kind, window.axes) for key, window in self.windows.items() for kind in self._kinds(key)}
        )
        mesh = windows[0].sharding.mesh
        assert isinstance(mesh, Mesh), "an island has devices"
        # By key, the share of each holder of a window that the devices encode.
        self.shares = {key: share_of(window, format) for key, window in self.rounded.items()}
        self._items = {
            (stream, number): list(self._items_of(stream, number, device))
            for stream in self.streams
            for number, device in (_senders(mesh, stream[1]) if stream[0] == "floats" else enumerate(mesh.devices.flat))
        }
        self._process = jax.process_index()
        self._process_of = [device.process_index for device in mesh.devices.flat]
        # Whether other processes have devices of the mesh too.
        self.in_parts = any(process != self._process for process in self._process_of)
        mine = [number for number, process in enumerate(self._process_of) if process == self._process]
        # The arrays that this process gets: (stream, position in the mesh, position among this process's devices).
        self.local = [(stream, number, mine.index(number)) for stream, number in self._items if number in mine]

    def whole(self, copies: Copies, before: CpuArrays) -> tuple[bytes, dict[str, Float32[np.ndarray, "..."]]]:
        """Build the whole payload; return it with the new residuals of the tensors that the host encodes.

        Args:
          copies: the arrays of one staged fragment.
          before: the residuals of the tensors that the host encodes, by key.

        Raises:
          NotFinite: the update has NaN or infinity, and the format is an integer format.
        """
        offsets = self._offsets()
        payload = bytearray(codec.encoded_size((window.shape for window in self.windows.values()), self._format))
        for kind, item, piece in self._pieces(copies):
            grid = self._grid(kind, item.key, self.windows[item.key].shape)
            np.ndarray(grid, piece.dtype, payload, offsets[kind, item.key])[item.where] = piece
        encoded, after = self._encoded(copies, before, {})
        for key, data in encoded.items():
            # The tensor's codes follow its scales.
            start = offsets["scales", key]
            payload[start : start + len(data)] = data
        return bytes(payload), after

    def part(
        self, copies: Copies, before: CpuArrays, others: Mapping[int, Bytes]
    ) -> tuple[list[Buffer], dict[str, Float32[np.ndarray, "..."]]]:
        """Wait for this process's devices, and build its part of the payload, in pieces.

        Args:
          copies: the arrays of one staged fragment, from this process's devices.
          before: the residuals of the tensors that the host encodes, by key; read on the first process.
          others: the results of `loose` on the other processes, by process; read on the first process.

        Returns:
          The part, and the new residuals of the tensors that the host encodes.

        Raises:
          NotFinite: this part of the update has NaN or infinity, and the format is an integer format.
          ValueError: `others` have the wrong size.
        """
        data: list[Buffer] = [codec.as_bytes(piece) for _, _, piece in self._pieces(copies)]
        encoded, after = self._encoded(copies, before, others) if self._process == LEADER else ({}, {})
        return pack_host_bytes(self._runs, [*data, *encoded.values()]), after

    def _pieces(self, copies: Copies) -> Iterator[tuple[Kind, _Item, Shaped[np.ndarray, "..."]]]:
        """Wait for the devices' arrays, and yield the pieces that go into the payload unchanged."""
        for stream, number, copy in copies:
            flat = np.asarray(copy)
            for item in self._items[stream, number]:
                if item.key not in self.on_cpu:
                    piece = item.piece(flat)
                    if stream[0] == "scales":
                        self._check(item.key, piece)
                    yield stream[0], item, piece

    def loose(self, copies: Copies) -> list[Buffer]:
        """Wait for this process's devices; return its pieces of the tensors that the first process encodes."""
        arrays = {(stream, number): copy for stream, number, copy in copies}
        items = self._loose_items(self._process)
        return [codec.as_bytes(item.piece(np.asarray(arrays[source]))) for source, item in items]

    def _joined(self, copies: Copies, others: Mapping[int, Bytes]) -> dict[str, Float32[np.ndarray, "..."]]:
        """Join the tensors that the host encodes from the pieces of all processes."""
        joined = {key: np.empty(self.windows[key].shape, np.float32) for key in self.windows if key in self.on_cpu}
        own = b"".join(self.loose(copies))
        for process in sorted(set(self._process_of)):
            flat, at = np.frombuffer(own if process == self._process else others.get(process, b""), np.float32), 0
            items = [item for _, item in self._loose_items(process)]
            expected = sum(math.prod(item.shape) for item in items)
            if flat.size != expected:
                raise ValueError(f"host {process} sent {flat.size} numbers of small tensors, expected {expected}")
            for item in items:
                size = math.prod(item.shape)
                joined[item.key][item.where] = flat[at : at + size].reshape(item.shape)
                at += size
        return joined

    def _encoded(
        self, copies: Copies, before: CpuArrays, others: Mapping[int, Bytes]
    ) -> tuple[dict[str, bytes], dict[str, Float32[np.ndarray, "..."]]]:
        """Encode the tensors that the host encodes; return scales and codes by key, and residuals by key."""
        encoded, after = {}, {}
        for key, floats in self._joined(copies, others).items():
            update = (floats + before[key]).reshape(-1)
            codes, scales = codec.quantize_on_cpu(update, self._format)
            kept_back = update - codec.dequantize_on_cpu(codes, scales, update.size, self._format)
            self._check(key, scales)
            encoded[key] = b"".join([codec.as_bytes(scales), codec.as_bytes(codes)])
            after[key] = kept_back.reshape(self.windows[key].shape)
        return encoded, after

    def _check(self, key: str, scales: Float[np.ndarray, "..."]) -> None:
        if not np.isfinite(scales).all():
            raise codec.NotFinite(f"{key!r} holds NaN or infinity, which {self._format} cannot carry; drop this update")

    @cached_property
    def _runs(self) -> Runs:
        """Return the places in the payload of this process's part."""
        offsets = self._offsets()
        runs = []
        for stream, number, _ in self.local:
            kind = stream[0]
            item_bytes = self._item_bytes(kind)
            for item in self._items[stream, number]:
                if item.key in self.on_cpu:
                    continue
                grid = self._grid(kind, item.key, self.windows[item.key].shape)
                box = (*item.where, *(slice(0, n) for n in grid[len(item.where) :]))
                runs.append(runs_of_box(offsets[kind, item.key], grid, box, item_bytes))
        if self._process == LEADER:
            for key in (key for key in self.windows if key in self.on_cpu):
                size = codec.encoded_size([self.windows[key].shape], self._format)
                runs.append(runs_of_box(offsets["scales", key], (size,), (slice(0, size),), 1))
        return concat(*runs)

    def _offsets(self) -> dict[tuple[Kind, str], int]:
        """Return the offset in the payload of each tensor's floats, scales and codes, as `codec.encode` places them."""
        offsets: dict[tuple[Kind, str], int] = {}
        start = 0
        for key in sorted(self.windows):
            shape = self.windows[key].shape
            scales = math.ceil(math.prod(shape) / codec.BLOCK) * self._item_bytes("scales") if self._integer else 0
            offsets["floats", key] = offsets["scales", key] = start
            offsets["codes", key] = start + scales
            start += codec.encoded_size([shape], self._format)
        return offsets

    def _item_bytes(self, kind: Kind) -> int:
        """Return the size in bytes of a value of this kind."""
        if kind == "floats":
            return 4
        if self._integer:
            return 1 if kind == "codes" else codec.scale_bytes(self._format)
        return codec.element_bytes(self._format)

    def _loose_items(self, process: int) -> list[tuple[tuple[Stream, int], _Item]]:
        """Return the items of host-encoded tensors from a process's devices, in the same order on every process."""
        return [
            (source, item)
            for source, items in self._items.items()
            if self._process_of[source[1]] == process
            for item in items
            if item.key in self.on_cpu
        ]

    def _kinds(self, key: str) -> tuple[Kind, ...]:
        """Return the kinds of values that devices send of a tensor: codes, with scales for integers, or floats."""
        if key not in self.rounded:
            return ("floats",)
        return ("codes", "scales") if self._integer else ("codes",)

    def _grid(self, kind: str, key: str, shape: Shape) -> Shape:
        """Return the shape of a stream's values for a slice or window of this shape."""
        if key not in self.rounded or not self._integer:
            return shape or (1,)
        grid = self.windows[key].block_grid(shape)
        return (*grid, codec.block_bytes(self._format)) if kind == "codes" else grid

    def _items_of(self, stream: Stream, number: int, device: jax.Device) -> Iterator[_Item]:
        kind, axes = stream
        start = 0
        for key, window in self.windows.items():
            if window.axes != axes or kind not in self._kinds(key):
                continue
            grid = self._grid(kind, key, window.local_shape)
            shard = window.sharding.devices_indices_map(window.tensor)[device]
            place = window.place(shard, blocks=key in self.rounded and self._integer)
            if (share := self.shares.get(key)) is not None:
                grid = (share.size, *grid[1:])
                place = place and share.place(*place, _holder(window, number))
            stop = start + math.prod(grid)
            if place is not None:
                where, take = place
                yield _Item(key, start, stop, grid, take, where)
            start = stop


def flat_spec(axes: Axes) -> PartitionSpec:
    """Return the spec of a flat array that is sharded over these axes."""
    return PartitionSpec(axes) if axes else PartitionSpec()


def share_of(window: Window, format: codec.Format) -> Share:
    """Return the share of a window that each of its holders encodes."""
    grid = window.block_grid(window.local_shape) if codec.is_integer(format) else window.local_shape or (1,)
    holders = math.prod(window.sharding.mesh.shape[axis] for axis in holder_axes(window))
    return Share(grid[0], math.ceil(grid[0] / holders), math.prod(grid[1:]))


def holder_axes(window: Window) -> Axes:
    """Return the mesh axes along which devices hold the same window, in the order of the mesh."""
    return tuple(axis for axis in window.sharding.mesh.axis_names if axis not in window.axes)


def _holder(window: Window, number: int) -> int:
    """Return the position of the mesh's n-th device among the holders of its window, along `holder_axes`."""
    shape = window.sharding.mesh.shape
    at = dict(zip(shape, np.unravel_index(number, tuple(shape.values())), strict=True))
    axes = holder_axes(window)
    return int(np.ravel_multi_index([at[axis] for axis in axes], [shape[axis] for axis in axes])) if axes else 0


def _senders(mesh: Mesh, axes: Axes) -> list[tuple[int, jax.Device]]:
    """Return one holder of each part of an array sharded over `axes`, as (position in the mesh, device).

    The k-th part is sent by the k-th of its holders, so that hosts with the same parts divide the work.
    """
    parts = math.prod(mesh.shape[axis] for axis in axes)
    held = NamedSharding(mesh, flat_spec(axes)).devices_indices_map((parts,))
    holders: dict[str, list[tuple[int, jax.Device]]] = {}
    for number, device in enumerate(mesh.devices.flat):
        holders.setdefault(repr(held[device]), []).append((number, device))
    return [found[part % len(found)] for part, found in enumerate(holders.values())]
