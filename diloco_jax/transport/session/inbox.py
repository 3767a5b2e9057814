"""Inboxes with room per session: sessions put deliveries into them, drivers take them out.

An Inbox belongs to one driver and holds the deliveries of all its sessions. Room is counted per session and lane,
so that neither a learner with many messages nor bulk data can block the control messages of other learners.

A driver that is behind reads only the newest step report of a learner (docs/decisions/0062-reports-that-wait.md). A new
report replaces a waiting one in its place in the queue, unless another control message of the learner arrived after it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from diloco_jax.protocol.messages import (
    AnchorValue,
    CutFragment,
    FragmentValue,
    HostBlocks,
    Message,
    StepReport,
)
from diloco_jax.protocol.pacing import LEARNERS_MAX_LIMIT
from diloco_jax.protocol.reports import merged_report
from diloco_jax.transport.commands import Command, Reply
from diloco_jax.transport.link import SUBSCRIBER, Delivery, Traffic, TransportConfig, is_bulk
from diloco_jax.transport.proto import diloco_pb2 as pb

# What each host of a learner with several sends.
HostPart = FragmentValue | AnchorValue | HostBlocks


@dataclass(slots=True)
class Waiting:
    """A delivery that the driver has not read."""

    session: Session
    delivery: Delivery
    since_s: float  # monotonic clock


class Inbox:
    """Deliveries that wait for one driver, in order of arrival."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiting: deque[Waiting] = deque()
        self._woken = False
        self._counting = threading.Lock()
        self.traffic = Traffic(0, 0)  # all sessions
        # Peers choose their names, so at most as many are counted as can be learners. Subscribers are not counted.
        self._of_learners: dict[str, Traffic] = {}

    def get(self, timeout_s: float) -> tuple[Session, Delivery] | None:
        """Remove and return the oldest delivery; None after `timeout_s` seconds or a `wake`."""
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
        """Make a waiting `get` return at once."""
        with self.changed:
            self._woken = True
            self.changed.notify_all()

    def count(self, peer: str, received_bytes: int = 0, sent_bytes: int = 0, shared_bytes: int = 0) -> None:
        """Add to the traffic of all sessions and of one peer; any thread may call it.

        Args:
            shared_bytes: Bytes for the peer that were sent once for several peers, and are counted for another one.
                They are traffic of the peer, but no further traffic of all sessions.
        """
        with self._counting:
            self.traffic = self.traffic.plus(received_bytes, sent_bytes)
            known = self._of_learners.get(peer)
            if known is None:
                if peer.startswith(SUBSCRIBER) or len(self._of_learners) >= LEARNERS_MAX_LIMIT:
                    return
                known = Traffic(0, 0)
            self._of_learners[peer] = known.plus(received_bytes, sent_bytes + shared_bytes)

    def traffic_of_learners(self) -> tuple[Traffic, dict[str, Traffic]]:
        """Return the traffic of all sessions, and at the same moment that of each learner, by name."""
        with self._counting:
            return self.traffic, dict(self._of_learners)


class Session:
    """One end of a session: it puts the peer's messages into an inbox until the session is over."""

    def __init__(self, inbox: Inbox, header: pb.Header, peer: str, config: TransportConfig) -> None:
        self.inbox = inbox
        # The header names the learner, its incarnation, the session and the host.
        self.header = header
        self.peer = peer
        self.config = config
        self.room = {False: config.queue_messages_max, True: config.queue_payloads_max}  # is_bulk -> room
        # Bytes of payloads in the inbox.
        self.waiting_bytes = 0
        self.waits_for_room = 0  # readers that do
        # Set while the newest control message is a report that the driver has not read.
        self.newest_report: Waiting | None = None
        self.open = True
        # Before it is set the driver does not know the session, and its end is not delivered.
        self.announced = False
        self.reason = ""
        # Receives what a host sends for its learner, instead of the inbox.
        self.on_host: Callable[[HostPart, bytes | memoryview], bool] | None = None
        # Called when a bulk message has left the queue to the peer.
        self.on_room: Callable[[], object] | None = None
        # Called once with the reason.
        self.on_end: Callable[[str], object] | None = None

    @property
    def host(self) -> int:
        return self.header.host

    @property
    def hosts(self) -> int:
        return max(1, self.header.hosts)

    def count(self, received_bytes: int = 0, sent_bytes: int = 0, shared_bytes: int = 0) -> None:
        """Add to the traffic of the peer as `Inbox.count` does; all hosts of a learner are one peer."""
        self.inbox.count(self.peer, received_bytes, sent_bytes, shared_bytes)

    def offer(self, message: Message, payload: bytes | memoryview) -> bool:
        """Deliver a message of the peer as `put` does, or to `on_host`; return whether it was accepted."""
        if self.on_host is not None and isinstance(message, HostPart):
            return self.on_host(message, payload)
        if isinstance(message, HostBlocks):
            self.fail("a learner with one host has no blocks to state")
            return False
        return self.put(message, payload)

    def put(self, message: Message, payload: bytes | memoryview) -> bool:
        """Wait for room, and put a message into the inbox; False if the session is over.

        There is room while the session's payloads in the inbox together stay within the limit of one payload. So a
        peer that sends faster than the driver reads cannot fill the memory.
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
        """Replace a waiting report by a newer one; False if none waits, or the driver must read both."""
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

    @property
    def cuts_waiting(self) -> int:
        """Return the number of cut versions that wait to be sent."""
        return 0

    def send(self, message: Message | Command | Reply, parts: tuple[memoryview, ...]) -> None:
        """Queue a message; LinkClosed if the session is over, or its queue is full, which ends it."""
        raise NotImplementedError

    def send_cut(self, cut: CutFragment, blocks: bytes, make_parts: Callable[[], tuple[memoryview, ...]]) -> None:
        """Queue the blocks of a version for a host; errors are those of `send`.

        Args:
            blocks: The host's statement of its blocks. Hosts with equal ones get equal payloads of a version.
            make_parts: Makes the payload, which may be a copy.
        """
        self.send(cut, make_parts())

    def fail(self, reason: str) -> None:
        """End the session with a reason."""
        raise NotImplementedError

    def finish(self, reason: str, *, tell: bool = True) -> bool:
        """End this side and put "disconnected" into the inbox; do nothing and return False if it was over already."""
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
