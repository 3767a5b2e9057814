"""Staging of a fragment: one program on all devices encodes its update, anchor - local, for the wire.

The program runs behind the running inner step and before the next one, which donates the parameters; the caller does
not wait. Only the encoded update goes to CPU memory, for int4 an eighth of the bytes of the parameters. Devices that
hold the same values encode a share of them each.

Error feedback: the residual is what rounding takes from an update, and it is added to the next update. A staged copy
has the residual that becomes valid if the copy is merged. The island keeps this residual when it adopts the version
that the copy was merged into. If shards cut the format's blocks (small or odd tensors), the devices send float32, and
the host encodes it with the same error feedback.
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
from diloco_jax.core.host_bytes import Buffer
from diloco_jax.training.exchange.outgoing_bytes import (
    Copies,
    CpuArrays,
    OutgoingBytes,
    Stream,
    flat_spec,
    holder_axes,
)
from diloco_jax.training.exchange.windows import Axes, FragmentWindows, floats
from diloco_jax.training.sharding import put_array

DeviceArrays = Sequence[Shaped[Array, "..."]]
Once = Callable[[object, Callable[[], jax.stages.Compiled]], jax.stages.Compiled]


class Residual(NamedTuple):
    """The part of a fragment's updates that rounding has left out so far."""

    # By mesh axes, one flat array for all tensors that are sharded over these axes; it is the concatenation of what
    # each device rounds.
    on_devices: Mapping[Axes, Float32[Array, "n"]]
    # By key, for the tensors that the host encodes.
    on_cpu: CpuArrays


# A payload and the residual after it.
_Encoded = tuple[bytes | list[Buffer], Residual]


class HeldFragment(NamedTuple):
    """The anchor and the residual of a fragment."""

    # The global value that the island adopted last: float32 on the devices, in the order of the slices.
    anchor: DeviceArrays
    # The residual of the updates that the island sent.
    residual: Residual


class _Outputs(NamedTuple):
    """The results of the program that stages a fragment."""

    # Flat arrays for the host, each the concatenation of its windows.
    streams: Mapping[Stream, Any]
    # `Residual.on_devices` after this copy.
    residual: Mapping[Axes, Any]
    # Windows of the parameters; empty if the island does not keep them.
    local: Sequence[Any]


class StagedFragment:
    """A fragment's update as it was after the newest step when it was staged. Any thread may call the methods."""

    def __init__(self, bytes_of: OutgoingBytes, copies: Copies, before: Residual, out: _Outputs) -> None:
        # Windows of the parameters at that step, on the devices; empty if the island does not keep them.
        self.local = out.local
        # This function waits for the results of `loose` on the other processes, and returns them by process. The owner
        # sets it on the first process.
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
        """Return whether the first process needs the results of `loose` on the other processes."""
        return self._bytes.in_parts and bool(self._bytes.on_cpu)

    def loose(self) -> list[Buffer]:
        """Wait for the copies, and return this process's pieces of the tensors that the first process encodes."""
        with self._lock:
            if self._loose is None:
                self._loose = self._bytes.loose(self._copies)
            return self._loose

    def encode(self) -> bytes | list[Buffer]:
        """Wait for the copies and return the payload: `codec.encode` of anchor - local + residual.

        If several processes have the island's devices, the result is this process's part of it (core/host_bytes.py).

        Raises:
          NotFinite: the update, or this part of it, has NaN or infinity, and the format is an integer format.
        """
        return self._result()[0]

    def residual(self) -> Residual | None:
        """Return the residual that becomes valid if this copy is merged; None if the copy could not be encoded."""
        try:
            return self._result()[1]
        except codec.NotFinite:
            return None

    def _result(self) -> _Encoded:
        with self._lock:
            if self._encoded is None:
                if self.has_loose and self._loose is None:
                    self._loose = self._bytes.loose(self._copies)
                before, how = self._before.on_cpu, self._bytes
                try:
                    payload: bytes | list[Buffer]
                    if how.in_parts:
                        payload, on_cpu = how.part(self._copies, before, self.of_others())
                    else:
                        payload, on_cpu = how.whole(self._copies, before)
                    self._encoded = payload, Residual(self._on_devices, on_cpu)
                except codec.NotFinite as error:
                    self._encoded = error
                self._copies = ()
            if isinstance(self._encoded, codec.NotFinite):
                raise self._encoded
            return self._encoded


