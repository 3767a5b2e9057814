"""Codec: it encodes a fragment's values as bytes for the wire, and decodes them.

Format    bytes of a tensor of n elements, nb = ceil(n / 256)       worst rounding error of one element x
float32   4 n                                                       none
bfloat16  2 n                                                       |x| / 256 (nearest even)
int8      4 nb scales, then 256 nb codes                            absmax of its block / 254
int4      4 nb scales, then 128 nb bytes of two codes each          absmax of its block / 14
int2      4 nb scales, then 64 nb bytes of four codes each          the larger of scale / 2 and |x| - scale
ternary   2 nb scales, then 52 nb bytes of five codes each          the larger of scale / 2 and |x| - scale

Integer formats are symmetric. A block of 256 consecutive elements of the flattened tensor shares a scale, and a code
is `round(x / scale)`. Zero stays zero. The last block is filled with zeros. Scales are float32 (ternary: bfloat16):

  int8     `absmax * float32(1 / 127)`
  int4     `absmax * float32(1 / 7)`
  int2     1.5336 times the mean magnitude of the elements that are not zero; codes are clipped to -1, 0 and 1
  ternary  the scale of int2, rounded to the nearest even bfloat16 before codes are computed

For normally distributed elements, the three levels of int2 and ternary have nearly the least possible mean square
error, 0.19 of the variance (J. Max, Quantizing for minimum distortion, 1960). An outlier changes such a scale little,
so the rest of its block survives.

Byte j (0 to 127) of an int4 block has the code of element j in its low four bits and that of element j + 128 in its
high four bits. Byte j (0 to 63) of an int2 block has the codes of elements j, j + 64, j + 128 and j + 192, two bits
each from the lowest. These codes are in two's complement. Byte j (0 to 51) of a ternary block is a number in base 3.
Its digits, from the lowest, are the codes of elements j, j + 52, j + 104, j + 156 and j + 208, each plus one; the last
four bytes have only four digits, at most 80. So each part of a block is contiguous, as vector units need it.

A block becomes all zero when its absmax (int2, ternary: its mean magnitude) is below 1e-30, and bfloat16 flushes
subnormal numbers to zero. XLA may flush them anyway, and the host must produce the same bytes.

The payload of a fragment is the tensors' bytes in ascending order of their keys, little-endian. It has no header,
because sender and receiver know the layout from the same plan.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal, get_args

import ml_dtypes
import numpy as np
import xxhash
from jaxtyping import Float, Float32, Shaped

Format = Literal["float32", "bfloat16", "int8", "int4", "int2", "ternary"]
# From wide to narrow.
FORMATS: tuple[Format, ...] = get_args(Format)
Shape = tuple[int, ...]
Bytes = bytes | bytearray | memoryview

# Elements that share a scale.
BLOCK = 256
_MAX_CODE = {"int8": 127, "int4": 7, "int2": 1, "ternary": 1}
# Codes in a byte.
_PER_BYTE = {"int8": 1, "int4": 2, "int2": 4, "ternary": 5}
# The scale of int2 and ternary over the mean magnitude. The optimum for three levels is 1.2240 sqrt(pi / 2) = 1.5341.
_LEVEL = np.float32(1.5336)
_ZERO_ABSMAX = np.float32(1e-30)
_SMALLEST_NORMAL = np.finfo(np.float32).smallest_normal
# The smallest normal number's bits as an integer.
_NORMAL = int(_SMALLEST_NORMAL.view(np.int32))
# The CPU works on this many blocks at once, because their 512 KiB stay in the cache.
_CHUNK = 512
# What is wrong with a payload.
BAD_SCALE = "a scale is negative or not finite; the payload is damaged"
BAD_CODES = "a byte of codes is above 242, or above 80 at the end of a block; the payload is damaged"
# The largest byte that a ternary block has at each place.
_MOST = np.where(np.arange(52) + 208 < BLOCK, 242, 80).astype(np.uint8)


class NotFinite(ValueError):
    """A value has NaN or infinity, which integer formats cannot carry."""


def as_bytes(array: Shaped[np.ndarray, "..."]) -> memoryview:
    """Return the memory of an array of any shape, empty ones and scalars included; a copy if it is not contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def encode(values: Mapping[str, Float[np.ndarray, "..."]], format: Format) -> bytes:
    """Encode a fragment on the CPU, to the same bytes as on the devices.

    Args:
      values: by key, tensors of any shape and float dtype; they are cast to float32 first.

    Raises:
      NotFinite: NaN or infinity with an integer format (the other formats carry them).
    """
    pieces: list[memoryview] = []
    for key in sorted(values):
        codes, scales = quantize_on_cpu(values[key], format)
        if not np.isfinite(scales).all():
            raise NotFinite(f"{key!r} holds NaN or infinity, which integer formats cannot carry; drop this update")
        pieces += (as_bytes(scales), as_bytes(codes))
    return b"".join(pieces)


