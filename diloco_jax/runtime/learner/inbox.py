"""The link thread of a learner: it keeps a link to the syncer, and hears, checks and decodes what comes."""

import itertools
import logging
import time
from typing import NamedTuple

from diloco_jax.core import codec
from diloco_jax.protocol.effects import Effect
from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.protocol.learner.mailbox import Mailbox
from diloco_jax.protocol.messages import GlobalFragment, StatePart, SyncerMessage
from diloco_jax.runtime.island.adoptions import GlobalValues, Values
from diloco_jax.runtime.island.host import Host
from diloco_jax.runtime.learner.effects import IDLE_S, Decisions, Mail, Signals
from diloco_jax.transport.link import Rejected, TransportError
from diloco_jax.transport.sharded import Dialler

RECONNECT_DELAYS_S = (0.2, 0.5, 1.0, 1.0, 2.0)

log = logging.getLogger(__name__)


class LearnerInbox:
    """The learner's mail: read, checked, and given to the machine at once or in the gap between two steps."""

    def __init__(self, host: Host, decisions: Decisions, heads: GlobalValues, signals: Signals) -> None:
        self._host = host
        self._decisions = decisions
        self._heads = heads
        self._signals = signals
        self._mailbox: Mailbox[Mail] = Mailbox(decisions.machine)

    def drain(self) -> None:
        """Give the machine what waits for the gap between two steps. The step thread calls it there."""
        while self._decisions.deliver(self._mailbox.take):
            pass

    def take(self, message: SyncerMessage, payload: bytes | memoryview) -> None:
        """Take a message that came. The link thread calls it."""
        if isinstance(message, GlobalFragment):
            self._take_global(message, payload)
        elif isinstance(message, StatePart) and codec.digest(payload) != message.digest:
            donor = message.learner_id
            log.warning(f"part {message.part} of the state of {donor} arrived damaged; it is asked for again")
        else:
            arrived = Mail(message, payload=payload)
            self._decisions.deliver(lambda now_s: self._mailbox.arrive(message, arrived, now_s))
            self._signals.woken.set()

    def _take_global(self, message: GlobalFragment, payload: bytes | memoryview) -> None:
        now_s = time.monotonic()
        if not self._decisions.ask(lambda machine: machine.wants(message, now_s)):
            return
        try:
            others = self._host.arrived(message, payload)
            values = self._heads.read(message, payload)
            others()
        except ValueError as error:
            log.warning(f"version {message.version} of fragment {message.fragment_id} {error}; asking again")
            self._decisions.ask(lambda machine: machine.on_corrupt(now_s))
            return
        self._heads.keep(message, values)
        self._decisions.ask(lambda _: self._keep(message, values))
        self._signals.woken.set()

    def _keep(self, message: GlobalFragment, values: Values) -> None:
        self._mailbox.read(message, Mail(message, values), time.monotonic())
        self._host.supersede(message)


class LinkKeeper(NamedTuple):
    """The link to the syncer: made, listened to, and made again when it is lost."""

    host: Host
    decisions: Decisions
    inbox: LearnerInbox
    dialler: Dialler
    signals: Signals

    def connect(self) -> None:
        """Make the link, and let the machine introduce itself; TransportError if the syncer or a host is away."""
        epoch = self.decisions.machine.epoch
        link = self.dialler.connect(epoch)
        try:
            self.host.connect(epoch, link.number)
        except TransportError:
            link.close(0.0)
            raise

        def connected(machine: Learner, now_s: float) -> list[Effect]:
            self.decisions.link = link
            return machine.on_connected(now_s)

        self.decisions.apply(connected)
        log.info("connected to the syncer")

    def run(self) -> None:
        """Listen until the learner ends: the body of the thread "link"."""
        try:
            while not (self.decisions.over or self.signals.failed):
                self._listen_once()
        except Exception as error:
            self.signals.fail(error)

    def _listen_once(self) -> None:
        deadline_s, link = self.decisions.ask(lambda machine: (machine.next_deadline_s(), self.decisions.link))
        assert link is not None, "the link thread listens without a link"
        timeout_s = IDLE_S if deadline_s is None else min(IDLE_S, max(0.0, deadline_s - time.monotonic()))
        delivery = link.receive(timeout_s)
        if deadline_s is not None and time.monotonic() >= deadline_s:
            self.decisions.apply(Learner.on_tick)
        if delivery is None:
            return
        if delivery.kind == "disconnected":
            self._reconnect(delivery.reason)
        else:
            self.inbox.take(delivery.message, delivery.payload)  # type: ignore[arg-type]

    def _reconnect(self, reason: str) -> None:
        """Connect again. Training goes on meanwhile; so the attempts have no limit, only a pace."""
        log.info(f"connection lost ({reason}); reconnecting, steps need no connection")
        self.decisions.apply(Learner.on_disconnected)
        self.decisions.close_link(0.0)
        for attempt in itertools.count(1):
            if self.decisions.over:
                return
            self.signals.stop.wait(RECONNECT_DELAYS_S[min(attempt, len(RECONNECT_DELAYS_S)) - 1])
            try:
                return self.connect()
            except Rejected:
                raise
            except (TransportError, ValueError) as error:  # ValueError: a certificate that has expired may be renewed
                log.info(f"attempt {attempt}: {error}")
