"""The inner loops of a merge, of an arrival and of a departure, compiled by Numba.

Those of a merge read encoded outer gradients and write the next version: the new value, the outer optimizer's new state
and the encoded step. Those of an arrival apply such a step to the value before. Those of a departure encode an update.
Rules of this file:

  * A loop does everything to a block of 256 elements while the block is in the level-1 cache. No learner's decoded
    values are ever in memory as a whole.
  * Plain IEEE operations run in a fixed order and are never contracted to fused multiply-adds. So every machine, and
    every division of the work into leaves, gets equal bits.
  * A block is passed as its address, because an array would cost a reference count, which takes longer than the
    arithmetic. Names that end in `_at` are addresses. The caller keeps the memory alive and is responsible for its size
    (passes.py, arrival.py, departure.py).
  * All loops run without the interpreter's lock.
"""

from typing import no_type_check

import numpy as np
from numba import njit

from diloco_jax.core.blocks import (
    INT8,
    add_codes,
    add_four,
    decode_add,
    encode,
    scale_of,
    unpack,
    usable,
)
from diloco_jax.core.lanes import (
    double_lanes,
    floats,
    in_order,
    ints,
    larger,
    largest,
    load,
    magnitude_bits,
    store,
    stream,
)
from diloco_jax.core.memory import (
    BLOCK,
    LANES,
    ROW,
    compiled,
    copy_bytes,
    fence,
    fill,
    float32s,
    int16s,
)

_INFINITE = np.uint32(0x7F800000)
# The results of `arrive`.
SOUND, BAD_SCALE, BAD_CODES = 0, 1, 2


@njit(forceinline=True)
@no_type_check
def _scratch(rows):
    return np.zeros((rows + 1) * BLOCK, np.float32)


@njit(forceinline=True)
@no_type_check
def _row(scratch, number):
    """Return the address of a block of the scratch memory, at the start of a cache line."""
    first = (np.uint64(scratch.ctypes.data) + np.uint64(63)) & ~np.uint64(63)
    return first + np.uint64(number) * ROW


@njit(forceinline=True)
@no_type_check
def _unit_of(element, unit):
    """Return the number of an element's unit; most tensors are one unit, and a division would take long."""
    return 0 if element < unit else element // unit


@compiled
@no_type_check
def _add_moved(moved_at, weight, size, acc_at):
    acc, moved = float32s(acc_at), float32s(moved_at)
    for j in range(size):
        acc[j] += weight * moved[j]


