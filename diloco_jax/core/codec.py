"""Codec: a fragment's values as bytes for the wire.

Format    bytes of a tensor of n elements                              worst rounding error of one element x
float32   4 n                                                          none
bfloat16  2 n                                                          |x| / 256 (nearest even)
int8      4 ceil(n / 256) scales, then n codes                         absmax of its block / 254
int4      4 ceil(n / 256) scales, then ceil(n / 2): two codes a byte   absmax of its block / 14

Integer formats are symmetric: a block of 256 consecutive elements shares the float32 scale `absmax / 127` (int8) or
`absmax / 7` (int4), and a code is `round(x / scale)`. Zero stays zero. A block is all zero when its absmax is below
1e-30, and bfloat16 flushes subnormal numbers: XLA may do so anyway, and the host must give the same bytes.

The payload of a fragment is the tensors' bytes, one after the other in ascending order of their keys, little-endian,
without padding or header: sender and receiver know the layout from the same plan.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Float32, Shaped

Format = Literal["float32", "bfloat16", "int8", "int4"]
Shape = tuple[int, ...]
Bytes = bytes | bytearray | memoryview

BLOCK = 256  # elements that share a scale
_MAX_CODE = {"int8": 127, "int4": 7}
_ZERO_ABSMAX = np.float32(1e-30)
_SMALLEST_NORMAL = np.finfo(np.float32).smallest_normal
_CHUNK = 1024 * BLOCK  # elements that the host works on at once: 1 MiB stays in the cache


@partial(jax.jit, static_argnames="format")
def quantize(x: Float[Array, "n"], format: Format) -> tuple[Shaped[Array, "codes"], Float32[Array, "scales"]]:
    """Encode one flat tensor on its device: `pack` of the result equals `encode` of the tensor.

    Infinities and NaNs give meaningless codes in the integer formats; `pack` refuses their scales.

    Args:
      x: flat tensor of n elements.
      format: of the wire.

    Returns:
      (codes, scales): float32[n] or bfloat16[n] and no scales; int8[n] or, for int4, uint8[ceil(n / 2)] with the
      first of two codes in the low bits, and float32[ceil(n / 256)].
    """
    return _quantize(jnp, x.astype(jnp.float32), format)


def pack(parts: Mapping[str, tuple[Shaped[np.ndarray, "codes"], Float32[np.ndarray, "scales"]]]) -> bytes:
    """Join quantised tensors, already copied to the host, into the payload of a fragment.

    Args:
      parts: (codes, scales) of each tensor as `quantize` returns them, by key.

    Raises:
      ValueError: a tensor held values that are not finite.
    """
    pieces: list[memoryview] = []
    for key in sorted(parts):
        codes, scales = parts[key]
        if not np.isfinite(scales).all():
            raise ValueError(f"{key!r} holds NaN or infinity, which integer formats cannot carry; drop this update")
        pieces += (scales.view(np.uint8).data, codes.view(np.uint8).data)
    return b"".join(pieces)


def encode(values: Mapping[str, Float[np.ndarray, "..."]], format: Format) -> bytes:
    """Encode a fragment on the host.

    Args:
      values: of the fragment, by key; the order of the mapping does not matter.
      format: of the wire.

    Raises:
      ValueError: NaN or infinity with an integer format (the other formats carry them).
    """
    return pack({key: _quantize_on_host(value, format) for key, value in values.items()})


def decode(
    payload: Bytes, keys_shapes: Sequence[tuple[str, Shape]], format: Format
) -> dict[str, Float32[np.ndarray, "..."]]:
    """Return the values that a payload holds, as new arrays, in the order of `keys_shapes`.

    Args:
      payload: from `encode` or `pack`.
      keys_shapes: key and shape of each tensor in any order (`Fragment.keys_shapes`).
      format: of the wire.

    Raises:
      ValueError: the payload has another length than this layout has, or an impossible scale.
    """
    expected_bytes = encoded_size([shape for _, shape in keys_shapes], format)
    received_bytes = memoryview(payload).nbytes
    if received_bytes != expected_bytes:
        raise ValueError(
            f"payload has {received_bytes} bytes, but {len(keys_shapes)} tensors in {format} take {expected_bytes}; "
            "sender and receiver must have the same plan and format"
        )
    decoded, offset = {}, 0
    for key, shape in sorted(keys_shapes):
        size = math.prod(shape)
        try:
            decoded[key] = _dequantize(payload, offset, size, format).reshape(shape)
        except ValueError as error:
            raise ValueError(f"{key!r}: {error}") from error
        offset += _tensor_bytes(size, format)
    return {key: decoded[key] for key, _ in keys_shapes}


def encoded_size(shapes: Iterable[Shape], format: Format) -> int:
    """Return the exact payload size in bytes of tensors with these shapes."""
    return sum(_tensor_bytes(math.prod(shape), format) for shape in shapes)


def digest(payload: Bytes | Iterable[Bytes]) -> int:
    """Checksum of a payload, in [0, 2^64): equal values have equal digests, damaged ones do not.

    Args:
      payload: contiguous bytes, or pieces of them in their order; how they are cut does not matter.

    Returns:
      The first 8 bytes of BLAKE2b, little-endian.
    """
    hasher = hashlib.blake2b(digest_size=8)
    for piece in (payload,) if isinstance(payload, bytes | bytearray | memoryview) else payload:
        hasher.update(piece)
    return int.from_bytes(hasher.digest(), "little")


def _tensor_bytes(size: int, format: Format) -> int:
    match format:
        case "float32":
            return 4 * size
        case "bfloat16":
            return 2 * size
        case "int8":
            return 4 * math.ceil(size / BLOCK) + size
        case "int4":
            return 4 * math.ceil(size / BLOCK) + math.ceil(size / 2)


def _quantize(xp: ModuleType, x: Any, format: Format) -> tuple[Any, Any]:
    """One definition for jax.numpy and numpy: the same IEEE operations in the same order give the same bytes."""
    no_scales = xp.zeros((0,), xp.float32)
    if format == "float32":
        return x, no_scales
    if format == "bfloat16":
        return xp.where(xp.abs(x) < _SMALLEST_NORMAL, xp.float32(0), x).astype(ml_dtypes.bfloat16), no_scales
    size, max_code = x.shape[0], _MAX_CODE[format]
    if size % BLOCK:
        x = xp.pad(x, (0, -size % BLOCK))
    blocks = x.reshape(-1, BLOCK)
    absmax = xp.max(xp.abs(blocks), axis=1, keepdims=True)
    # A product with a rounded constant, not absmax / max_code: XLA may replace division by a constant.
    scales = xp.where(absmax < _ZERO_ABSMAX, xp.float32(0), absmax * np.float32(1 / max_code))
    codes = xp.rint(blocks / xp.where(scales == 0, xp.float32(1), scales))
    codes = xp.where(scales == 0, xp.float32(0), codes).astype(xp.int8).reshape(-1)
    if format == "int8":
        return codes[:size], scales.reshape(-1)
    low, high = codes[0::2], codes[1::2]
    packed = (low & 15).astype(xp.uint8) | (high.astype(xp.uint8) << 4)
    return packed[: (size + 1) // 2], scales.reshape(-1)


def _quantize_on_host(value: Float[np.ndarray, "..."], format: Format) -> tuple[np.ndarray, np.ndarray]:
    flat = value.reshape(-1).astype(np.float32, copy=False)
    if format == "float32":
        return _quantize(np, flat, format)
    with np.errstate(invalid="ignore"):  # values that are not finite show in the scales, which `pack` checks
        parts = [_quantize(np, flat[i : i + _CHUNK], format) for i in range(0, max(flat.size, 1), _CHUNK)]
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([codes for codes, _ in parts]), np.concatenate([scales for _, scales in parts])


def _dequantize(payload: Bytes, offset: int, size: int, format: Format) -> np.ndarray:
    if format in ("float32", "bfloat16"):
        dtype = np.dtype("<f4") if format == "float32" else np.dtype(ml_dtypes.bfloat16)
        return np.frombuffer(payload, dtype, size, offset).astype(np.float32)
    num_blocks = math.ceil(size / BLOCK)
    scales = np.frombuffer(payload, "<f4", num_blocks, offset)
    if not (np.isfinite(scales) & (scales >= 0)).all():
        raise ValueError("a scale is negative or not finite; the payload is damaged")
    offset += 4 * num_blocks
    codes = np.zeros(num_blocks * BLOCK, np.int8)
    if format == "int8":
        codes[:size] = np.frombuffer(payload, np.int8, size, offset)
    else:
        packed = np.frombuffer(payload, np.int8, (size + 1) // 2, offset)
        codes[0 : 2 * packed.size : 2] = (packed << 4) >> 4  # arithmetic shifts restore the sign
        codes[1 : 2 * packed.size : 2] = packed >> 4
    values: np.ndarray = codes.reshape(-1, BLOCK) * scales.reshape(-1, 1)
    return values.reshape(-1)[:size]
