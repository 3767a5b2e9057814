"""Memory of arrays that comes back when nobody sees them any more."""

from __future__ import annotations

import mmap
import weakref

import numpy as np

from diloco_jax.core.passes import Flat

FREE_MAX = 4  # arrays that wait to be written again: those of a fragment, and one for a sum of steps


class Buffers:
    """Arrays that nobody uses any more, to be written again: fresh memory costs as much as the merge itself.

    An array comes back by itself as soon as nobody refers to it or to a view of it. So whatever is captured, on its way
    to a learner or to a disk stays as it was, and nobody must say when it is not needed any more.

    Args:
      size: elements of the largest array.
    """

    def __init__(self, size: int) -> None:
        self._bytes = _whole_pages(4 * max(1, size))
        self._free: list[mmap.mmap] = []

    def take(self, size: int) -> Flat:
        """Return an array of this size with any content."""
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = self._free.pop() if self._free else mmap.mmap(-1, self._bytes, kind)
        used = _whole_pages(4 * size)
        if used < self._bytes and hasattr(mmap, "MADV_DONTNEED"):  # what a larger array left behind
            memory.madvise(mmap.MADV_DONTNEED, used, self._bytes - used)
        array = np.frombuffer(memory, np.float32, size)
        weakref.finalize(array, self._give, memory).atexit = False
        return array

    def _give(self, memory: mmap.mmap) -> None:
        if len(self._free) < FREE_MAX:
            self._free.append(memory)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