@compiled
@no_type_check
def _add_values(payloads, moved, weights, number, fmt, at, block, first, size, zeros_at, to_at):
    """Compute to = sum_m w_m (v_m + moved_m) for a block, with the weights of one unit."""
    if _as_codes(moved, fmt):
        count, from_at = payloads.size, zeros_at
        for m in range(0, count - 3, 4):
            add_four(
                from_at, payloads[m], payloads[m + 1], payloads[m + 2], payloads[m + 3], fmt, at, block,
                weights[number, m], weights[number, m + 1], weights[number, m + 2], weights[number, m + 3], to_at,
            )  # fmt: skip
            from_at = to_at
        for m in range(count // 4 * 4, count):
            add_codes(from_at, payloads[m], fmt, at, block, weights[number, m], to_at)
            from_at = to_at
        return
    fill(to_at, 0)
    for m in range(payloads.size):
        decode_add(payloads[m], fmt, at, block, size, weights[number, m], to_at)
        if moved[m]:
            _add_moved(moved[m] + np.uint64(4 * first), weights[number, m], size, to_at)


@compiled
@no_type_check
def _mean(payloads, moved, weights, unit, fmt, at, start, first, size, zeros_at, acc_at, spare_at):
    """Compute acc = sum_m w_m (v_m + moved_m) for a block, where each unit has its weights; zeros from `size` on."""
    begin, to_at = start + first, acc_at
    for number in range(_unit_of(begin, unit), _unit_of(begin + size - 1, unit) + 1):
        _add_values(payloads, moved, weights, number, fmt, at, begin // BLOCK, first, size, zeros_at, to_at)
        if number * unit > begin:
            skip = np.uint64(4 * (number * unit - begin))
            copy_bytes(acc_at + skip, spare_at + skip, ROW - skip)
        to_at = spare_at
    fill(acc_at, size)


@compiled
@no_type_check
def _dot_codes(a_at, b_at):
    a, b, total = int16s(a_at), int16s(b_at), np.int32(0)
    for j in range(BLOCK):
        total = np.int32(total + np.int32(np.int32(a[j]) * np.int32(b[j])))
    return np.float64(total)


@compiled
@no_type_check
def _dot(a_at, b_at):
    """Return the sum of products as float64, in an order that is the same everywhere: by lanes first."""
    sums = double_lanes(floats(np.float32(0)))
    for j in range(0, BLOCK, LANES):
        here = np.uint64(4 * j)
        sums = sums + double_lanes(load(a_at + here)) * double_lanes(load(b_at + here))
    return in_order(sums)


@compiled
@no_type_check
def _value(payload_at, moved_at, fmt, at, block, size, row_at):
    """Decode one learner's block, with zeros from `size` on; return NaN if the block is unusable, otherwise 1."""
    fill(row_at, 0)
    decode_add(payload_at, fmt, at, block, size, np.float32(1), row_at)
    if moved_at:
        _add_moved(moved_at, np.float32(1), size, row_at)
    fill(row_at, size)
    if fmt < INT8:
        return 1.0
    return 1.0 if usable(payload_at, fmt, at, block) else np.nan


@compiled
@no_type_check
def _as_codes(moved, fmt):
    """Return whether products are computed from codes: the codes are integers, and no values are added."""
    for m in range(moved.size):
        if moved[m]:
            return False
    return fmt >= INT8


@compiled
@no_type_check
def _load(payload_at, moved_at, first, as_codes, fmt, at, block, size, row_at):
    """Write one learner's block to a row, as codes (int16) or values (float32); return the scale, NaN if unusable."""
    if as_codes:
        return unpack(payload_at, fmt, at, block, row_at)
    return _value(
        payload_at, moved_at + np.uint64(4 * first) if moved_at else np.uint64(0), fmt, at, block, size, row_at
    )


@compiled
@no_type_check
def _within(row_at, low, high, size, as_codes, spare_at):
    """Return a row whose elements outside of one unit are zeros: the row itself, or a copy in spare memory."""
    if high - low == size:
        return row_at
    width = 2 if as_codes else 4
    skip = np.uint64(width * low)
    fill(spare_at, 0)
    copy_bytes(spare_at + skip, row_at + skip, np.uint64(width * (high - low)))
    return spare_at


@compiled
@no_type_check
def gram(payloads, moved, fmt, at, start, size, unit, products):
    """Compute products[u, i, j] = <v_i + moved_i, v_j + moved_j> for i <= j, over a leaf's part of its u-th unit.

    The arguments are those of `update`; `products` is float64[units, learners, learners]. If a learner has a negative
    or non-finite scale, damaged codes or a non-finite value, its own square is not finite. The products of the other
    learners among each other do not depend on it.
    """
    count, as_codes = payloads.size, _as_codes(moved, fmt)
    scratch, scales = _scratch(count + 1), np.zeros(count, np.float64)
    spare_at = _row(scratch, count)
    products[:, :, :] = 0.0
    for first in range(0, size, BLOCK):
        begin, block, part = start + first, (start + first) // BLOCK, min(BLOCK, size - first)
        for m in range(count):
            scales[m] = _load(payloads[m], moved[m], first, as_codes, fmt, at, block, part, _row(scratch, m))
        for number in range(_unit_of(begin, unit), _unit_of(begin + part - 1, unit) + 1):
            low, high = max(0, number * unit - begin), min(part, (number + 1) * unit - begin)
            for i in range(count):
                a_at = _within(_row(scratch, i), low, high, part, as_codes, spare_at)
                for j in range(i, count):
                    b_at = _row(scratch, j)
                    dot = _dot_codes(a_at, b_at) if as_codes else _dot(a_at, b_at)
                    products[number - _unit_of(start, unit), i, j] += scales[i] * scales[j] * dot
    # This use keeps the scratch memory alive until here, because the loops have only its addresses.
    scratch[0] = np.float32(0)


@compiled
@no_type_check
def squares(payloads, moved, fmt, at, start, size, unit, products):
    """Compute products[u, i, i] as `gram` does, with the same bits; the other products are 0."""
    as_codes, scratch = _as_codes(moved, fmt), _scratch(2)
    row_at, spare_at = _row(scratch, 0), _row(scratch, 1)
    products[:, :, :] = 0.0
    for m in range(payloads.size):
        for first in range(0, size, BLOCK):
            begin, block, part = start + first, (start + first) // BLOCK, min(BLOCK, size - first)
            scale = _load(payloads[m], moved[m], first, as_codes, fmt, at, block, part, row_at)
            for number in range(_unit_of(begin, unit), _unit_of(begin + part - 1, unit) + 1):
                low, high = max(0, number * unit - begin), min(part, (number + 1) * unit - begin)
                a_at = _within(row_at, low, high, part, as_codes, spare_at)
                dot = _dot_codes(a_at, a_at) if as_codes else _dot(a_at, a_at)
                products[number - _unit_of(start, unit), m, m] += scale * scale * dot
    # This use keeps the scratch memory alive until here, because the loops have only its addresses.
    scratch[0] = np.float32(0)


@compiled
@no_type_check
def squares_of_mean(payloads, moved, weights, unit, fmt, at, start, size, sums):
    """Compute sums[u] = |sum_m w_m (v_m + moved_m)|^2 over a leaf's part of its u-th unit.

    The arguments are those of `update`; `sums` is float64[units]. The sum over the learners is float32.
    """
    scratch = _scratch(3)
    acc_at, spare_at, zeros_at = _row(scratch, 0), _row(scratch, 1), _row(scratch, 2)
    sums[:] = 0.0
    for first in range(0, size, BLOCK):
        begin, part = start + first, min(BLOCK, size - first)
        _mean(payloads, moved, weights, unit, fmt, at, start, first, part, zeros_at, acc_at, spare_at)
        for number in range(_unit_of(begin, unit), _unit_of(begin + part - 1, unit) + 1):
            low, high = max(0, number * unit - begin), min(part, (number + 1) * unit - begin)
            a_at = _within(acc_at, low, high, part, False, spare_at)
            sums[number - _unit_of(start, unit)] += _dot(a_at, a_at)
    # This use keeps the scratch memory alive until here, because the loops have only its addresses.
    scratch[0] = np.float32(0)


@compiled
@no_type_check
def _largest(at):
    """Return the bits of a block's largest magnitude."""
    most = ints(0)
    for j in range(0, BLOCK, LANES):
        most = larger(most, magnitude_bits(load(at + np.uint64(4 * j))))
    return largest(most)


@njit(forceinline=True)
@no_type_check
def _write(at, value, past):
    """Store numbers that are read only in the next round, past the caches if the address allows it.

    Ordinary stores would first read the old content. Copying the results there at the end of a block would make the
    next block wait, because a processor has room for a few dozen unfinished stores.
    """
    if past:
        stream(at, value)
    else:
        store(at, value)


@compiled
@no_type_check
def _move(acc_at, trace_at, residual_at, rate, momentum, new_trace_at, wanted_at, past):
    """Compute Nesterov's step of a block plus its residual; return the bits of the largest magnitude."""
    rates, momenta, most = floats(rate), floats(momentum), ints(0)
    for j in range(0, BLOCK, LANES):
        here = np.uint64(4 * j)
        acc = load(acc_at + here)
        moved = acc + momenta * load(trace_at + here)
        _write(new_trace_at + here, moved, past)
        wanted = load(residual_at + here) - rates * (acc + momenta * moved)
        store(wanted_at + here, wanted)
        most = larger(most, magnitude_bits(wanted))
    return largest(most)


@compiled
@no_type_check
def _apply(value_at, wanted_at, rounded_at, new_value_at, new_residual_at, past, residual_past):
    """Compute a block's new value and its new residual; return the bits of the value's largest magnitude."""
    most = ints(0)
    for j in range(0, BLOCK, LANES):
        here = np.uint64(4 * j)
        rounded = load(rounded_at + here)
        value = load(value_at + here) + rounded
        _write(new_value_at + here, value, past)
        _write(new_residual_at + here, load(wanted_at + here) - rounded, residual_past)
        most = larger(most, magnitude_bits(value))
    return largest(most)


@compiled
@no_type_check
def _get(array, first, size, spare_at):
    """Return the address of a block of an array, or of spare memory with its elements and zeros; zeros if empty."""
    if array.size == 0:
        return spare_at
    at = array.ctypes.data + np.uint64(4 * first)
    if size == BLOCK:
        return at
    fill(spare_at, size)
    copy_bytes(spare_at, at, np.uint64(4 * size))
    return spare_at


@njit(forceinline=True)
@no_type_check
def _target(array, first, size, spare_at):
    """Return the address of a whole block of an array that is written, or of spare memory."""
    return array.ctypes.data + np.uint64(4 * first) if array.size and size == BLOCK else spare_at


@compiled
@no_type_check
def update(
    payloads, moved, weights, unit, fmt_in, at_in, start, value, trace, residual, rate, momentum,
    fmt_out, step, at_out, new_value, new_trace, new_residual,
):  # fmt: skip
    """Compute the next version of a leaf: weighted sum, Nesterov's step, encoding, application.

        g = sum_m w_m (v_m + moved_m);  t' = g + mu t;  s = r - lr (g + mu t');  x' = x + Q(s);  r' = s - Q(s)

    Args:
      payloads: uint64[learners], the address of each learner's payload v.
      moved: uint64[learners], for each learner the address of the values to add to this leaf; 0 for none.
      weights: float32[units, learners], w of each unit of the tensor.
      unit: elements of a unit.
      fmt_in: format of the payloads, a constant of blocks.py.
      at_in: offsets of the tensor's scales and codes in a payload, in bytes.
      start: first element of the leaf in the tensor, a multiple of 256.
      value: x of the leaf, float32[n].
      trace: t of the leaf; empty without momentum.
      residual: r of the leaf, what earlier rounding left out; empty if the step is not rounded.
      rate: lr.
      momentum: mu.
      fmt_out: format of the step.
      step: the payload that Q(s) is written to, uint8.
      at_out: offsets of the tensor's scales and codes in the step, in bytes.
      new_value: array for x'.
      new_trace: array for t'.
      new_residual: array for r'.

    Returns:
      Whether the new value is finite; if so, the new trace and residual are finite too.
    """
    scratch = _scratch(10)
    acc_at, wanted_at, rounded_at = _row(scratch, 0), _row(scratch, 1), _row(scratch, 2)
    x_spare, t_spare, r_spare = _row(scratch, 3), _row(scratch, 4), _row(scratch, 5)
    x_new, t_new, r_new = _row(scratch, 6), _row(scratch, 7), _row(scratch, 8)
    zeros_at, most, size = _row(scratch, 9), np.uint32(0), BLOCK
    for first in range(0, value.size, BLOCK):
        block, size = (start + first) // BLOCK, min(BLOCK, value.size - first)
        x_at, t_at = _get(value, first, size, x_spare), _get(trace, first, size, t_spare)
        r_at = _get(residual, first, size, r_spare)
        x_to, t_to = _target(new_value, first, size, x_new), _target(new_trace, first, size, t_new)
        r_to = _target(new_residual, first, size, r_new)
        past = size == BLOCK and (x_to | t_to | r_to) & np.uint64(63) == np.uint64(0)
        _mean(payloads, moved, weights, unit, fmt_in, at_in, start, first, size, zeros_at, acc_at, wanted_at)
        largest_step = _move(acc_at, t_at, r_at, rate, momentum, t_to, wanted_at, past and trace.size > 0)
        encode(wanted_at, largest_step, fmt_out, step.ctypes.data, at_out, block, size, rounded_at)
        largest_value = _apply(x_at, wanted_at, rounded_at, x_to, r_to, past, past and residual.size > 0)
        most = max(most, largest_value)
    if size < BLOCK:
        here, num_bytes = np.uint64(4 * (value.size - size)), np.uint64(4 * size)
        copy_bytes(new_value.ctypes.data + here, x_new, num_bytes)
        if trace.size:
            copy_bytes(new_trace.ctypes.data + here, t_new, num_bytes)
        if residual.size:
            copy_bytes(new_residual.ctypes.data + here, r_new, num_bytes)
    fence()
    # This use keeps the scratch memory alive until here, because the loops have only its addresses.
    scratch[0] = np.float32(0)
    return most < _INFINITE


@compiled
@no_type_check
def _damage(payload_at, fmt, at, block):
    """Return what is wrong with a block of integer codes: SOUND, BAD_SCALE or BAD_CODES."""
    scale = scale_of(payload_at, fmt, at, block)
    if not (scale >= np.float32(0) and scale < np.float32(np.inf)):
        return BAD_SCALE
    return SOUND if usable(payload_at, fmt, at, block) else BAD_CODES


@compiled
@no_type_check
def arrive(payload, fmt, at, start, base, value):
    """Compute value = base + step for a leaf, with the roundings of `codec.decode` followed by a sum.

    Args:
      payload: the encoded step of the fragment, uint8.
      fmt: format of the step, a constant of blocks.py.
      at: offsets of the tensor's scales and codes in the payload, in bytes.
      start: first element of the leaf in the tensor, a multiple of 256.
      base: the leaf of the value before, float32[n].
      value: array for the result, float32[n]; it must not overlap with `base`.

    Returns:
      SOUND, or the first kind of damage of the leaf: BAD_SCALE (negative or not finite) before BAD_CODES.
    """
    payload_at, base_at, value_at = payload.ctypes.data, base.ctypes.data, value.ctypes.data
    scratch, bad_scale, bad_codes = _scratch(1), False, False
    spare_at = _row(scratch, 0)
    for first in range(0, value.size, BLOCK):
        block, size, here = (start + first) // BLOCK, min(BLOCK, value.size - first), np.uint64(4 * first)
        if fmt >= INT8:
            damage = _damage(payload_at, fmt, at, block)
            bad_scale = bad_scale or damage == BAD_SCALE
            bad_codes = bad_codes or damage == BAD_CODES
        if fmt >= INT8 and size == BLOCK:
            add_codes(base_at + here, payload_at, fmt, at, block, np.float32(1), value_at + here)
            continue
        # A whole block of codes is added, so the last elements of a tensor are computed beside the array.
        to_at = value_at + here if size == BLOCK else spare_at
        copy_bytes(to_at, base_at + here, np.uint64(4 * size))
        decode_add(payload_at, fmt, at, block, size, np.float32(1), to_at)
        if size < BLOCK:
            copy_bytes(value_at + here, spare_at, np.uint64(4 * size))
    # This use keeps the scratch memory alive until here, because the loops have only its addresses.
    scratch[0] = np.float32(0)
    if bad_scale:
        return BAD_SCALE
    return BAD_CODES if bad_codes else SOUND


@compiled
@no_type_check
def depart(update, fmt, payload, at, left):
    """Encode a tensor's update in an integer format, with the bits of `codec.encode`.

    Args:
      update: float32[n].
      fmt: an integer format, a constant of blocks.py.
      payload: the tensor's scales and codes, uint8, which are written.
      at: offsets of the scales and of the codes in the payload, in bytes.
      left: array for update - decoded, float32[n]; product and difference are computed in float64.

    Returns:
      Whether all scales are finite, so that the update is, too.
    """
    scratch, finite = _scratch(4), True
    spare_at, rounded_at, codes_at, left_at = _row(scratch, 0), _row(scratch, 1), _row(scratch, 2), _row(scratch, 3)
    for first in range(0, update.size, BLOCK):
        block, size = first // BLOCK, min(BLOCK, update.size - first)
        wanted_at, to_at = _get(update, first, size, spare_at), _target(left, first, size, left_at)
        encode(wanted_at, _largest(wanted_at), fmt, payload.ctypes.data, at, block, size, rounded_at)
        scale = scale_of(payload.ctypes.data, fmt, at, block)
        finite = finite and scale < np.float32(np.inf)
        unpack(payload.ctypes.data, fmt, at, block, codes_at)
        factor, codes, wanted, to = np.float64(scale), int16s(codes_at), float32s(wanted_at), float32s(to_at)
        for j in range(BLOCK):
            to[j] = np.float32(np.float64(wanted[j]) - np.float64(codes[j]) * factor)
        if size < BLOCK:
            copy_bytes(left.ctypes.data + np.uint64(4 * first), left_at, np.uint64(4 * size))
    # This use keeps the scratch memory alive until here, because the loops have only its addresses.
    scratch[0] = np.float32(0)
    return finite
