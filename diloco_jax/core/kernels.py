"""The inner loops of a merge, compiled by Numba: from encoded outer gradients to new value, state and encoded step.

Rules of this file
  * Blocks of 256 elements pass through the level-1 cache: whatever is done to a block is done while it is there, and
    no learner's values are ever in memory decoded.
  * Plain IEEE operations in a fixed order, never contracted to fused multiply-adds, so every machine gets equal bits,
    and so does every cut of the work into leaves.
  * Payloads are read at their addresses; whoever calls keeps them alive and vouches for their size (merger.py).
  * Everything runs without the interpreter's lock.
"""

from __future__ import annotations

from typing import Any, no_type_check

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

BLOCK = 256
FLOAT32, BFLOAT16, INT8, INT4 = 0, 1, 2, 3
_HALF = BLOCK // 2
_ZERO_ABSMAX = np.float32(1e-30)
_ROUND = np.float32(1.5 * 2**23)  # x + this - this rounds |x| < 2^22 to the nearest even integer
_SHARE_INT8, _SHARE_INT4 = np.float32(1 / 127), np.float32(1 / 7)
_LANES = 16  # partial sums, so that a sum in a fixed order can use vector units


def _compiled(function: Any) -> Any:
    return njit(cache=True, nogil=True, error_model="numpy")(function)


