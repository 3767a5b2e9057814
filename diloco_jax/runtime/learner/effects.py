"""The learner's machine as its threads use it: one input at a time, with its effects executed before the next one.

The link thread keeps a link to the syncer, and hears, checks and decodes what comes.
"""

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from diloco_jax.core import codec
from diloco_jax.protocol import effects
from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.protocol.learner.mailbox import Given, Mailbox
from diloco_jax.protocol.messages import AnchorValue, FragmentValue, GlobalFragment, StatePart, SyncerMessage
from diloco_jax.runtime.island.adoptions import GlobalValues, ReceivedState, Values
from diloco_jax.runtime.island.host import Host
from diloco_jax.runtime.island.payloads import PayloadSender
from diloco_jax.runtime.island.saved_states import StateName
from diloco_jax.runtime.learner.tape import LearnerTape
from diloco_jax.transport.endpoints.sharded import Dialler
from diloco_jax.transport.link import Link, LinkClosed, Rejected, TransportError

RECONNECT_DELAYS_S = (0.2, 0.5, 1.0, 1.0, 2.0)
IDLE_S = 0.2  # longest sleep of a thread that waits for messages, so that it notices the end

T = TypeVar("T")
log = logging.getLogger(__name__)


class Signals:
    """The words that the threads of one learner have for each other: that it ends, and that something came."""

    def __init__(self, stop: threading.Event) -> None:
        self.stop = stop  # set from outside to leave politely
        self.woken = threading.Event()  # set when something came that a step thread without a step may wait for
        self.compiled = threading.Event()  # set when steps can run
        self._failure: Exception | None = None

    def fail(self, error: Exception) -> None:
        """End the learner by an error of one of its threads, the first of them; the step thread raises it."""
        self._failure = self._failure or error
        self.woken.set()

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure


class Mail(NamedTuple):
    """A message of the syncer, with what its payload was decoded to."""

    message: SyncerMessage
    values: Values | None = None
    payload: bytes | memoryview = b""


@dataclass(eq=False)
class Decisions:
    """The machine with its effects, and the lock that guards both; any thread may give it an input.

    Whole states and evaluations are the step thread's, outside of the lock.
    """

    machine: Learner
    host: Host
    tape: LearnerTape
    payloads: PayloadSender
    saved: StateName | None  # the state on disk that may be taken over
    signals: Signals

    def __post_init__(self) -> None:
        self.finished = ""  # the reason that the machine gave when it ended; "" before
        self.examination: effects.EvaluateModel | None = None  # that is wanted
        self.state: effects.AdoptState | None = None  # the whole state that is wanted
        self.link: Link | None = None  # over which a learner sends; without one nothing is sent
        self._received = ReceivedState(self.host.moving.bytes.num_bytes)  # the parts of a donor's
        self._lock = threading.Lock()

    @property
    def over(self) -> bool:
        """Tell if the machine has ended, or shall."""
        return bool(self.finished) or self.signals.stop.is_set()

    def ask(self, question: Callable[[Learner], T]) -> T:
        """Call the machine for an answer without effects."""
        with self._lock:
            return question(self.machine)

    def apply(self, decide: Callable[[Learner, float], list[effects.Effect]]) -> None:
        """Give the machine an input and execute what it asks for. Called with the machine and the time in seconds."""
        with self._lock:
            self._execute(decide(self.machine, time.monotonic()))

    def deliver(self, give: Callable[[float], Given[Mail] | None]) -> bool:
        """Give the machine a message by its mailbox, and execute what it asks for; False if `give` gave it none."""
        with self._lock:
            given = give(time.monotonic())
            if given is not None:
                self._execute(given.effects, given.item)
        return given is not None

    def close_link(self, timeout_s: float) -> None:
        """Give the link up; what waits to be sent has so many seconds."""
        link, self.link = self.link, None
        if link is not None:
            link.close(timeout_s)

    def send(self, message: object) -> None:
        """Send a message of the machine, with its payload where it has one."""
        link = self.link
        if link is None:
            return
        if isinstance(message, FragmentValue):
            staged = self.host.take_for_round(message)
            self.tape.note("sent", message.fragment_id, message.global_step, message.local_step)
            self.payloads.value(link, message, staged)
        elif isinstance(message, AnchorValue):
            self.payloads.anchor(link, message, self.host.anchors[message.fragment_id])
        elif isinstance(message, StatePart):
            self.payloads.part(link, message, self.host.moving_state(message.local_step, message.receiver))
        else:
            with contextlib.suppress(LinkClosed):  # the link thread learns of it too, and reconnects
                link.send(message)  # type: ignore[arg-type]

    def _execute(self, requests: Sequence[effects.Effect], arrived: Mail | None = None) -> None:
        """Execute effects in their order; `arrived` is the message that was the input, if it was one."""
        for effect in requests:
            match effect:
                case effects.Send(_, message):
                    self.send(message)
                case effects.Stage(fragment_id, local_step):
                    self.host.stage(fragment_id, local_step)
                case effects.Unstage(fragment_id, local_step):
                    self.host.unstage(fragment_id, local_step)
                case effects.Adopt():
                    assert arrived is not None, "a fragment was adopted that did not come"
                    message, values = arrived.message, arrived.values
                    assert values is not None and isinstance(message, GlobalFragment), "a fragment came without values"
                    self.tape.adopt(message)
                    self.host.adopt(message, values)
                case effects.StageState(local_step):
                    self.tape.note("staged_state", local_step)
                    self.host.stage_state(local_step)
                case effects.UnstageState(local_step):
                    self.host.unstage_state(local_step)
                case effects.KeepPart(part, parts):
                    assert arrived is not None and isinstance(arrived.message, StatePart), "a kept part did not come"
                    self._received.keep(part, parts, arrived.payload, arrived.message.incarnation)
                case effects.DropParts():
                    self._received.drop()
                case effects.AdoptState():
                    self.state = effect
                case effects.EvaluateModel():
                    self.examination = effect
                case effects.SaveState(global_step):
                    self._save(global_step)
                case effects.Finish(reason):
                    self.finished = reason
                case effects.Drop(peer, reason):
                    log.info(f"dropped a message of {peer}: {reason}")
                case _:
                    raise AssertionError(f"the learner has no effect {effect}")

    def _save(self, global_step: int) -> None:
        """Begin to write a copy of the present state to disk, unless the one before is still being written."""
        machine = self.machine
        name = StateName(machine.incarnation, machine.local_step, global_step, tuple(machine.digests))
        if self.host.save(name):
            self.tape.note("saved", machine.local_step, global_step)
        else:
            log.info(f"the state of global step {global_step} is not saved: the one before is still being written")

    def load_state(self, effect: effects.AdoptState) -> tuple[int, int]:
        """Take a whole state over, and return incarnation and local step of its life; ValueError if it does not fit."""
        self.state, saved, self.saved = None, self.saved, None
        if effect.donor:
            self.host.load_state(self._received.take())
            return self._received.donor_incarnation, effect.donor_step
        assert saved is not None, "an own state was adopted without one"
        self.host.restore(effect.fragments)
        return saved.incarnation, saved.local_step

    def forget_saved(self) -> None:
        self.saved = None
        self.host.forget_saved()


