"""Sixteen numbers at once: each operation against NumPy, on ordinary numbers and on the edges of float32."""

from typing import Any, no_type_check

import numpy as np
import pytest
from numba import njit

from diloco_jax.core import lanes
from diloco_jax.core.memory import fence, prefetch

EDGES = [0.0, -0.0, 1.0, -1.5, 2.5, 1e-40, -1e-40, 3e38, -3e38, 1e-30, 7.0, 0.5, -0.5, 1e10, 2**-126, 255.0]
A, B = np.array(EDGES, np.float32), np.array(EDGES[::-1], np.float32)


@njit
@no_type_check
def calculate(a_at, b_at, out_at):
    a, b = lanes.load(a_at), lanes.load(b_at)
    lanes.store(out_at, a + b)
    lanes.store(out_at + np.uint64(64), a - b)
    lanes.store(out_at + np.uint64(128), a * b)
    lanes.store(out_at + np.uint64(192), a / b)
    lanes.store(out_at + np.uint64(256), lanes.magnitudes(a))
    lanes.store(out_at + np.uint64(320), lanes.float_lanes(lanes.above(a, b)))
    # A product and a sum with two roundings: a fused multiply-add has only one.
    lanes.stream(out_at + np.uint64(384), a * b + a)
    prefetch(out_at + np.uint64(1 << 40))
    fence()
    largest = lanes.largest(lanes.larger(lanes.magnitude_bits(a), lanes.magnitude_bits(b)))
    return lanes.folded(a), lanes.in_order(lanes.double_lanes(a) * lanes.double_lanes(b)), largest


@njit
@no_type_check
def pack(from_at, to_at):
    """Write the sum of the two halves of each byte, then the bytes as unsigned numbers, halved."""
    signed = lanes.load_int8(from_at)
    low, high = (signed << lanes.ints(28)) >> lanes.ints(28), signed >> lanes.ints(4)
    lanes.store_bytes(to_at, low + high)
    halved = lanes.int_lanes(lanes.float_lanes(lanes.load_uint8(from_at)) * lanes.floats(np.float32(0.5)))
    lanes.store_bytes(to_at + np.uint64(16), (halved & lanes.ints(127)) | lanes.ints(0))
    return lanes.total(signed - lanes.ints(1))


def aligned(size: int) -> np.ndarray:
    """Return float32 memory that starts at a multiple of 64."""
    memory = np.zeros(size + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4
    return memory[start : start + size]


def test_arithmetic_is_that_of_numpy() -> None:
    out = aligned(7 * 16)
    sums = calculate(*(np.uint64(each.ctypes.data) for each in (A, B, out)))
    with np.errstate(all="ignore"):
        want = [A + B, A - B, A * B, A / B, abs(A), (A > B).astype(np.float32), A * B + A]
        half = A[:8] + A[8:]
        half = half[:4] + half[4:]
        half = half[:2] + half[2:]
        assert np.float32(sums[0]).tobytes() == (half[0] + half[1]).tobytes()
    assert out.tobytes() == np.concatenate(want).tobytes()
    in_order = 0.0
    for a, b in zip(A.astype(np.float64), B.astype(np.float64), strict=True):
        in_order += a * b
    assert sums[1] == in_order
    assert sums[2] == max(abs(A).view(np.uint32))


@pytest.mark.parametrize("seed", [0, 1])
def test_bytes_are_read_and_written_with_and_without_a_sign(seed: int) -> None:
    given, got = np.random.default_rng(seed).integers(0, 256, 16, np.uint8), np.zeros(32, np.uint8)
    total: Any = pack(np.uint64(given.ctypes.data), np.uint64(got.ctypes.data))
    signed = given.view(np.int8).astype(np.int32)
    low = (signed & 15) - 16 * (signed >> 3 & 1)
    assert got[:16].view(np.int8).tolist() == (low + (signed >> 4)).tolist()
    assert got[16:].tolist() == (given // 2).tolist()
    assert total == signed.sum() - 16
