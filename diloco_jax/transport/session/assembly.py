"""Assembly of the bulk lane: chunks from several connections become messages with payloads, in order, each once.

Bounds, whatever the peer does
  * The assembly opens a message other than the oldest only while at most MESSAGES_MAX are open and their full payloads
    together stay within the limit of one payload. So all payloads together stay below twice that limit.
  * A payload has at most RANGES_MAX ranges that do not touch.
A chunk that exceeds a bound waits, and its connection waits with it. The chunks of the oldest message never wait behind
it, because every connection carries its chunks in order.
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
    """A message with some of its chunks."""

    def __init__(self, key: Key, partial: Partial | None) -> None:
        self.key = key
        self.resumed = partial is not None
        self.message: Message | None = None
        self.ranges = Ranges() if partial is None else partial.ranges
        self.buffer = None if partial is None else partial.buffer
        # The payload shares the chunk's memory if it arrived in one chunk.
        self.payload = memoryview(b"")

    @property
    def complete(self) -> bool:
        return self.message is not None and self.ranges.filled == self.key[1]

    def fill(self, start: int, data: memoryview) -> None:
        self.ranges.add(start, start + data.nbytes)
        if data.nbytes == self.key[1]:
            self.payload = data
            return
        if self.buffer is None:
            # The system allocates pages when they are filled, so an announced payload without bytes costs nothing.
            self.buffer = np.empty(self.key[1], np.uint8)
        self.buffer.data[start : start + data.nbytes] = data
        if self.ranges.filled == self.key[1]:
            self.payload = self.buffer.data.toreadonly()


class Assembly:
    """The receiving end of a session's bulk lane, shared by the readers of all its connections.

    Args:
        partials: Takes the incomplete payloads at the end of the session, and gives them to the next one.
    """

    def __init__(self, payload_bytes_max: int, partials: Partials) -> None:
        self._payload_bytes_max = payload_bytes_max
        self._partials = partials
        self._changed = threading.Condition()
        self._open: dict[int, _Open] = {}
        # The number of the oldest message that was not delivered.
        self._next = 1
        self._delivering = False
        self._closed = False
        # The full size of the payloads of all open messages.
        self.claimed_bytes = 0

    def add(self, incoming: Incoming) -> None:
        """Add one chunk; wait while there is no room for it, and do nothing once the assembly is closed.

        Raises:
            WireError: The chunk is corrupt, too large or out of place, or completes a payload that differs from the
                announced one.
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
        """Tell whether a chunk with `size` bytes can be added, or refused, without waiting."""
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
            raise WireError(f"message {number} leaves out bytes of a payload, but nothing of it is kept here")
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
        """Refuse a payload from two sessions that differs, as a whole, from the announced one."""
        if not each.resumed:
            return
        assert each.buffer is not None
        each.payload = each.buffer.data.toreadonly()
        if digest(each.payload) != each.key[0]:
            self._forget(number)
            raise WireError(f"the payload of message {number} is not the one whose first part was kept")

    def deliver(self, offer: Callable[[Message, memoryview], object]) -> None:
        """Deliver complete messages in order; `offer` may block.

        One thread delivers at a time; the others return at once.
        """
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
        """Refuse chunks from now on, end all waits, and keep payloads that the next session can continue."""
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
