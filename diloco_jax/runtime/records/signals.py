"""First acts of every process of a run: obey signals, and do not outlive the parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

PARENT_ENV = "DILOCO_PARENT_PID"
# Exit statuses: failed; one clear message about wrong input, nothing to retry; asked to end before its work was done.
FAILED, USER_ERROR, INTERRUPTED = 1, 2, 130
_PR_SET_PDEATHSIG = 1
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8


def stop_on_signals() -> threading.Event:
    """Return an event that SIGINT and SIGTERM set; the second signal of either kind ends the process at once."""
    stop = threading.Event()

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)
    return stop


def die_with_parent() -> None:
    """Ask Linux for SIGTERM when the supervisor dies, however it dies; elsewhere, and without one, do nothing."""
    parent = os.environ.get(PARENT_ENV)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it died before we asked
        raise SystemExit("the supervisor of this run is gone")


def give_memory_back() -> None:
    """Let the C library return large blocks at once, where it is glibc: by itself it keeps many, for each thread."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 19)
        libc.mallopt(_M_ARENA_MAX, 2)
