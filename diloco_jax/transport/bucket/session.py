"""One end of a session in a bucket, with four threads: two write messages and payloads, two read them.

Silence is the only sign that the other side is gone, because a bucket keeps what a dead process wrote. Each side writes
something every half of `keepalive_s`. A side that reads nothing for `keepalive_s + keepalive_timeout_s` ends the
session. A store that does not answer is silence, too, so each side tries again until then. So is an
object that was not written by the other side: it counts as missing, and may still be replaced.

The last object of a side has a goodbye. A learner writes nothing before the syncer has taken its session.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from diloco_jax.protocol.messages import SYNCER, CutFragment, GlobalFragment, Message
from diloco_jax.protocol.texts import REASON_LENGTH_MAX, clean
from diloco_jax.transport import wire
from diloco_jax.transport.bucket.stream import (
    OBJECT_BYTES,
    Received,
    Shared,
    StreamPlace,
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
from diloco_jax.transport.store.seal import SEAL_BYTES, Unsealed
from diloco_jax.transport.store.store import StoreError

# An entry's own bytes in an object.
ENTRY_BYTES = 8
# Objects of the other side that are read before we say so in an object that has nothing else.
OWED_MAX = 16
# The notice that payloads were delivered waits so many polls for an object that is written anyway.
RIDE_POLLS = 4
# A message waits so long for those that follow at once, such as the metrics after a report, but at most this share of a
# poll. Without the wait they would be a second object.
GATHER_S, GATHER_SHARE = 0.05, 0.1
# The pause after a store that did not answer.
AGAIN_S = 1.0
# A learner whose syncer is silent for this long, or five polls, looks for a newer one, and again as often. A payload
# that is missing for as long is lost.
DOUBT_S = 5.0
# A session that failed tries for this long to write its goodbye.
FAREWELL_S = 2.0

log = logging.getLogger(__name__)

# Returns the object of a version for receivers with equal blocks, held for one message.
Share = Callable[[GlobalFragment, bytes, Callable[[], tuple[memoryview, ...]]], Shared]


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
        serves: Whether this is the syncer's end, which waits for the goodbye of the other side when it ends.
        superseded: Tells a learner whether a newer syncer leads.
        name: The other side's name in deliveries, if it is not its name on the wire.
        share: Lets hosts with equal blocks read one object; each gets a separate one without it.
    """

    def __init__(
        self,
        inbox: Inbox,
        header: pb.Header,
        config: TransportConfig,
        place: StreamPlace,
        readable: tuple[type, ...],
        *,
        serves: bool,
        superseded: Callable[[], bool] = lambda: False,
        name: str = "",
        share: Share | None = None,
    ) -> None:
        peer = header.sender if serves else SYNCER
        super().__init__(inbox, header, name or peer, config)
        self.place = place
        self._serves = serves
        self._superseded = superseded
        self._share = share
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
        # When the oldest of them was queued.
        self._queued_s = 0.0
        self._fetching: deque[Received] = deque()
        # Messages of the bulk lane that we have delivered, and our newest object that the other side has to know of.
        self._delivered = self._owed = 0
        # The session is over, and what waits is not sent any more.
        self._drops = self._payloads_done = False
        # When an ended session gives up writing.
        self._gives_up_s = 0.0
        self._lingers = False
        self.refused = ""
        self.final = False
        # Whether the syncer has taken the session.
        self._taken = serves
        self._settled = threading.Event()
        self._over = threading.Event()
        # Our last object is written, or given up; and the other side's last object was read.
        self.written = threading.Event()
        self.parted = threading.Event()
        self._heard_s = time.monotonic()
        # When our last object was written, and what it said that we have read and delivered.
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
            name = f"diloco-{word}-{self.peer}"
            threading.Thread(target=self._guard, args=(body,), name=name, daemon=True).start()

    def _guard(self, body: Callable[[], None]) -> None:
        """Run the body of a thread; a thread that ended silently would leave a session that never ends."""
        try:
            body()
        except Exception as error:
            log.exception(f"an error in the session with {self.peer!r}")
            self.fail(f"the session with {self.peer!r} failed: {error!r}")

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
            shared: The payload, in place of `parts`, if other sessions get it, too. It is held for this message.
        """
        body, bulk = wire.pack_body(message), is_bulk(message)
        if bulk:
            if shared is not None:
                with self._changed:
                    self._promised.append(shared)
            item = Bulk(body, parts, isinstance(message, CutFragment), shared)
            queued = self._outbox.put(item)  # type: ignore[arg-type]
            if shared is not None and not queued:
                self._break_promise(shared)
        else:
            with self._changed:
                queued = self.open and len(self._entries) < self.config.queue_messages_max
                if queued:
                    self._append(control_entry(body))
        if not queued:
            self.fail(f"the {'bulk' if bulk else 'control'} queue to {self.peer!r} is full: it does not read it")
            raise LinkClosed(f"the session with {self.peer!r} is over: {self.reason}")

    def _append(self, entry: pb.Entry) -> None:
        """Queue an entry; the lock is held."""
        if not self._entries:
            self._queued_s = time.monotonic()
        self._entries.append(entry)
        self._changed.notify_all()

    def send_cut(self, cut: CutFragment, blocks: bytes, make_parts: Callable[[], tuple[memoryview, ...]]) -> None:
        if self._share is None:
            super().send_cut(cut, blocks, make_parts)
        else:
            self.send(cut, (), self._share(cut.value, blocks, make_parts))

    def _break_promise(self, shared: Shared) -> None:
        """Release a payload for several sessions that this one does not send, unless that is done."""
        with self._changed:
            if shared not in self._promised:
                return
            self._promised.remove(shared)
        shared.release()

    def fail(self, reason: str) -> None:
        self._end(reason, tell=True, grace_s=0.0)

    def retire(self, reason: str, grace_s: float) -> None:
        """End this side without a delivery here; what waits is still written for `grace_s` seconds, then a goodbye."""
        self._end(reason, tell=False, grace_s=grace_s)

    def refuse(self, reason: str, *, final: bool) -> None:
        """Tell a learner why it gets no session; nothing was started. StoreError if that fails."""
        self.finish(reason)
        self._writer.write(pb.Batch(refused=reason, final=final))
        self.written.set()

    def _end(self, reason: str, *, tell: bool, grace_s: float) -> None:
        if not self.finish(reason, tell=tell):
            return
        flush = grace_s > 0
        with self._changed:
            self._gives_up_s = time.monotonic() + max(grace_s, FAREWELL_S)
            self._lingers = flush and self._serves
            if not flush:
                self._drop()
            self._fetching.clear()
            self._changed.notify_all()
        self._outbox.close(reason, flush=flush)
        self._over.set()
        self._settled.set()

    def _drop(self) -> None:
        """Send nothing more but the goodbye; the lock is held."""
        self._drops = True
        self._entries.clear()

    def _pause(self) -> None:
        """Wait before the next try."""
        if self._over.is_set():
            time.sleep(min(AGAIN_S, FAREWELL_S / 10))
        else:
            self._over.wait(AGAIN_S)

    @property
    def _silence_s(self) -> float:
        return self.config.keepalive_s + self.config.keepalive_timeout_s

    @property
    def _gave_up(self) -> bool:
        return not self.open and self._over.is_set() and time.monotonic() > self._gives_up_s

    def _on_take(self) -> None:
        if self.on_room is not None:
            self.on_room()

    # What follows runs on the session's threads.

    def _write_payloads(self) -> None:
        number = 0
        try:
            while (taken := self._outbox.take()) is not None:
                item: Bulk = taken  # type: ignore[assignment]
                number += 1
                if not self._await_turn() or (reference := self._write_payload(item)) is None:
                    break
                with self._changed:
                    if not self._drops:
                        self._append(bulk_entry(number, item.body, item.size, reference))
                        continue
                self._writer.withdraw()
        finally:
            with self._changed:
                # A session that ends with its queue unsent must not send what comes after it.
                self._payloads_done = True
                left = list(self._promised)
                self._changed.notify_all()
            for shared in left:
                self._break_promise(shared)

    def _await_turn(self) -> bool:
        """Wait until the other side has delivered enough of the bulk lane; False if that comes to nothing."""
        most = self.config.queue_payloads_max
        with self._changed:
            while self._writer.undelivered >= most and not self._drops and not self._gave_up:
                self._changed.wait(1.0 if self.open else 0.1)
            if self._gave_up:
                self._drop()
            return not self._drops

    def _write_payload(self, item: Bulk) -> str | None:
        """Return the reference to a payload once it is in the bucket, "" if there is none; None if that failed."""
        since_s = time.monotonic()
        while True:
            try:
                reference, size = self._writer.write_payload(item.parts, item.shared)
                break
            except StoreError as error:
                if self._drops or self._gave_up:
                    with self._changed:
                        self._drop()
                    return None
                if self.open and time.monotonic() > since_s + self._silence_s:
                    self.fail(f"no payload can be written: {error}")
                    return None
                log.info(f"a payload for {self.peer} waits: {error}")
            self._pause()
        # This learner's link carries a shared payload although another session has written it.
        shared_bytes = item.size + SEAL_BYTES if reference and not size else 0
        self.count(sent_bytes=size, shared_bytes=shared_bytes)
        if item.shared is not None:
            with self._changed:
                self._promised.remove(item.shared)
        return reference

    def _write(self) -> None:
        """Write objects until the session is over; the last one has the goodbye."""
        try:
            while True:
                with self._changed:
                    while not self._due():
                        self._changed.wait(self._wait_s())
                    # Nobody reads: the syncer has not taken the session, or its learner has ended it.
                    if not self._taken or (not self.open and self._serves and self.parted.is_set()):
                        return
                    ends = not self.open and (self._payloads_done or self._drops)
                    batch = self._batch(ends=ends)
                    ends = ends and not self._entries
                if not self._put(batch):
                    return
                self._written_s, self._told = time.monotonic(), (batch.read, batch.fetched)
                if ends:
                    return
        finally:
            self.written.set()
            if not self._lingers:
                self._writer.end()

    def _wait_s(self) -> float:
        """Return the longest time until an object may be due without a further change."""
        since_s, poll_s = time.monotonic() - self._written_s, self.config.poll_s
        rests_s = self._rests_s(since_s) if self._entries else 0.0
        wait_s = rests_s if rests_s > 0 else poll_s
        return max(0.001, min(wait_s, self.config.keepalive_s / 8))

    def _due(self) -> bool:
        """Tell whether an object shall be written now."""
        since_s, (read, delivered) = time.monotonic() - self._written_s, self._told
        if not self.open:
            return self._payloads_done or self._drops or bool(self._entries)
        if not self._taken:
            return False
        if since_s >= self.config.keepalive_s / 2:
            return True
        if self._entries and not self._writer.full and self._rests_s(since_s) <= 0:
            return True
        # An object that only says what we have read is not answered in the same way, or that would never end.
        if self._owed - read >= OWED_MAX:
            return True
        # The other side may wait for room for its next payload.
        return self._delivered > delivered and since_s >= RIDE_POLLS * self.config.poll_s

    def _rests_s(self, since_s: float) -> float:
        """Return how long waiting entries still wait, if the last object was written `since_s` seconds ago."""
        poll_s = self.config.poll_s
        gathers_s = min(GATHER_S, GATHER_SHARE * poll_s) - (time.monotonic() - self._queued_s)
        return max(poll_s - since_s, gathers_s)

    def _batch(self, *, ends: bool) -> pb.Batch:
        batch = pb.Batch(read=self._reader.read, fetched=self._delivered)
        size = 0
        while self._entries and size <= OBJECT_BYTES:
            entry = self._entries.popleft()
            size += entry.ByteSize() + ENTRY_BYTES
            batch.entries.append(entry)
        if ends and not self._entries:
            batch.entries.append(control_entry(wire.goodbye_head(self.reason)))
        return batch

    def _put(self, batch: pb.Batch) -> bool:
        """Write an object; False if the session ended before the store answered."""
        while True:
            try:
                self.count(sent_bytes=self._writer.write(batch))
                return True
            except StoreError as error:
                if self._gave_up:
                    return False
                log.info(f"messages for {self.peer} wait: {error}")
                self._pause()

    def _read(self) -> None:
        asked_s, trouble = time.monotonic(), ""
        doubt_s = max(DOUBT_S, 5 * self.config.poll_s)
        while self.open:
            try:
                batch = self._reader.next()
                trouble = self._reader.trouble
                if batch is not None:
                    self._take(batch)
                    # Our driver may have kept us from reading for long.
                    self._heard_s = asked_s = time.monotonic()
                    continue
                if time.monotonic() - asked_s > doubt_s:
                    asked_s = time.monotonic()
                    if self._superseded():
                        self.fail("a newer syncer leads the run")
                        return
            except StoreError as error:
                trouble = str(error)
            except ValueError as error:
                self.fail(f"{self.peer!r} sent what cannot be used: {error}")
                return
            silent_s = time.monotonic() - self._heard_s
            # Before a session is taken, `connect` has the limit.
            if self._taken and silent_s > self._silence_s:
                self.fail(f"{self.peer!r} has written nothing for {silent_s:.0f} s{f' ({trouble})' if trouble else ''}")
                return
            self._over.wait(self.config.poll_s)
        self._linger()

    def _linger(self) -> None:
        """Read what the other side still acknowledges, until its goodbye."""
        while self._lingers and not self.parted.is_set() and not self._gave_up:
            batch = None
            with contextlib.suppress(StoreError, ValueError):
                batch = self._reader.next()
            if batch is None:
                self.parted.wait(min(self.config.poll_s, max(0.001, self._gives_up_s - time.monotonic())))
                continue
            self._acknowledge(batch)
            with contextlib.suppress(wire.WireError):
                if any(isinstance(self._reader.entry(each).event, wire.Goodbye) for each in batch.entries):
                    self.parted.set()
        if self._lingers:
            self._writer.end()

    def _acknowledge(self, batch: pb.Batch) -> None:
        self.count(received_bytes=batch.ByteSize())
        self._writer.acknowledge(batch.read, batch.fetched)
        with self._changed:
            self._changed.notify_all()

    def _take(self, batch: pb.Batch) -> None:
        self._acknowledge(batch)
        if batch.refused and not self._serves:
            self.refused, self.final = clean(batch.refused, REASON_LENGTH_MAX), batch.final
            self.fail(self.refused)
            return
        for each in batch.entries:
            received = self._reader.entry(each)
            if isinstance(received.event, wire.Ready):
                self.announced = self._taken = True
                self._settled.set()
            elif received.bulk or isinstance(received.event, wire.Goodbye):
                if received.size > self.config.payload_bytes_max:
                    raise wire.WireError(
                        f"a payload of {received.size} bytes, the limit is {self.config.payload_bytes_max}: raise "
                        "transport.payload_bytes_max on all sides, or use more fragments"
                    )
                if isinstance(received.event, wire.Goodbye):
                    self.parted.set()
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
                self._delivered += 1
                if self._fetching:
                    self._fetching.popleft()
                self._changed.notify_all()

    def _fetched_payload(self, received: Received) -> bytes | None:
        """Return a payload; None if the session is over before, which a payload that is lost ends."""
        since_s = time.monotonic()
        gone_s = max(DOUBT_S, 5 * self.config.poll_s)
        while self.open:
            limit_s, lost = gone_s, "somebody else deletes or changes objects there"
            try:
                payload = self._reader.fetch(received)
                if payload is not None:
                    self.count(received_bytes=len(payload))
                    return payload
                trouble = f"it is no longer in the bucket: {lost}"
            except StoreError as error:
                limit_s, trouble = self._silence_s, str(error)
            except Unsealed as error:
                trouble = f"{error}; {lost}"
            except wire.WireError as error:
                limit_s, trouble = -1.0, str(error)
            if time.monotonic() > since_s + limit_s:
                self.fail(f"a payload of {self.peer!r} cannot be read: {trouble}")
                return None
            log.info(f"a payload of {self.peer} waits: {trouble}")
            self._over.wait(min(AGAIN_S, self.config.poll_s))
        return None
