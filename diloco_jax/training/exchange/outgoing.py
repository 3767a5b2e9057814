"""The way out of a fragment: one program on all devices makes its update, anchor - local, as it goes on the wire.

It runs behind the inner step that is under way and before the next one, which donates the parameters. What goes to host
memory is the encoded update, for int4 an eighth of the bytes of the parameters; the caller waits for nothing.
Devices that hold the same encode a share of it each.

Error feedback: what rounding takes from an update, its residual, is added to the next one. A staged copy carries the
residual that there is once this copy was used; the island takes it over when it adopts the version that the copy went
into. Where shards cut the format's blocks (small or odd tensors), float32 goes to the host, which does the same there.
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float32, Shaped

from diloco_jax.core import codec
from diloco_jax.core.codec import Bytes
from diloco_jax.core.parts import Buffer
from diloco_jax.training.exchange.outgoing_bytes import (
    Copies,
    HostArrays,
    OutgoingBytes,
    Stream,
    flat_spec,
    holder_axes,
)
from diloco_jax.training.exchange.windows import Axes, FragmentWindows, floats
from diloco_jax.training.models.protocol import Params
from diloco_jax.training.sharding import put_array

DeviceArrays = Sequence[Shaped[Array, "..."]]
Once = Callable[[object, Callable[[], jax.stages.Compiled]], jax.stages.Compiled]


class Residual(NamedTuple):
    """The sum of what rounding has kept back of a fragment's updates so far."""

    # flat, what each device rounds one after the other, for all tensors shared out over the same mesh axes
    on_devices: Mapping[Axes, Float32[Array, "n"]]
    on_host: HostArrays  # of tensors that the host encodes, by key


_Encoded = tuple[bytes | list[Buffer], Residual]  # a payload, and what rounding keeps back of it


class HeldFragment(NamedTuple):
    """An island's data of a fragment beside its parameters."""

    anchor: DeviceArrays  # the global value that it adopted last, float32 on the devices, in the order of the slices
    residual: Residual  # of the updates that it sent


class _Outputs(NamedTuple):
    """The results of the program."""

    streams: Mapping[Stream, Any]  # flat arrays of what goes to the host, the windows one after the other
    residual: Mapping[Axes, Any]  # `Residual.on_devices` that there is once this copy was used
    local: Sequence[Any]  # windows of the parameters, if the island wants them


class StagedFragment:
    """A fragment's update as it was after the newest step when it was staged. Any thread may call the methods."""

    def __init__(self, bytes_of: OutgoingBytes, copies: Copies, before: Residual, out: _Outputs) -> None:
        # windows of the parameters at that step, on the devices; empty if the island does not want them
        self.local = out.local
        # waits for what `loose` gave on the other processes, by process; the owner sets it on the first one
        self.of_others: Callable[[], Mapping[int, Bytes]] = dict
        self._bytes = bytes_of
        self._copies = copies
        self._before = before
        self._on_devices = out.residual
        self._lock = threading.Lock()
        self._loose: list[Buffer] | None = None
        self._encoded: _Encoded | codec.NotFinite | None = None

    @property
    def has_loose(self) -> bool:
        """Return whether the first of several processes needs what `loose` gives on the others, as `of_others`."""
        return self._bytes.in_parts and bool(self._bytes.on_host)

    def loose(self) -> list[Buffer]:
        """Wait for the copies; what the first process encodes of what this one has, as pieces."""
        with self._lock:
            if self._loose is None:
                self._loose = self._bytes.loose(self._copies)
            return self._loose

    def encode(self) -> bytes | list[Buffer]:
        """Wait for the copies and return the payload: `codec.encode` of anchor - local + residual.

        With devices on several processes: this process's part of it (core/parts.py).

        Raises:
          NotFinite: the update, or this part of it, is not, and the format cannot say so.
        """
        return self._result()[0]

    def residual(self) -> Residual | None:
        """Return what rounding keeps back once this copy was used; None if it could not be sent."""
        try:
            return self._result()[1]
        except codec.NotFinite:
            return None

    def _result(self) -> _Encoded:
        with self._lock:
            if self._encoded is None:
                if self.has_loose and self._loose is None:
                    self._loose = self._bytes.loose(self._copies)
                before, how = self._before.on_host, self._bytes
                try:
                    payload: bytes | list[Buffer]
                    if how.in_parts:
                        payload, on_host = how.part(self._copies, before, self.of_others())
                    else:
                        payload, on_host = how.whole(self._copies, before)
                    self._encoded = payload, Residual(self._on_devices, on_host)
                except codec.NotFinite as error:
                    self._encoded = error
                self._copies = ()
            if isinstance(self._encoded, codec.NotFinite):
                raise self._encoded
            return self._encoded


