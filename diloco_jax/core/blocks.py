"""The inner loops for one block of 256 elements that depend on the format: they decode and encode it.

kernels.py calls them. Most work on sixteen elements at once (lanes.py).
"""

from typing import no_type_check

import numpy as np
from numba import njit

from diloco_jax.core.lanes import (
    above,
    float_lanes,
    floats,
    folded,
    int_lanes,
    ints,
    load,
    load_int8,
    load_uint8,
    magnitude_bits,
    magnitudes,
    store,
    store_bytes,
    total,
)
from diloco_jax.core.memory import (
    BLOCK,
    LANES,
    ROW,
    compiled,
    copy_bytes,
    float32s,
    float_of,
    int8s,
    int16s,
    prefetch,
    scalar,
    uint8s,
    uint16s,
    uint32s,
)

_HALF, _QUARTER = BLOCK // 2, BLOCK // 4
FLOAT32, BFLOAT16, INT8, INT4, INT2, TERNARY = 0, 1, 2, 3, 4, 5
# Bytes of a block's codes in base 3, and the number of those that have a fifth digit.
_FIFTH, _FIVES = 52, 48
# 2^16 / 3^(k + 1), rounded up. Times a byte, modulo 2^16, it is the fraction that starts with the byte's digit k.
_DIGIT = (21846, 7282, 2428, 810, 270)
# Blocks between one whose codes are read and one whose codes are requested from memory.
_AHEAD = 16
# Adding and subtracting this number rounds |x| < 2^22 to the nearest even integer.
_ROUND = np.float32(1.5 * 2**23)
_SHARE_INT8, _SHARE_INT4, _ZERO_ABSMAX = np.float32(1 / 127), np.float32(1 / 7), np.float32(1e-30)
# The constants of the same names in codec.py.
_LEVEL, _NORMAL = np.float32(1.5336), 0x00800000


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


@njit(forceinline=True)
@no_type_check
def _width(fmt):
    """Return the bytes of a block's codes."""
    if fmt == INT4:
        return _HALF
    if fmt == INT2:
        return _QUARTER
    return _FIFTH if fmt == TERNARY else BLOCK


@njit(forceinline=True)
@no_type_check
def _codes_at(payload_at, fmt, at, block):
    """Return the address of a block's codes, and request those of a later block from memory."""
    width = _width(fmt)
    codes_at = payload_at + np.uint64(at[1] + block * width)
    # With many learners, the processor does not see by itself that each payload is read from its start to its end.
    for line in range(0, width, 64):
        prefetch(codes_at + np.uint64(_AHEAD * width + line))
    return codes_at


@njit(forceinline=True)
@no_type_check
def _add_int8(from_at, codes, factors, to_at):
    for j in range(0, BLOCK, LANES):
        here = np.uint64(4 * j)
        sum = load(from_at + here)
        for m in range(len(codes)):
            sum = sum + floats(factors[m]) * float_lanes(load_int8(codes[m] + np.uint64(j)))
        store(to_at + here, sum)


@njit(forceinline=True)
@no_type_check
def _add_int4(from_at, codes, factors, to_at):
    for j in range(0, _HALF, LANES):
        low_at, high_at = np.uint64(4 * j), np.uint64(4 * (j + _HALF))
        low, high = load(from_at + low_at), load(from_at + high_at)
        for m in range(len(codes)):
            bytes, factor = load_int8(codes[m] + np.uint64(j)), floats(factors[m])
            low = low + factor * float_lanes((bytes << ints(28)) >> ints(28))
            high = high + factor * float_lanes(bytes >> ints(4))
        store(to_at + low_at, low)
        store(to_at + high_at, high)


@njit(forceinline=True)
@no_type_check
def _add_int2(from_at, codes, factors, to_at):
    for j in range(0, _QUARTER, LANES):
        first_at, second_at = np.uint64(4 * j), np.uint64(4 * (j + _QUARTER))
        third_at, fourth_at = np.uint64(4 * (j + _HALF)), np.uint64(4 * (j + _HALF + _QUARTER))
        first, second = load(from_at + first_at), load(from_at + second_at)
        third, fourth = load(from_at + third_at), load(from_at + fourth_at)
        for m in range(len(codes)):
            bytes, factor = load_int8(codes[m] + np.uint64(j)), floats(factors[m])
            first = first + factor * float_lanes((bytes << ints(30)) >> ints(30))
            second = second + factor * float_lanes((bytes << ints(28)) >> ints(30))
            third = third + factor * float_lanes((bytes << ints(26)) >> ints(30))
            fourth = fourth + factor * float_lanes(bytes >> ints(6))
        store(to_at + first_at, first)
        store(to_at + second_at, second)
        store(to_at + third_at, third)
        store(to_at + fourth_at, fourth)


