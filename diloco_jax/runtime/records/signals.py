"""First acts and last words of every process of a run: obey signals, do not outlive the parent, end with a status."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

PARENT_ENV = "DILOCO_PARENT_PID"
# Exit statuses, by which supervisors start again or not: failed, another attempt may succeed; wrong input, none will;
# ended by its watchdog (pulse.py); asked to end before its work was done, as by SIGTERM, which is no failure.
FAILED, WRONG_INPUT, HUNG, INTERRUPTED = 1, 2, 124, 130
_PR_SET_PDEATHSIG = 1
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8


def stop_on_signals(last_act: Callable[[], object] = lambda: None) -> threading.Event:
    """Return an event that SIGINT and SIGTERM set; the second of them ends the process, after its `last_act`."""
    stop = threading.Event()

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            last_act()
            os._exit(128 + number)
        stop.set()

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)
    return stop


def stop_on_sigterm(stop: threading.Event) -> Callable[[], object]:
    """Let SIGTERM set an event, where this may be asked for; returns what puts things back."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    before = signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    return lambda: signal.signal(signal.SIGTERM, before)


def die_with_parent() -> None:
    """Ask Linux for SIGTERM when the supervisor dies, however it dies; elsewhere, and without one, do nothing."""
    parent = os.environ.get(PARENT_ENV)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it died before we asked
        raise SystemExit("the supervisor of this run is gone")


def be_killed_with_parent() -> None:
    """Ask Linux for SIGKILL when the parent ends, which ends a stopped process too; elsewhere do nothing."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    """Tell whether a process stands still because of SIGSTOP or its relatives; False where that cannot be seen."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return told.rpartition(")")[2].split()[:1] == ["T"]


def end_now(status: int) -> NoReturn:
    """End this process with this exit status, whatever its threads do; what was printed is kept."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


def give_memory_back() -> None:
    """Let the C library return large blocks at once, where it is glibc: by itself it keeps many, for each thread."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 19)
        libc.mallopt(_M_ARENA_MAX, 2)
