"""Book-keeping that every transport shares: inboxes with room per session, who may connect, whom an answer reaches.

An Inbox belongs to one driver and holds the deliveries of all its sessions. Room is counted per session and lane,
so that neither a talkative learner nor bulk data can keep the control messages of others out.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from diloco_jax.protocol.messages import SYNCER, Message, SyncerMessage
from diloco_jax.transport.link import (
    SYNCER_TYPES,
    Delivery,
    LinkClosed,
    Payload,
    Traffic,
    TransportConfig,
    TransportError,
    is_bulk,
    payload_parts,
)

CLOSING = "the syncer is closing"


class Refused(TransportError):
    """The syncer does not take this connection, and why."""


class Inbox:
    """Deliveries that wait for one driver, in order of arrival."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiting: deque[tuple[Session, Delivery]] = deque()
        self._woken = False
        self._counting = threading.Lock()
        self._traffic = Traffic(0, 0)

    def get(self, timeout_s: float) -> tuple[Session, Delivery] | None:
        """Take the oldest delivery, or None after `timeout_s` seconds or a `wake`."""
        with self.changed:
            self.changed.wait_for(lambda: self.waiting or self._woken, timeout=max(0.0, timeout_s))
            self._woken = False
            if not self.waiting:
                return None
            session, delivery = self.waiting.popleft()
            if delivery.message is not None:
                session.room[is_bulk(delivery.message)] += 1
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
            self._traffic = Traffic(
                self._traffic.received_bytes + received_bytes, self._traffic.sent_bytes + sent_bytes
            )

    @property
    def traffic(self) -> Traffic:
        """What all sessions moved so far."""
        return self._traffic


class Session(ABC):
    """One end of a session: puts what its peer sends into an inbox, until it is over."""

    def __init__(self, inbox: Inbox, peer: str, config: TransportConfig) -> None:
        self.inbox = inbox
        self.peer = peer
        self.config = config
        self.room = {False: config.queue_messages_max, True: config.queue_payloads_max}  # by is_bulk
        self.open = True
        self.announced = False  # until it is set the driver knows nothing of the session, and is not told of its end
        self.reason = ""

    @abstractmethod
    def send(self, message: Message, parts: tuple[memoryview, ...]) -> None:
        """Queue a message to the peer; LinkClosed if the session is over or its queue full, which ends it."""

    @abstractmethod
    def fail(self, reason: str) -> None:
        """End the session on both sides, at once, telling the peer if that is still possible."""

    def offer(self, message: Message, payload: bytes | memoryview, *, wait: bool) -> bool:
        """Put a message into the inbox; False if there is no room (`wait` waits for it) or the session is over."""
        bulk = is_bulk(message)
        with self.inbox.changed:
            if wait:
                self.inbox.changed.wait_for(lambda: not self.open or self.room[bulk] > 0)
            if not self.open or self.room[bulk] == 0:
                return False
            self.room[bulk] -= 1
            self.inbox.waiting.append((self, Delivery("message", self.peer, message, payload)))
            self.inbox.changed.notify_all()
            return True

    def finish(self, reason: str, *, tell: bool = True) -> bool:
        """End this side and put "disconnected" into the inbox; False, and nothing happens, if it was over already."""
        with self.inbox.changed:
            if not self.open:
                return False
            self.open = False
            self.reason = reason
            if tell and self.announced:
                self.inbox.waiting.append((self, Delivery("disconnected", self.peer, reason=reason)))
            self.inbox.changed.notify_all()
            return True


S = TypeVar("S", bound=Session)


class SessionListener(Generic[S]):
    """The part of a Listener that does not depend on how bytes travel."""

    def __init__(self, config: TransportConfig, run_id: str, epoch: int) -> None:
        self.config = config
        self.run_id = run_id
        self.epoch = epoch
        self.inbox = Inbox()
        self._lock = threading.Lock()
        self._newest: dict[str, tuple[tuple[int, int], S]] = {}
        self._heard: dict[str, Session] = {}  # only the driver's thread touches it
        self._closed = False

    def admit(
        self, run_id: str, epoch: int, learner_id: str, incarnation: int, number: int, make: Callable[[], S]
    ) -> S:
        """Return the session with this name, made now if the name is new; that ends the learner's previous one.

        Raises:
            Refused: It is of another run or epoch, its name is not allowed, or a newer session of the learner is known.
        """
        if (run_id, epoch) != (self.run_id, self.epoch):
            raise Refused(
                f"{learner_id!r} belongs to run {run_id!r} epoch {epoch}, this syncer to run {self.run_id!r} epoch "
                f"{self.epoch}: start both from the same config"
            )
        if not learner_id or learner_id == SYNCER:
            raise Refused(f"learner_id {learner_id!r} is not allowed: choose another one")
        stamp = (incarnation, number)
        with self._lock:
            if self._closed:
                raise Refused(CLOSING)
            known = self._newest.get(learner_id)
            if known is not None and known[0] == stamp and known[1].open:
                return known[1]
            if known is not None and known[0] >= stamp:
                raise Refused(
                    f"{learner_id!r} incarnation {incarnation} is stale, a later connection with incarnation "
                    f"{known[0][0]} is known: stop this process, or start it with a larger incarnation"
                )
            if known is not None:  # under the lock: its end must be in the inbox before the new session speaks
                known[1].fail(f"replaced by a newer connection of {learner_id!r}, incarnation {incarnation}")
            session = make()
            self._newest[learner_id] = (stamp, session)
            return session

    def receive(self, timeout_s: float) -> Delivery | None:
        """Return the next delivery of any learner, or None after `timeout_s` seconds; 0 only looks."""
        item = self.inbox.get(timeout_s)
        if item is None:
            return None
        session, delivery = item
        if delivery.kind == "message":
            self._heard[session.peer] = session
        elif self._heard.get(session.peer) is session:
            del self._heard[session.peer]
        return delivery

    def send(self, peer: str, message: SyncerMessage, payload: Payload = b"") -> bool:
        """Queue a message to the session that `peer` was last heard from; False if it is over. See Listener.send."""
        parts = payload_parts(message, payload, SYNCER_TYPES, self.config.payload_bytes_max)
        session = self._heard.get(peer)
        if session is None:
            return False
        try:
            session.send(message, parts)
        except LinkClosed:
            return False
        return True

    def wake(self) -> None:
        """Let a waiting `receive` return at once. See Listener.wake."""
        self.inbox.wake()

    @property
    def traffic(self) -> Traffic:
        """What was received and sent so far. See Listener.traffic."""
        return self.inbox.traffic

    def stop_admitting(self) -> list[S]:
        """Refuse everyone from now on, and return the sessions that are open."""
        with self._lock:
            self._closed = True
            return [session for _, session in self._newest.values() if session.open]
