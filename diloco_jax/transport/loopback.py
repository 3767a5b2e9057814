"""The transport inside one process: what is sent lies in the other side's inbox when `send` returns.

For tests, and for islands that are sub-meshes of one process. Payloads are handed over without a copy (several
parts are joined once). There is no queue between the two inboxes, so a full inbox ends the session.
"""

from __future__ import annotations

import itertools

from diloco_jax.protocol.messages import SYNCER, LearnerMessage, Message
from diloco_jax.transport.inbox import Inbox, Session
from diloco_jax.transport.link import (
    LEARNER_TYPES,
    Delivery,
    LinkClosed,
    Payload,
    TransportConfig,
    TransportError,
    is_bulk,
    payload_parts,
)
from diloco_jax.transport.sessions import Refused, SessionListener

_numbers = itertools.count(1)


class LoopbackSession(Session):
    """One of two ends that know each other."""

    other: LoopbackSession

    def send(self, message: Message, parts: tuple[memoryview, ...]) -> None:
        """Put the message into the peer's inbox."""
        payload = parts[0].toreadonly() if len(parts) == 1 else b"".join(parts)
        if self.open and self.other.offer(message, payload, wait=False):
            self.inbox.count(sent_bytes=len(payload))
            self.other.inbox.count(received_bytes=len(payload))
            return
        lane = "bulk" if is_bulk(message) else "control"
        self.fail(f"the {lane} queue to {self.peer!r} is full: it does not read what it is sent")
        raise LinkClosed(f"the session with {self.peer!r} is over: {self.reason}")

    def fail(self, reason: str) -> None:
        """End both sides."""
        self.finish(reason)
        self.other.finish(reason)


class LoopbackListener(SessionListener[LoopbackSession]):
    """Listener of this process; pass it to `connect`."""

    @property
    def address(self) -> str:
        """For logs: there is no address that another process could use."""
        return f"loopback:{self.run_id}"

    def close(self, grace_s: float = 5.0) -> None:
        """End all sessions; what was sent is in the learners' inboxes already, so `grace_s` is not needed."""
        del grace_s
        for session in self.stop_admitting():
            session.finish("closed", tell=False)
            session.other.finish("closed by the syncer")


class LoopbackLink:
    """Link inside one process."""

    def __init__(self, session: LoopbackSession) -> None:
        self._session = session

    def send(self, message: LearnerMessage, payload: Payload = b"") -> None:
        """Put the message into the syncer's inbox. See Link.send."""
        parts = payload_parts(message, payload, LEARNER_TYPES, self._session.config.payload_bytes_max)
        self._session.send(message, parts)

    def receive(self, timeout_s: float) -> Delivery | None:
        """Return the next delivery, or None after `timeout_s` seconds; 0 only looks."""
        item = self._session.inbox.get(timeout_s)
        return None if item is None else item[1]

    def close(self, grace_s: float = 5.0) -> None:
        """End the session; what was sent is in the syncer's inbox already, so `grace_s` is not needed."""
        del grace_s
        self._session.finish("closed", tell=False)
        self._session.other.finish(f"closed by {self._session.other.peer!r}")


def listen(config: TransportConfig, *, run_id: str, epoch: int = 0) -> LoopbackListener:
    """Return a listener for learners of this process."""
    return LoopbackListener(config, run_id, epoch)


def connect(
    listener: LoopbackListener,
    config: TransportConfig,
    *,
    run_id: str,
    epoch: int = 0,
    learner_id: str,
    incarnation: int,
) -> LoopbackLink:
    """Return a link to `listener`.

    Raises:
        TransportError: The listener refuses: another run, a later epoch, a stale incarnation, or it is closed.
    """

    def make() -> LoopbackSession:
        ours, theirs = LoopbackSession(Inbox(), SYNCER, config), LoopbackSession(listener.inbox, learner_id, config)
        ours.other, theirs.other = theirs, ours
        ours.announced = True
        return theirs

    try:
        theirs = listener.admit(run_id, epoch, learner_id, incarnation, next(_numbers), make)
        listener.establish(theirs)
    except Refused as error:
        raise TransportError(f"the syncer at {listener.address} refused {learner_id!r}: {error}") from None
    return LoopbackLink(theirs.other)
