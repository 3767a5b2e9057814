"""One end of a session in a bucket, with four threads: two write messages and payloads, two read them.

Silence is the only sign that the other side is gone, because a bucket keeps what a dead process wrote. Each side writes
something every half of `keepalive_s`, and takes the other side for lost after `keepalive_s + keepalive_timeout_s` in
which it has read nothing. A store that does not answer is silence, too, so each side tries again until then.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from diloco_jax.protocol.messages import SYNCER, CutFragment, Message
from diloco_jax.transport import wire
from diloco_jax.transport.bucket.stream import (
    OBJECT_BYTES,
    Place,
    Received,
    Shared,
    StreamReader,
    StreamWriter,
    bulk_entry,
    control_entry,
)
from diloco_jax.transport.commands import Command, Reply
from diloco_jax.transport.link import BULK_TYPES, LinkClosed, TransportConfig, is_bulk
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session.inbox import Inbox, Session
from diloco_jax.transport.session.stream import Outbox, lane_header
from diloco_jax.transport.store import names
from diloco_jax.transport.store.store import StoreError

# Objects of the other side that are read before we say so in an object that has nothing else.
OWED_MAX = 16
# The pause after a store that did not answer.
AGAIN_S = 1.0
# A learner whose syncer is silent for this long, or five polls, looks for a newer one, and again as often.
DOUBT_S = 5.0

log = logging.getLogger(__name__)


class Bulk(NamedTuple):
    """A message of the bulk lane that waits for its writer."""

    body: bytes
    parts: tuple[memoryview, ...]
    is_cut: bool = False
    shared: Shared | None = None

    @property
    def size(self) -> int:
        """Return the bytes of its payload."""
        return self.shared.size if self.shared is not None else sum(part.nbytes for part in self.parts)


class BucketSession(Session):
    """One end of a session over two streams of objects.

    Args:
        header: Header with run, epoch, incarnation, session and host; the sender is the learner.
        place: Where its objects are.
        readable: Message classes that the peer may send.
        serves: Whether this is the syncer's end.
        superseded: Tells a learner whether a newer syncer leads.
        name: The other side's name in deliveries, if it is not its name on the wire.
    """

    def __init__(
        self,
        inbox: Inbox,
        header: pb.Header,
        config: TransportConfig,
        place: Place,
        readable: tuple[type, ...],
        *,
        serves: bool,
        superseded: Callable[[], bool] = lambda: False,
        name: str = "",
    ) -> None:
        peer = header.sender if serves else SYNCER
        super().__init__(inbox, header, name or peer, config)
        self.place = place
        self._superseded = superseded
        ours, theirs = (names.DOWN, names.UP) if serves else (names.UP, names.DOWN)
        self._writer = StreamWriter(place, ours)
        readers = [
            wire.Reader(
                lane_header(header, lane, 0, peer),
                tuple(kind for kind in readable if (kind in BULK_TYPES) == (lane == pb.LANE_BULK)),
            )
            for lane in (pb.LANE_CONTROL, pb.LANE_BULK)
        ]
        self._reader = StreamReader(place, theirs, *readers)
        self._outbox = Outbox(config.queue_payloads_max)
        self._outbox.on_take = self._on_take
        # Payloads for several sessions that wait to be written here.
        self._promised: deque[Shared] = deque()
        self._changed = threading.Condition()
        self._entries: deque[pb.Entry] = deque()
        self._fetching: deque[Received] = deque()
        self._fetched = self._owed = 0
        self._payloads_done = self._flushes = False
        self.refused = ""
        self.final = False
        self._settled = threading.Event()
        self.written = threading.Event()
        self._heard_s = time.monotonic()
        # When our last object was written, and what it said that we have read and fetched.
        self._written_s, self._told = -1e9, (0, 0)

    def start(self, *first: pb.Entry) -> None:
        """Start the threads; `first` are our first entries."""
        self._entries.extend(first)
        self._heard_s = time.monotonic()
        for word, body in (
            ("write", self._write),
            ("payloads", self._write_payloads),
            ("read", self._read),
            ("fetch", self._fetch),
        ):
            threading.Thread(target=body, name=f"diloco-{word}-{self.peer}", daemon=True).start()

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the syncer takes the session; return False after `timeout_s`, or when it is over."""
        return self._settled.wait(timeout_s) and self.open

    @property
    def receiving(self) -> bool:
        """Tell whether a payload is on its way to the driver."""
        return bool(self._fetching) or self.waiting_bytes > 0

    @property
    def cuts_waiting(self) -> int:
        return self._outbox.cuts

    def send(
        self, message: Message | Command | Reply, parts: tuple[memoryview, ...], shared: Shared | None = None
    ) -> None:
        """Queue a message; LinkClosed if the session is over, or its queue is full, which ends it.

        Args:
            shared: The payload, in place of `parts`, if other sessions get it, too.
        """
        body, bulk = wire.pack_body(message), is_bulk(message)
        if bulk:
            if shared is not None:
                shared.hold()
                with self._changed:
                    self._promised.append(shared)
            queued = self._outbox.put(Bulk(body, parts, isinstance(message, CutFragment), shared))  # type: ignore[arg-type]
        else:
            with self._changed:
                queued = self.open and len(self._entries) < self.config.queue_messages_max
                if queued:
                    self._entries.append(control_entry(body))
                    self._changed.notify_all()
        if not queued:
            self.fail(f"the {'bulk' if bulk else 'control'} queue to {self.peer!r} is full: it does not read it")
            raise LinkClosed(f"the session with {self.peer!r} is over: {self.reason}")

    def fail(self, reason: str) -> None:
        self._end(reason, tell=True, flush=False)

    def retire(self, reason: str) -> None:
        """End this side without a delivery here; what waits is still written, then a goodbye."""
        self._end(reason, tell=False, flush=True)

    def refuse(self, reason: str, *, final: bool) -> None:
        """Tell a learner why it gets no session; nothing was started."""
        batch = pb.Batch(refused=reason, final=final)
        with contextlib.suppress(StoreError):
            self._writer.write(batch)

    def _end(self, reason: str, *, tell: bool, flush: bool) -> None:
        if not self.finish(reason, tell=tell):
            return
        self._outbox.close(reason, flush=flush)
        with self._changed:
            self._flushes = flush
            if not flush:
                self._entries.clear()
                self._payloads_done = True
            self._fetching.clear()
            self._changed.notify_all()
        self._settled.set()

    def _on_take(self) -> None:
        if self.on_room is not None:
            self.on_room()

    # What follows runs on the session's threads.

    def _write_payloads(self) -> None:
        number = 0
        while (taken := self._outbox.take()) is not None:
            item: Bulk = taken  # type: ignore[assignment]
            number += 1
            reference = ""
            if item.size and not (reference := self._write_payload(item)):
                break
            with self._changed:
                self._entries.append(bulk_entry(number, item.body, item.size, reference))
                self._changed.notify_all()
            del item, taken
        with self._changed:
            self._payloads_done = True
            left, self._promised = list(self._promised), deque()
            self._changed.notify_all()
        with contextlib.suppress(StoreError):
            for shared in left:
                shared.release()

    def _write_payload(self, item: Bulk) -> str:
        """Return the reference to a payload once it is in the bucket; "" if the session ends before."""
        while not self._outbox.cut:
            try:
                reference, size = self._writer.write_payload(item.parts, item.shared)
            except StoreError as error:
                log.info(f"a payload for {self.peer} waits: {error}")
                time.sleep(AGAIN_S)
                continue
            self.inbox.count(sent_bytes=size)
            if item.shared is not None:
                with self._changed:
                    self._promised.remove(item.shared)
            return reference
        return ""

    def _write(self) -> None:
        """Write objects until the session is over; the last one has the goodbye."""
        try:
            while True:
                with self._changed:
                    while not self._due():
                        self._changed.wait(self._wait_s())
                    ends = not self.open and self._payloads_done
                    batch = self._batch(ends=ends)
                    ends = ends and not self._entries
                if not self._put(batch):
                    return
                self._written_s, self._told = time.monotonic(), (batch.read, batch.fetched)
                if ends:
                    return
        finally:
            self.written.set()
            with contextlib.suppress(StoreError):
                self._writer.end()

    def _wait_s(self) -> float:
        """Return the longest time until an object may be due without a further change."""
        since_s, poll_s = time.monotonic() - self._written_s, self.config.poll_s
        wait_s = poll_s - since_s if self._entries and since_s < poll_s else poll_s
        return max(0.001, min(wait_s, self.config.keepalive_s / 8))

    def _due(self) -> bool:
        """Tell whether an object shall be written now."""
        since_s, (read, fetched) = time.monotonic() - self._written_s, self._told
        if not self.open:
            return self._payloads_done or bool(self._entries)
        if since_s >= self.config.keepalive_s / 2:
            return True
        if self._entries and not self._writer.full and since_s >= self.config.poll_s:
            return True
        # An object that only says what we have read is not answered in the same way, or that would never end.
        owes = self._owed > read or self._fetched > fetched
        return owes and (self._owed - read >= OWED_MAX or since_s >= 4 * self.config.poll_s)

    def _batch(self, *, ends: bool) -> pb.Batch:
        batch = pb.Batch(read=self._reader.read, fetched=self._fetched)
        size = 0
        while self._entries and size <= OBJECT_BYTES:
            entry = self._entries.popleft()
            size += len(entry.frame)
            batch.entries.append(entry)
        if ends and not self._entries:
            batch.entries.append(control_entry(wire.goodbye_head(self.reason)))
        return batch

    def _put(self, batch: pb.Batch) -> bool:
        """Write an object; False if the session ended before the store answered."""
        while True:
            try:
                self.inbox.count(sent_bytes=self._writer.write(batch))
                return True
            except StoreError as error:
                if not self.open and not self._flushes:
                    return False
                log.info(f"messages for {self.peer} wait: {error}")
                with self._changed:
                    self._changed.wait_for(lambda: not self.open, AGAIN_S)
                if not self.open:
                    # One more try, so that a short fault does not cost the goodbye.
                    self._flushes = False

    def _read(self) -> None:
        doubt_s = max(DOUBT_S, 5 * self.config.poll_s)
        asked_s, trouble = time.monotonic(), ""
        while self.open:
            try:
                batch = self._reader.next()
                trouble = ""
                if batch is not None:
                    self._heard_s = asked_s = time.monotonic()
                    self._take(batch)
                    continue
                if time.monotonic() - asked_s > doubt_s:
                    asked_s = time.monotonic()
                    if self._superseded():
                        self.fail("a newer syncer leads the run")
                        return
            except StoreError as error:
                trouble = f" ({error})"
            except ValueError as error:
                self.fail(f"{self.peer!r} sent what cannot be used: {error}")
                return
            # A reader that ended silently would leave a session that never ends.
            except Exception as error:
                self.fail(f"the session with {self.peer!r} failed: {error!r}")
                return
            silent_s = time.monotonic() - self._heard_s
            if silent_s > self.config.keepalive_s + self.config.keepalive_timeout_s:
                self.fail(f"{self.peer!r} has written nothing for {silent_s:.0f} s{trouble}")
                return
            with self._changed:
                self._changed.wait_for(lambda: not self.open, self.config.poll_s)

    def _take(self, batch: pb.Batch) -> None:
        self.inbox.count(received_bytes=batch.ByteSize())
        # What stays behind is deleted at the end of the session.
        with contextlib.suppress(StoreError):
            self._writer.acknowledge(batch.read, batch.fetched)
        if batch.refused:
            self.refused, self.final = batch.refused, batch.final
            self.fail(batch.refused)
            return
        for each in batch.entries:
            received = self._reader.entry(each)
            if isinstance(received.event, wire.Ready):
                self.announced = True
                self._settled.set()
            elif received.bulk or isinstance(received.event, wire.Goodbye):
                if received.size > self.config.payload_bytes_max:
                    raise wire.WireError(
                        f"a payload of {received.size} bytes, the limit is {self.config.payload_bytes_max}: raise "
                        "transport.payload_bytes_max on all sides, or use more fragments"
                    )
                self._queue(received)
            else:
                self.offer(received.event, memoryview(b""))
        with self._changed:
            if batch.entries:
                self._owed = self._reader.read
            self._changed.notify_all()

    def _queue(self, received: Received) -> None:
        """Queue a message for the thread that fetches payloads; waits for room."""
        with self._changed:
            room = self.config.queue_payloads_max
            self._changed.wait_for(lambda: not self.open or len(self._fetching) < room)
            if self.open:
                self._fetching.append(received)
                self._changed.notify_all()

    def _fetch(self) -> None:
        """Deliver the messages of the bulk lane, and the goodbye after them."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self.open or bool(self._fetching))
                if not self.open:
                    return
                # It stays in the queue until it is delivered, so that `receiving` is true meanwhile.
                received = self._fetching[0]
            if isinstance(received.event, wire.Goodbye):
                self.fail(f"{self.peer!r} ended the session: {received.event.reason}")
                return
            payload: bytes | None = b""
            if received.payload:
                payload = self._fetched_payload(received)
                if payload is None:
                    return
            if not isinstance(received.event, wire.Ready):
                self.offer(received.event, memoryview(payload or b""))
            with self._changed:
                self._fetched += bool(received.payload)
                if self._fetching:
                    self._fetching.popleft()
                self._changed.notify_all()

    def _fetched_payload(self, received: Received) -> bytes | None:
        """Return a payload; None if the session is over before, which a payload that is gone ends."""
        while self.open:
            try:
                payload = self._reader.fetch(received)
            except StoreError as error:
                log.info(f"a payload of {self.peer} waits: {error}")
                time.sleep(AGAIN_S)
                continue
            except ValueError as error:
                self.fail(f"{self.peer!r} sent what cannot be used: {error}")
                return None
            if payload is None:
                self.fail(f"a payload of {self.peer!r} is no longer in the bucket: somebody else deletes objects there")
                return None
            self.inbox.count(received_bytes=len(payload))
            return payload
        return None