@njit(forceinline=True)
@no_type_check
def _digits(codes_at, share):
    """Return one digit of each of sixteen bytes in base 3, minus one, given the digit's number of _DIGIT."""
    fraction = (load_uint8(codes_at) * ints(share)) & ints(0xFFFF)
    return ((fraction * ints(3)) >> ints(16)) - ints(1)


@njit(forceinline=True)
@no_type_check
def _add_ternary(from_at, codes, factors, to_at):
    for k in range(5):
        for j in (0, 32):
            # The second of two lanes at the end of a digit overlaps with the first, and both are loaded before either
            # is stored. The fifth digit has no such end.
            skip = LANES if j == 0 or k == 4 else _FIFTH - 3 * LANES
            skip = 0 if j and k == 4 else skip
            first_at, second_at = np.uint64(4 * (k * _FIFTH + j)), np.uint64(4 * (k * _FIFTH + j + skip))
            first, second = load(from_at + first_at), load(from_at + second_at)
            for m in range(len(codes)):
                codes_at, factor = codes[m] + np.uint64(j), floats(factors[m])
                first = first + factor * float_lanes(_digits(codes_at, _DIGIT[k]))
                second = second + factor * float_lanes(_digits(codes_at + np.uint64(skip), _DIGIT[k]))
            store(to_at + first_at, first)
            store(to_at + second_at, second)


@njit(forceinline=True)
@no_type_check
def _add_codes(from_at, codes, factors, fmt, to_at):
    """Compute to = from + sum_m factor_m codes_m for a block of codes, from their addresses."""
    if fmt == INT8:
        _add_int8(from_at, codes, factors, to_at)
    elif fmt == INT4:
        _add_int4(from_at, codes, factors, to_at)
    elif fmt == INT2:
        _add_int2(from_at, codes, factors, to_at)
    else:
        _add_ternary(from_at, codes, factors, to_at)


@compiled
@no_type_check
def add_codes(from_at, payload_at, fmt, at, block, weight, to_at):
    """Compute to = from + weight * block, for one block of codes."""
    codes, factor = _codes_at(payload_at, fmt, at, block), weight * scale_of(payload_at, fmt, at, block)
    _add_codes(from_at, (codes,), (factor,), fmt, to_at)


@compiled
@no_type_check
def add_four(from_at, a_at, b_at, c_at, d_at, fmt, at, block, a, b, c, d, to_at):
    """Compute what four calls of `add_codes` compute one after another, for payloads with the weights a, b, c and d.

    The sums stay in registers. More learners at once would gain nothing: equal places in many payloads often share the
    few lines of one set of the level-1 cache.
    """
    a *= scale_of(a_at, fmt, at, block)
    b *= scale_of(b_at, fmt, at, block)
    c *= scale_of(c_at, fmt, at, block)
    d *= scale_of(d_at, fmt, at, block)
    a_at, b_at = _codes_at(a_at, fmt, at, block), _codes_at(b_at, fmt, at, block)
    c_at, d_at = _codes_at(c_at, fmt, at, block), _codes_at(d_at, fmt, at, block)
    _add_codes(from_at, (a_at, b_at, c_at, d_at), (a, b, c, d), fmt, to_at)


@compiled
@no_type_check
def decode_add(payload_at, fmt, at, block, size, weight, acc_at):
    """Compute acc += weight * block, for one block of a payload."""
    if fmt >= INT8:
        add_codes(acc_at, payload_at, fmt, at, block, weight, acc_at)
    elif fmt == BFLOAT16:
        acc, halves = float32s(acc_at), uint16s(payload_at + np.uint64(at[1] + 2 * block * BLOCK))
        for j in range(size):
            acc[j] += weight * float_of(np.uint32(np.uint32(halves[j]) << 16))
    else:
        acc, values = float32s(acc_at), float32s(payload_at + np.uint64(at[1] + 4 * block * BLOCK))
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


@njit(forceinline=True)
@no_type_check
def _two(at):
    return magnitudes(load(at)) + magnitudes(load(at + np.uint64(4 * _HALF)))


@njit(forceinline=True)
@no_type_check
def _four(at):
    return _two(at) + _two(at + np.uint64(4 * _QUARTER))


@njit(forceinline=True)
@no_type_check
def _eight(at):
    return _four(at) + _four(at + np.uint64(2 * _QUARTER))


