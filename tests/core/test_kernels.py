"""The compiled loops touch nothing but what they were given."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

# Every array ends where the readable memory ends, so a read or a write behind it kills the process.
AT_THE_END = """
import ctypes, mmap, sys
import numpy as np
from diloco_jax.core import kernels
from tests.core.merging import FORMATS, SHAPES, layout_of, payload_of, random_values

KINDS = {name: getattr(kernels, name.upper()) for name in FORMATS}
protect = ctypes.CDLL(None, use_errno=True).mprotect
held = []

def at_the_end(array):
    pages = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    flat = np.frombuffer(memory, np.uint8)
    assert protect(ctypes.c_void_p(flat.ctypes.data + pages), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    held.append(memory)
    copy = flat[pages - array.nbytes : pages].view(array.dtype)
    copy[:] = array
    return copy

up = sys.argv[1]
for key, shape in SHAPES.items():
    layout, size = layout_of({key: shape}), int(np.prod(shape))
    values = [random_values(seed, {key: shape}) for seed in range(6)]
    payloads = [at_the_end(payload_of(value, up)) for value in values[:2]]
    moved = at_the_end(layout.flat(values[2]))
    sources = np.array([p.ctypes.data for p in payloads], np.uint64), np.array([moved.ctypes.data, 0], np.uint64)
    place = layout.places(up)[0]
    at = (place.scales, place.codes)
    for moves in (sources[1], np.zeros(2, np.uint64)):
        kernels.gram(sources[0], moves, KINDS[up], at, 0, size, size, at_the_end(np.zeros(4)).reshape(1, 2, 2))
        parts = at_the_end(np.zeros(4 * -(-size // 35))).reshape(-1, 2, 2)
        kernels.gram(sources[0], moves, KINDS[up], at, 0, size, 35, parts)
        halves = at_the_end(np.full(2 * len(parts), 0.5, np.float32)).reshape(-1, 2)
        for down in FORMATS:
            out = layout.places(down)[0]
            step = at_the_end(np.zeros(layout.payload_bytes(down) if down != "float32" else 0, np.uint8))
            flats = [at_the_end(layout.flat(value)) for value in values[3:]]
            new = [at_the_end(np.zeros(size, np.float32)) for _ in range(3)]
            assert kernels.update(
                *(sources[0], moves), halves, 35, KINDS[up], at, 0, *flats, np.float32(0.7),
                np.float32(0.9), KINDS[down], step, (out.scales, out.codes), *new,
            )
            assert all(array.all() for array in new[:2]), "something was not written"
"""


@pytest.mark.skipif(sys.platform != "linux", reason="protects pages with mprotect of Linux")
@pytest.mark.parametrize("up", ["float32", "bfloat16", "int8", "int4"])
def test_nothing_behind_an_array_is_touched(up: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", AT_THE_END, up], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert result.returncode == 0, result.stderr or f"died with {result.returncode}"
