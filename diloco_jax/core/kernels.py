"""The inner loops of a merge, compiled by Numba: from encoded outer gradients to new value, state and encoded step.

Rules of this file
  * Blocks of 256 elements pass through the level-1 cache: whatever is done to a block is done while it is there, and
    no learner's values are ever in memory decoded.
  * Plain IEEE operations in a fixed order, never contracted to fused multiply-adds, so every machine gets equal bits,
    and so does every cut of the work into leaves.
  * A block is passed on as its address: an array would cost a reference count, which takes longer than the arithmetic.
    Names that end in `_at` are addresses. Whoever calls keeps the memory alive and vouches for its size (passes.py).
  * Everything runs without the interpreter's lock.
"""

from typing import Any, no_type_check

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

BLOCK = 256
FLOAT32, BFLOAT16, INT8, INT4 = 0, 1, 2, 3
_HALF = BLOCK // 2
_ROW, _HIGH = np.uint64(4 * BLOCK), np.uint64(4 * _HALF)  # bytes of a block in float32, and of half of it
_ROUND = np.float32(1.5 * 2**23)  # x + this - this rounds |x| < 2^22 to the nearest even integer
_SHARE_INT8, _SHARE_INT4, _ZERO_ABSMAX = np.float32(1 / 127), np.float32(1 / 7), np.float32(1e-30)
_MAGNITUDE, _INFINITE = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
_BATCH = 64  # blocks that are moved at once: 64 KiB of each array fit the level-2 cache
_LANES = 16  # partial sums, so that a sum in a fixed order can use vector units


def _compiled(function: Any) -> Any:
    try:
        return njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:  # there is no folder to keep it in, not even the user's
        return njit(nogil=True, error_model="numpy")(function)


def _at(dtype: Any, size: int = BLOCK) -> Any:
    """Return a function from an address to the array that is there."""

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


_float, _sums = _at(types.float32, 1), _at(types.float64, _LANES)
_floats, _words = _at(types.float32), _at(types.uint32)
_shorts, _halves, _codes = _at(types.int16), _at(types.uint16), _at(types.int8)


@intrinsic
@no_type_check
def _float_of(typingctx, bits):
    """Return the float32 number of these bits."""

    def code(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), code


@intrinsic
@no_type_check
def _memcpy(typingctx, to_at, from_at, num_bytes):
    """Copy by the C library: for tens of KiB it does not read first what it overwrites, as any loop here does."""

    def code(context, builder, signature, arguments):
        pointer = context.get_value_type(types.CPointer(types.uint8))
        to_at, from_at = (builder.inttoptr(address, pointer) for address in arguments[:2])
        cgutils.raw_memcpy(builder, to_at, from_at, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.uint64), code


@njit(forceinline=True)
@no_type_check
def _scratch(rows):
    return np.zeros((rows + 1) * BLOCK, np.float32)


@njit(forceinline=True)
@no_type_check
def _row(scratch, number):
    """Return the address of a block, at the beginning of a cache line."""
    first = (np.uint64(scratch.ctypes.data) + np.uint64(63)) & ~np.uint64(63)
    return first + np.uint64(number) * _ROW


@_compiled
@no_type_check
def _fill(to_at, begin):
    to = _floats(to_at)
    for j in range(begin, BLOCK):
        to[j] = np.float32(0)


@_compiled
@no_type_check
def _decode_add(payload_at, fmt, at, block, size, weight, acc_at):
    """Compute acc += weight * (a block of the payload)."""
    acc = _floats(acc_at)
    if fmt == INT4:
        factor = weight * _float(payload_at + np.uint64(at[0] + 4 * block))[0]
        codes = _codes(payload_at + np.uint64(at[1] + block * _HALF))
        high = _floats(acc_at + _HIGH)
        for j in range(_HALF):
            acc[j] += factor * np.float32(np.int32(np.int8(codes[j] << 4) >> 4))
            high[j] += factor * np.float32(np.int32(codes[j] >> 4))
    elif fmt == INT8:
        factor = weight * _float(payload_at + np.uint64(at[0] + 4 * block))[0]
        codes = _codes(payload_at + np.uint64(at[1] + block * BLOCK))
        for j in range(BLOCK):
            acc[j] += factor * np.float32(np.int32(codes[j]))
    elif fmt == BFLOAT16:
        halves = _halves(payload_at + np.uint64(at[1] + 2 * block * BLOCK))
        for j in range(size):
            acc[j] += weight * _float_of(np.uint32(np.uint32(halves[j]) << 16))
    else:
        values = _floats(payload_at + np.uint64(at[1] + 4 * block * BLOCK))
        for j in range(size):
            acc[j] += weight * values[j]