def decode(
    payload: Bytes, keys_shapes: Sequence[tuple[str, Shape]], format: Format
) -> dict[str, Float32[np.ndarray, "..."]]:
    """Decode a payload to new float32 arrays by key, in the order of `keys_shapes`.

    Args:
      keys_shapes: key and shape of each tensor, in any order (`Fragment.keys_shapes`).

    Raises:
      ValueError: the payload's length does not fit this layout, a scale is negative or not finite, or a byte of codes
        is not one that a sender writes.
    """
    check_size(payload, [shape for _, shape in keys_shapes], format)
    decoded, offset = {}, 0
    for key, shape in sorted(keys_shapes):
        size = math.prod(shape)
        try:
            decoded[key] = _dequantize(payload, offset, size, format).reshape(shape)
        except ValueError as error:
            raise ValueError(f"{key!r}: {error}") from error
        offset += _tensor_bytes(size, format)
    return {key: decoded[key] for key, _ in keys_shapes}


def check_size(payload: Bytes, shapes: Collection[Shape], format: Format) -> None:
    """Raise ValueError if a payload does not have the size of tensors with these shapes."""
    received_bytes, expected_bytes = memoryview(payload).nbytes, encoded_size(shapes, format)
    if received_bytes != expected_bytes:
        raise ValueError(
            f"payload has {received_bytes} bytes, but {len(shapes)} tensors in {format} take {expected_bytes}; "
            "sender and receiver must have the same plan and format"
        )


def encoded_size(shapes: Iterable[Shape], format: Format) -> int:
    """Return the exact payload size in bytes of tensors with these shapes."""
    return sum(_tensor_bytes(math.prod(shape), format) for shape in shapes)


# The checksum that `digest` computes, for bytes that come one after another.
Checksum = xxhash.xxh3_64


def digest(payload: Bytes | Iterable[Bytes]) -> int:
    """Return the checksum (XXH3) of a payload, in [0, 2^64), whatever pieces it comes in."""
    hasher = Checksum()
    for piece in (payload,) if isinstance(payload, bytes | bytearray | memoryview) else payload:
        hasher.update(piece)
    return hasher.intdigest()


def is_integer(format: Format) -> bool:
    """Return whether this format has blocks, codes and scales."""
    return format in _MAX_CODE


def block_bytes(format: Format) -> int:
    """Return the size in bytes of a block's codes in an integer format."""
    return math.ceil(BLOCK / _PER_BYTE[format])


def scale_type(format: Format) -> np.dtype:
    """Return the type of a block's scale in an integer format."""
    return np.dtype(ml_dtypes.bfloat16) if format == "ternary" else np.dtype("<f4")


def scale_bytes(format: Format) -> int:
    """Return the size in bytes of a block's scale in an integer format."""
    return scale_type(format).itemsize


def element_bytes(format: Format) -> int:
    """Return the size in bytes of an element in a format without blocks."""
    return {"float32": 4, "bfloat16": 2}[format]


# The following functions take `xp`, jax.numpy or numpy: the same IEEE operations in the same order give the same bytes.


def to_blocks(xp: ModuleType, x: Any) -> Any:
    """Reshape float32[n] to float32[ceil(n / 256), 256], padded with zeros."""
    if padding := -x.shape[0] % BLOCK:
        x = xp.pad(x, (0, padding))
    return x.reshape(-1, BLOCK)


def round_elements(xp: ModuleType, x: Any, format: Format) -> Any:
    """Round float32 values of any shape to bfloat16; with the format float32, return them unchanged."""
    if format == "float32":
        return x
    return xp.where(xp.abs(x) < _SMALLEST_NORMAL, xp.float32(0), x).astype(ml_dtypes.bfloat16)