@compiled
@no_type_check
def _usual(wanted_at):
    """Return the mean magnitude of a block's elements that are not zero, added in the order of codec.py."""
    sums, below, count = _eight(wanted_at) + _eight(wanted_at + np.uint64(_QUARTER)), ints(_NORMAL - 1), ints(0)
    for j in range(0, BLOCK, LANES):
        # The shift makes -1 of a negative difference.
        count = count + ((below - magnitude_bits(load(wanted_at + np.uint64(4 * j)))) >> ints(31))
    return folded(sums) / np.float32(max(-total(count), 1))


@njit(forceinline=True)
@no_type_check
def _rounded(wanted_at, divisor):
    """Return sixteen quotients, rounded to the nearest even integer."""
    return (load(wanted_at) / divisor + floats(_ROUND)) - floats(_ROUND)


@compiled
@no_type_check
def _encode_int(wanted_at, absmax, fmt, scale_at, codes_at, rounded_at):
    scale = np.float32(0) if absmax < _ZERO_ABSMAX else absmax * (_SHARE_INT8 if fmt == INT8 else _SHARE_INT4)
    scalar(scale_at)[0] = scale
    factor, divisor = floats(scale), floats(np.float32(np.inf) if scale == np.float32(0) else scale)
    if fmt == INT4:
        for j in range(0, _HALF, LANES):
            low_at, high_at = np.uint64(4 * j), np.uint64(4 * (j + _HALF))
            low, high = _rounded(wanted_at + low_at, divisor), _rounded(wanted_at + high_at, divisor)
            store_bytes(codes_at + np.uint64(j), (int_lanes(low) & ints(15)) | (int_lanes(high) << ints(4)))
            store(rounded_at + low_at, low * factor)
            store(rounded_at + high_at, high * factor)
    else:
        for j in range(0, BLOCK, LANES):
            code = _rounded(wanted_at + np.uint64(4 * j), divisor)
            store_bytes(codes_at + np.uint64(j), int_lanes(code))
            store(rounded_at + np.uint64(4 * j), code * factor)


@compiled
@no_type_check
def _encode_int2(wanted_at, scale_at, codes_at, rounded_at):
    usual = _usual(wanted_at)
    scale = np.float32(0) if usual < _ZERO_ABSMAX else usual * _LEVEL
    scalar(scale_at)[0] = scale
    factor, divisor = floats(scale), floats(np.float32(np.inf) if scale == np.float32(0) else scale)
    zero = floats(np.float32(0))
    for j in range(0, _QUARTER, LANES):
        byte = ints(0)
        for k in range(4):
            here = np.uint64(4 * (j + k * _QUARTER))
            whole = _rounded(wanted_at + here, divisor)
            code = above(whole, zero) - above(zero, whole)
            byte = byte | ((code & ints(3)) << ints(2 * k))
            store(rounded_at + here, float_lanes(code) * factor)
        store_bytes(codes_at + np.uint64(j), byte)


@compiled
@no_type_check
def _encode_ternary(wanted_at, scale_at, codes_at, rounded_at):
    usual = _usual(wanted_at)
    scalar(rounded_at)[0] = np.float32(0) if usual < _ZERO_ABSMAX else usual * _LEVEL
    word = np.int64(uint32s(rounded_at)[0])
    # NaN with all bits would overflow, and become zero.
    half = (word + 0x7FFF + ((word >> 16) & 1)) >> 16 if word <= 0x7F800000 else 0x7FC0
    uint16s(scale_at)[0] = np.uint16(half)
    scale = float_of(np.uint32(half << 16))
    limit = np.float32(np.inf) if scale == np.float32(0) else scale * np.float32(0.5)
    for j in range(0, BLOCK, LANES):
        wanted = load(wanted_at + np.uint64(4 * j))
        code = above(wanted, floats(limit)) - above(floats(-limit), wanted)
        store(rounded_at + np.uint64(4 * j), float_lanes(code))
    # The last bytes have no fifth digit. They are written first, because the lanes before them overlap with them.
    for j in (_FIFTH - LANES, 0, LANES, 2 * LANES):
        byte = ints(40)
        for k in range(4):
            byte = byte + int_lanes(load(rounded_at + np.uint64(4 * (j + k * _FIFTH)))) * ints(3**k)
        if j != _FIFTH - LANES:
            byte = byte + (int_lanes(load(rounded_at + np.uint64(4 * (j + 4 * _FIFTH)))) + ints(1)) * ints(81)
        store_bytes(codes_at + np.uint64(j), byte)
    for j in range(0, BLOCK, LANES):
        here = rounded_at + np.uint64(4 * j)
        store(here, load(here) * floats(scale))


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
