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
from typing import NamedTuple

from diloco_jax.core.codec import digest
from diloco_jax.protocol.messages import Message
from diloco_jax.transport.partials import RESUME_BYTES_MIN, Key, Partial, Partials, Ranges
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session.spares import take_buffer
from diloco_jax.transport.wire import WireError

MESSAGES_MAX = 64
RANGES_MAX = 1024


class _Open:
    """A message with some of its chunks."""

    def __init__(self, key: Key, chunk: pb.Chunk, partial: Partial | None) -> None:
        self.key = key
        # The digest of the whole payload if an earlier session started it, else 0.
        self.digest = chunk.digest
        # Whether its chunks have no checksums.
        self.digested = chunk.digested
        self.resumed = partial is not None
        self.message: Message | None = None
        self.ranges = Ranges() if partial is None else partial.ranges  # arrived
        # Ranges that arrived, or that a connection is filling.
        self.claimed = Ranges(self.ranges)
        self.buffer = None if partial is None else partial.buffer
        self.filling = 0  # connections

    @property
    def complete(self) -> bool:
        return self.message is not None and not self.filling and self.ranges.filled == self.key[1]

    @property
    def payload(self) -> memoryview:
        return memoryview(b"") if self.buffer is None else self.buffer.data.toreadonly()

    def claim(self, start: int, size: int) -> memoryview:
        """Return the memory of a range; ValueError if it is empty, or claimed already."""
        self.claimed.add(start, start + size)
        if self.buffer is None:
            # The system allocates pages when they are filled, so an announced payload without bytes costs nothing.
            self.buffer = take_buffer(self.key[1])
        return self.buffer.data[start : start + size]

    def left(self) -> list[Partial]:
        """Return what the next session can continue: nothing while a connection fills a range."""
        whole, size = self.buffer, self.key[1]
        if whole is None or self.filling or not self.ranges.filled or not self.key[0] or size <= RESUME_BYTES_MIN:
            return []
        return [Partial(self.key, whole, self.ranges)]


class ChunkPlace(NamedTuple):
    """The memory for one chunk's data, until `filled` or `leave`."""

    message: _Open
    chunk: pb.Chunk
    view: memoryview


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

    def claim(self, message: Message | None, chunk: pb.Chunk, size: int) -> ChunkPlace | None:
        """Return the memory for one chunk's data; wait while there is no room for it. None: the assembly was closed.

        The caller fills it, and then calls `filled`, or `leave` if it cannot.

        Raises:
            WireError: The chunk is too large or out of place.
        """
        self._check_size(chunk)
        with self._changed:
            each = self._wait_for_room(chunk, size)
            if each is None:
                return None
            view = self._claim(each, message, chunk, size)
            each.filling += 1
            return ChunkPlace(each, chunk, view)

    def filled(self, place: ChunkPlace) -> None:
        """Note that a chunk's data arrived; WireError if the payload is complete and differs from the announced one."""
        each, start, size = place.message, place.chunk.offset, place.view.nbytes
        with self._changed:
            each.filling -= 1
            if size:
                each.ranges.add(start, start + size)
            if self._closed:
                left = each.left()
            else:
                left = []
                if each.complete:
                    self._check_whole(place.chunk.message, each)
                self._changed.notify_all()
        self._partials.put(left)

    def leave(self, place: ChunkPlace, arrived: int = 0) -> None:
        """Give up a place, because its connection was lost after `arrived` bytes, or brought damaged data."""
        start = place.chunk.offset
        with self._changed:
            place.message.filling -= 1
            if arrived:
                place.message.ranges.add(start, start + arrived)
            left = place.message.left() if self._closed else []
        self._partials.put(left)

    def _check_size(self, chunk: pb.Chunk) -> None:
        if chunk.payload_bytes > self._payload_bytes_max:
            raise WireError(
                f"message {chunk.message} announces a payload of {chunk.payload_bytes} bytes, the limit here is "
                f"{self._payload_bytes_max}: raise transport.payload_bytes_max on all sides, or use more fragments"
            )

    def has_room(self, chunk: pb.Chunk, size: int) -> bool:
        """Tell whether a chunk with `size` bytes can be added, or refused, without waiting."""
        each = self._open.get(chunk.message)
        if each is not None:
            return len(each.claimed) < RANGES_MAX or each.claimed.touches(chunk.offset, chunk.offset + size)
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
        self._open[number] = _Open(key, chunk, partial)
        self.claimed_bytes += chunk.payload_bytes
        return self._open[number]

    def _claim(self, each: _Open, message: Message | None, chunk: pb.Chunk, size: int) -> memoryview:
        key = (chunk.key, chunk.payload_bytes)
        where = f"chunk of {size} bytes at {chunk.offset} of {chunk.payload_bytes} of message {chunk.message}"
        ours, theirs = (each.resumed, each.digest, each.digested), (chunk.resumed, chunk.digest, chunk.digested)
        if each.key != key or ours != theirs or chunk.offset + size > chunk.payload_bytes:
            raise WireError(f"{where} is out of place")
        if message is not None:
            if each.message is not None:
                raise WireError(f"message {chunk.message} came twice")
            each.message = message
        if not size:
            if chunk.offset or message is None or (chunk.payload_bytes and not chunk.resumed):
                raise WireError(f"{where} is out of place")
            return memoryview(bytearray())
        try:
            return each.claim(chunk.offset, size)
        except ValueError as error:
            raise WireError(f"{where} is out of place: {error}") from None

    def _check_whole(self, number: int, each: _Open) -> None:
        """Refuse a payload from two sessions that differs, as a whole, from the announced one."""
        if each.resumed and digest(each.payload) != each.digest:
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

    @property
    def receiving(self) -> bool:
        """Tell whether a payload has arrived in part, or is complete and not delivered."""
        return bool(self._open)

    def _forget(self, number: int) -> None:
        self.claimed_bytes -= self._open.pop(number).key[1]

    def close(self) -> None:
        """Refuse chunks from now on, end all waits, and keep payloads that the next session can continue."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            # The connections that are filling a range keep the others when they end.
            left = [partial for each in self._open.values() for partial in each.left()]
            self._open.clear()
            self.claimed_bytes = 0
            self._changed.notify_all()
        self._partials.put(left)
