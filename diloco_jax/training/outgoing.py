"""The way out of a fragment: one program on all devices makes its update, anchor - local, as it goes on the wire.

It runs behind the inner step that is under way and before the next one, which donates the parameters. What goes to host
memory is the encoded update, for int4 an eighth of the bytes of the parameters; the caller waits for nothing.

Error feedback: what rounding takes from an update, its residual, is added to the next one. A staged copy carries the
residual that there is once this copy was used; the island takes it over when it adopts the version that the copy went
into. Where shards cut the format's blocks (small or odd tensors), float32 goes to the host, which does the same there.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float32, Shaped

from diloco_jax.core import codec
from diloco_jax.training.models.protocol import Params
from diloco_jax.training.windows import Axes, Index, Shape, Starts, Window, tensors_of

HostArrays = Mapping[str, Shaped[np.ndarray, "..."]]
DeviceArrays = Sequence[Shaped[Array, "..."]]
Stream = tuple[Literal["codes", "floats"], Axes]  # what travels in one array: its kind, and over what it is shared out


class Residual(NamedTuple):
    """What rounding has kept back of a fragment's updates so far.

    Attributes:
      on_devices: flat, the windows one after the other, for all tensors that are shared out over the same mesh axes.
      on_host: of tensors that the host encodes, by key.
    """

    on_devices: Mapping[Axes, Float32[Array, "n"]]
    on_host: HostArrays


class Held(NamedTuple):
    """What an island holds of a fragment beside its parameters.

    Attributes:
      anchor: the global value that it adopted last, float32 on the devices, in the order of the slices.
      residual: of the updates that it sent.
    """

    anchor: DeviceArrays
    residual: Residual


class _Outputs(NamedTuple):
    """What the program returns.

    Attributes:
      streams: flat arrays of what goes to the host, the windows one after the other.
      residual: `Residual.on_devices` that there is once this copy was used.
      local: windows of the parameters, if the island wants them.
    """

    streams: Mapping[Stream, Any]
    residual: Mapping[Axes, Any]
    local: Sequence[Any]


class _Item(NamedTuple):
    """Where a part of a stream belongs: `stream[start:stop].reshape(grid)[take]` to `result[where]`."""

    key: str
    start: int
    stop: int
    grid: Shape
    take: Index
    where: Index


class StagedFragment:
    """A fragment's update as it was after the step before `stage`. Any thread may call the methods.

    Attributes:
      local: windows of the parameters at that step, on the devices; empty if the island does not want them.
    """

    def __init__(
        self, program: OutgoingProgram, copies: Sequence[tuple[Stream, int, Array]], before: Residual, out: _Outputs
    ) -> None:
        self.local = out.local
        self._program = program
        self._copies = copies
        self._before = before
        self._on_devices = out.residual
        self._lock = threading.Lock()
        self._encoded: tuple[bytes, Residual] | ValueError | None = None

    def encode(self) -> bytes:
        """Wait for the copies and return the payload: `codec.encode` of anchor - local + residual.

        Raises:
          ValueError: the update is not finite, and the format cannot say so.
        """
        return self._result()[0]

    def residual(self) -> Residual | None:
        """What rounding keeps back once this copy was used; None if it could not be sent."""
        try:
            return self._result()[1]
        except ValueError:
            return None

    def _result(self) -> tuple[bytes, Residual]:
        with self._lock:
            if self._encoded is None:
                try:
                    payload, on_host = self._program.assemble(self._copies, self._before.on_host)
                    self._encoded = payload, Residual(self._on_devices, on_host)
                except ValueError as error:
                    self._encoded = error
                self._copies = ()
            if isinstance(self._encoded, ValueError):
                raise self._encoded
            return self._encoded


class OutgoingProgram:
    """How one fragment is staged.

    Attributes:
      key: equal for fragments that may share what `compile` makes.
      compiled: what `compile` made, set by the owner.

    Args:
      windows: of its slices.
      format: of the wire.
      keep_local: whether staged copies hold the parameters too, on the devices (for `rebase`).
    """

    def __init__(self, windows: Sequence[Window], format: codec.Format, keep_local: bool) -> None:
        self.compiled: jax.stages.Compiled | None = None
        self._windows = {window.part.key: window for window in windows}
        self._format = format
        self._keep_local = keep_local
        self._mesh = windows[0].sharding.mesh
        self._paths, self._tensor_of = tensors_of(windows)
        self._starts = Starts(windows)
        self.key = (self._tensor_of, *(window.geometry for window in windows))
        self._integer = codec.is_integer(format)
        self._on_host = {key for key, window in self._windows.items() if self._integer and window.block_dim is None}
        self._rounded = {key: w for key, w in self._windows.items() if format != "float32" and key not in self._on_host}
        self._devices = {window.axes: self._representatives(window.axes) for window in windows}
        self._items = {
            (stream, number): list(self._items_of(stream, device))
            for stream in self._streams()
            for number, device in self._devices[stream[1]]
        }

    def stage(self, params: Params, held: Held) -> StagedFragment:
        """Dispatch the program, and copies of what it makes to the host; returns at once."""
        assert self.compiled is not None, "the program was not compiled"
        tensors = [params[path] for path in self._paths]
        out: _Outputs = self.compiled(tensors, held.anchor, held.residual.on_devices, self._starts.on_devices)
        named = [(stream, number, out.streams[stream].addressable_data(number)) for stream, number in self._items]
        for _, _, part in named:  # nobody donates these: no copies of them on another kind of memory are needed
            part.copy_to_host_async()
        return StagedFragment(self, named, held.residual, out)

    def no_residual(self) -> Residual:
        """Of a fragment of which nothing was sent."""
        on_devices = {
            axes: jax.device_put(np.zeros(leaf.shape, np.float32), leaf.sharding)
            for axes, leaf in self._residuals().items()
        }
        return Residual(on_devices, {key: np.zeros(self._windows[key].shape, np.float32) for key in self._on_host})

    def assemble(
        self, copies: Sequence[tuple[Stream, int, Array]], before: HostArrays
    ) -> tuple[bytes, dict[str, Float32[np.ndarray, "..."]]]:
        """Wait for what the devices sent, join it, and encode what they left to the host.

        Args:
          copies: (stream, device's position in the mesh, flat array) of one staged fragment.
          before: residuals of the tensors that the host encodes.

        Returns:
          (payload, residuals of these tensors afterwards)

        Raises:
          ValueError: the update is not finite, and the format cannot say so.
        """
        results: dict[str, dict[str, np.ndarray]] = {"codes": {}, "floats": {}}
        for stream, number, copy in copies:
            flat, joined = np.asarray(copy), results[stream[0]]
            for key, start, stop, grid, take, where in self._items[stream, number]:
                if key not in joined:
                    joined[key] = np.empty(self._grid(stream[0], key, self._windows[key].shape), flat.dtype)
                joined[key][where] = flat[start:stop].reshape(grid)[take]
        nothing, after = np.zeros(0, np.float32), {}
        parts = {}
        for key, window in self._windows.items():
            codes, floats = results["codes"].get(key, nothing), results["floats"].get(key, nothing)
            if key in self._on_host:
                update = (floats + before[key]).reshape(-1)
                codes, floats = codec.quantize_on_host(update, self._format)
                after[key] = update - codec.dequantize_on_host(codes, floats, update.size, self._format)
                after[key] = after[key].reshape(window.shape)
            elif self._format == "float32":
                codes, floats = floats, nothing
            parts[key] = codes, floats
        return codec.pack(parts), after

    # ---- what travels ---------------------------------------------------------------------------------------------

    def _kinds(self, key: str) -> tuple[Literal["codes", "floats"], ...]:
        """Integer formats have codes, and their scales among the floats; what the host encodes are floats only."""
        if key not in self._rounded:
            return ("floats",)
        return ("codes", "floats") if self._integer else ("codes",)

    def _streams(self) -> list[Stream]:
        return sorted({(kind, window.axes) for key, window in self._windows.items() for kind in self._kinds(key)})

    def _grid(self, kind: str, key: str, shape: Shape) -> Shape:
        """Shape of what a stream holds of a slice or window of this shape."""
        if key not in self._rounded or not self._integer:
            return shape
        grid = self._windows[key].block_grid(shape)
        return (*grid, codec.block_bytes(self._format)) if kind == "codes" else grid

    def _items_of(self, stream: Stream, device: jax.Device) -> Iterator[_Item]:
        kind, axes = stream
        start = 0
        # As the program joins them: the scales of what it rounded come first, then what it did not round.
        for key, window in sorted(self._windows.items(), key=lambda item: item[0] not in self._rounded):
            if window.axes != axes or kind not in self._kinds(key):
                continue
            grid = self._grid(kind, key, window.local_shape)
            stop = start + math.prod(grid)
            shard = window.sharding.devices_indices_map(window.tensor)[device]
            place = window.place(shard, blocks=key in self._rounded and self._integer)
            if place is not None:
                where, take = place
                yield _Item(key, start, stop, grid, take, where)
            start = stop

    def _representatives(self, axes: Axes) -> list[tuple[int, jax.Device]]:
        """One of the devices that hold the same part of what is shared out over `axes`, for each part, by position."""
        parts = math.prod(self._mesh.shape[axis] for axis in axes)
        held = NamedSharding(self._mesh, _flat(axes)).devices_indices_map((parts,))
        first: dict[str, tuple[int, jax.Device]] = {}
        for number, device in enumerate(self._mesh.devices.flat):
            first.setdefault(repr(held[device]), (number, device))
        return list(first.values())

    # ---- the program ----------------------------------------------------------------------------------------------

    def compile(self, tensors: Mapping[str, jax.ShapeDtypeStruct]) -> jax.stages.Compiled:
        """Compile for parameters of these shapes, dtypes and layouts, by path, which may not change afterwards."""

        def described(shape: Shape, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)

        windows = self._windows.values()
        anchors = [described(window.shape, window.value_sharding) for window in windows]
        inputs: tuple[Any, ...] = (
            [tensors[path] for path in self._paths],
            anchors,
            self._residuals(),
            self._starts.described,
        )
        outputs = _Outputs(
            {stream: _flat(stream[1]) for stream in self._streams()},
            {axes: _flat(axes) for axes in self._residuals()},
            [window.spec for window in windows] if self._keep_local else [],
        )
        program = jax.shard_map(
            self._on_each_device,
            mesh=self._mesh,
            in_specs=jax.tree.map(lambda leaf: leaf.sharding.spec, inputs),
            out_specs=outputs,
            check_vma=False,  # it would refuse outputs that are equal on several devices only because the inputs are
        )
        return jax.jit(program).lower(*inputs).compile()

    def _residuals(self) -> dict[Axes, jax.ShapeDtypeStruct]:
        sizes: dict[Axes, int] = {}
        for window in self._rounded.values():
            size = window.num_blocks * codec.BLOCK if self._integer else math.prod(window.local_shape)
            sizes[window.axes] = sizes.get(window.axes, 0) + size
        return {
            axes: jax.ShapeDtypeStruct(
                (size * len(self._devices[axes]),), np.float32, sharding=NamedSharding(self._mesh, _flat(axes))
            )
            for axes, size in sizes.items()
        }

    def _on_each_device(
        self, tensors: DeviceArrays, anchors: DeviceArrays, residuals: Mapping[Axes, Array], starts: Array
    ) -> _Outputs:
        kept: list[Array] = []
        plain: dict[Axes, list[Array]] = {}
        rounded: dict[Axes, list[Array]] = {}
        for (key, window), anchor, tensor, start in zip(
            self._windows.items(), anchors, [tensors[i] for i in self._tensor_of], starts, strict=True
        ):
            local = window.cut(tensor, start).astype(jnp.float32)
            if self._keep_local:
                kept.append(jnp.copy(local))
            update = (window.of_value(anchor, start) - local).reshape(-1)
            if key not in self._rounded:
                plain.setdefault(window.axes, []).append(update)
            elif self._integer:
                rounded.setdefault(window.axes, []).append(codec.to_blocks(jnp, update).reshape(-1))
            else:
                rounded.setdefault(window.axes, []).append(update)
        streams: dict[Stream, Array] = {}
        after = {}
        for axes, parts in rounded.items():  # all tensors together: fewer and larger loops, less to compile
            update = jnp.concatenate(parts) + residuals[axes]
            streams["codes", axes], scales, after[axes] = _round(update, self._format)
            if scales is not None:
                plain.setdefault(axes, []).insert(0, scales)
        for axes, parts in plain.items():
            streams["floats", axes] = jnp.concatenate(parts)
        return _Outputs(streams, after, kept)


def _flat(axes: Axes) -> PartitionSpec:
    return PartitionSpec(axes) if axes else PartitionSpec()


def _round(update: Float32[Array, "n"], format: codec.Format) -> tuple[Array, Array | None, Float32[Array, "n"]]:
    """Flat codes, scales if the format has them, and what rounding keeps back."""
    if format == "bfloat16":
        rounded = codec.round_elements(jnp, update, format)
        # XLA may drop a cast to bfloat16 and back; this it may not.
        decoded = jax.lax.reduce_precision(rounded.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)
        # NaN and infinity are sent as such; nothing is kept back of them.
        return rounded, None, jnp.where(jnp.isfinite(update), update - decoded, 0)
    # Without barriers XLA computes updates and maxima anew for each element that needs them: several times the work.
    blocks = jax.lax.optimization_barrier(codec.to_blocks(jnp, update))
    numbers, scales = codec.scale_blocks(jnp, blocks, format)
    kept_back = blocks - numbers * scales[:, None]
    return codec.pack_codes(jnp, numbers, format).reshape(-1), scales, kept_back.reshape(-1)
