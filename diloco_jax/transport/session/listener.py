"""The syncer's side of any transport, which is the same for all: one inbox, the book of sessions, operators."""

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from diloco_jax.protocol.messages import EvaluateWithout, GlobalFragment, SyncerMessage
from diloco_jax.transport.link import (
    SYNCER_TYPES,
    Delivery,
    LinkClosed,
    Payload,
    Traffic,
    TransportConfig,
    Version,
    payload_parts,
)
from diloco_jax.transport.session.description import Description
from diloco_jax.transport.session.inbox import Inbox, Session
from diloco_jax.transport.session.operator_requests import Operate, OperatorRequests
from diloco_jax.transport.session.sessions import SessionBook


class Listener:
    """The syncer's side of a transport, with one inbox for all learners. A transport lets sessions in.

    Attributes:
        config: Settings of the connections.
        address: Address for learners.
        on_operator: The driver's answer to a request of an operator (`ask_operator`). `receive` calls it, so it runs
            on the driver's thread. It returns what happens now, in words, or raises ValueError with the reason why
            nothing happens. None: the answer is that this syncer cannot do it.
        status_json: The answer to `diloco status`; the driver may replace it at any time.
    """

    address: str

    def __init__(self, config: TransportConfig, run_id: str, epoch: int, subscribers_max: int, run: str = "") -> None:
        self.config = config
        self._inbox = Inbox()
        # One thread, so that every host gets the versions in their order.
        self._cutting = ThreadPoolExecutor(1, "diloco-cut")
        self._book = SessionBook(config, run_id, epoch, self._later, run=run)
        full = f"this syncer takes {subscribers_max} subscribers: stop one, or raise syncer.subscribers_max"
        self._subscribers = SessionBook(config, run_id, epoch, known_max=subscribers_max, full=full)
        self._requests = OperatorRequests(self._inbox.wake)
        # Only the driver's thread touches it.
        self._heard: dict[str, Session] = {}
        self.on_operator: Operate | None = None
        self.status_json = "{}"
        self.description = Description("", "")
        self.number_of: Callable[[str], int] = lambda _: 0

    @property
    def lost(self) -> str:
        """Return why another process has become the run's syncer; "" while this one is."""
        return ""

    def abandon(self) -> None:
        """Let `close` leave the claim to be the syncer: the run has not ended, and another process may continue it."""

    def announce(
        self, settings: Callable[[], Mapping[str, str]], description: Description, number_of: Callable[[str], int]
    ) -> None:
        """Take the answers for processes that ask before they join. Any thread may call the functions.

        Args:
            settings: Returns what learners must agree on; only a listener that answers `diloco doctor` uses it.
            number_of: Returns the number of a learner.
        """
        del settings
        self.description, self.number_of = description, number_of

    def receive(self, timeout_s: float) -> Delivery | None:
        """Return the next delivery of any learner, or None after `timeout_s` seconds; 0 does not wait."""
        item = self._inbox.get(timeout_s)
        self._requests.answer(self.on_operator)
        if item is None:
            return None
        session, delivery = item
        if delivery.kind == "message":
            self._heard[session.peer] = session
        elif self._heard.get(session.peer) is session:
            del self._heard[session.peer]
        return delivery

    def send(self, peer: str, message: SyncerMessage | EvaluateWithout, payload: Payload = b"") -> bool:
        """Queue a message to the session that brought the last delivery of `peer`; never blocks.

        Answering the session that was *heard*, rather than the newest, keeps a returning learner from getting messages
        for its previous incarnation.

        Returns:
            False, and nothing is sent, when that session is over or has just been cut because its queue is full: its
            "disconnected" delivery is in the inbox, or was received already.

        Raises:
            ValueError: The message or its payload can never be sent (wrong type, too large).
        """
        parts = payload_parts(message, payload, SYNCER_TYPES, self.config.payload_bytes_max)
        session = self._heard.get(peer)
        if session is None:
            return False
        try:
            session.send(message, parts)
        except LinkClosed:
            return False
        return True

    def send_version(self, peer: str, message: GlobalFragment, version: Version) -> bool:
        """Queue a version as `send` does; each of a learner's several hosts gets its blocks of it.

        Returns:
            False as `send` does. Hosts get their blocks later, so the end of their sessions is only a delivery.
        """
        session = self._heard.get(peer)
        hosts = None if session is None else self._book.hosts_of(session)
        if session is None or hosts is None:
            return self.send(peer, message, version.payload)
        hosts.send_version(message, version)
        return session.open

    def _later(self, do: Callable[[], None]) -> None:
        """Call a function on the thread that cuts versions, unless the listener is closed."""
        # A closed listener has no sessions that could get a version.
        with contextlib.suppress(RuntimeError):
            self._cutting.submit(do)

    def wake(self) -> None:
        """Make a waiting `receive` return None at once; any thread may call it."""
        self._inbox.wake()

    def traffic_of_learners(self) -> tuple[Traffic, dict[str, Traffic]]:
        """Return the bytes from and to all peers so far, and those of each learner by name, over all its hosts.

        Every byte that is counted belongs to a session. So the traffic of all is the sum over the learners and the
        subscribers. In a bucket a version is written once for all and read by each, so the sum is larger than it there.
        """
        return self._inbox.traffic_of_learners()

    @property
    def requests(self) -> dict[str, int]:
        """Return the requests to a bucket so far, and their bytes, by name; {} without a bucket."""
        return {}

    def stop_admitting(self) -> list[Session]:
        """Refuse every new session from now on, and return the open ones."""
        self._requests.close()
        return [*self._book.stop_admitting(), *self._subscribers.stop_admitting()]

    def close(self, grace_s: float = 5.0) -> None:
        """Send what is queued for at most `grace_s` seconds, then end all sessions; safe to call again."""
        raise NotImplementedError
