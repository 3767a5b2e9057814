"""Codec: a fragment's values as bytes for the wire.

Format    bytes of a tensor of n elements, nb = ceil(n / 256)       worst rounding error of one element x
float32   4 n                                                       none
bfloat16  2 n                                                       |x| / 256 (nearest even)
int8      4 nb scales, then 256 nb codes                            absmax of its block / 254
int4      4 nb scales, then 128 nb bytes of two codes each          absmax of its block / 14
int2      4 nb scales, then 64 nb bytes of four codes each          the larger of scale / 2 and |x| - scale

Integer formats are symmetric: a block of 256 consecutive elements of the flattened tensor shares a float32 scale, and a
code is `round(x / scale)`, two's complement. The scale is `absmax * float32(1 / 127)` (int8), `absmax * float32(1 / 7)`
(int4), or 1.5336 times the mean magnitude of the elements that are not zero (int2, whose codes are cut to -1, 0 and 1):
of normally distributed elements these three levels have next to the least mean square error, 0.19 of the variance (J.
Max, Quantizing for minimum distortion, 1960), and an outlier does not drown its block. The last block is filled up with
zeros. Byte j (0 to 127) of an int4 block holds the code of element j in its low four bits and that of element j + 128
in its high ones; byte j (0 to 63) of an int2 block those of j, j + 64, j + 128 and j + 192, two bits each from the
lowest: the parts are contiguous, as vector units want them. Zero stays zero. A block is all zero when its absmax (int2:
that mean) is below 1e-30, and bfloat16 flushes subnormal numbers: XLA may do so anyway, and the host must give the same
bytes.

The payload of a fragment is the tensors' bytes, one after the other in ascending order of their keys, little-endian,
without header: sender and receiver know the layout from the same plan.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal

import ml_dtypes
import numpy as np
import xxhash
from jaxtyping import Float, Float32, Shaped

Format = Literal["float32", "bfloat16", "int8", "int4", "int2"]
Shape = tuple[int, ...]
Bytes = bytes | bytearray | memoryview

BLOCK = 256  # elements that share a scale
_MAX_CODE = {"int8": 127, "int4": 7, "int2": 1}
_PER_BYTE = {"int8": 1, "int4": 2, "int2": 4}  # codes
_LEVEL = np.float32(1.5336)  # of three, over the mean magnitude; the best is 1.2240 sqrt(pi / 2) = 1.5341
_ZERO_ABSMAX = np.float32(1e-30)
_SMALLEST_NORMAL = np.finfo(np.float32).smallest_normal
_NORMAL = int(_SMALLEST_NORMAL.view(np.int32))  # as a whole number
_CHUNK = 512  # blocks that the host works on at once: 512 KiB stay in the cache


class NotFinite(ValueError):
    """NaN or infinity, which integer formats cannot carry."""


def as_bytes(array: Shaped[np.ndarray, "..."]) -> memoryview:
    """Return the memory of an array of any shape, of no axes and of no elements too; a copy if it is not contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def encode(values: Mapping[str, Float[np.ndarray, "..."]], format: Format) -> bytes:
    """Encode a fragment on the host.

    Raises:
      NotFinite: NaN or infinity with an integer format (the other formats carry them).
    """
    pieces: list[memoryview] = []
    for key in sorted(values):
        codes, scales = quantize_on_host(values[key], format)
        if not np.isfinite(scales).all():
            raise NotFinite(f"{key!r} holds NaN or infinity, which integer formats cannot carry; drop this update")
        pieces += (as_bytes(scales), as_bytes(codes))
    return b"".join(pieces)


def decode(
    payload: Bytes, keys_shapes: Sequence[tuple[str, Shape]], format: Format
) -> dict[str, Float32[np.ndarray, "..."]]:
    """Return the values that a payload holds, as new arrays, in the order of `keys_shapes`.

    Args:
      keys_shapes: key and shape of each tensor in any order (`Fragment.keys_shapes`).

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
    """Return the checksum of a payload, in [0, 2^64): equal bytes have equal digests (XXH3), damaged ones not."""
    hasher = xxhash.xxh3_64()
    for piece in (payload,) if isinstance(payload, bytes | bytearray | memoryview) else payload:
        hasher.update(piece)
    return hasher.intdigest()


def is_integer(format: Format) -> bool:
    """Return whether this format has blocks, codes and scales."""
    return format in _MAX_CODE


def block_bytes(format: Format) -> int:
    """Return the size in bytes of a block's codes in an integer format."""
    return BLOCK // _PER_BYTE[format]


def element_bytes(format: Format) -> int:
    """Return the size in bytes of an element in a format without blocks."""
    return {"float32": 4, "bfloat16": 2}[format]


# One definition for jax.numpy and numpy (`xp`): the same IEEE operations in the same order give the same bytes.


def to_blocks(xp: ModuleType, x: Any) -> Any:
    """Reshape a flat float32[n] to float32[ceil(n / 256), 256], filled up with zeros."""
    if padding := -x.shape[0] % BLOCK:
        x = xp.pad(x, (0, padding))
    return x.reshape(-1, BLOCK)


def round_elements(xp: ModuleType, x: Any, format: Format) -> Any:
    """Round float32 of any shape to an elementwise format: bfloat16, or float32, which changes nothing."""
    if format == "float32":
        return x
    return xp.where(xp.abs(x) < _SMALLEST_NORMAL, xp.float32(0), x).astype(ml_dtypes.bfloat16)


