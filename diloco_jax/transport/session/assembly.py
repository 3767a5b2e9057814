"""Chunks of the bulk lane, as they come over several connections, to messages with payloads, in order, each once.

Bounds, whatever the peer does
  * A message other than the oldest is begun only while at most MESSAGES_MAX are open and their payloads, counted whole,
    are together within the limit of one: so all together are below twice that limit.
  * A payload has at most RANGES_MAX ranges that do not touch.
Who brings more waits, and with it its connection; the rest of what fills the oldest message never waits behind it, for
every connection carries its chunks in order.
"""

import threading
from collections.abc import Callable

import google_crc32c
import numpy as np

from diloco_jax.core.codec import digest
from diloco_jax.protocol.messages import Message
from diloco_jax.transport.partials import RESUME_BYTES_MIN, Key, Partial, Partials, Ranges
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.wire import Incoming, WireError

MESSAGES_MAX = 64
RANGES_MAX = 1024


class _Open:
    """A message of which something has come."""

    def __init__(self, key: Key, partial: Partial | None) -> None:
        self.key = key
        self.resumed = partial is not None
        self.message: Message | None = None
        self.ranges = Ranges() if partial is None else partial.ranges
        self.buffer = None if partial is None else partial.buffer
        self.payload = memoryview(b"")  # if it came in one chunk: that

    @property
    def complete(self) -> bool:
        return self.message is not None and self.ranges.filled == self.key[1]

    def fill(self, start: int, data: memoryview) -> None:
        self.ranges.add(start, start + data.nbytes)
        if data.nbytes == self.key[1]:
            self.payload = data
            return
        if self.buffer is None:
            self.buffer = np.empty(self.key[1], np.uint8)  # pages are taken when filled: an empty claim costs nothing
        self.buffer.data[start : start + data.nbytes] = data
        if self.ranges.filled == self.key[1]:
            self.payload = self.buffer.data.toreadonly()


class Assembly:
    """The receiving end of a session's bulk lane; the readers of all its connections share it.

    Args:
        partials: Where what is not complete at the end of the session goes, and where the next one finds it.
    """

    def __init__(self, payload_bytes_max: int, partials: Partials) -> None:
        self._payload_bytes_max = payload_bytes_max
        self._partials = partials
        self._changed = threading.Condition()
        self._open: dict[int, _Open] = {}
        self._next = 1  # number of the oldest message that was not delivered
        self._delivering = False
        self._closed = False
        self.claimed_bytes = 0  # size of the payloads of all open messages

    def add(self, incoming: Incoming) -> None:
        """Take one chunk; waits while there is no room for it, and does nothing once the assembly is closed.

        Raises:
            WireError: The chunk is corrupt, too large, out of place, or completes a payload that is not what it was
                said to be.
        """
        chunk, data = incoming.chunk, incoming.data
        if chunk.payload_bytes > self._payload_bytes_max:
            raise WireError(
                f"message {chunk.message} announces a payload of {chunk.payload_bytes} bytes, the limit here is "
                f"{self._payload_bytes_max}: raise transport.payload_bytes_max on all sides, or use more fragments"
            )
        if google_crc32c.value(np.frombuffer(data, np.uint8)) != chunk.crc32c:
            raise WireError(f"corrupt chunk: crc32c differs at offset {chunk.offset} of message {chunk.message}")
        with self._changed:
            each = self._wait_for_room(chunk, data.nbytes)
            if each is not None:
                self._fill(each, incoming)

    def has_room(self, chunk: pb.Chunk, size: int) -> bool:
        """Tell whether a chunk with `size` bytes would be taken, or refused, at once."""
        each = self._open.get(chunk.message)
        if each is not None:
            return len(each.ranges) < RANGES_MAX or each.ranges.touches(chunk.offset, chunk.offset + size)
        if chunk.message <= self._next:
            return True
        fits = self.claimed_bytes + chunk.payload_bytes <= self._payload_bytes_max
        return len(self._open) < MESSAGES_MAX and fits

    def _wait_for_room(self, chunk: pb.Chunk, size: int) -> _Open | None:
        """Return the open message of the chunk; None if the assembly was closed meanwhile."""
        number = chunk.message
        self._changed.wait_for(lambda: self._closed or self.has_room(chunk, size))
        if self._closed:
            return None
        if number in self._open:
            return self._open[number]
        if number < self._next:
            raise WireError(f"a chunk of message {number}, which is complete: {self._next} is the next")
        key = (chunk.key, chunk.payload_bytes)
        partial = self._partials.claim(key) if chunk.resumed else None
        if chunk.resumed and partial is None:
            raise WireError(f"message {number} leaves out bytes of a payload of which nothing is kept here")
        self._open[number] = _Open(key, partial)
        self.claimed_bytes += chunk.payload_bytes
        return self._open[number]

    def _fill(self, each: _Open, incoming: Incoming) -> None:
        message, chunk, data = incoming
        key = (chunk.key, chunk.payload_bytes)
        where = f"chunk of {data.nbytes} bytes at {chunk.offset} of {chunk.payload_bytes} of message {chunk.message}"
        if each.key != key or each.resumed != chunk.resumed or chunk.offset + data.nbytes > chunk.payload_bytes:
            raise WireError(f"{where} is out of place")
        if message is not None:
            if each.message is not None:
                raise WireError(f"message {chunk.message} came twice")
            each.message = message
        if data:
            try:
                each.fill(chunk.offset, data)
            except ValueError as error:
                raise WireError(f"{where} is out of place: {error}") from None
        elif chunk.offset or message is None or (chunk.payload_bytes and not chunk.resumed):
            raise WireError(f"{where} is out of place")
        if each.complete:
            self._check_whole(chunk.message, each)
        self._changed.notify_all()

    def _check_whole(self, number: int, each: _Open) -> None:
        """Refuse a payload of two sessions that is not, as a whole, what was announced."""
        if not each.resumed:
            return
        assert each.buffer is not None
        each.payload = each.buffer.data.toreadonly()
        if digest(each.payload) != each.key[0]:
            self._forget(number)
            raise WireError(f"the payload of message {number} is not the one whose first part was kept")

    def deliver(self, offer: Callable[[Message, memoryview], object]) -> None:
        """Hand out what is complete, in order; `offer` may block. One thread at a time, the others go on at once."""
        with self._changed:
            if self._delivering:
                return
            self._delivering = True
        while True:
            with self._changed:
                each = self._open.get(self._next)
                if each is None or each.message is None or not each.complete:
                    self._delivering = False
                    return
            offer(each.message, each.payload)
            with self._changed:
                if self._closed:
                    return
                self._forget(self._next)
                self._next += 1
                self._changed.notify_all()

    def _forget(self, number: int) -> None:
        self.claimed_bytes -= self._open.pop(number).key[1]

    def close(self) -> None:
        """Take nothing more, let nobody wait, and keep what can be continued by the next session."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            left = [
                Partial(each.key, each.buffer, each.ranges)
                for each in self._open.values()
                if each.buffer is not None and each.ranges.filled and each.key[0] and each.key[1] > RESUME_BYTES_MIN
            ]
            self._open.clear()
            self.claimed_bytes = 0
            self._changed.notify_all()
        self._partials.put(left)
