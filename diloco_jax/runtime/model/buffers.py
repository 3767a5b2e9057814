"""Memory that later arrays use again: fresh memory costs as much as the arithmetic of a merge or of an arrival."""

import itertools
import mmap
import weakref

import numpy as np

from diloco_jax.core.outer import Flat

# Arrays start at different bytes of a 4 KiB page. A processor compares only the low 12 bits of addresses first, so a
# loop that writes one array while it reads the same place of another waits for stores that it does not need.
STAGGER, PLACES = 256, 16


class Buffers:
    """Memory of unused arrays, for later arrays.

    An array's memory returns as soon as there is no reference to it or to a view of it. So an array in a capture, or on
    its way to another process, a device or a disk, never changes, and no caller must free it.

    Args:
        size: elements of the largest array.
        free_max: number of free arrays that are kept.
    """

    def __init__(self, size: int, free_max: int) -> None:
        self._bytes = _whole_pages(4 * max(1, size) + STAGGER * PLACES)
        self._free_max = free_max
        self._numbers = itertools.count()
        # Free memory, and the byte where its arrays start.
        self._free: list[tuple[mmap.mmap, int]] = []

    def take(self, size: int) -> Flat:
        """Return an array of this size with undefined content."""
        memory, start = self._free.pop() if self._free else self._fresh()
        used = _whole_pages(start + 4 * size)
        # The rest has the content of a larger array.
        if used < self._bytes and hasattr(mmap, "MADV_DONTNEED"):
            memory.madvise(mmap.MADV_DONTNEED, used, self._bytes - used)
        array = np.frombuffer(memory, np.float32, size, start)
        weakref.finalize(array, self._give, memory, start).atexit = False
        return array

    def _fresh(self) -> tuple[mmap.mmap, int]:
        memory = mmap.mmap(-1, self._bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return memory, STAGGER * (next(self._numbers) % PLACES)

    def _give(self, memory: mmap.mmap, start: int) -> None:
        if len(self._free) < self._free_max:
            self._free.append((memory, start))


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
