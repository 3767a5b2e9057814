"""A session over several streams of frames; the same class serves the learner's and the syncer's side.

One stream carries the control lane. The others, the stripes, share the bulk lane: the next free stripe takes the next
chunk. `send` fills an outbox per lane. Each stream has a writer thread that empties the outbox and a reader thread that
fills the inbox. The sender of a small payload writes it itself if no writer has anything to do. A stream ends with a
Goodbye frame. The whole session fails when a stream ends without one, or when anything else is wrong.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple, TypeVar

import grpc

from diloco_jax.protocol.messages import SYNCER, CutFragment, Digested, Message
from diloco_jax.protocol.releases import PROTOCOL
from diloco_jax.protocol.texts import REASON_LENGTH_MAX, clean
from diloco_jax.transport import wire
from diloco_jax.transport.commands import Command, Reply
from diloco_jax.transport.link import BULK_TYPES, LinkClosed, TransportConfig, is_bulk
from diloco_jax.transport.partials import RESUME_BYTES_MIN, Partials, PeerHoldings, key_of
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.session.assembly import Assembly
from diloco_jax.transport.session.inbox import Inbox, Session

# The status for a learner that need not try again.
REFUSAL = grpc.StatusCode.FAILED_PRECONDITION
DENIALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.ABORTED)
# A failed session has this long to tell the peer why, before its streams are cut.
LINGER_S = 1.0
CONTROL = (pb.LANE_CONTROL, 0)
# A payload up to this size may be sent on the thread of its sender, which it does not keep for long.
AT_ONCE_BYTES_MAX = 1 << 16

ResultT = TypeVar("ResultT")


class Outgoing(NamedTuple):
    """A message that waits for its writer; other sessions may share the payload."""

    message: Message | Command | Reply
    body: bytes
    parts: tuple[memoryview, ...]

    @property
    def is_cut(self) -> bool:
        """Return whether it is a version that was cut for one host."""
        return isinstance(self.message, CutFragment)


class Outbox:
    """The bounded queue to the writers of one lane."""

    def __init__(self, messages_max: int) -> None:
        self._messages_max = messages_max
        self._changed = threading.Condition()
        self._waiting: deque[Outgoing] = deque()
        # Whether a writer waits for the next item.
        self._awaited = False
        self._closed = False
        # Called when a writer has taken an item.
        self.on_take: Callable[[], object] = lambda: None
        # Writers stop even inside a payload.
        self.cut = False
        self.reason = ""

    def put(self, item: Outgoing) -> bool:
        """Queue an item; False if the queue is full or closed."""
        with self._changed:
            if self._closed or len(self._waiting) >= self._messages_max:
                return False
            self._waiting.append(item)
            self._changed.notify()
            return True

    def take(self, timeout_s: float | None = None) -> Outgoing | None:
        """Wait for the oldest item, and return it; None when the queue is closed and empty.

        Raises:
            TimeoutError: No item came within `timeout_s` seconds.
        """
        with self._changed:
            self._awaited = True
            try:
                if not self._changed.wait_for(lambda: self._waiting or self._closed, timeout_s):
                    raise TimeoutError
            finally:
                self._awaited = False
            item = self._waiting.popleft() if self._waiting else None
        self.on_take()
        return item

    def pass_by(self, count: Callable[[], ResultT]) -> ResultT | None:
        """Call `count` while a writer waits and nothing else does, and return its result; else None."""
        with self._changed:
            return count() if self._awaited and not self._waiting and not self._closed else None

    @property
    def cuts(self) -> int:
        """Return the number of cut versions that wait."""
        with self._changed:
            return sum(item.is_cut for item in self._waiting)

    def close(self, reason: str, *, flush: bool) -> None:
        """Refuse further items; with `flush` waiting items are still sent, otherwise dropped."""
        with self._changed:
            self.reason = self.reason or reason
            self._closed = True
            if not flush:
                self.cut = True
                self._waiting.clear()
            self._changed.notify_all()


class Pieces:
    """The bulk lane's outbox as pieces of frames, in order; a free writer takes the next one.

    To wake a writer takes longer than to send a few bytes. So a small message that finds all writers waiting does not
    go through the outbox: its sender takes the only piece of it (`take_only`), and writes it.

    Args:
        writers: The number of threads that take pieces.
    """

    def __init__(self, outbox: Outbox, chunk_bytes: int, writers: int = 1) -> None:
        # Ranges of coming payloads that the peer has already, and whether it takes digested chunks.
        self.held = PeerHoldings()
        self._outbox = outbox
        self._chunk_bytes = chunk_bytes
        # The owner holds the lock while it waits for a message, because other writers have nothing to do then.
        self._lock = threading.Lock()
        # Writers that have no piece in hand.
        self._counting = threading.Lock()
        self._free, self._writers = 0, writers
        self._number = 0
        self._current: Iterator[wire.BulkPiece] = iter(())

    def take(self, timeout_s: float | None = None) -> wire.BulkPiece | None:
        """Wait for the next piece, and return it; None at the end.

        Raises:
            TimeoutError: No piece came within `timeout_s` seconds.
        """
        self._count_free(1)
        if not self._lock.acquire(timeout=-1 if timeout_s is None else timeout_s):
            self._count_free(-1)
            raise TimeoutError
        try:
            while not self._outbox.cut:
                piece = next(self._current, None)
                if piece is not None:
                    return piece
                # This frees the payload while the writer waits for the next one.
                self._current = iter(())
                item = self._outbox.take(timeout_s)
                if item is None:
                    return None
                self._number += 1
                self._current = self._cut(self._number, item)
                del item
            self._current = iter(())
            return None
        finally:
            # Before another writer can wait for the next message, this one has a piece.
            self._count_free(-1)
            self._lock.release()

    def _count_free(self, change: int) -> None:
        with self._counting:
            self._free += change

    def take_only(self, item: Outgoing) -> wire.BulkPiece | None:
        """Return the piece of a message that needs one; None if a writer has to send the message, after others.

        No connection may carry this piece before one of an earlier message: that one could wait behind it forever.
        """
        if sum(part.nbytes for part in item.parts) > min(AT_ONCE_BYTES_MAX, self._chunk_bytes):
            return None
        number = self._outbox.pass_by(self._count_message)
        if not number:
            return None
        return next(self._cut(number, item))

    def _count_message(self) -> int:
        """Return the number of a message that no writer sends; 0 if a writer still sends an earlier one."""
        if self._free < self._writers:
            return 0
        self._number += 1
        return self._number

    def _cut(self, number: int, item: Outgoing) -> Iterator[wire.BulkPiece]:
        size = sum(part.nbytes for part in item.parts)
        key, held = 0, None
        if size > RESUME_BYTES_MIN:
            key = key_of(item.parts)
            held = self.held.claim((key, size))
        digested = self.held.digests and isinstance(item.message, Digested)
        return wire.pieces(number, item.body, item.parts, self._chunk_bytes, key, held, digested=digested)


class Lane:
    """One stream in both directions: the control lane, or a stripe of the bulk lane.

    The control lane is a call of gRPC, and a stripe is a connection beside it (stripe.py).
    """

    def __init__(self, ours: pb.Header, theirs: pb.Header, outbox: Outbox, readable: tuple[type, ...]) -> None:
        self.bulk = ours.lane == pb.LANE_BULK
        self.name = "bulk" if self.bulk else "control"
        self.title = f"{self.name}-{ours.stripe}" if self.bulk else self.name  # thread names
        self.ours = ours
        self.header = wire.pack_header(ours)
        self.outbox = outbox
        allowed = tuple(kind for kind in readable if (kind in BULK_TYPES) == self.bulk)
        self.reader = wire.Reader(theirs, allowed)
        self.cancel: Callable[[], object] | None = None
        # Ends the reading of a connection beside gRPC, so that its half of a payload can be kept at once.
        self.stop_reading: Callable[[], object] = lambda: None
        # Sends a small message on the caller's thread; False if it has to go through the outbox.
        self.send_at_once: Callable[[Outgoing], bool] = lambda _: False
        self.ready = False
        self.said_goodbye = False
        self.written = threading.Event()


def lane_header(header: pb.Header, lane: pb.Lane, stripe: int, sender: str) -> pb.Header:
    """Copy the header for one stream and direction."""
    copy = pb.Header()
    copy.CopyFrom(header)
    copy.lane, copy.stripe, copy.sender = lane, stripe, sender
    return copy


class StreamSession(Session):
    """One end of a session over several streams.

    Args:
        header: Header with run, epoch, incarnation, session, host and number of stripes; the session adds sender, lane
            and stripe.
        sender: Our name in the frames that we send: a learner_id or "syncer".
        peer: The other side's name in the frames that it sends.
        partials: Incomplete payloads of earlier sessions with this peer.
        readable: Message classes that the peer may send.
        name: The other side's name in deliveries, if it is not `peer`.
    """

    def __init__(
        self,
        inbox: Inbox,
        header: pb.Header,
        sender: str,
        peer: str,
        config: TransportConfig,
        partials: Partials,
        readable: tuple[type, ...],
        name: str = "",
    ) -> None:
        super().__init__(inbox, header, name or peer, config)
        self._dialled = peer == SYNCER
        self.partials = partials
        outboxes = {True: Outbox(config.queue_payloads_max), False: Outbox(config.queue_messages_max)}
        self._outboxes = outboxes  # is_bulk -> outbox
        outboxes[True].on_take = self._on_take
        self.pieces = Pieces(outboxes[True], config.chunk_bytes, header.stripes)
        self.assembly = Assembly(config.payload_bytes_max, partials)
        streams = [(pb.LANE_BULK, stripe) for stripe in range(header.stripes)]
        self.lanes = {
            (lane, stripe): Lane(
                lane_header(header, lane, stripe, sender),
                lane_header(header, lane, stripe, peer),
                outboxes[lane == pb.LANE_BULK],
                readable,
            )
            for lane, stripe in [CONTROL, *streams]
        }
        self.control = self.lanes[CONTROL]
        self._first_stripe = self.lanes[pb.LANE_BULK, 0]
        # "refused" if the other side does not take us, "denied" if our token or certificate does not allow it.
        self.refused: Literal["", "refused", "denied"] = ""
        self._lock = threading.Lock()
        # Set when all streams are ready, or the session is over.
        self._settled = threading.Event()
        # Set on the listener's side when the session has replaced earlier ones, or is over.
        self._established = threading.Event()

    def bind(self, lane: Lane, cancel: Callable[[], object]) -> bool:
        """Give the lane its stream; return False if it has one already."""
        with self._lock:
            if lane.cancel is not None:
                return False
            lane.cancel = cancel
            return True

    def mark_ready(self, lane: Lane) -> None:
        """Note that the stream is open on both sides; the session is open when all streams are."""
        with self._lock:
            lane.ready = True
            if all(each.ready for each in self.lanes.values()):
                # On the syncer's side it is set when the session is established.
                self.announced = self.announced or self._dialled
                self._settled.set()

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until all streams are open; return False after `timeout_s`, or when the session is over."""
        return self._settled.wait(timeout_s) and self.open

    def mark_established(self) -> None:
        """Let the bulk connections start."""
        self._established.set()

    def wait_established(self) -> bool:
        """Wait until the session is established; return False when it is over."""
        return self._established.wait() and self.open

    @property
    def cuts_waiting(self) -> int:
        return self._outboxes[True].cuts

    def _on_take(self) -> None:
        if self.on_room is not None:
            self.on_room()

    def send(self, message: Message | Command | Reply, parts: tuple[memoryview, ...]) -> None:
        """Queue a message; LinkClosed if the session is over, or its queue is full, which ends it."""
        bulk = is_bulk(message)
        item = Outgoing(message, wire.pack_body(message), parts)
        if (bulk and self._first_stripe.send_at_once(item)) or self._outboxes[bulk].put(item):
            return
        lane = "bulk" if bulk else "control"
        self.fail(f"the {lane} queue to {self.peer!r} is full: it does not read what it is sent")
        raise LinkClosed(f"the session with {self.peer!r} is over: {self.reason}")

    def fail(self, reason: str) -> None:
        """End the session with a reason; writers send it in a Goodbye, and streams that do not end soon are cut."""
        if not self.finish(reason):
            return
        for outbox in self._outboxes.values():
            outbox.close(reason, flush=False)
        self.assembly.close()
        for lane in self.lanes.values():
            lane.stop_reading()
        self._settled.set()
        self._established.set()
        timer = threading.Timer(LINGER_S, self.cancel)
        timer.name, timer.daemon = f"diloco-linger-{self.peer}", True
        timer.start()

    def retire(self, reason: str) -> None:
        """End this side without a delivery here; writers send the waiting messages, then a Goodbye."""
        self.finish(reason, tell=False)
        for outbox in self._outboxes.values():
            outbox.close(reason, flush=True)
        self.assembly.close()
        self._settled.set()
        self._established.set()

    def ready_frame(self) -> bytes:
        """Return the listener's first frame; call it when earlier sessions of the peer are over."""
        return wire.ready_frame(self.control.header, self.partials.announce())

    def wait_written(self, until_s: float) -> None:
        """Wait until the writers are done, at most until `until_s` on the monotonic clock."""
        for lane in self.lanes.values():
            if lane.cancel is not None:
                lane.written.wait(max(0.0, until_s - time.monotonic()))

    def cancel(self) -> None:
        """Cut all streams that have not ended."""
        for lane in self.lanes.values():
            if lane.cancel is not None:
                lane.cancel()

    def write_control(self) -> Iterator[bytes]:
        """Yield the frames of the control lane until its outbox is closed; the calling thread is the lane's writer."""
        lane = self.control
        threading.current_thread().name = f"diloco-write-{lane.title}-{self.peer}"
        try:
            while (item := lane.outbox.take()) is not None:
                frame = wire.control_frame(lane.header, item.body)
                self.count(sent_bytes=len(frame))
                yield frame
            yield wire.goodbye_frame(lane.header, lane.outbox.reason)
        finally:
            lane.written.set()

    def _read_control(self, stream: Iterable[bytes]) -> None:
        """Put the messages of the control lane into the inbox until it ends; the body of its reader thread."""
        lane = self.control
        try:
            for raw in stream:
                self.count(received_bytes=len(raw))
                event = lane.reader.read(raw)
                if isinstance(event, wire.Ready):
                    self.hear_holdings(event.holdings)
                    self.mark_ready(lane)
                elif isinstance(event, wire.Goodbye):
                    self.hear_goodbye(lane, event.reason)
                elif event.message is not None:
                    # The session drops the message if it is over.
                    self.offer(event.message, memoryview(b""))
                del event, raw
            if not lane.said_goodbye:
                self.fail_lost(lane)
        except wire.WireError as error:
            self.fail(f"{self.peer!r} sent on the {lane.name} connection what cannot be used: {error}")
        # A reader that ended silently would leave a session that never ends.
        except Exception as error:
            self.fail_lost(lane, error)

    def start_reader(self, stream: Iterable[bytes]) -> None:
        """Read the control lane on a separate thread."""
        name = f"diloco-read-{self.control.title}-{self.peer}"
        threading.Thread(target=self._read_control, args=(stream,), name=name, daemon=True).start()

    def fail_lost(self, lane: Lane, error: object = None) -> None:
        """Fail because a stream broke, with gRPC's reason, or with the reason of the syncer that refused."""
        lost = f"the {lane.name} connection to {self.peer!r} was lost"
        if not isinstance(error, grpc.Call):
            self.fail(f"{lost}: {error!r}" if error is not None and str(error) else lost)
        elif error.code() is grpc.StatusCode.UNIMPLEMENTED:
            self.refused = "refused"
            self.fail(
                f"it is of another release than this side, which speaks protocol {PROTOCOL}: upgrade the syncer first, "
                "then the islands"
            )
        elif error.code() in (REFUSAL, *DENIALS):
            self.refused = "refused" if error.code() is REFUSAL else "denied"
            self.fail(clean(error.details(), REASON_LENGTH_MAX))
        else:
            self.fail(f"{lost}: {clean(error.details(), REASON_LENGTH_MAX)} ({error.code().name})")

    def hear_holdings(self, holdings: pb.Holdings) -> None:
        """Send from now on what the peer, by its list, needs; WireError if the list is not possible."""
        try:
            self.pieces.held = PeerHoldings(holdings)
        except ValueError as error:
            raise wire.WireError(f"unusable holdings: {error}") from None

    def hear_goodbye(self, lane: Lane, reason: str) -> None:
        """Note that the peer ends the stream; the session is over when it has ended all of them."""
        with self._lock:
            lane.said_goodbye = True
            complete = all(each.said_goodbye for each in self.lanes.values())
        if complete:
            self.fail(f"{self.peer!r} ended the session: {reason}")
