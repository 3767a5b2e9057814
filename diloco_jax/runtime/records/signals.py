"""First acts and last words of every process of a run: obey signals, do not outlive the parent, end with a status.

Who starts a process again goes by its exit status; `diloco_jax.cli`, `diloco train` and what `diloco launch` writes use
these numbers, and no others:

    DONE          the work is done
    FAILED        another attempt may succeed
    WRONG_INPUT   another attempt would fail as well: somebody has to change something
    HUNG          its watchdog ended it (pulse.py): start it again
    INTERRUPTED   asked to end before its work was done, by SIGTERM, Ctrl-C or a preemption notice: no failure

A second SIGTERM or SIGINT ends a process at once, with 128 + its number.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable

PARENT_ENV = "DILOCO_PARENT_PID"
DONE, FAILED, WRONG_INPUT, HUNG, INTERRUPTED = 0, 1, 2, 124, 130
_PR_SET_PDEATHSIG = 1


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
