"""Bounded queues to the writers, and the bulk lane's payloads cut into chunks for whichever writer is free."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from diloco_jax.transport import wire
from diloco_jax.transport.partials import RESUME_BYTES_MIN, PeerHoldings, payload_key


class Outgoing(NamedTuple):
    """A message that waits for its writer. The payload is shared with whoever else sends it."""

    body: bytes
    parts: tuple[memoryview, ...]


class Outbox:
    """Bounded queue to the writers of one lane."""

    def __init__(self, messages_max: int) -> None:
        self._messages_max = messages_max
        self._changed = threading.Condition()
        self._waiting: deque[Outgoing] = deque()
        self._closed = False
        self.cut = False  # writers stop even inside a payload
        self.reason = ""

    def put(self, item: Outgoing) -> bool:
        """Queue an item; False if the queue is full or closed."""
        with self._changed:
            if self._closed or len(self._waiting) >= self._messages_max:
                return False
            self._waiting.append(item)
            self._changed.notify()
            return True

    def take(self) -> Outgoing | None:
        """Wait for the oldest item; None when the queue is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            return self._waiting.popleft() if self._waiting else None

    def close(self, reason: str, *, flush: bool) -> None:
        """Take no more items. What waits is still handed out if `flush`, else forgotten."""
        with self._changed:
            self.reason = self.reason or reason
            self._closed = True
            if not flush:
                self.cut = True
                self._waiting.clear()
            self._changed.notify_all()


class Pieces:
    """The bulk lane's outbox as pieces of frames, in order; every writer takes the next one when it is free."""

    def __init__(self, outbox: Outbox, chunk_bytes: int) -> None:
        self.held = PeerHoldings()  # what the peer has of payloads that come
        self._outbox = outbox
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()  # held while its owner waits for a message: the others could do nothing else
        self._number = 0
        self._current: Iterator[wire.BulkPiece] = iter(())

    def take(self) -> wire.BulkPiece | None:
        """Wait for the next piece; None when there will be no more."""
        with self._lock:
            while not self._outbox.cut:
                piece = next(self._current, None)
                if piece is not None:
                    return piece
                self._current = iter(())  # do not keep the payload while waiting for the next one
                item = self._outbox.take()
                if item is None:
                    return None
                self._number += 1
                self._current = self._cut(item)
                del item
            self._current = iter(())
            return None

    def _cut(self, item: Outgoing) -> Iterator[wire.BulkPiece]:
        size = sum(part.nbytes for part in item.parts)
        key, held = 0, None
        if size > RESUME_BYTES_MIN:
            key = payload_key(item.parts)
            held = self.held.claim((key, size))
        return wire.pieces(self._number, item.body, item.parts, self._chunk_bytes, key, held)
