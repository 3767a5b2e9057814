"""Threads in which a gRPC server runs its calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any


class DaemonThreads(futures.Executor):
    """A thread per call. A pool would make the process wait at exit for calls that last as long as the run."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        future: futures.Future[Any] = futures.Future()

        def body() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # as every executor does: the future carries it
                future.set_exception(error)

        threading.Thread(target=body, name="diloco-call", daemon=True).start()
        return future
