"""A session over two streams of frames, one per lane; the same class serves the learner's and the syncer's side.

Each lane has an outbox that `send` fills and a writer thread empties, and a reader thread that fills the inbox. A
lane ends with a Goodbye frame. When the first lane ends without one, or anything is wrong, the whole session fails.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import grpc

from diloco_jax.protocol.messages import SYNCER, Message
from diloco_jax.transport import wire
from diloco_jax.transport.link import BULK_TYPES, LEARNER_TYPES, SYNCER_TYPES, LinkClosed, TransportConfig, is_bulk
from diloco_jax.transport.proto import diloco_pb2 as pb
from diloco_jax.transport.sessions import Inbox, Session

LANES = {"control": pb.LANE_CONTROL, "bulk": pb.LANE_BULK}
REFUSAL = grpc.StatusCode.FAILED_PRECONDITION  # the answer to a learner that need not try again
DENIALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.ABORTED)
LINGER_S = 1.0  # how long a failed session may try to tell the peer why, before its streams are cut


class Outgoing(NamedTuple):
    """A message that waits for its writer. The payload is shared with whoever else sends it."""

    body: bytes
    parts: tuple[memoryview, ...]


class Outbox:
    """Bounded queue to one writer."""

    def __init__(self, messages_max: int) -> None:
        self._messages_max = messages_max
        self._changed = threading.Condition()
        self._waiting: deque[Outgoing] = deque()
        self._closed = False
        self.cut = False  # a writer stops even inside a payload
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


class Lane:
    """One stream in both directions."""

    def __init__(self, name: str, ours: pb.Header, theirs: pb.Header, config: TransportConfig) -> None:
        bulk = name == "bulk"
        sendable = SYNCER_TYPES if theirs.sender != SYNCER else LEARNER_TYPES
        readable = LEARNER_TYPES if sendable is SYNCER_TYPES else SYNCER_TYPES
        self.name = name
        self.ours = ours
        self.header = wire.pack_header(ours)
        self.outbox = Outbox(config.queue_payloads_max if bulk else config.queue_messages_max)
        allowed = tuple(kind for kind in readable if (kind in BULK_TYPES) == bulk)
        self.assembler = wire.Assembler(theirs, allowed, config.payload_bytes_max)
        self.cancel: Callable[[], object] | None = None
        self.ready = False
        self.said_goodbye = False
        self.written = threading.Event()


def lane_header(header: pb.Header, lane: int, sender: str) -> pb.Header:
    """Return a copy of the header for one lane and direction."""
    copy = pb.Header()
    copy.CopyFrom(header)
    copy.lane = lane  # type: ignore[assignment]
    copy.sender = sender
    return copy


class StreamSession(Session):
    """One end of a session over two streams.

    Args:
        header: Names the run, the epoch, the learner's incarnation and the session; sender and lane are set here.
        sender: Our name in the frames that we send: a learner_id or "syncer".
        peer: The other side's name.
    """

    def __init__(self, inbox: Inbox, header: pb.Header, sender: str, peer: str, config: TransportConfig) -> None:
        super().__init__(inbox, peer, config)
        self.lanes = {
            name: Lane(name, lane_header(header, lane, sender), lane_header(header, lane, peer), config)
            for name, lane in LANES.items()
        }
        self.refused = False  # the other side answered that it does not take us
        self._lock = threading.Lock()
        self._settled = threading.Event()  # both lanes are ready, or the session is over

    def bind(self, lane: Lane, cancel: Callable[[], object]) -> bool:
        """Give the lane its stream; False if it has one already."""
        with self._lock:
            if lane.cancel is not None:
                return False
            lane.cancel = cancel
            return True

    def mark_ready(self, lane: Lane) -> None:
        """Note that the lane is open on both sides; the session is, when both are."""
        with self._lock:
            lane.ready = True
            if all(each.ready for each in self.lanes.values()):
                self.announced = self.announced or self.peer == SYNCER  # the syncer's side: once it is established
                self._settled.set()

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until both lanes are open; False after `timeout_s` or when the session is over."""
        return self._settled.wait(timeout_s) and self.open

    def send(self, message: Message, parts: tuple[memoryview, ...]) -> None:
        """Queue a message for its lane's writer. See Session.send."""
        lane = self.lanes["bulk" if is_bulk(message) else "control"]
        if lane.outbox.put(Outgoing(wire.pack_body(message), parts)):
            return
        self.fail(f"the {lane.name} queue to {self.peer!r} is full: it does not read what it is sent")
        raise LinkClosed(f"the session with {self.peer!r} is over: {self.reason}")

    def fail(self, reason: str) -> None:
        """End the session; writers say goodbye with the reason, and streams that do not end soon are cut."""
        if not self.finish(reason):
            return
        for lane in self.lanes.values():
            lane.outbox.close(reason, flush=False)
        self._settled.set()
        timer = threading.Timer(LINGER_S, self.cancel)
        timer.name, timer.daemon = f"diloco-linger-{self.peer}", True
        timer.start()

    def retire(self, reason: str) -> None:
        """End this side without a delivery here; writers send what waits, then say goodbye."""
        self.finish(reason, tell=False)
        for lane in self.lanes.values():
            lane.outbox.close(reason, flush=True)
        self._settled.set()

    def wait_written(self, until_s: float) -> None:
        """Wait until the writers are done, or until the monotonic clock shows `until_s`."""
        for lane in self.lanes.values():
            if lane.cancel is not None:
                lane.written.wait(max(0.0, until_s - time.monotonic()))

    def cancel(self) -> None:
        """Cut both streams; nothing happens to a stream that has ended."""
        for lane in self.lanes.values():
            if lane.cancel is not None:
                lane.cancel()

    def write(self, lane: Lane) -> Iterator[bytes]:
        """Yield the lane's frames until its outbox is closed; the thread that draws them is the lane's writer."""
        threading.current_thread().name = f"diloco-write-{lane.name}-{self.peer}"
        try:
            while (item := lane.outbox.take()) is not None:
                for frame in wire.frames(lane.header, item.body, item.parts, self.config.chunk_bytes):
                    if lane.outbox.cut:
                        break
                    self.inbox.count(sent_bytes=len(frame))
                    yield frame
                del item  # do not keep the payload while waiting for the next one
            yield wire.goodbye_frame(lane.header, lane.outbox.reason)
        finally:
            lane.written.set()

    def read(self, lane: Lane, stream: Iterable[bytes]) -> None:
        """Put what the stream brings into the inbox until it ends; the body of the lane's reader thread."""
        try:
            for raw in stream:
                self.inbox.count(received_bytes=len(raw))
                event = lane.assembler.feed(raw)
                if isinstance(event, wire.Received):
                    self.offer(event.message, event.payload, wait=True)  # when the session is over: drain the stream
                elif isinstance(event, wire.Ready):
                    self.mark_ready(lane)
                elif isinstance(event, wire.Goodbye):
                    self._hear_goodbye(lane, event.reason)
                del event
            if not lane.said_goodbye:
                self.fail_lost(lane)
        except wire.WireError as error:
            self.fail(f"{self.peer!r} sent on the {lane.name} connection what cannot be used: {error}")
        except Exception as error:  # a reader that dies silently would leave a session that never ends
            self.fail_lost(lane, error)
        finally:
            lane.assembler.forget()

    def start_reader(self, lane: Lane, stream: Iterable[bytes]) -> None:
        """Run `read` in a thread of its own."""
        name = f"diloco-read-{lane.name}-{self.peer}"
        threading.Thread(target=self.read, args=(lane, stream), name=name, daemon=True).start()

    def fail_lost(self, lane: Lane, error: object = None) -> None:
        """Fail because a stream broke, in gRPC's words if there are any, or in those of the syncer that refused."""
        if isinstance(error, grpc.Call) and error.code() is REFUSAL:
            self.refused = True
            self.fail(error.details())
            return
        if isinstance(error, grpc.Call) and error.code() in DENIALS:
            self.fail(error.details())
            return
        lost = f"the {lane.name} connection to {self.peer!r} was lost"
        if isinstance(error, grpc.Call):
            self.fail(f"{lost}: {error.details()} ({error.code().name})")
        else:
            self.fail(f"{lost}: {error!r}" if error is not None and str(error) else lost)

    def _hear_goodbye(self, lane: Lane, reason: str) -> None:
        with self._lock:
            lane.said_goodbye = True
            complete = all(each.said_goodbye for each in self.lanes.values())
        if complete:
            self.fail(f"{self.peer!r} ended the session: {reason}")