class OutgoingProgram:
    """The program that stages one fragment.

    Args:
      on: the fragment's windows.
      keep_local: whether staged copies also keep the parameters on the devices, for `rebase`.
      once: takes a key and a function; calls the function only if it has no result for the key yet.
    """

    def __init__(self, on: FragmentWindows, format: codec.Format, keep_local: bool, once: Once) -> None:
        self._on = on
        self._bytes = OutgoingBytes(on.windows, format)
        self._format = format
        self._keep_local = keep_local
        self._integer = codec.is_integer(format)
        self.compiled = once(("out", on.geometry), self._compile)

    def dispatch(self, params: Mapping[str, Any], held: HeldFragment) -> StagedFragment:
        """Start the program and the copies of its streams to CPU memory; return without waiting for either."""
        tensors = [params[path] for path in self._on.paths]
        out: _Outputs = self.compiled(tensors, held.anchor, held.residual.on_devices, self._on.starts)
        named = [(stream, number, out.streams[stream].addressable_data(i)) for stream, number, i in self._bytes.local]
        # No step donates these arrays, so they need no extra copy in pinned memory.
        for _, _, part in named:
            part.copy_to_host_async()
        return StagedFragment(self._bytes, named, held.residual, out)

    def no_residual(self) -> Residual:
        """Return the zero residual of a fragment that the island has not sent yet."""
        on_devices = {
            axes: put_array(np.zeros(leaf.shape, np.float32), leaf.sharding) for axes, leaf in self._residuals().items()
        }
        on_cpu = {key: np.zeros(self._bytes.windows[key].shape, np.float32) for key in self._bytes.on_cpu}
        return Residual(on_devices, on_cpu)

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
            # The check would refuse outputs that are replicated only because their inputs are.
            check_vma=False,
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
            # The anchor is rounded to the parameters' dtype first; otherwise its rounding would look like an update.
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
        # All tensors are rounded together, because fewer and larger loops compile faster.
        for axes, parts in rounded.items():
            update = _joined(parts) + residuals[axes]
            streams["codes", axes], scales, after[axes] = _round(update, self._format)
            if scales is not None:
                streams["scales", axes] = scales
        for axes, parts in plain.items():
            streams["floats", axes] = _joined(parts)
        return _Outputs(streams, after, kept)


def as_held(value: Float32[Array, "..."], dtype: jnp.dtype) -> Float32[Array, "..."]:
    """Round a global value to the parameters' dtype and return it as float32; call this inside a program."""
    if dtype == jnp.float32:
        return value
    # Without a barrier XLA may drop a cast and its inverse. The alternative, `reduce_precision`, loses subnormals.
    return jax.lax.optimization_barrier(value.astype(dtype)).astype(jnp.float32)


def _joined(parts: Sequence[Float32[Array, "..."]]) -> Float32[Array, "n"]:
    """Concatenate arrays to one flat array."""
    # The arrays are concatenated as rows. Flat, XLA makes a loop over all elements that masks out other arrays' parts,
    # which takes ten times as long on CPUs.
    width = math.gcd(*(part.size for part in parts))
    return jnp.concatenate([part.reshape(-1, width) for part in parts]).reshape(-1)


def _round(update: Float32[Array, "n"], format: codec.Format) -> tuple[Array, Array | None, Float32[Array, "n"]]:
    """Return flat codes, scales (None if the format has none), and the residual."""
    if format == "bfloat16":
        rounded = codec.round_elements(jnp, update, format)
        # XLA may drop a cast to bfloat16 and back, but not `reduce_precision`.
        decoded = jax.lax.reduce_precision(rounded.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)
        # NaN and infinity are sent unchanged, so their residual is 0.
        return rounded, None, jnp.where(jnp.isfinite(update), update - decoded, 0)
    # Without a barrier XLA recomputes updates and maxima for each element that needs them, several times the work.
    blocks = jax.lax.optimization_barrier(codec.to_blocks(jnp, update))
    numbers, scales = codec.scale_blocks(jnp, blocks, format)
    kept_back = blocks - numbers * scales[:, None]
    codes = codec.pack_codes(jnp, numbers, format).reshape(-1)
    return codes, scales.astype(codec.scale_type(format)), kept_back.reshape(-1)