@_compiled
@no_type_check
def _add_moved(moved_at, weight, size, acc_at):
    acc, moved = _floats(acc_at), _floats(moved_at)
    for j in range(size):
        acc[j] += weight * moved[j]


@_compiled
@no_type_check
def _mean(payloads, moved, weights, unit, fmt, at, start, first, size, acc_at, spare_at):
    """Compute acc = sum_m w_m (v_m + moved_m) of a block, each unit with its own weights; zeros behind `size`."""
    begin, to_at = start + first, acc_at
    for number in range(begin // unit, (begin + size - 1) // unit + 1):
        _fill(to_at, 0)
        for m in range(payloads.size):
            _decode_add(payloads[m], fmt, at, begin // BLOCK, size, weights[number, m], to_at)
            if moved[m]:
                _add_moved(moved[m] + np.uint64(4 * first), weights[number, m], size, to_at)
        if number > begin // unit:
            skip = np.uint64(4 * (number * unit - begin))
            _memcpy(acc_at + skip, spare_at + skip, _ROW - skip)
        to_at = spare_at
    _fill(acc_at, size)


@_compiled
@no_type_check
def _unpack(payload_at, fmt, at, block, row_at):
    """Unpack codes of a block as integers; return its scale, or NaN where it is none."""
    scale = _float(payload_at + np.uint64(at[0] + 4 * block))[0]
    row = _shorts(row_at)
    if fmt == INT4:
        packed, high = _codes(payload_at + np.uint64(at[1] + block * _HALF)), _shorts(row_at + np.uint64(2 * _HALF))
        for j in range(_HALF):
            row[j] = np.int16(np.int8(packed[j] << 4) >> 4)
            high[j] = np.int16(packed[j] >> 4)
    else:
        codes = _codes(payload_at + np.uint64(at[1] + block * BLOCK))
        for j in range(BLOCK):
            row[j] = np.int16(codes[j])
    return np.float64(scale) if scale >= np.float32(0) else np.nan


@_compiled
@no_type_check
def _dot_codes(a_at, b_at):
    a, b, total = _shorts(a_at), _shorts(b_at), np.int32(0)
    for j in range(BLOCK):
        total = np.int32(total + np.int32(np.int32(a[j]) * np.int32(b[j])))
    return np.float64(total)


@_compiled
@no_type_check
def _dot(a_at, b_at, sums_at):
    a, b, sums = _floats(a_at), _floats(b_at), _sums(sums_at)
    for k in range(_LANES):
        part = 0.0
        for j in range(0, BLOCK, _LANES):
            part += np.float64(a[j + k]) * np.float64(b[j + k])
        sums[k] = part
    total = 0.0
    for k in range(_LANES):
        total += sums[k]
    return total


@_compiled
@no_type_check
def _value(payload_at, moved_at, fmt, at, block, size, row_at):
    """Decode one learner's values of a block, with zeros behind `size`; return the scale, which may be NaN, or 1."""
    _fill(row_at, 0)
    _decode_add(payload_at, fmt, at, block, size, np.float32(1), row_at)
    if moved_at:
        _add_moved(moved_at, np.float32(1), size, row_at)
    _fill(row_at, size)
    if fmt < INT8:
        return 1.0
    return 1.0 if _float(payload_at + np.uint64(at[0] + 4 * block))[0] >= np.float32(0) else np.nan


@_compiled
@no_type_check
def gram(payloads, moved, fmt, at, start, size, unit, products):
    """Compute products[u, i, j] = <v_i + moved_i, v_j + moved_j>, i <= j, over a leaf's part of its u-th unit.

    The arguments are those of `update`. With a scale that is negative or not finite, or a value that is not finite, the
    learner's own product is not finite and those of others are what they are without it.
    """
    count, as_codes = payloads.size, fmt >= INT8
    scratch, scales = _scratch(count + 2), np.zeros(count, np.float64)
    sums_at, spare_at = _row(scratch, count), _row(scratch, count + 1)
    for m in range(count):
        as_codes = as_codes and not moved[m]
    width = 2 if as_codes else 4  # bytes of an element of a row
    products[:, :, :] = 0.0
    for first in range(0, size, BLOCK):
        begin, block, part = start + first, (start + first) // BLOCK, min(BLOCK, size - first)
        for m in range(count):
            row_at = _row(scratch, m)
            if as_codes:
                scales[m] = _unpack(payloads[m], fmt, at, block, row_at)
            else:
                moved_at = moved[m] + np.uint64(4 * first) if moved[m] else np.uint64(0)
                scales[m] = _value(payloads[m], moved_at, fmt, at, block, part, row_at)
        for number in range(begin // unit, (begin + part - 1) // unit + 1):
            low, high = max(0, number * unit - begin), min(part, (number + 1) * unit - begin)
            for i in range(count):
                a_at = _row(scratch, i)
                if high - low < part:  # zeros in place of what is of other units
                    _fill(spare_at, 0)
                    _memcpy(spare_at + np.uint64(width * low), a_at + np.uint64(width * low), width * (high - low))
                    a_at = spare_at
                for j in range(i, count):
                    b_at = _row(scratch, j)
                    dot = _dot_codes(a_at, b_at) if as_codes else _dot(a_at, b_at, sums_at)
                    products[number - start // unit, i, j] += scales[i] * scales[j] * dot
    scratch[0] = np.float32(0)  # the memory is alive until here


@_compiled
@no_type_check
def _largest(bits):
    """Return the bits of a block's largest magnitude: as integers they order as the numbers do, and NaN is last."""
    most = np.uint32(0)
    for j in range(BLOCK):
        size = np.uint32(bits[j] & _MAGNITUDE)
        most = size if size > most else most
    return most


@_compiled
@no_type_check
def _move(acc_at, trace_at, residual_at, rate, momentum, new_trace_at, wanted_at):
    """Compute Nesterov's step of a block, with what was left out so far. Return the bits of its largest magnitude."""
    acc, trace, residual = _floats(acc_at), _floats(trace_at), _floats(residual_at)
    new_trace, wanted = _floats(new_trace_at), _floats(wanted_at)
    for j in range(BLOCK):
        moved = acc[j] + momentum * trace[j]
        new_trace[j] = moved
        wanted[j] = residual[j] - rate * (acc[j] + momentum * moved)
    return _largest(_words(wanted_at))


@_compiled
@no_type_check
def _encode_int(wanted_at, absmax, fmt, scale_at, codes_at, rounded_at):
    wanted, rounded, codes = _floats(wanted_at), _floats(rounded_at), _codes(codes_at)
    scale = np.float32(0) if absmax < _ZERO_ABSMAX else absmax * (_SHARE_INT8 if fmt == INT8 else _SHARE_INT4)
    _float(scale_at)[0] = scale
    divisor = np.float32(np.inf) if scale == np.float32(0) else scale
    for j in range(BLOCK):
        rounded[j] = (wanted[j] / divisor + _ROUND) - _ROUND
    if fmt == INT8:
        for j in range(BLOCK):
            codes[j] = np.int8(np.int32(rounded[j]))
    else:
        high = _floats(rounded_at + _HIGH)
        for j in range(_HALF):
            codes[j] = np.int8((np.int32(rounded[j]) & 15) | (np.int32(high[j]) << 4))
    for j in range(BLOCK):
        rounded[j] *= scale


@_compiled
@no_type_check
def _encode_bfloat16(wanted, halves, rounded, size):
    """Round to nearest even; subnormal numbers become zero, as in codec.py, and NaN stays NaN."""
    for j in range(size):
        word = np.int64(wanted[j])
        half = (word + 0x7FFF + ((word >> 16) & 1)) >> 16
        half = half if (word & 0x7FFFFFFF) >= 0x00800000 else 0
        half = half if (word & 0x7FFFFFFF) <= 0x7F800000 else 0x7FC0
        halves[j] = np.uint16(half)
        rounded[j] = np.uint32(half << 16)


@_compiled
@no_type_check
def _encode(wanted_at, most, fmt, step_at, at, block, size, rounded_at):
    """Write a block of the step; `rounded` becomes what it decodes to."""
    if fmt >= INT8:
        width = _HALF if fmt == INT4 else BLOCK
        scale_at, codes_at = step_at + np.uint64(at[0] + 4 * block), step_at + np.uint64(at[1] + block * width)
        _encode_int(wanted_at, _float_of(most), fmt, scale_at, codes_at, rounded_at)
    elif fmt == BFLOAT16:
        halves = _halves(step_at + np.uint64(at[1] + 2 * block * BLOCK))
        _encode_bfloat16(_words(wanted_at), halves, _words(rounded_at), size)
    else:
        _memcpy(rounded_at, wanted_at, _ROW)


@_compiled
@no_type_check
def _apply(value_at, wanted_at, rounded_at, new_value_at, new_residual_at):
    """Compute the new value of a block, and what is left out. Return the bits of the largest magnitude."""
    value, wanted, rounded = _floats(value_at), _floats(wanted_at), _floats(rounded_at)
    new_value, new_residual = _floats(new_value_at), _floats(new_residual_at)
    for j in range(BLOCK):
        new_value[j] = value[j] + rounded[j]
        new_residual[j] = wanted[j] - rounded[j]
    return _largest(_words(new_value_at))


@_compiled
@no_type_check
def update(
    payloads, moved, weights, unit, fmt_in, at_in, start, value, trace, residual, rate, momentum,
    fmt_out, step, at_out, new_value, new_trace, new_residual,
):  # fmt: skip
    """Take a leaf from payloads to its new version: weighted sum, Nesterov's step, encoding, application.

        g = sum_m w_m (v_m + moved_m);  t' = g + mu t;  s = r - lr (g + mu t');  x' = x + Q(s);  r' = s - Q(s)

    Args are the addresses of the learners' payloads, and for each of what is to be added to its values of this leaf, or
    0; their weights, for each `unit` elements of the tensor; where the tensor's scales and codes begin in them and in
    the step (`at_in`, `at_out`); where the leaf starts in the tensor, a multiple of 256; and the leaf's arrays. `trace`
    is empty without momentum, `residual` where nothing is rounded.

    Returns whether the new value is finite; then the trace and the residual are, too.
    """
    scratch = _scratch(3 + 6 * _BATCH)
    acc_at, wanted_at, rounded_at = _row(scratch, 0), _row(scratch, 1), _row(scratch, 2)
    x_at, t_at, r_at = _row(scratch, 3), _row(scratch, 3 + _BATCH), _row(scratch, 3 + 2 * _BATCH)
    x_new, t_new, r_new = _row(scratch, 3 + 3 * _BATCH), _row(scratch, 3 + 4 * _BATCH), _row(scratch, 3 + 5 * _BATCH)
    most = np.uint32(0)
    for begin in range(0, value.size, _BATCH * BLOCK):
        end = min(begin + _BATCH * BLOCK, value.size)
        here, num_bytes = np.uint64(4 * begin), np.uint64(4 * (end - begin))
        _memcpy(x_at, value.ctypes.data + here, num_bytes)
        if trace.size:
            _memcpy(t_at, trace.ctypes.data + here, num_bytes)
        if residual.size:
            _memcpy(r_at, residual.ctypes.data + here, num_bytes)
        for first in range(begin, end, BLOCK):
            there = np.uint64(4 * (first - begin))
            block, size = (start + first) // BLOCK, min(BLOCK, value.size - first)
            if size < BLOCK:  # of an earlier batch
                _fill(x_at + there, size)
                _fill(t_at + there, size)
                _fill(r_at + there, size)
            _mean(payloads, moved, weights, unit, fmt_in, at_in, start, first, size, acc_at, wanted_at)
            largest = _move(acc_at, t_at + there, r_at + there, rate, momentum, t_new + there, wanted_at)
            _encode(wanted_at, largest, fmt_out, step.ctypes.data, at_out, block, size, rounded_at)
            largest = _apply(x_at + there, wanted_at, rounded_at, x_new + there, r_new + there)
            most = largest if largest > most else most
        _memcpy(new_value.ctypes.data + here, x_new, num_bytes)
        if trace.size:
            _memcpy(new_trace.ctypes.data + here, t_new, num_bytes)
        if residual.size:
            _memcpy(new_residual.ctypes.data + here, r_new, num_bytes)
    scratch[0] = np.float32(0)  # the memory is alive until here
    return most < _INFINITE
