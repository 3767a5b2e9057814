"""Start and end of every process of a run: signals, the end of its parent, and exit statuses."""

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import NamedTuple, NoReturn

PARENT_ENV = "DILOCO_PARENT_PID"
# Exit statuses; AFTER_END has their meanings.
FAILED, WRONG_INPUT, HUNG, INTERRUPTED, TERMINATED = 1, 2, 124, 130, 128 + signal.SIGTERM
_PR_SET_PDEATHSIG = 1
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8


class AfterEnd(NamedTuple):
    """Meaning of an exit status, whether another start may succeed, and whether the end counts as a failure."""

    # docs/troubleshooting.md has the same words.
    meaning: str
    # Another start may succeed.
    again: bool
    # The end counts towards the limit of restarts.
    failed: bool


AFTER_END = {
    0: AfterEnd("the work is done", again=False, failed=False),
    FAILED: AfterEnd("it failed: the syncer is down, a host or a disk was lost", again=True, failed=True),
    WRONG_INPUT: AfterEnd(
        "the input is wrong, or a refusal will repeat (config, run, token, certificate)", again=False, failed=True
    ),
    HUNG: AfterEnd("its watchdog ended it", again=True, failed=True),
    INTERRUPTED: AfterEnd(
        "it was asked to end before its work was done: SIGTERM, Ctrl-C, a preemption notice", again=True, failed=False
    ),
    TERMINATED: AfterEnd("SIGTERM came twice, or before the process could handle it", again=True, failed=False),
}
# Statuses of processes that were asked to end.
ASKED_TO_END = tuple(status for status, then in AFTER_END.items() if then.again and not then.failed)


def after_end(status: int) -> AfterEnd:
    """Return the consequence of an exit status, or of the negative number of the signal that ended the process."""
    return AFTER_END.get(128 - status if status < 0 else status, AFTER_END[FAILED])


class RefusedForGood(ValueError):
    """The run refuses this learner, and would refuse every later start of it; the message has the remedy."""


def end_refused() -> None:
    """Let a program that does not handle RefusedForGood end with WRONG_INPUT and one line, so that nobody restarts it.

    Python would end it with FAILED, which supervisors take for a failure that another start may mend.
    """
    before = sys.excepthook
    if getattr(before, "ends_refused", False):
        return

    def hook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        if not isinstance(error, RefusedForGood):
            before(kind, error, where)
            return
        sys.stderr.write(f"diloco_jax: {error}\n")
        # Python takes the status of an exit from here.
        raise SystemExit(WRONG_INPUT)

    hook.ends_refused = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def stop_on_signals(last_act: Callable[[], object] = lambda: None) -> threading.Event:
    """Return an event that SIGINT and SIGTERM set; a second signal calls `last_act` and ends the process."""
    stop = threading.Event()

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            last_act()
            os._exit(128 + number)
        stop.set()

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)
    return stop


@contextlib.contextmanager
def ended_at_once(last_act: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Let the first SIGINT or SIGTERM end this process, with INTERRUPTED, while the block prepares its work.

    A handler of Python would wait for the end of a compilation. So the system's handler wakes a thread, which calls
    `last_act`. Use it only where a kill loses nothing. In other threads than the main one it has no effect.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reads, writes = os.pipe()
    os.set_blocking(writes, False)

    def watch() -> None:
        while told := os.read(reads, 1):
            if told[0] in (signal.SIGINT, signal.SIGTERM):
                last_act()
                end_now(INTERRUPTED)
        os.close(reads)

    before = signal.set_wakeup_fd(writes)
    threading.Thread(target=watch, name="signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writes)


def stop_on_sigterm(stop: threading.Event) -> Callable[[], object]:
    """Let SIGTERM set an event, if this is the main thread; return a function that undoes it."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    before = signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    return lambda: signal.signal(signal.SIGTERM, before)


def die_with_parent() -> None:
    """Let Linux send SIGTERM when the supervisor ends; do nothing on other systems, or without a supervisor."""
    parent = os.environ.get(PARENT_ENV)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # The supervisor ended before this call.
    if os.getppid() != int(parent):
        raise SystemExit("the supervisor of this run has ended")


def end_now(status: int) -> NoReturn:
    """End this process at once with this exit status, and flush its output."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Import modules without garbage collections, which would look at all modules again and again and free nothing."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def give_memory_back() -> None:
    """Make glibc return large blocks at once, because by default it keeps many of them for each thread."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 19)
        libc.mallopt(_M_ARENA_MAX, 2)
