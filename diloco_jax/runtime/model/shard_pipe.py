"""Pipes between the syncer's control process and its merge shards: JSON and raw bytes over a socket pair.

A frame is a length, a JSON object of that length, and the bytes of the arrays that it describes. Nothing is ever
executed that came in. The writer is a thread of its own behind a queue that never blocks, so anybody may send, also
while the interpreter collects garbage.
"""

from __future__ import annotations

import json
import queue
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from diloco_jax.core.passes import State

_LENGTH = struct.Struct("<Q")


class Frame(NamedTuple):
    """One message, with the arrays that go with it."""

    head: Mapping[str, Any]
    arrays: list[np.ndarray]


class Pipe:
    """One end. Both ends run the same program on the same host, and trust each other.

    Args:
        connection: a connected stream socket.
        on_frame: gets every frame, on the pipe's own thread.
        on_end: is called there once, with the reason, when the other end is gone.
    """

    def __init__(
        self, connection: socket.socket, on_frame: Callable[[Frame], None], on_end: Callable[[str], None]
    ) -> None:
        self._connection = connection
        self._on_frame = on_frame
        self._on_end = on_end
        self._outgoing: queue.SimpleQueue[tuple[Mapping[str, Any], Sequence[np.ndarray]] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="pipe-out", daemon=True)

    def start(self) -> None:
        """Begin to read and write."""
        self._writer.start()
        threading.Thread(target=self._read, name="pipe-in", daemon=True).start()

    def send(self, head: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """Queue a frame; never blocks, any thread.

        Args:
            head: what JSON can say.
            arrays: contiguous; nobody may write to them any more.
        """
        self._outgoing.put((head, arrays))

    def close(self, timeout_s: float) -> None:
        """Write what is queued for at most so many seconds, and end the connection."""
        self._outgoing.put(None)
        self._writer.join(timeout_s)
        self._connection.close()

    def _write(self) -> None:
        try:
            while (item := self._outgoing.get()) is not None:
                head, arrays = item
                kinds = [[array.dtype.str, list(array.shape)] for array in arrays]
                raw = json.dumps({**head, "arrays": kinds}).encode()
                self._connection.sendall(_LENGTH.pack(len(raw)) + raw)
                for array in arrays:
                    self._connection.sendall(_bytes_of(np.ascontiguousarray(array)))
                del item, arrays
        except OSError:
            return  # the reader says so

    def _read(self) -> None:
        try:
            while True:
                length = bytearray(_LENGTH.size)
                self._fill(memoryview(length))
                raw = bytearray(*_LENGTH.unpack(length))
                self._fill(memoryview(raw))
                head = json.loads(raw)
                arrays = [np.empty(shape, name) for name, shape in head.pop("arrays")]
                for array in arrays:
                    self._fill(_bytes_of(array))
                self._on_frame(Frame(head, arrays))
        except (EOFError, OSError) as error:
            self._on_end(str(error))

    def _fill(self, view: memoryview) -> None:
        """Receive as many bytes as there is room for."""
        while view:
            count = self._connection.recv_into(view)
            if not count:
                raise EOFError("the connection ended")
            view = view[count:]


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def pack_state(state: State) -> tuple[list[str], list[np.ndarray]]:
    """Return a state as names of its outer leaves, and arrays."""
    return list(state.outer), [state.value, state.residual, *(np.asarray(leaf) for leaf in state.outer.values())]


def unpack_state(names: Sequence[str], arrays: Sequence[np.ndarray]) -> State:
    """Return the state that `pack_state` packed."""
    return State(arrays[0], dict(zip(names, arrays[2:], strict=True)), arrays[1])