def quantize_blocks(xp: ModuleType, blocks: Any, format: Format) -> tuple[Any, Any]:
    """Quantise float32[nb, 256] to an integer format.

    Returns:
      (codes, scales). Codes are int8[nb, 256] for int8, uint8[nb, 128] for int4, uint8[nb, 64] for int2, and
      uint8[nb, 52] for ternary. Scales are [nb] of `scale_type`; the scale of a block with a non-finite value is not
      finite.
    """
    numbers, scales = scale_blocks(xp, blocks, format)
    return pack_codes(xp, numbers, format), scales.astype(scale_type(format))


def scale_blocks(xp: ModuleType, blocks: Any, format: Format) -> tuple[Any, Any]:
    """Compute codes, as whole numbers in float32[nb, 256], and scales in float32[nb]; `pack_codes` packs the codes."""
    magnitudes = blocks.view(xp.int32) & 0x7FFFFFFF
    if format in ("int2", "ternary"):
        size = _sum(xp.abs(blocks))
        usual = size / xp.maximum(_sum((magnitudes >= _NORMAL).astype(xp.float32)), xp.float32(1))
        scales = xp.where(usual < _ZERO_ABSMAX, xp.float32(0), usual * _LEVEL)
    else:
        # The magnitudes are compared as integers, because then NaN is the largest. XLA's maximum of floats ignores NaN
        # on CPUs, so that NaN would travel as zeros.
        absmax = xp.max(magnitudes, axis=1).view(xp.float32)
        # This is a product with a rounded constant, not absmax / max_code, because XLA may replace such a division.
        scales = xp.where(absmax < _ZERO_ABSMAX, xp.float32(0), absmax * np.float32(1 / _MAX_CODE[format]))
    if format == "ternary":
        scales = _rounded(xp, scales)
        # Comparisons are exact on every device; quotients are not.
        half = xp.where(scales == 0, xp.float32(np.inf), scales * xp.float32(0.5))[:, None]
        return ((blocks > half).astype(xp.int8) - (blocks < -half).astype(xp.int8)).astype(xp.float32), scales
    divisors = xp.where(scales == 0, xp.float32(np.inf), scales)
    numbers = xp.rint(blocks / divisors[:, None])
    return xp.clip(numbers, -1, 1) if format == "int2" else numbers, scales


def _sum(rows: Any) -> Any:
    """Sum each row of float32[nb, 256] by adding halves, so that every machine adds in the same order."""
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]


def _rounded(xp: ModuleType, scales: Any) -> Any:
    """Round scales, float32[nb] of at least 0, to the nearest even numbers that bfloat16 has; NaN stays NaN."""
    # XLA may drop a cast to bfloat16 and back, but not arithmetic with the bits.
    word = scales.view(xp.uint32)
    near = (word + 0x7FFF + ((word >> 16) & 1)) >> 16 << 16
    return xp.where(word > 0x7F800000, scales, near.view(xp.float32))


def pack_codes(xp: ModuleType, numbers: Any, format: Format) -> Any:
    """Pack codes, whole numbers in float32[nb, 256], to the bytes of the wire."""
    codes = numbers.astype(xp.int8)
    if format == "int8":
        return codes
    if format == "ternary":
        return _pack_base3(xp, codes.view(xp.uint8))
    width, bits = block_bytes(format), 8 // _PER_BYTE[format]
    packed = codes[:, :width] & (2**bits - 1)
    for k in range(1, _PER_BYTE[format]):
        packed = packed | ((codes[:, k * width : (k + 1) * width] & (2**bits - 1)) << (k * bits))
    return packed.view(xp.uint8)


def _pack_base3(xp: ModuleType, codes: Any) -> Any:
    """Pack uint8[nb, 256], -1 as 255, to bytes of up to five digits each."""
    width, rest = block_bytes("ternary"), 4 * block_bytes("ternary")
    none = xp.zeros((codes.shape[0], 5 * width - BLOCK), xp.uint8)
    packed = xp.concatenate([codes[:, rest:] + xp.uint8(1), none], axis=1)
    for k in (3, 2, 1, 0):
        packed = packed * xp.uint8(3) + codes[:, k * width : (k + 1) * width]
    # The four lower digits are their codes plus one, and 1 + 3 + 9 + 27 is 40.
    return packed + xp.uint8(40)


