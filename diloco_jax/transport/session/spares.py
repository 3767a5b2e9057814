"""Memory for payloads that arrive, used again when nobody refers to the earlier payload any more.

Fresh memory costs about as much as a copy: the system clears every page before its first byte is written. So a process
states how many bytes of payloads are in flight by the plan of its run. It keeps memory for the next payload as long as
this memory and that of payloads in use are together within that size. The rest goes back to the system, such as the
memory of a whole model that arrived when a learner joined.
"""

import contextlib
import weakref
from collections import deque

import numpy as np

# A smaller buffer comes from the allocator, which keeps such memory by itself.
SPARE_BYTES_MIN = 1 << 20

# Several threads use both without a lock, because the garbage collector may give a buffer back at any point.
_spares: deque[np.ndarray] = deque()
# Bytes of the memory in use, by the id of its array.
_lent: dict[int, int] = {}
# What the process has stated.
_in_flight_bytes = 0


def keep_spares(in_flight_bytes: int) -> None:
    """Keep memory of payloads for later ones, up to the size of all payloads in flight at a time.

    If a process has several islands, they share what the largest of them states.
    """
    global _in_flight_bytes
    _in_flight_bytes = max(_in_flight_bytes, in_flight_bytes)


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
    _lent[id(whole)] = whole.nbytes
    weakref.finalize(lent, _give, whole).atexit = False
    _free_excess()
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
    del _lent[id(whole)]
    _spares.append(whole)
    _free_excess()


def _free_excess() -> None:
    """Free the oldest spares until all memory of payloads is within the plan, or nothing is spare."""
    # Another thread may have taken the last one.
    with contextlib.suppress(IndexError):
        while sum(list(_lent.values())) + sum(each.nbytes for each in list(_spares)) > _in_flight_bytes:
            _spares.popleft()