class OutgoingProgram:
    """The program that stages one fragment.

    Args:
      keep_local: whether staged copies hold the parameters too, on the devices (for `rebase`).
      once: returns what a function made for an equal key before, or makes now.
    """

    def __init__(self, on: FragmentWindows, format: codec.Format, keep_local: bool, once: Once) -> None:
        self._on = on
        self._bytes = OutgoingBytes(on.windows, format)
        self._format = format
        self._keep_local = keep_local
        self._integer = codec.is_integer(format)
        self.compiled = once(("out", on.geometry), self._compile)

    def dispatch(self, params: Params, held: HeldFragment) -> StagedFragment:
        """Dispatch the program, and copies of its results to the host; return at once."""
        tensors = [params[path] for path in self._on.paths]
        out: _Outputs = self.compiled(tensors, held.anchor, held.residual.on_devices, self._on.starts)
        named = [(stream, number, out.streams[stream].addressable_data(i)) for stream, number, i in self._bytes.local]
        for _, _, part in named:  # nobody donates these: no copies of them on another kind of memory are needed
            part.copy_to_host_async()
        return StagedFragment(self._bytes, named, held.residual, out)

    def no_residual(self) -> Residual:
        """Return the residual of a fragment of which nothing was sent."""
        on_devices = {
            axes: put_array(np.zeros(leaf.shape, np.float32), leaf.sharding) for axes, leaf in self._residuals().items()
        }
        on_host = {key: np.zeros(self._bytes.windows[key].shape, np.float32) for key in self._bytes.on_host}
        return Residual(on_devices, on_host)

    def _compile(self) -> jax.stages.Compiled:
        on = self._on
        inputs: tuple[Any, ...] = (on.tensors, on.anchors, self._residuals(), on.starts_described)
        everywhere = flat_spec(on.mesh.axis_names)
        outputs = _Outputs(
            {(kind, axes): flat_spec(axes) if kind == "floats" else everywhere for kind, axes in self._bytes.streams},
            dict.fromkeys(self._residuals(), everywhere),
            [window.spec for window in on.windows] if self._keep_local else [],
        )
        program = jax.shard_map(
            self._on_each_device,
            mesh=on.mesh,
            in_specs=jax.tree.map(lambda leaf: leaf.sharding.spec, inputs),
            out_specs=outputs,
            check_vma=False,  # it would refuse outputs that are equal on several devices only because the inputs are
        )
        return jax.jit(program).lower(*inputs).compile()

    def _residuals(self) -> dict[Axes, jax.ShapeDtypeStruct]:
        sizes: dict[Axes, int] = {}
        for key, share in self._bytes.shares.items():
            axes = self._bytes.windows[key].axes
            sizes[axes] = sizes.get(axes, 0) + share.units * (codec.BLOCK if self._integer else 1)
        everywhere = NamedSharding(self._on.mesh, flat_spec(self._on.mesh.axis_names))
        return {axes: floats((size * self._on.mesh.size,), everywhere) for axes, size in sizes.items()}

    def _on_each_device(
        self, tensors: DeviceArrays, anchors: DeviceArrays, residuals: Mapping[Axes, Array], starts: Array
    ) -> _Outputs:
        kept: list[Array] = []
        plain: dict[Axes, list[Array]] = {}
        rounded: dict[Axes, list[Array]] = {}
        for (key, window), anchor, tensor, start in zip(
            self._bytes.windows.items(), anchors, [tensors[i] for i in self._on.tensor_of], starts, strict=True
        ):
            cut = window.cut(tensor, start)
            local = cut.astype(jnp.float32)
            if self._keep_local:
                kept.append(jnp.copy(local))
            # Against what these parameters held of the anchor: else rounding it would look like an update.
            update = (as_held(window.of_value(anchor, start), cut.dtype) - local).reshape(-1)
            if (share := self._bytes.shares.get(key)) is None:
                plain.setdefault(window.axes, []).append(update)
                continue
            units = codec.to_blocks(jnp, update) if self._integer else update
            holders = holder_axes(window)
            part = share.cut(units, jax.lax.axis_index(holders) if holders else 0)
            rounded.setdefault(window.axes, []).append(part)
        streams: dict[Stream, Array] = {}
        after = {}
        for axes, parts in rounded.items():  # all tensors together: fewer and larger loops, less to compile
            update = _joined(parts) + residuals[axes]
            streams["codes", axes], scales, after[axes] = _round(update, self._format)
            if scales is not None:
                streams["scales", axes] = scales
        for axes, parts in plain.items():
            streams["floats", axes] = _joined(parts)
        return _Outputs(streams, after, kept)


def as_held(value: Float32[Array, "..."], dtype: jnp.dtype) -> Float32[Array, "..."]:
    """Return a global value as parameters of this dtype hold it, in float32; to be called inside of a program."""
    if dtype == jnp.float32:
        return value
    # Without a barrier XLA may drop a cast and its way back. Its other means, `reduce_precision`, loses subnormals.
    return jax.lax.optimization_barrier(value.astype(dtype)).astype(jnp.float32)


def _joined(parts: Sequence[Float32[Array, "..."]]) -> Float32[Array, "n"]:
    """Return arrays one after the other, flat."""
    # As rows: flat, a loop over everything would mask out what is of another array, which takes CPUs ten times as long.
    width = math.gcd(*(part.size for part in parts))
    return jnp.concatenate([part.reshape(-1, width) for part in parts]).reshape(-1)


def _round(update: Float32[Array, "n"], format: codec.Format) -> tuple[Array, Array | None, Float32[Array, "n"]]:
    """Return flat codes, scales if the format has them, and what rounding keeps back."""
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
