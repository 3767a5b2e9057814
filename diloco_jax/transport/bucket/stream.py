"""One direction of a session in a bucket: numbered objects, each a batch of messages, and their payloads.

The writer puts object after object under names that the reader computes. With its own objects the reader tells how many
it has read, and how many payloads it has fetched, and the writer deletes those. So a stream holds a bounded number of
objects, and nobody lists it.
"""

import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from google.protobuf.message import DecodeError

from diloco_jax.protocol.messages import Message
from diloco_jax.transport import wire
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.store import names
from diloco_jax.transport.store.bucket import Bucket
from diloco_jax.transport.store.seal import SEAL_BYTES

# Messages of one object, unless a single one is larger.
OBJECT_BYTES = 1 << 20
# What a reader accepts: that, one message more, and the rest of a batch.
OBJECT_BYTES_MAX = OBJECT_BYTES + 2 * wire.HEAD_BYTES_MAX
# Objects that the reader has not read. A writer waits above it.
UNREAD_MAX = 256


class Shared:
    """A payload for several sessions: it is written once, and deleted when the last one has fetched it.

    Args:
        number: Unique in this process and epoch.
    """

    def __init__(self, bucket: Bucket, epoch: int, number: int, parts: Sequence[memoryview]) -> None:
        self.reference = names.reference("v", number)
        self.size = sum(part.nbytes for part in parts)
        self._bucket = bucket
        self._key = names.payload(epoch, "", "", self.reference)
        self._parts: Sequence[memoryview] = parts
        self._lock = threading.Lock()
        self._written = False
        # Sessions that will fetch it, and the listener while it is the newest of its fragment.
        self._holders = 1

    def hold(self) -> None:
        """Count one more holder."""
        with self._lock:
            self._holders += 1

    def write(self) -> int:
        """Write the object unless that is done, and return the bytes written; StoreError if that fails."""
        with self._lock:
            if self._written:
                return 0
            size = self._bucket.write(self._key, *self._parts)
            self._written, self._parts = True, ()
            return size

    def release(self) -> None:
        """Count one holder less; the last one deletes the object. StoreError if that fails."""
        with self._lock:
            self._holders -= 1
            gone = self._holders == 0
            if gone:
                self._parts = ()
        if gone and self._written:
            self._bucket.store.delete([self._key])


class Place(NamedTuple):
    """Where a session's streams are."""

    bucket: Bucket
    epoch: int
    # Of the session.
    prefix: str


class StreamWriter:
    """Our direction. One thread writes objects, one writes payloads, and any thread may report what is read."""

    def __init__(self, place: Place, way: str) -> None:
        self._place, self._way = place, way
        # Number of the last object, and of the last payload of this session.
        self.number = self._payloads = 0
        self._lock = threading.Lock()
        self._unread: deque[tuple[int, str]] = deque()
        # Payloads of entries, in the order of the entries: their count so far, and what is to be deleted.
        self._entries = 0
        self._unfetched: deque[tuple[int, str | Shared]] = deque()

    @property
    def full(self) -> bool:
        """Tell whether the reader is so far behind that nothing more is written."""
        return len(self._unread) >= UNREAD_MAX

    def write(self, batch: pb.Batch) -> int:
        """Write the next object, and return its size. After a StoreError the same call writes the same object again."""
        number = self.number + 1
        key = names.in_stream(self._place.prefix, self._way, number)
        size = self._place.bucket.write(key, batch.SerializeToString())
        self.number = number
        with self._lock:
            self._unread.append((number, key))
        return size

    def write_payload(self, parts: Sequence[memoryview], shared: Shared | None) -> tuple[str, int]:
        """Write a payload, and return the reference to it with the bytes written; StoreError if that fails."""
        if shared is not None:
            written, reference, kept = shared.write(), shared.reference, shared
            with self._lock:
                self._entries += 1
                self._unfetched.append((self._entries, kept))
            return reference, written
        reference = names.reference("s", self._payloads + 1)
        key = names.payload(self._place.epoch, self._place.prefix, self._way, reference)
        written = self._place.bucket.write(key, *parts)
        self._payloads += 1
        with self._lock:
            self._entries += 1
            self._unfetched.append((self._entries, key))
        return reference, written

    def acknowledge(self, read: int, fetched: int) -> None:
        """Delete what the reader has read; a StoreError leaves it to the end of the session."""
        keys: list[str] = []
        with self._lock:
            while self._unread and self._unread[0][0] <= read:
                keys.append(self._unread.popleft()[1])
            done: list[str | Shared] = []
            while self._unfetched and self._unfetched[0][0] <= fetched:
                done.append(self._unfetched.popleft()[1])
        keys += [each for each in done if isinstance(each, str)]
        self._place.bucket.store.delete(keys)
        for each in done:
            if isinstance(each, Shared):
                each.release()

    def end(self) -> None:
        """Let go of payloads that nobody fetches any more; StoreError if the store does not answer."""
        with self._lock:
            left, self._unfetched = list(self._unfetched), deque()
        for _, each in left:
            if isinstance(each, Shared):
                each.release()


