"""Inboxes with room per session: sessions put deliveries into them, drivers take them out.

An Inbox belongs to one driver and holds the deliveries of all its sessions. Room is counted per session and lane,
so that neither a talkative learner nor bulk data can keep the control messages of others out.

A driver that is behind reads the newest step report of a learner only (docs/decisions/0062-reports-that-wait.md). The
report that waits is replaced where it is in the queue, unless another control message of its learner came after it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from diloco_jax.protocol.messages import FragmentValue, Message, StepReport
from diloco_jax.protocol.reports import merged_report
from diloco_jax.transport.link import Delivery, Traffic, TransportConfig, is_bulk
from diloco_jax.transport.proto import diloco_pb2 as pb


@dataclass(slots=True)
class Waiting:
    """A delivery that its driver has not read."""

    session: Session
    delivery: Delivery
    since_s: float  # on the monotonic clock


class Inbox:
    """Deliveries that wait for one driver, in order of arrival."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiting: deque[Waiting] = deque()
        self._woken = False
        self._counting = threading.Lock()
        self.traffic = Traffic(0, 0)  # of all its sessions

    def get(self, timeout_s: float) -> tuple[Session, Delivery] | None:
        """Take the oldest delivery, or None after `timeout_s` seconds or a `wake`."""
        with self.changed:
            self.changed.wait_for(lambda: self.waiting or self._woken, timeout=max(0.0, timeout_s))
            self._woken = False
            if not self.waiting:
                return None
            first = self.waiting.popleft()
            session, delivery = first.session, first.delivery
            if session.newest_report is first:
                session.newest_report = None
            if delivery.message is not None:
                session.room[is_bulk(delivery.message)] += 1
                session.waiting_bytes -= len(delivery.payload)
                if session.waits_for_room:
                    self.changed.notify_all()
            return session, delivery

    def wake(self) -> None:
        """Let a waiting `get` return at once."""
        with self.changed:
            self._woken = True
            self.changed.notify_all()

    def count(self, received_bytes: int = 0, sent_bytes: int = 0) -> None:
        """Add to the traffic of all sessions of this inbox; any thread."""
        with self._counting:
            received, sent = self.traffic
            self.traffic = Traffic(received + received_bytes, sent + sent_bytes)


class Session:
    """One end of a session: puts what its peer sends into an inbox, until it is over."""

    def __init__(self, inbox: Inbox, header: pb.Header, peer: str, config: TransportConfig) -> None:
        self.inbox = inbox
        self.header = header  # names the learner, its incarnation, the session and the host
        self.peer = peer
        self.config = config
        self.room = {False: config.queue_messages_max, True: config.queue_payloads_max}  # by is_bulk
        self.waiting_bytes = 0  # of payloads in the inbox
        self.waits_for_room = 0  # readers that do
        self.newest_report: Waiting | None = None  # if it is the newest control message, and nobody has read it
        self.open = True
        self.announced = False  # until it is set the driver knows nothing of the session, and is not told of its end
        self.reason = ""
        self.on_value: Callable[[FragmentValue, bytes | memoryview], bool] | None = None  # in place of the inbox
        self.on_end: Callable[[str], object] | None = None  # gets the reason, once

    @property
    def host(self) -> int:
        return self.header.host

    @property
    def hosts(self) -> int:
        return max(1, self.header.hosts)

    def offer(self, message: Message, payload: bytes | memoryview) -> bool:
        """Hand on what the peer sent; False if nothing becomes of it. See `put`."""
        if self.on_value is not None and isinstance(message, FragmentValue):
            return self.on_value(message, payload)
        return self.put(message, payload)

    def put(self, message: Message, payload: bytes | memoryview) -> bool:
        """Wait for room, and put a message into the inbox; False if the session is over.

        There is room when all payloads in the inbox together stay below the limit of one, so that a peer that sends
        faster than the driver reads cannot fill the memory.
        """
        bulk, size, now_s = is_bulk(message), len(payload), time.monotonic()
        with self.inbox.changed:
            if isinstance(message, StepReport) and self._replace_report(message, now_s):
                return True
            if not (self.room[bulk] > 0 and self._fits(size)):
                self.waits_for_room += 1
                self.inbox.changed.wait_for(lambda: not self.open or (self.room[bulk] > 0 and self._fits(size)))
                self.waits_for_room -= 1
            if not self.open:
                return False
            self.room[bulk] -= 1
            self.waiting_bytes += size
            delivery = Delivery("message", self.peer, message, payload, session=self.header.session)
            entry = Waiting(self, delivery, now_s)
            if not bulk:
                self.newest_report = entry if isinstance(message, StepReport) else None
            self.inbox.waiting.append(entry)
            self.inbox.changed.notify_all()
            return True

    def _replace_report(self, report: StepReport, now_s: float) -> bool:
        """Let a report take the place of one that waits; False if none does, or both must be read."""
        entry = self.newest_report
        if entry is None or not self.open or not isinstance(entry.delivery.message, StepReport):
            return False
        merged = merged_report(entry.delivery.message, report, now_s - entry.since_s)
        if merged is None:
            return False
        entry.delivery, entry.since_s = entry.delivery._replace(message=merged), now_s
        return True

    def _fits(self, size: int) -> bool:
        return not self.waiting_bytes or self.waiting_bytes + size <= self.config.payload_bytes_max

    def finish(self, reason: str, *, tell: bool = True) -> bool:
        """End this side and put "disconnected" into the inbox; False, and nothing happens, if it was over already."""
        with self.inbox.changed:
            if not self.open:
                return False
            self.open = False
            self.reason = reason
            if tell and self.announced:
                end = Delivery("disconnected", self.peer, reason=reason, session=self.header.session)
                self.inbox.waiting.append(Waiting(self, end, time.monotonic()))
            self.inbox.changed.notify_all()
        if self.on_end is not None:
            self.on_end(reason)
        return True
