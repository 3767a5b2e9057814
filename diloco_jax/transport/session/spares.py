"""Memory for payloads that arrive, used again when nobody refers to the earlier payload any more.

Fresh memory costs about as much as a copy: the system clears every page before its first byte is written.
"""

import weakref
from collections import deque

import numpy as np

# Memory that waits for the next payload, per process.
SPARE_BYTES_MAX = 1 << 28
# A smaller buffer comes from the allocator, which keeps such memory by itself.
SPARE_BYTES_MIN = 1 << 20

# Several threads use it without a lock, because the garbage collector may give a buffer back at any point.
_spares: deque[np.ndarray] = deque()


def take_buffer(size: int) -> np.ndarray:
    """Return memory for a payload of `size` bytes, with undefined content, shape (size,) and dtype uint8.

    The system allocates fresh pages when they are filled, so a payload that is only announced costs nothing.
    """
    if size < SPARE_BYTES_MIN:
        return np.empty(size, np.uint8)
    whole = _take_spare(size)
    if whole is None:
        whole = np.empty(size, np.uint8)
    # The memory is spare when no view of this array is left. A slice of `whole` would not do: NumPy lets the views of a
    # slice refer to `whole` itself.
    lent = np.frombuffer(whole.data, np.uint8, size)
    weakref.finalize(lent, _give, whole).atexit = False
    return lent


def _take_spare(size: int) -> np.ndarray | None:
    for _ in range(len(_spares)):
        try:
            spare = _spares.popleft()
        except IndexError:
            return None
        if size <= spare.nbytes <= 2 * size:
            return spare
        _spares.append(spare)
    return None


def _give(whole: np.ndarray) -> None:
    if whole.nbytes > SPARE_BYTES_MAX:
        return
    _spares.append(whole)
    while sum(each.nbytes for each in list(_spares)) > SPARE_BYTES_MAX:
        _spares.popleft()