class Received(NamedTuple):
    """An entry of an object: a message, the end of the session, or the notice that the syncer takes it."""

    event: wire.Ready | wire.Goodbye | Message
    bulk: bool = False
    # Reference and size in bytes of its payload; "" if it has none.
    payload: str = ""
    size: int = 0


class StreamReader:
    """The other side's direction, for one thread.

    Args:
        control, bulk: Readers of the messages of each lane.
    """

    def __init__(self, place: Place, way: str, control: wire.Reader, bulk: wire.Reader) -> None:
        self._place, self._way = place, way
        self._control, self._bulk = control, bulk
        # Objects that were read.
        self.read = 0

    def next(self) -> pb.Batch | None:
        """Return the next object; None if it is not there yet.

        Raises:
            ValueError: It is too large, damaged, or of another run.
            StoreError: The store did not answer.
        """
        key = names.in_stream(self._place.prefix, self._way, self.read + 1)
        content = self._place.bucket.read(key, OBJECT_BYTES_MAX)
        if content is None:
            return None
        self.read += 1
        try:
            return pb.Batch.FromString(content)
        except DecodeError as error:
            raise wire.WireError(f"malformed object: {error}") from None

    def entry(self, entry: pb.Entry) -> Received:
        """Return an entry of an object; WireError if it is not allowed."""
        if not entry.bulk:
            found = self._control.read_head(entry.frame, 0)
            if isinstance(found, wire.Incoming):
                if found.message is None:
                    raise wire.WireError("an entry without a message")
                return Received(found.message)
            return Received(found)
        read = self._bulk.read_head(entry.frame, int(bool(entry.payload)))
        if not isinstance(read, wire.Incoming) or read.message is None:
            raise wire.WireError("an entry of the bulk lane without a message")
        if bool(entry.payload) != bool(read.chunk.payload_bytes):
            raise wire.WireError(f"an entry names {read.chunk.payload_bytes} bytes at {entry.payload[:40]!r}")
        return Received(read.message, True, entry.payload, read.chunk.payload_bytes)

    def fetch(self, received: Received) -> bytes | None:
        """Return the payload of an entry; None if it is gone. Raises as `next`."""
        place = self._place
        key = names.payload(place.epoch, place.prefix, self._way, received.payload)
        data = place.bucket.store.read_whole(key, received.size + SEAL_BYTES)
        return None if data is None else place.bucket.seal.open(key, data)


def control_entry(body: bytes) -> pb.Entry:
    """Return the entry of a message of the control lane."""
    return pb.Entry(frame=body)


def bulk_entry(number: int, body: bytes, size: int, payload: str) -> pb.Entry:
    """Return the entry of a message of the bulk lane, the session's number-th."""
    chunk = pb.Chunk(payload_bytes=size, message=number)
    return pb.Entry(frame=wire.piece_head(wire.BulkPiece(body, chunk, [])), bulk=True, payload=payload)
