"""Pipes between a syncer's control process and its merge shards (docs/decisions/0033-shard-commands.md).

A message goes as multiprocessing.connection sends it, pickled: only a process and its own child have the pipe. The
bytes of the arrays beside it follow as they are, from memory to memory. The writer is a thread of its own behind a
queue that never blocks, so anybody may send, also while the interpreter collects garbage.
"""

import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np


@dataclass(eq=False)
class Pipe:
    """One end. Both ends run the same program on the same host, and trust each other."""

    connection: Connection
    on_message: Callable[[Any, list[np.ndarray]], None]  # gets every message and its arrays, on the pipe's own thread
    on_end: Callable[[str], None]  # is called there once, with the reason, when the other end is gone

    def __post_init__(self) -> None:
        self._outgoing: queue.SimpleQueue[tuple[Any, Sequence[np.ndarray]] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="pipe-out", daemon=True)

    def start(self) -> None:
        self._writer.start()
        threading.Thread(target=self._read, name="pipe-in", daemon=True).start()

    def send(self, message: Any, arrays: Sequence[np.ndarray] = ()) -> None:
        """Queue a message; never blocks, any thread. Nobody may write to the arrays any more."""
        self._outgoing.put((message, arrays))

    def close(self, timeout_s: float) -> None:
        """Write what is queued for at most so many seconds, and end the connection."""
        self._outgoing.put(None)
        self._writer.join(timeout_s)
        self.connection.close()

    def _write(self) -> None:
        try:
            while (item := self._outgoing.get()) is not None:
                message, arrays = item
                self.connection.send((message, [(array.dtype.str, array.shape) for array in arrays]))
                for array in arrays:
                    view = _bytes_of(np.ascontiguousarray(array))
                    while view:
                        view = view[os.write(self.connection.fileno(), view) :]
                del item, message, arrays
        except OSError:
            return  # the reader says so

    def _read(self) -> None:
        try:
            while True:
                message, kinds = self.connection.recv()
                arrays = [np.empty(shape, dtype) for dtype, shape in kinds]
                for array in arrays:
                    view = _bytes_of(array)
                    while view:
                        count = os.readv(self.connection.fileno(), [view])
                        if not count:
                            raise EOFError("the connection ended")
                        view = view[count:]
                self.on_message(message, arrays)
        except (EOFError, OSError) as error:
            self.on_end(str(error) or "the connection ended")


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
