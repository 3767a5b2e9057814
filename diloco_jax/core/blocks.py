"""The inner loops for one block of 256 elements that depend on the format: they decode and encode it.

kernels.py calls them. `compiled` compiles its loops, and those of the other modules here.
"""

import hashlib
from typing import Any, no_type_check

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

BLOCK = 256
_HALF, _QUARTER = BLOCK // 2, BLOCK // 4
FLOAT32, BFLOAT16, INT8, INT4, INT2, TERNARY = 0, 1, 2, 3, 4, 5
# Bytes of a block's codes in base 3, and the number of those that have a fifth digit.
_FIFTH, _FIVES = 52, 48
# 2^16 / 3^(k + 1), rounded up. Times a byte, modulo 2^16, it is the fraction that starts with the byte's digit k.
_DIGIT = (21846, 7282, 2428, 810, 270)
# Bytes of a block in float32.
ROW = np.uint64(4 * BLOCK)
# Adding and subtracting this number rounds |x| < 2^22 to the nearest even integer.
_ROUND = np.float32(1.5 * 2**23)
_SHARE_INT8, _SHARE_INT4, _ZERO_ABSMAX = np.float32(1 / 127), np.float32(1 / 7), np.float32(1e-30)
# The constants of the same names in codec.py.
_LEVEL, _NORMAL = np.float32(1.5336), np.uint32(0x00800000)
# The number of partial sums, so that a sum in a fixed order can use vector units.
LANES = 16
MAGNITUDE = np.uint32(0x7FFFFFFF)


def compiled(function: Any) -> Any:
    """Compile a loop, and cache the compiled code if there is a folder for it."""
    try:
        loop = njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:
        # No folder for a cache can be written to, not even the user's.
        return njit(nogil=True, error_model="numpy")(function)
    if not hasattr(loop, "_cache"):
        # NUMBA_DISABLE_JIT is set.
        return loop
    # Numba takes cached code if the file of the function is unchanged. Functions that are inlined into it may be in
    # other files, and after a change of these alone the old code would run.
    kept = loop._cache._cache_file
    kept._source_stamp = (kept._source_stamp, _sources(function.__globals__))
    return loop


def _sources(names: dict[str, Any]) -> str:
    """Return a digest of the source of a module, given its names, and of the modules whose loops it uses."""
    modules, left = {}, [names]
    while left:
        module = left.pop()
        if module["__name__"] in modules:
            continue
        modules[module["__name__"]] = module["__spec__"].loader.get_source(module["__name__"]) or ""
        left += [value.py_func.__globals__ for value in module.values() if hasattr(value, "py_func")]
    return hashlib.blake2b("".join(modules.values()).encode(), digest_size=16).hexdigest()


