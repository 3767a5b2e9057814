"""A thread for calls that may be slow or fail, so that neither steps nor the protocol wait for them."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

WAITING_MAX = 4096  # calls that wait for one object

log = logging.getLogger(__name__)


class Aside:
    """An object in a thread of its own. What raises there is told once, and the object is not called any more.

    Args:
        make: makes the object, in its thread.
    """

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        self._name = name
        self._waiting: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue(WAITING_MAX)
        self._lost = 0
        self._thread = threading.Thread(target=self._run, args=(make,), name=name, daemon=True)
        self._thread.start()

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method soon, in the order of the calls; one that the object does not have is not called."""
        if not self._thread.is_alive():
            return
        try:
            self._waiting.put_nowait((method, arguments))
        except queue.Full:
            if not self._lost:
                log.warning(f"{self._name} is too slow: {WAITING_MAX} calls wait, what comes now is lost")
            self._lost += 1

    def _run(self, make: Callable[[], Any]) -> None:
        method = "its constructor"
        try:
            target = make()
            while (job := self._waiting.get()) is not None:
                method, arguments = job
                getattr(target, method, lambda *_: None)(*arguments)
        except (Exception, SystemExit) as error:
            told = f"{type(error).__name__}: {error}"
            log.warning(f"{self._name} failed in {method} and is not called any more, the run goes on: {told}")

    def close(self, ends_s: float) -> None:
        """Let it do what waits until then (`time.monotonic`); a thread that hangs ends with the process."""
        while self._thread.is_alive() and time.monotonic() < ends_s:
            with contextlib.suppress(queue.Full):
                self._waiting.put(None, timeout=0.1)
                break
        self._thread.join(max(0.0, ends_s - time.monotonic()))
        waiting = self._waiting.qsize() if self._thread.is_alive() else 0
        if self._lost or waiting:
            log.warning(f"{self._name} did not get all: {self._lost} calls were lost, {waiting} still waited")


def close_all(asides: Iterable[Aside], within_s: float) -> None:
    """Close all of them; those that wait for something have this long together."""
    ends_s = time.monotonic() + within_s
    for aside in asides:
        aside.close(ends_s)