def _pointer_to(dtype: Any) -> Any:
    @intrinsic
    @no_type_check
    def pointer(typingctx, address):
        def code(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(dtype)(types.uint64), code

    return pointer


_codes_at = _pointer_to(types.int8)
_halves_at = _pointer_to(types.uint16)
_floats_at = _pointer_to(types.float32)


@_compiled
@no_type_check
def _decode_add(acc, words, address, fmt, scales_at, codes_at, block, size, weight):
    """acc += weight * (block of the payload at `address`)."""
    if fmt == INT4:
        scale = carray(_floats_at(address + np.uint64(scales_at + 4 * block)), (1,), np.float32)[0]
        codes = carray(_codes_at(address + np.uint64(codes_at + block * _HALF)), (_HALF,), np.int8)
        factor = weight * scale
        low, high = acc[:_HALF], acc[_HALF:]
        for j in range(_HALF):
            low[j] += factor * np.float32(np.int32(np.int8(codes[j] << 4) >> 4))
            high[j] += factor * np.float32(np.int32(codes[j] >> 4))
    elif fmt == INT8:
        scale = carray(_floats_at(address + np.uint64(scales_at + 4 * block)), (1,), np.float32)[0]
        codes = carray(_codes_at(address + np.uint64(codes_at + block * BLOCK)), (BLOCK,), np.int8)
        factor = weight * scale
        for j in range(BLOCK):
            acc[j] += factor * np.float32(np.int32(codes[j]))
    elif fmt == BFLOAT16:
        halves = carray(_halves_at(address + np.uint64(codes_at + 2 * block * BLOCK)), (BLOCK,), np.uint16)
        for j in range(size):
            words[j] = np.uint32(halves[j]) << 16
        values = words.view(np.float32)
        for j in range(size):
            acc[j] += weight * values[j]
    else:
        values = carray(_floats_at(address + np.uint64(codes_at + 4 * block * BLOCK)), (BLOCK,), np.float32)
        for j in range(size):
            acc[j] += weight * values[j]


@_compiled
@no_type_check
def _unpack_int(codes, address, fmt, at, block):
    """Codes of a block as integers; returns its scale."""
    scale = carray(_floats_at(address + np.uint64(at[0] + 4 * block)), (1,), np.float32)[0]
    if fmt == INT4:
        packed = carray(_codes_at(address + np.uint64(at[1] + block * _HALF)), (_HALF,), np.int8)
        low, high = codes[:_HALF], codes[_HALF:]
        for j in range(_HALF):
            low[j] = np.int8(packed[j] << 4) >> 4
            high[j] = packed[j] >> 4
    else:
        codes[:] = carray(_codes_at(address + np.uint64(at[1] + block * BLOCK)), (BLOCK,), np.int8)
    return scale


@_compiled
@no_type_check
def _dot_int(a, b):
    total = np.int32(0)
    for j in range(BLOCK):
        total = np.int32(total + np.int32(np.int32(a[j]) * np.int32(b[j])))
    return total


@_compiled
@no_type_check
def _dot(a, b, lanes):
    lanes[:] = 0.0
    for j in range(0, BLOCK, _LANES):
        x, y = a[j : j + _LANES], b[j : j + _LANES]
        for k in range(_LANES):
            lanes[k] += np.float64(x[k]) * np.float64(y[k])
    total = 0.0
    for k in range(_LANES):
        total += lanes[k]
    return total


@_compiled
@no_type_check
def gram(addresses, extras, fmt, at, start, stop, products):
    """products[i, j] = sum v_i v_j, for i <= j, over elements start..stop-1 of a tensor; start is a multiple of 256.

    `extras` holds what is to be added to each learner's values, if anything: float32[learners, stop - start].
    Returns False when a scale is negative. A value that is not finite makes its learner's products not finite.
    """
    count = addresses.size
    rows, words = np.zeros((count, BLOCK), np.float32), np.zeros(BLOCK, np.uint32)
    codes, scales = np.zeros((count, BLOCK), np.int16), np.zeros(count, np.float64)
    lanes, one = np.zeros(_LANES, np.float64), np.float32(1)
    as_codes = fmt >= INT8 and extras.size == 0
    products[:] = 0.0
    for first in range(start, stop, BLOCK):
        size, block = min(BLOCK, stop - first), first // BLOCK
        for m in range(count):
            if fmt >= INT8:
                scales[m] = np.float64(_unpack_int(codes[m], addresses[m], fmt, at, block))
                if scales[m] < 0:
                    return False
            if not as_codes:
                rows[m, :] = np.float32(0)
                _decode_add(rows[m], words, addresses[m], fmt, at[0], at[1], block, size, one)
                if extras.size:
                    row, more = rows[m], extras[m, first - start : first - start + size]
                    for j in range(size):
                        row[j] += more[j]
        for i in range(count):
            for j in range(i, count):
                if as_codes:
                    products[i, j] += scales[i] * scales[j] * np.float64(_dot_int(codes[i], codes[j]))
                else:
                    products[i, j] += _dot(rows[i], rows[j], lanes)
    return True


@_compiled
@no_type_check
def weighted_sum(addresses, weights, extra, fmt, at, start, stop, out):
    """out = sum_m w_m v_m + extra, over elements start..stop-1 of a tensor."""
    acc, words = np.empty(BLOCK, np.float32), np.zeros(BLOCK, np.uint32)
    for first in range(start, stop, BLOCK):
        size = min(BLOCK, stop - first)
        acc[:] = np.float32(0)
        for m in range(addresses.size):
            _decode_add(acc, words, addresses[m], fmt, at[0], at[1], first // BLOCK, size, weights[m])
        if extra.size:
            more = extra[first - start : first - start + size]
            for j in range(size):
                acc[j] += more[j]
        target = out[first - start : first - start + size]
        for j in range(size):
            target[j] = acc[j]


@_compiled
@no_type_check
def _nesterov(acc, trace, new_trace, momentum, size):
    for j in range(size):
        moved = acc[j] + momentum * trace[j]
        new_trace[j] = moved
        acc[j] = acc[j] + momentum * moved


@_compiled
@no_type_check
def _absmax(values, lanes):
    """Largest magnitude of a block. A value that is not finite is noticed elsewhere: its code is not (`_spread`)."""
    lanes[:] = np.float32(0)
    for j in range(0, BLOCK, 2 * _LANES):
        part = values[j : j + 2 * _LANES]
        for k in range(2 * _LANES):
            size = abs(part[k])
            lanes[k] = size if size > lanes[k] else lanes[k]
    most = np.float32(0)
    for k in range(2 * _LANES):
        most = lanes[k] if lanes[k] > most else most
    return most


@_compiled
@no_type_check
def _encode_int(wanted, rounded, codes, lanes, share, fmt):
    """Codes of a block; `rounded` becomes what they decode to. Returns the scale."""
    absmax = _absmax(wanted, lanes)
    if absmax < _ZERO_ABSMAX:
        rounded[:] = np.float32(0)
        codes[:] = np.uint8(0)
        return np.float32(0)
    scale = absmax * share
    for j in range(BLOCK):
        rounded[j] = (wanted[j] / scale + _ROUND) - _ROUND
    if fmt == INT8:
        for j in range(BLOCK):
            codes[j] = np.uint8(np.int32(rounded[j]))
    else:
        low, high = rounded[:_HALF], rounded[_HALF:]
        for j in range(_HALF):
            codes[j] = np.uint8((np.int32(low[j]) & 15) | (np.int32(high[j]) << 4))
    for j in range(BLOCK):
        rounded[j] *= scale
    return scale


@_compiled
@no_type_check
def _encode_bfloat16(bits, rounded_bits, halves, size):
    """Nearest even; subnormal numbers become zero, as in codec.py."""
    for j in range(size):
        word = np.int64(bits[j])
        half = (word + 0x7FFF + ((word >> 16) & 1)) >> 16
        half = half if (word & 0x7FFFFFFF) >= 0x00800000 else 0
        halves[j] = np.uint16(half)
        rounded_bits[j] = np.uint32(half << 16)


@_compiled
@no_type_check
def _add(value, rounded, new_value, spread, size):
    """The new value. `spread` becomes NaN as soon as one is not finite."""
    for j in range(size):
        moved = value[j] + rounded[j]
        new_value[j] = moved
        spread[j] += moved * np.float32(0)


@_compiled
@no_type_check
def update(
    addresses, weights, extra, fmt_in, at_in, start, value, trace, residual, rate, momentum,
    fmt_out, payload, at_out, new_value, new_trace, new_residual,
):  # fmt: skip
    """One leaf from payloads to the new version: weighted sum, Nesterov's step, encoding, application.

        g = sum_m w_m v_m + extra;  t' = g + mu t;  step = r - lr (g + mu t');  x' = x + Q(step);  r' = step - Q(step)

    Args are addresses and weights of the payloads; where the tensor's scales and codes begin in them and in the
    payload that is written (`at_in`, `at_out`); and the leaf's arrays. `trace` is empty without momentum, `residual`
    where nothing is rounded.

    Returns whether everything is finite.
    """
    acc, words = np.empty(BLOCK, np.float32), np.zeros(BLOCK, np.uint32)
    wanted, rounded = np.zeros(BLOCK, np.float32), np.zeros(BLOCK, np.float32)
    lanes, spread = np.zeros(2 * _LANES, np.float32), np.zeros(BLOCK, np.float32)
    share = _SHARE_INT8 if fmt_out == INT8 else _SHARE_INT4
    block_bytes = _HALF if fmt_out == INT4 else BLOCK
    stop = start + value.size
    for first in range(start, stop, BLOCK):
        size, block = min(BLOCK, stop - first), first // BLOCK
        here = slice(first - start, first - start + size)
        acc[:] = np.float32(0)
        for m in range(addresses.size):
            _decode_add(acc, words, addresses[m], fmt_in, at_in[0], at_in[1], block, size, weights[m])
        if extra.size:
            more = extra[here]
            for j in range(size):
                acc[j] += more[j]
        if trace.size:
            _nesterov(acc, trace[here], new_trace[here], momentum, size)
        if residual.size:
            left = residual[here]
            for j in range(size):
                wanted[j] = left[j] - rate * acc[j]
        else:
            for j in range(size):
                wanted[j] = -(rate * acc[j])
        for j in range(size, BLOCK):
            wanted[j] = np.float32(0)
        if fmt_out >= INT8:
            codes = payload[at_out[1] + block * block_bytes : at_out[1] + (block + 1) * block_bytes]
            scale = payload[at_out[0] + 4 * block : at_out[0] + 4 * block + 4].view(np.float32)
            scale[0] = _encode_int(wanted, rounded, codes, lanes, share, fmt_out)
        elif fmt_out == BFLOAT16:
            halves = payload[at_out[1] + 2 * first : at_out[1] + 2 * (first + size)].view(np.uint16)
            _encode_bfloat16(wanted.view(np.uint32), rounded.view(np.uint32), halves, size)
        else:
            rounded[:] = wanted
        _add(value[here], rounded, new_value[here], spread, size)
        if residual.size:
            left = new_residual[here]
            for j in range(size):
                left[j] = wanted[j] - rounded[j]
    total = np.float32(0)
    for j in range(BLOCK):
        total += spread[j]
    return total == np.float32(0)