def _at(dtype: Any, size: int = BLOCK) -> Any:
    """Return a function that takes an address and returns the array stored there."""

    @intrinsic
    @no_type_check
    def pointer(typingctx, address):
        def code(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(dtype)(types.uint64), code

    @njit(forceinline=True)
    @no_type_check
    def array(address):
        return carray(pointer(address), (size,))

    return array


scalar, float64s = _at(types.float32, 1), _at(types.float64, LANES)
float32s, uint32s = _at(types.float32), _at(types.uint32)
int16s, uint16s = _at(types.int16), _at(types.uint16)
int8s, uint8s = _at(types.int8), _at(types.uint8)


@intrinsic
@no_type_check
def float_of(typingctx, bits):
    """Return the float32 number that has these bits."""

    def code(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), code


@compiled
@no_type_check
def fill(to_at, begin):
    to = float32s(to_at)
    for j in range(begin, BLOCK):
        to[j] = np.float32(0)


@intrinsic
@no_type_check
def copy_bytes(typingctx, to_at, from_at, num_bytes):
    """Copy bytes with the C library, which does not first read what it overwrites, as a compiled loop does."""

    def code(context, builder, signature, arguments):
        pointer = context.get_value_type(types.CPointer(types.uint8))
        to_at, from_at = (builder.inttoptr(address, pointer) for address in arguments[:2])
        cgutils.raw_memcpy(builder, to_at, from_at, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.uint64), code


@compiled
@no_type_check
def _decode_add_int2(payload_at, at, block, weight, acc_at):
    factor = weight * scalar(payload_at + np.uint64(at[0] + 4 * block))[0]
    codes = int8s(payload_at + np.uint64(at[1] + block * _QUARTER))
    for k in range(4):
        part = float32s(acc_at + np.uint64(4 * k * _QUARTER))
        for j in range(_QUARTER):
            part[j] += factor * np.float32(np.int32(np.int8(codes[j] << (6 - 2 * k)) >> 6))


@compiled
@no_type_check
def scale_of(payload_at, fmt, at, block):
    """Return the scale of a block of integer codes."""
    if fmt == TERNARY:
        half = uint16s(payload_at + np.uint64(at[0] + 2 * block))[0]
        return float_of(np.uint32(np.uint32(half) << 16))
    return scalar(payload_at + np.uint64(at[0] + 4 * block))[0]


@njit(forceinline=True)
@no_type_check
def _digit(byte, share):
    """Return the digit of a byte in base 3 that a number of _DIGIT stands for, minus one."""
    fraction = np.uint16(np.uint32(byte) * share)
    return np.int16((np.uint32(fraction) * np.uint32(3)) >> np.uint32(16)) - np.int16(1)


@compiled
@no_type_check
def _decode_add_ternary(payload_at, at, block, weight, acc_at):
    factor = weight * scale_of(payload_at, TERNARY, at, block)
    codes = uint8s(payload_at + np.uint64(at[1] + block * _FIFTH))
    for k in range(5):
        part, share = float32s(acc_at + np.uint64(4 * k * _FIFTH)), np.uint32(_DIGIT[k])
        for j in range(_FIFTH if k < 4 else _FIVES):
            part[j] += factor * np.float32(np.int32(_digit(codes[j], share)))


@compiled
@no_type_check
def usable(payload_at, fmt, at, block):
    """Return whether a block of integer codes is one that a sender writes: no damaged codes, no negative scale or NaN.

    An infinite scale counts as usable here, because it makes the learner's square infinite.
    """
    scale = scale_of(payload_at, fmt, at, block)
    if fmt != TERNARY:
        return scale >= np.float32(0)
    codes, most, last = uint8s(payload_at + np.uint64(at[1] + block * _FIFTH)), np.uint8(0), np.uint8(0)
    for j in range(_FIVES):
        most = max(most, codes[j])
    for j in range(_FIVES, _FIFTH):
        last = max(last, codes[j])
    return scale >= np.float32(0) and most <= 242 and last <= 80


@compiled
@no_type_check
def decode_add(payload_at, fmt, at, block, size, weight, acc_at):
    """Compute acc += weight * block, for one block of a payload."""
    acc = float32s(acc_at)
    if fmt == INT4:
        factor = weight * scalar(payload_at + np.uint64(at[0] + 4 * block))[0]
        codes = int8s(payload_at + np.uint64(at[1] + block * _HALF))
        high = float32s(acc_at + np.uint64(4 * _HALF))
        for j in range(_HALF):
            acc[j] += factor * np.float32(np.int32(np.int8(codes[j] << 4) >> 4))
            high[j] += factor * np.float32(np.int32(codes[j] >> 4))
    elif fmt == INT8:
        factor = weight * scalar(payload_at + np.uint64(at[0] + 4 * block))[0]
        codes = int8s(payload_at + np.uint64(at[1] + block * BLOCK))
        for j in range(BLOCK):
            acc[j] += factor * np.float32(np.int32(codes[j]))
    elif fmt == BFLOAT16:
        halves = uint16s(payload_at + np.uint64(at[1] + 2 * block * BLOCK))
        for j in range(size):
            acc[j] += weight * float_of(np.uint32(np.uint32(halves[j]) << 16))
    elif fmt == INT2:
        _decode_add_int2(payload_at, at, block, weight, acc_at)
    elif fmt == TERNARY:
        _decode_add_ternary(payload_at, at, block, weight, acc_at)
    else:
        values = float32s(payload_at + np.uint64(at[1] + 4 * block * BLOCK))
        for j in range(size):
            acc[j] += weight * values[j]


@compiled
@no_type_check
def _unpack_ternary(codes_at, row_at):
    codes = uint8s(codes_at)
    for k in range(5):
        part, share = int16s(row_at + np.uint64(2 * k * _FIFTH)), np.uint32(_DIGIT[k])
        for j in range(_FIFTH if k < 4 else _FIVES):
            part[j] = _digit(codes[j], share)


@compiled
@no_type_check
def _unpack_int2(codes_at, row_at):
    codes, first, second = int8s(codes_at), int16s(row_at), int16s(row_at + np.uint64(2 * _QUARTER))
    third, fourth = int16s(row_at + np.uint64(4 * _QUARTER)), int16s(row_at + np.uint64(6 * _QUARTER))
    # One loop with four constant shifts takes half as long as four loops whose shift is a variable.
    for j in range(_QUARTER):
        code = np.int16(codes[j])
        first[j] = np.int16(code << 14) >> 14
        second[j] = np.int16(code << 12) >> 14
        third[j] = np.int16(code << 10) >> 14
        fourth[j] = np.int16(code << 8) >> 14


@compiled
@no_type_check
def unpack(payload_at, fmt, at, block, row_at):
    """Unpack the codes of a block as int16; return its scale, or NaN if the block is not usable."""
    row = int16s(row_at)
    if fmt == INT4:
        packed, high = int8s(payload_at + np.uint64(at[1] + block * _HALF)), int16s(row_at + np.uint64(2 * _HALF))
        for j in range(_HALF):
            row[j] = np.int16(np.int8(packed[j] << 4) >> 4)
            high[j] = np.int16(packed[j] >> 4)
    elif fmt == INT2:
        _unpack_int2(payload_at + np.uint64(at[1] + block * _QUARTER), row_at)
    elif fmt == TERNARY:
        _unpack_ternary(payload_at + np.uint64(at[1] + block * _FIFTH), row_at)
    else:
        codes = int8s(payload_at + np.uint64(at[1] + block * BLOCK))
        for j in range(BLOCK):
            row[j] = np.int16(codes[j])
    return np.float64(scale_of(payload_at, fmt, at, block)) if usable(payload_at, fmt, at, block) else np.nan


@compiled
@no_type_check
def _usual(wanted_at, sums_at):
    """Return the mean magnitude of a block's elements that are not zero, added in the order of codec.py."""
    wanted, words, sums, count = float32s(wanted_at), uint32s(wanted_at), float32s(sums_at), 0
    for j in range(BLOCK):
        sums[j] = abs(wanted[j])
        count += np.int64((words[j] & MAGNITUDE) >= _NORMAL)
    half = BLOCK // 2
    while half:
        for j in range(half):
            sums[j] += sums[j + half]
        half //= 2
    return sums[0] / np.float32(max(count, 1))


@compiled
@no_type_check
def _encode_int(wanted_at, absmax, fmt, scale_at, codes_at, rounded_at):
    wanted, rounded, codes = float32s(wanted_at), float32s(rounded_at), int8s(codes_at)
    scale = np.float32(0) if absmax < _ZERO_ABSMAX else absmax * (_SHARE_INT8 if fmt == INT8 else _SHARE_INT4)
    scalar(scale_at)[0] = scale
    divisor = np.float32(np.inf) if scale == np.float32(0) else scale
    for j in range(BLOCK):
        rounded[j] = (wanted[j] / divisor + _ROUND) - _ROUND
    if fmt == INT4:
        high = float32s(rounded_at + np.uint64(4 * _HALF))
        for j in range(_HALF):
            codes[j] = np.int8((np.int32(rounded[j]) & 15) | (np.int32(high[j]) << 4))
    else:
        for j in range(BLOCK):
            codes[j] = np.int8(np.int32(rounded[j]))
    for j in range(BLOCK):
        rounded[j] *= scale


@compiled
@no_type_check
def _encode_int2(wanted_at, scale_at, codes_at, rounded_at):
    usual = _usual(wanted_at, rounded_at)
    wanted, rounded, codes = float32s(wanted_at), float32s(rounded_at), int8s(codes_at)
    scale = np.float32(0) if usual < _ZERO_ABSMAX else usual * _LEVEL
    scalar(scale_at)[0] = scale
    divisor = np.float32(np.inf) if scale == np.float32(0) else scale
    for j in range(BLOCK):
        rounded[j] = min(max((wanted[j] / divisor + _ROUND) - _ROUND, np.float32(-1)), np.float32(1))
    for j in range(_QUARTER):
        byte = np.int32(0)
        for k in range(4):
            byte |= (np.int32(rounded[j + k * _QUARTER]) & 3) << (2 * k)
        codes[j] = np.int8(byte)
    for j in range(BLOCK):
        rounded[j] *= scale


@compiled
@no_type_check
def _encode_ternary(wanted_at, scale_at, codes_at, rounded_at):
    usual = _usual(wanted_at, rounded_at)
    wanted, rounded, codes = float32s(wanted_at), float32s(rounded_at), uint8s(codes_at)
    scalar(rounded_at)[0] = np.float32(0) if usual < _ZERO_ABSMAX else usual * _LEVEL
    word = np.int64(uint32s(rounded_at)[0])
    # NaN with all bits would overflow, and become zero.
    half = (word + 0x7FFF + ((word >> 16) & 1)) >> 16 if word <= 0x7F800000 else 0x7FC0
    uint16s(scale_at)[0] = np.uint16(half)
    scale = float_of(np.uint32(half << 16))
    limit = np.float32(np.inf) if scale == np.float32(0) else scale * np.float32(0.5)
    for j in range(BLOCK):
        rounded[j] = np.float32(wanted[j] > limit) - np.float32(wanted[j] < -limit)
    for j in range(_FIFTH):
        byte = np.int32(40)
        for k in range(4):
            byte += np.int32(rounded[j + k * _FIFTH]) * np.int32(3**k)
        codes[j] = np.uint8(byte)
    for j in range(_FIVES):
        codes[j] += np.uint8(81 * (np.int32(rounded[j + 4 * _FIFTH]) + 1))
    for j in range(BLOCK):
        rounded[j] *= scale


@compiled
@no_type_check
def _encode_bfloat16(wanted, halves, rounded, size):
    """Round to the nearest even bfloat16; subnormal numbers become zero, as in codec.py, and NaN stays NaN."""
    for j in range(size):
        word = np.int64(wanted[j])
        half = (word + 0x7FFF + ((word >> 16) & 1)) >> 16
        half = half if (word & 0x7FFFFFFF) >= 0x00800000 else 0
        half = half if (word & 0x7FFFFFFF) <= 0x7F800000 else 0x7FC0
        halves[j] = np.uint16(half)
        rounded[j] = np.uint32(half << 16)


@compiled
@no_type_check
def encode(wanted_at, most, fmt, step_at, at, block, size, rounded_at):
    """Encode a block of `wanted` into the step's payload, and write the decoded values to `rounded`."""
    if fmt == INT2:
        scale_at, codes_at = step_at + np.uint64(at[0] + 4 * block), step_at + np.uint64(at[1] + block * _QUARTER)
        _encode_int2(wanted_at, scale_at, codes_at, rounded_at)
    elif fmt == TERNARY:
        scale_at, codes_at = step_at + np.uint64(at[0] + 2 * block), step_at + np.uint64(at[1] + block * _FIFTH)
        _encode_ternary(wanted_at, scale_at, codes_at, rounded_at)
    elif fmt >= INT8:
        width = _HALF if fmt == INT4 else BLOCK
        scale_at, codes_at = step_at + np.uint64(at[0] + 4 * block), step_at + np.uint64(at[1] + block * width)
        _encode_int(wanted_at, float_of(most), fmt, scale_at, codes_at, rounded_at)
    elif fmt == BFLOAT16:
        halves = uint16s(step_at + np.uint64(at[1] + 2 * block * BLOCK))
        _encode_bfloat16(uint32s(wanted_at), halves, uint32s(rounded_at), size)
    else:
        copy_bytes(rounded_at, wanted_at, ROW)