def _unpack_base3(xp: ModuleType, packed: Any) -> Any:
    """Return the codes int8[nb, 256] of `_pack_base3`."""
    digits = []
    for _ in range(5):
        above = packed // xp.uint8(3)
        digits.append((packed - above * xp.uint8(3)).view(xp.int8) - xp.int8(1))
        packed = above
    # Cutting the last digits, not the result, leaves an array without gaps, which is faster to convert.
    digits[4] = digits[4][:, : BLOCK - 4 * packed.shape[1]]
    return xp.concatenate(digits, axis=1)


def dequantize_blocks(xp: ModuleType, codes: Any, scales: Any, format: Format) -> Any:
    """Return the float32[nb, 256] that the codes and scales of `quantize_blocks` stand for."""
    if format == "ternary":
        codes = _unpack_base3(xp, codes.view(xp.uint8))
    elif format != "int8":
        packed, bits = codes.view(xp.int8), 8 // _PER_BYTE[format]
        # A left shift followed by an arithmetic right shift restores the sign.
        codes = xp.concatenate([(packed << (8 - bits - at)) >> (8 - bits) for at in range(0, 8, bits)], axis=1)
    return codes.astype(xp.float32) * scales[:, None]


def _tensor_bytes(size: int, format: Format) -> int:
    if is_integer(format):
        return math.ceil(size / BLOCK) * (scale_bytes(format) + block_bytes(format))
    return element_bytes(format) * size


def quantize_on_cpu(
    values: Float[np.ndarray, "..."], format: Format
) -> tuple[Shaped[np.ndarray, "..."], Float[np.ndarray, "scales"]]:
    """Return codes and scales of a flattened array, bit-equal to those that the devices compute.

    Integer formats give the arrays of `quantize_blocks` with nb = ceil(n / 256). The other formats give float32[n] or
    bfloat16[n] and an empty array of scales.
    """
    flat = values.reshape(-1).astype(np.float32, copy=False)
    if not is_integer(format):
        return round_elements(np, flat, format), np.zeros(0, np.float32)
    blocks = to_blocks(np, flat)
    codes = np.empty((len(blocks), block_bytes(format)), np.int8 if format == "int8" else np.uint8)
    scales = np.empty(len(blocks), scale_type(format))
    # Non-finite values make their scales non-finite, which `encode` checks.
    with np.errstate(invalid="ignore"):
        for i in range(0, len(blocks), _CHUNK):
            part = slice(i, i + _CHUNK)
            codes[part], scales[part] = quantize_blocks(np, blocks[part], format)
    return codes, scales


def dequantize_on_cpu(
    codes: Shaped[np.ndarray, "nb width"], scales: Float[np.ndarray, "nb"], size: int, format: Format
) -> Float32[np.ndarray, "size"]:
    """Return the first `size` values that codes and scales of an integer format stand for."""
    values = np.empty((len(scales), BLOCK), np.float32)
    scales = scales.astype(np.float32, copy=False)
    # The caller must refuse non-finite scales.
    with np.errstate(invalid="ignore"):
        for i in range(0, len(scales), _CHUNK):
            part = slice(i, i + _CHUNK)
            values[part] = dequantize_blocks(np, codes[part], scales[part], format)
    return values.reshape(-1)[:size]


def _dequantize(payload: Bytes, offset: int, size: int, format: Format) -> np.ndarray:
    if not is_integer(format):
        dtype = np.dtype("<f4") if format == "float32" else np.dtype(ml_dtypes.bfloat16)
        return np.frombuffer(payload, dtype, size, offset).astype(np.float32)
    count, width = math.ceil(size / BLOCK), block_bytes(format)
    scales = np.frombuffer(payload, scale_type(format), count, offset).astype(np.float32)
    if not (np.isfinite(scales) & (scales >= 0)).all():
        raise ValueError(BAD_SCALE)
    codes = np.frombuffer(payload, np.int8, count * width, offset + count * scale_bytes(format)).reshape(count, width)
    if format == "ternary" and (codes.view(np.uint8) > _MOST).any():
        raise ValueError(BAD_CODES)
    return dequantize_on_cpu(codes, scales, size, format)