def quantize_blocks(xp: ModuleType, blocks: Any, format: Format) -> tuple[Any, Any]:
    """Quantise float32[nb, 256] to an integer format.

    Returns:
      (codes, scales): int8[nb, 256] or, for int4, uint8[nb, 128], for int2 uint8[nb, 64], and float32[nb]; a block with
      values that are not finite has a scale that is not.
    """
    numbers, scales = scale_blocks(xp, blocks, format)
    return pack_codes(xp, numbers, format), scales


def scale_blocks(xp: ModuleType, blocks: Any, format: Format) -> tuple[Any, Any]:
    """Do the first half of `quantize_blocks`: codes as whole numbers in float32[nb, 256], and scales."""
    magnitudes = blocks.view(xp.int32) & 0x7FFFFFFF
    if format == "int2":
        size = _sum(xp.abs(blocks))
        usual = size / xp.maximum(_sum((magnitudes >= _NORMAL).astype(xp.float32)), xp.float32(1))
        scales = xp.where(usual < _ZERO_ABSMAX, xp.float32(0), usual * _LEVEL)
    else:
        # Of magnitudes as whole numbers, where NaN is the largest: XLA's maximum of floats on CPUs passes over NaN, and
        # values that a learner does not have would travel as zeros.
        absmax = xp.max(magnitudes, axis=1).view(xp.float32)
        # A product with a rounded constant, not absmax / max_code: XLA may replace division by a constant.
        scales = xp.where(absmax < _ZERO_ABSMAX, xp.float32(0), absmax * np.float32(1 / _MAX_CODE[format]))
    divisors = xp.where(scales == 0, xp.float32(np.inf), scales)
    numbers = xp.rint(blocks / divisors[:, None])
    return xp.clip(numbers, -1, 1) if format == "int2" else numbers, scales


def _sum(rows: Any) -> Any:
    """Sum float32[nb, 256] along rows by halves, so that every machine adds in the same order."""
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]


def pack_codes(xp: ModuleType, numbers: Any, format: Format) -> Any:
    """Do the second half of `quantize_blocks`: codes as they travel."""
    codes = numbers.astype(xp.int8)
    if format == "int8":
        return codes
    width, bits = block_bytes(format), 8 // _PER_BYTE[format]
    packed = codes[:, :width] & (2**bits - 1)
    for k in range(1, _PER_BYTE[format]):
        packed = packed | ((codes[:, k * width : (k + 1) * width] & (2**bits - 1)) << (k * bits))
    return packed.view(xp.uint8)


def dequantize_blocks(xp: ModuleType, codes: Any, scales: Any, format: Format) -> Any:
    """Return the float32[nb, 256] that codes and scales of `quantize_blocks` stand for."""
    if format != "int8":
        packed, bits = codes.view(xp.int8), 8 // _PER_BYTE[format]
        # Arithmetic shifts restore the sign.
        codes = xp.concatenate([(packed << (8 - bits - at)) >> (8 - bits) for at in range(0, 8, bits)], axis=1)
    return codes.astype(xp.float32) * scales[:, None]


def _tensor_bytes(size: int, format: Format) -> int:
    if is_integer(format):
        return math.ceil(size / BLOCK) * (4 + block_bytes(format))
    return element_bytes(format) * size


def quantize_on_host(
    values: Float[np.ndarray, "..."], format: Format
) -> tuple[Shaped[np.ndarray, "..."], Float32[np.ndarray, "scales"]]:
    """Return codes and scales of an array of any shape, flattened, as the devices compute them.

    They are float32[n] or bfloat16[n] and no scales; for nb = ceil(n / 256) what `quantize_blocks` returns.
    """
    flat = values.reshape(-1).astype(np.float32, copy=False)
    if not is_integer(format):
        return round_elements(np, flat, format), np.zeros(0, np.float32)
    blocks = to_blocks(np, flat)
    codes = np.empty((len(blocks), block_bytes(format)), np.int8 if format == "int8" else np.uint8)
    scales = np.empty(len(blocks), np.float32)
    with np.errstate(invalid="ignore"):  # values that are not finite show in the scales, which `encode` checks
        for i in range(0, len(blocks), _CHUNK):
            part = slice(i, i + _CHUNK)
            codes[part], scales[part] = quantize_blocks(np, blocks[part], format)
    return codes, scales


def dequantize_on_host(
    codes: Shaped[np.ndarray, "nb width"], scales: Float32[np.ndarray, "nb"], size: int, format: Format
) -> Float32[np.ndarray, "size"]:
    """Return the first `size` values that codes and scales of an integer format stand for."""
    values = np.empty((len(scales), BLOCK), np.float32)
    with np.errstate(invalid="ignore"):  # scales that are not finite are for the caller to refuse
        for i in range(0, len(scales), _CHUNK):
            part = slice(i, i + _CHUNK)
            values[part] = dequantize_blocks(np, codes[part], scales[part], format)
    return values.reshape(-1)[:size]


def _dequantize(payload: Bytes, offset: int, size: int, format: Format) -> np.ndarray:
    if not is_integer(format):
        dtype = np.dtype("<f4") if format == "float32" else np.dtype(ml_dtypes.bfloat16)
        return np.frombuffer(payload, dtype, size, offset).astype(np.float32)
    count, width = math.ceil(size / BLOCK), block_bytes(format)
    scales = np.frombuffer(payload, "<f4", count, offset)
    if not (np.isfinite(scales) & (scales >= 0)).all():
        raise ValueError("a scale is negative or not finite; the payload is damaged")
    codes = np.frombuffer(payload, np.int8, count * width, offset + 4 * count).reshape(count, width)
    return dequantize_on_host(codes, scales, size, format)
