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

from diloco_jax.protocol.messages import Message, SyncerMessage
from diloco_jax.transport.link import (
    SYNCER_TYPES,
    Delivery,
    LinkClosed,
    Payload,
    Traffic,
    TransportConfig,
    TransportError,
    check_name,
    is_bulk,
    payload_parts,
)

CLOSING = "the syncer is closing"
KNOWN_MAX = 10_000  # learners that are remembered, so that an older process of one is recognised
DRAINS_MAX = 16
DRAIN_ANSWER_S = 3.0  # below the patience of those who ask


class Refused(TransportError):
    """The syncer does not take this connection, and why.

    Args:
        final: whether another attempt of the same process would be refused as well.
    """

    def __init__(self, reason: str, *, final: bool = True) -> None:
        super().__init__(reason)
        self.final = final


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
                session.waiting_bytes -= len(delivery.payload)
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
        self.waiting_bytes = 0  # of payloads in the inbox
        self.open = True
        self.announced = False  # until it is set the driver knows nothing of the session, and is not told of its end
        self.reason = ""
        self.number = 0

    @abstractmethod
    def send(self, message: Message, parts: tuple[memoryview, ...]) -> None:
        """Queue a message to the peer; LinkClosed if the session is over or its queue full, which ends it."""

    @abstractmethod
    def fail(self, reason: str) -> None:
        """End the session on both sides, at once, telling the peer if that is still possible."""

    def offer(self, message: Message, payload: bytes | memoryview, *, wait: bool) -> bool:
        """Put a message into the inbox; False if there is no room (`wait` waits for it) or the session is over.

        Who waits also waits until all payloads in the inbox together stay below the limit of one, so that a peer that
        sends faster than the driver reads cannot fill the memory.
        """
        bulk, size = is_bulk(message), len(payload)
        with self.inbox.changed:
            if wait:
                self.inbox.changed.wait_for(lambda: not self.open or (self.room[bulk] > 0 and self._fits(size)))
            if not self.open or self.room[bulk] == 0:
                return False
            self.room[bulk] -= 1
            self.waiting_bytes += size
            self.inbox.waiting.append((self, Delivery("message", self.peer, message, payload, session=self.number)))
            self.inbox.changed.notify_all()
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
                self.inbox.waiting.append(
                    (self, Delivery("disconnected", self.peer, reason=reason, session=self.number))
                )
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
        self.on_drain: Callable[[str], str] | None = None
        self._drains: deque[_Drain] = deque()
        self._opening: dict[tuple[str, tuple[int, int]], S] = {}  # not all of their connections are there yet
        self._newest: dict[str, tuple[tuple[int, int], S]] = {}
        self._heard: dict[str, Session] = {}  # only the driver's thread touches it
        self._closed = False

    def admit(
        self, run_id: str, epoch: int, learner_id: str, incarnation: int, number: int, make: Callable[[], S]
    ) -> S:
        """Return the session with this name, made now if the name is new.

        Call this only for a peer whose credentials are good. It ends nobody's session: `establish` does.

        Raises:
            Refused: It is of another run or a later epoch, its name is not allowed, or a newer session of the learner
                is known.
        """
        self._check_names(run_id, epoch, learner_id, incarnation)
        stamp = (incarnation, number)
        with self._lock:
            if self._closed:
                raise Refused(CLOSING, final=False)
            known = self._newest.get(learner_id)
            if known is not None and known[0] == stamp and known[1].open:
                return known[1]
            self._check_not_stale(learner_id, stamp)
            session = self._opening.get((learner_id, stamp))
            if session is None or not session.open:
                self._opening = {key: each for key, each in self._opening.items() if each.open}
                session = self._opening[learner_id, stamp] = make()
            return session

    def establish(self, session: S) -> None:
        """Make a session whose connections are all there the only one of its learner: the one before it ends.

        Raises:
            Refused: A newer one was quicker, or the syncer is closing.
        """
        with self._lock:
            key = next((key for key, each in self._opening.items() if each is session), None)
            if key is None:  # it is established already, by its other connection
                return
            del self._opening[key]
            learner_id, stamp = key
            try:
                if self._closed:
                    raise Refused(CLOSING, final=False)
                if not session.open:
                    raise Refused(session.reason, final=False)
                self._check_not_stale(learner_id, stamp)
                known = self._newest.get(learner_id)
                if known is None and len(self._newest) >= KNOWN_MAX:
                    self._forget_one()
            except Refused as error:
                session.fail(str(error))
                raise
            if known is not None:  # under the lock: its end must be in the inbox before the new session speaks
                known[1].fail(f"replaced by a newer connection of {learner_id!r}, incarnation {stamp[0]}")
            self._newest.pop(learner_id, None)  # so that the newest comes last
            self._newest[learner_id] = (stamp, session)
            session.announced = True

    def _check_names(self, run_id: str, epoch: int, learner_id: str, incarnation: int) -> None:
        if run_id != self.run_id:
            raise Refused(
                f"{learner_id!r} belongs to run {run_id!r}, this syncer to run {self.run_id!r}: start both from the "
                "same config"
            )
        if epoch > self.epoch:
            raise Refused(
                f"{learner_id!r} has heard of epoch {epoch} of the syncer, this one is of epoch {self.epoch}: stop "
                "this old syncer, and connect to the newer one",
                final=False,  # the newer one may take its place
            )
        try:
            check_name(learner_id)
        except ValueError as error:
            raise Refused(str(error)) from None
        if incarnation < 0:
            raise Refused(f"incarnation {incarnation} of {learner_id!r} is not allowed: use 0 or more")

    def _check_not_stale(self, learner_id: str, stamp: tuple[int, int]) -> None:
        known = self._newest.get(learner_id)
        if known is not None and known[0] >= stamp:
            raise Refused(
                f"{learner_id!r} incarnation {stamp[0]} is stale, a later connection with incarnation {known[0][0]} is "
                "known: stop this process, or start it with a larger incarnation"
            )

    def _forget_one(self) -> None:
        """Forget the learner whose session ended and that connected the longest time ago."""
        gone = next((name for name, (_, session) in self._newest.items() if not session.open), None)
        if gone is None:
            raise Refused(f"{KNOWN_MAX} learners are connected, this syncer takes no more", final=False)
        del self._newest[gone]

    def receive(self, timeout_s: float) -> Delivery | None:
        """Return the next delivery of any learner, or None after `timeout_s` seconds; 0 only looks."""
        item = self.inbox.get(timeout_s)
        self._carry_out_drains()
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
            sessions = [*(session for _, session in self._newest.values()), *self._opening.values()]
            return [session for session in sessions if session.open]

    # ---- drain requests ---------------------------------------------------------------------------------------------

    def request_drain(self, learner_id: str) -> tuple[bool, str]:
        """On any thread but the driver's: let the driver drain a learner; return whether it did, and its words."""
        request = _Drain(learner_id)
        with self._lock:
            if self._closed:
                return False, CLOSING
            if len(self._drains) >= DRAINS_MAX:
                return False, f"{DRAINS_MAX} drain requests are waiting; ask again later"
            self._drains.append(request)
        self.inbox.wake()
        if request.done.wait(DRAIN_ANSWER_S):
            return request.ok, request.message
        with self._lock:
            if request in self._drains:
                self._drains.remove(request)
                return False, f"the syncer was busy for {DRAIN_ANSWER_S:g} s and did nothing; ask again"
        return False, f"the syncer has begun but did not end within {DRAIN_ANSWER_S:g} s; see `diloco status`"

    def _carry_out_drains(self) -> None:
        """On the driver's thread."""
        while self._drains:
            with self._lock:
                if not self._drains:  # its caller gave up
                    return
                request = self._drains.popleft()
            try:
                if self.on_drain is None:
                    raise ValueError("this syncer cannot drain learners")
                request.message = self.on_drain(request.learner_id)
                request.ok = True
            except ValueError as error:
                request.message = str(error)
            finally:  # whatever else went wrong is the driver's to handle, but the caller must not wait for it
                request.done.set()


class _Drain:
    """A request that waits for the driver."""

    def __init__(self, learner_id: str) -> None:
        self.learner_id = learner_id
        self.done = threading.Event()
        self.ok = False
        self.message = "the syncer failed; see its log"
