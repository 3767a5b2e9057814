"""One direction of a session in a bucket: numbered objects, each a batch of messages, and their payloads.

The writer puts object after object under names that the reader computes. With its own objects the reader tells how many
it has read, and how many messages of the bulk lane it has delivered, and the writer deletes those. So a stream holds a
bounded number of objects, and nobody lists it.

An object that the run's processes did not write counts as missing: the writer may still replace it with its own.
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
from diloco_jax.transport.store.seal import SEAL_BYTES, Unsealed
from diloco_jax.transport.store.store import TooLarge

# Messages of one object, unless a single one is larger.
OBJECT_BYTES = 1 << 20
# What a reader accepts: that, one message more, and the rest of a batch.
OBJECT_BYTES_MAX = OBJECT_BYTES + 2 * wire.HEAD_BYTES_MAX
# Objects that the reader has not read. A writer waits above it.
UNREAD_MAX = 256


class Shared:
    """A payload for several sessions: it is written once, and deleted when the last one has fetched it.

    Sharing shows nobody more than separate objects do. The object is sealed like all others (store/seal.py), under a
    separate nonce and with its name authenticated, so one name never has two contents. Everyone who may read it has
    the run's token, and may read every object. The name is a number and says nothing about the content, as a digest
    would: the owner of the store could compare that with the digest of a guess.

    Args:
        number: Unique in this process and epoch.
    """

    def __init__(self, bucket: Bucket, epoch: int, number: int, parts: Sequence[memoryview]) -> None:
        self.reference = names.reference("v", number)
        self.size = sum(part.nbytes for part in parts)
        self._bucket = bucket
        self._key = names.payload(epoch, "", "", self.reference)
        self._parts: Sequence[memoryview] = parts
        # Held while the object is written, which may take long, by no thread that must not wait.
        self._writing = threading.Lock()
        self._lock = threading.Lock()
        self._tried = self._written = False
        # Messages whose sessions will fetch it, and the listener while it may get one more.
        self._holders = 1

    def hold(self) -> None:
        """Count one more holder."""
        with self._lock:
            self._holders += 1

    def write(self) -> int:
        """Write the object unless that is done, and return the bytes written; StoreError if that fails."""
        with self._writing:
            if self._written:
                return 0
            # A request that fails may have succeeded.
            self._tried = True
            size = self._bucket.write(self._key, *self._parts)
            self._written, self._parts = True, ()
            return size

    def release(self) -> None:
        """Count one holder less; the last one deletes the object."""
        with self._lock:
            self._holders -= 1
            gone = self._holders == 0
        if gone:
            self._parts = ()
            if self._tried:
                self._bucket.discard([self._key])


class StreamPlace(NamedTuple):
    """The place of a session's streams."""

    bucket: Bucket
    epoch: int
    # Of the session.
    prefix: str


class StreamWriter:
    """Our direction. One thread writes objects, one writes payloads, and any thread may report what is read."""

    def __init__(self, place: StreamPlace, way: str) -> None:
        self._place, self._way = place, way
        # Number of the last object, and of the last payload of this session.
        self.number = self._payloads = 0
        self._lock = threading.Lock()
        self._unread: deque[tuple[int, str]] = deque()
        # Messages of the bulk lane, in their order: their count so far, and the payload that is to be deleted.
        self._count = 0
        self._undelivered: deque[tuple[int, str | Shared | None]] = deque()

    @property
    def full(self) -> bool:
        """Tell whether the reader is so far behind that nothing more is written."""
        return len(self._unread) >= UNREAD_MAX

    @property
    def undelivered(self) -> int:
        """Return the number of messages of the bulk lane that the reader has not delivered."""
        return len(self._undelivered)

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
        """Write the payload of the next message of the bulk lane, if it has one.

        Returns:
            The reference to it, and the bytes written.

        Raises:
            StoreError: That failed; the same call may be repeated.
        """
        reference, written = "", 0
        kept: str | Shared | None = shared
        if shared is not None and shared.size:
            written, reference = shared.write(), shared.reference
        elif parts:
            reference = names.reference("s", self._payloads + 1)
            kept = names.payload(self._place.epoch, self._place.prefix, self._way, reference)
            written = self._place.bucket.write(kept, *parts)
            self._payloads += 1
        with self._lock:
            self._count += 1
            self._undelivered.append((self._count, kept))
        return reference, written

    def withdraw(self) -> None:
        """Delete the payload that was written last, because its message is not sent."""
        with self._lock:
            last = [self._undelivered.pop()] if self._undelivered else []
        self._let_go([], last)

    def acknowledge(self, read: int, delivered: int) -> None:
        """Delete what the reader needs no more."""
        keys: list[str] = []
        done: list[tuple[int, str | Shared | None]] = []
        with self._lock:
            while self._unread and self._unread[0][0] <= read:
                keys.append(self._unread.popleft()[1])
            while self._undelivered and self._undelivered[0][0] <= delivered:
                done.append(self._undelivered.popleft())
        self._let_go(keys, done)

    def end(self) -> None:
        """Let go of payloads for several sessions that this one's reader fetches no more."""
        with self._lock:
            left, self._undelivered = list(self._undelivered), deque()
        self._let_go([], [each for each in left if isinstance(each[1], Shared)])

    def _let_go(self, keys: list[str], done: Sequence[tuple[int, str | Shared | None]]) -> None:
        keys += [each for _, each in done if isinstance(each, str)]
        if keys:
            self._place.bucket.discard(keys)
        for _, each in done:
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

    def __init__(self, place: StreamPlace, way: str, control: wire.Reader, bulk: wire.Reader) -> None:
        self._place, self._way = place, way
        self._control, self._bulk = control, bulk
        # Objects that were read.
        self.read = 0
        # Why the next object is not used, if there is one.
        self.trouble = ""

    def next(self) -> pb.Batch | None:
        """Return the next object; None if it is not there yet.

        Raises:
            WireError: Its content is not allowed.
            StoreError: The store did not answer.
        """
        key = names.in_stream(self._place.prefix, self._way, self.read + 1)
        try:
            content = self._place.bucket.read(key, OBJECT_BYTES_MAX)
        except (TooLarge, Unsealed) as error:
            self.trouble = str(error)
            return None
        self.trouble = ""
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
        """Return the payload of an entry; None if it is gone.

        Raises:
            Unsealed: It is damaged.
            WireError: The entry refers to no payload.
            StoreError: The store did not answer.
        """
        place = self._place
        try:
            key = names.payload(place.epoch, place.prefix, self._way, received.payload)
        except ValueError as error:
            raise wire.WireError(str(error)) from None
        data = place.bucket.store.read_whole(key, received.size + SEAL_BYTES)
        return None if data is None else place.bucket.seal.open(key, data)


def control_entry(body: bytes) -> pb.Entry:
    """Return the entry of a message of the control lane."""
    return pb.Entry(frame=body)


def bulk_entry(number: int, body: bytes, size: int, payload: str) -> pb.Entry:
    """Return the entry of a message of the bulk lane, the session's number-th."""
    chunk = pb.Chunk(payload_bytes=size, message=number)
    return pb.Entry(frame=wire.piece_head(wire.BulkPiece(body, chunk, [])), bulk=True, payload=payload)