class LearnerInbox:
    """The learner's mail: read, checked, and given to the machine at once or in the gap between two steps."""

    def __init__(self, decisions: Decisions, heads: GlobalValues) -> None:
        self._decisions = decisions
        self._heads = heads
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
            self._decisions.signals.woken.set()

    def _take_global(self, message: GlobalFragment, payload: bytes | memoryview) -> None:
        now_s = time.monotonic()
        if not self._decisions.ask(lambda machine: machine.wants(message, now_s)):
            return
        try:
            others = self._decisions.host.arrived(message, payload)
            values = self._heads.read(message, payload)
            others()
        except ValueError as error:
            log.warning(f"version {message.version} of fragment {message.fragment_id} {error}; asking again")
            self._decisions.ask(lambda machine: machine.on_corrupt(now_s))
            return
        self._heads.keep(message, values)
        self._decisions.ask(lambda _: self._keep(message, values))
        self._decisions.signals.woken.set()

    def _keep(self, message: GlobalFragment, values: Values) -> None:
        self._mailbox.read(message, Mail(message, values), time.monotonic())
        self._decisions.host.supersede(message)


class LinkKeeper(NamedTuple):
    """The link to the syncer: made, listened to, and made again when it is lost."""

    decisions: Decisions
    inbox: LearnerInbox
    dialler: Dialler

    def connect(self) -> None:
        """Make the link, and let the machine introduce itself; TransportError if the syncer or a host is away."""
        epoch = self.decisions.machine.epoch
        link = self.dialler.connect(epoch)
        try:
            self.decisions.host.connect(epoch, link.number)
        except TransportError:
            link.close(0.0)
            raise

        def connected(machine: Learner, now_s: float) -> list[effects.Effect]:
            self.decisions.link = link
            return machine.on_connected(now_s)

        self.decisions.apply(connected)
        log.info("connected to the syncer")

    def run(self) -> None:
        """Listen until the learner ends: the body of the thread "link"."""
        try:
            while not (self.decisions.over or self.decisions.signals.failed):
                self._listen_once()
        except Exception as error:
            self.decisions.signals.fail(error)

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
            self.decisions.signals.stop.wait(RECONNECT_DELAYS_S[min(attempt, len(RECONNECT_DELAYS_S)) - 1])
            try:
                return self.connect()
            except Rejected:
                raise
            except (TransportError, ValueError) as error:  # ValueError: a certificate that has expired may be renewed
                log.info(f"attempt {attempt}: {error}")
