"""The driver of the learner's machine: one input at a time, with its effects executed before the next one.

The link thread keeps a link to the syncer, and receives, checks and decodes the messages.
"""

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

from diloco_jax.core import codec
from diloco_jax.core.codec import Bytes
from diloco_jax.protocol import effects
from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.protocol.learner.mailbox import Given, Mailbox
from diloco_jax.protocol.messages import (
    OTHER_RUN,
    AnchorValue,
    CutFragment,
    Evaluate,
    EvaluateWithout,
    FragmentValue,
    GlobalFragment,
    StateChunk,
    SyncerMessage,
)
from diloco_jax.runtime.island.adoptions import ArrivedValue, GlobalValues, ReceivedState
from diloco_jax.runtime.island.evaluation import Change
from diloco_jax.runtime.island.host import Host
from diloco_jax.runtime.island.payloads import PayloadSender
from diloco_jax.runtime.island.saved_states import StateName
from diloco_jax.runtime.learner.tape import LearnerTape
from diloco_jax.runtime.records.signals import RefusedForGood
from diloco_jax.transport.endpoints.dialler import Dialler
from diloco_jax.transport.link import Link, LinkClosed, Rejected, TransportError, is_bulk

RECONNECT_DELAYS_S = (0.2, 0.5, 1.0, 1.0, 2.0)
# A thread that waits for messages wakes up this often to notice the end.
IDLE_S = 0.2

T = TypeVar("T")
log = logging.getLogger(__name__)


class Signals:
    """The signals among the threads of one learner: the end, arrivals, and failures."""

    def __init__(self, stop: threading.Event) -> None:
        # Set from outside to leave the run.
        self.stop = stop
        # Set when an event arrives that a waiting step thread may need.
        self.woken = threading.Event()
        self.compiled = threading.Event()  # steps can run
        self._failure: Exception | None = None

    def fail(self, error: Exception) -> None:
        """End the learner by an error of one of its threads; the step thread raises the first one."""
        self._failure = self._failure or error
        self.woken.set()

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def check(self) -> None:
        """Raise the error that ended the learner, if there is one."""
        if self._failure is not None:
            raise self._failure


class Mail(NamedTuple):
    """A message of the syncer, with its decoded payload."""

    message: SyncerMessage
    value: ArrivedValue | None = None
    payload: bytes | memoryview = b""


@dataclass(eq=False)
class Decisions:
    """The machine, the execution of its effects, and the lock of both; any thread may give it an input.

    The step thread loads whole states and evaluates, outside of the lock.
    """

    machine: Learner
    host: Host
    tape: LearnerTape
    payloads: PayloadSender
    # The state on disk that may be restored.
    saved: StateName | None
    signals: Signals

    def __post_init__(self) -> None:
        # The machine's reason at its end; empty before.
        self.finished = ""
        self.examination: effects.EvaluateModel | None = None  # requested
        # The change of the newest EvaluateWithout, and its number.
        self._change: tuple[int, Change] | None = None
        # The whole state that the step thread shall load.
        self.state: effects.AdoptState | None = None
        # Without a link nothing is sent.
        self.link: Link | None = None
        # The parts of a donor's state.
        self._received = ReceivedState(self.host.moving.bytes.num_bytes)
        self._lock = threading.Lock()

    @property
    def over(self) -> bool:
        """Tell whether the machine has ended, or shall end."""
        return bool(self.finished) or self.signals.stop.is_set()

    def ask(self, question: Callable[[Learner], T]) -> T:
        """Query the machine without effects."""
        with self._lock:
            return question(self.machine)

    def apply(self, decide: Callable[[Learner, float], list[effects.Effect]]) -> None:
        """Give the machine an input, and execute its effects; `decide` gets the machine and the time in seconds."""
        with self._lock:
            self._execute(decide(self.machine, time.monotonic()))

    def deliver(self, give: Callable[[float], Given[Mail] | None]) -> bool:
        """Give the machine a message from its mailbox, and execute its effects; return False if there was none."""
        with self._lock:
            given = give(time.monotonic())
            if given is not None:
                self._execute(given.effects, given.item)
        return given is not None

    def close_link(self, timeout_s: float) -> None:
        """Close the link, and send what is queued for at most `timeout_s` seconds."""
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
            self.payloads.anchor(link, message, self.host.take_anchor(message))
        elif isinstance(message, StateChunk):
            receiver, moving = message.receiver, self.host.moving_state(message.local_step, message.receiver)
            self.payloads.part(link, message, moving, partial(self._refuse_state, receiver))
        else:
            # The link thread notices it too, and reconnects.
            with contextlib.suppress(LinkClosed):
                link.send(message)  # type: ignore[arg-type]

    def keep_change(self, message: EvaluateWithout, payload: Bytes) -> None:
        """Keep the payload of a request until the evaluation starts; a newer one replaces it."""
        with self._lock:
            self._change = message.number, Change(message.fragment_id, payload)

    def take_change(self, number: int) -> Change | None:
        """Return what came with this request for an evaluation, and forget it; None if nothing did."""
        with self._lock:
            kept = self._change
            if kept is None or kept[0] > number:
                return None
            self._change = None
        return kept[1] if kept[0] == number else None

    def _refuse_state(self, receiver: str, reason: str) -> None:
        self.apply(lambda machine, now_s: machine.on_state_unusable(receiver, reason))

    def _execute(self, requests: Sequence[effects.Effect], arrived: Mail | None = None) -> None:
        """Execute effects in their order; `arrived` is the message that caused them, if there is one."""
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
                    message, value = arrived.message, arrived.value
                    assert value is not None and isinstance(message, GlobalFragment), "a fragment came without a value"
                    self.tape.adopt(message)
                    self.host.adopt(message, value)
                case effects.StageState(local_step):
                    self.tape.note("staged_state", local_step)
                    self.host.stage_state(local_step)
                case effects.UnstageState(local_step):
                    self.host.unstage_state(local_step)
                case effects.KeepChunk(part, parts):
                    assert arrived is not None and isinstance(arrived.message, StateChunk), "a kept part did not come"
                    self._received.keep(part, parts, arrived.payload, arrived.message.incarnation)
                case effects.DropChunks():
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
        """Start to write a copy of the present state to disk, unless the previous one is still being written."""
        machine = self.machine
        name = StateName(machine.incarnation, machine.local_step, global_step, tuple(machine.digests), machine.run)
        if self.host.save(name):
            self.tape.note("saved", machine.local_step, global_step)
        else:
            log.info(f"the state of global step {global_step} is not saved: the previous one is still being written")

    def load_state(self, effect: effects.AdoptState) -> tuple[int, int]:
        """Load a whole state, and return its donor's incarnation and local step; ValueError if it does not fit."""
        self.state, saved, self.saved = None, self.saved, None
        if effect.donor:
            self.host.load_state(self._received.take())
            return self._received.donor_incarnation, effect.donor_step
        assert saved is not None, "an own state was adopted without one"
        self.host.restore(effect.fragments)
        return saved.incarnation, saved.local_step

    def forget_saved(self) -> None:
        """Free the state that was read from disk."""
        self.saved = None
        self.host.forget_saved()


class LearnerInbox:
    """The learner's inbox: messages are checked, and given to the machine at once or between two steps."""

    def __init__(self, decisions: Decisions, heads: GlobalValues) -> None:
        self._decisions = decisions
        self._heads = heads
        self._mailbox: Mailbox[Mail] = Mailbox(decisions.machine)
        # Payloads with another digest than their messages named; they were requested again.
        self.damaged = 0

    def drain(self) -> None:
        """Give the machine the messages that wait for the gap between two steps; the step thread calls it there."""
        while self._decisions.deliver(self._mailbox.take):
            pass

    def waiting(self) -> set[int]:
        """Return the fragments that wait to be adopted."""
        return self._decisions.ask(lambda _: self._mailbox.fragments())

    def take(self, message: SyncerMessage | CutFragment | EvaluateWithout, payload: bytes | memoryview) -> None:
        """Handle a message that arrived; the link thread calls it."""
        if isinstance(message, GlobalFragment):
            self._take_global(message, payload, message.digest)
        elif isinstance(message, CutFragment):
            self._take_global(message.value, payload, message.digest)
            self._decisions.host.handled()
        elif isinstance(message, StateChunk) and codec.digest(payload) != message.digest:
            self._take_damaged(message)
        else:
            if isinstance(message, EvaluateWithout):
                self._decisions.keep_change(message, payload)
                message, payload = Evaluate(message.number, ()), b""
            arrived = Mail(message, payload=payload)
            self._decisions.deliver(lambda now_s: self._mailbox.arrive(message, arrived, now_s))
            self._decisions.signals.woken.set()

    def _take_damaged(self, message: StateChunk) -> None:
        """Report a part of a peer's state that has another digest than its message names."""
        self.damaged += 1
        log.warning(f"part {message.part} of the state of {message.learner_id} arrived damaged; it is not used")
        self._decisions.apply(lambda machine, now_s: machine.on_part_damaged(message, now_s))
        self._decisions.signals.woken.set()

    def _take_global(self, message: GlobalFragment, payload: bytes | memoryview, digest: int) -> None:
        """Read a value that arrived, or this host's blocks of it, with the digest of the blocks."""
        now_s, host = time.monotonic(), self._decisions.host
        if not self._decisions.ask(lambda machine: machine.wants(message, now_s)):
            return
        try:
            self._heads.check(message.fragment_id)
            value = self._heads.read(message, host.complete(message, payload, self._is_linked), digest)
            # The step thread only dispatches the adoption, so that the devices hardly wait between two steps.
            host.place(message.fragment_id, value)
            host.wait_for_others(message, self._is_linked)
        except LinkClosed as error:
            # The syncer sends the value again on the next link.
            log.info(f"version {message.version} of fragment {message.fragment_id} is dropped: {error}")
            return
        except ValueError as error:
            self.damaged += 1
            log.warning(f"version {message.version} of fragment {message.fragment_id} {error}; asking again")
            self._decisions.ask(lambda machine: machine.on_corrupt(now_s))
            return
        self._heads.keep(message, value)
        self._decisions.ask(lambda _: self._keep(message, value))
        self._decisions.signals.woken.set()

    def _is_linked(self) -> bool:
        link = self._decisions.link
        return link is not None and link.open

    def _keep(self, message: GlobalFragment, value: ArrivedValue) -> None:
        self._mailbox.read(message, Mail(message, value), time.monotonic())
        self._decisions.host.supersede(message)


class LinkKeeper(NamedTuple):
    """The link to the syncer: it is opened, read, and opened again when it is lost."""

    decisions: Decisions
    inbox: LearnerInbox
    dialler: Dialler

    def connect(self) -> None:
        """Open the link, and send the machine's hello; TransportError if the syncer or a host cannot be reached."""
        epoch, run = self.decisions.machine.epoch, self.decisions.machine.run
        link = self.dialler.connect(epoch, run=run)
        try:
            self.decisions.host.connect(epoch, link.number)
        except TransportError:
            link.close(0.0)
            raise

        def connected(machine: Learner, now_s: float) -> list[effects.Effect]:
            self.decisions.link = link
            return machine.on_connected(now_s)

        self.decisions.apply(connected)
        log.info(f"{self.decisions.machine.learner_id}: connected to the syncer")

    def run(self) -> None:
        """Read messages until the learner ends; the body of the thread "link"."""
        try:
            while not (self.decisions.over or self.decisions.signals.failed):
                self._listen_once()
        except Exception as error:
            self.decisions.signals.fail(error)

    def beat(self) -> None:
        """Send heartbeats while the link thread reads a value; the body of the thread "heartbeat"."""
        try:
            while not (self.decisions.over or self.decisions.signals.failed):
                self.decisions.signals.stop.wait(IDLE_S)
                self.decisions.apply(Learner.on_busy)
        except Exception as error:
            self.decisions.signals.fail(error)

    def _listen_once(self) -> None:
        deadline_s, link = self.decisions.ask(lambda machine: (machine.next_deadline_s(), self.decisions.link))
        assert link is not None, "the link thread listens without a link"
        timeout_s = IDLE_S if deadline_s is None else min(IDLE_S, max(0.0, deadline_s - time.monotonic()))
        delivery = link.receive(timeout_s)
        if deadline_s is not None and time.monotonic() >= deadline_s:
            came = None if delivery is None else delivery.message
            # What is missing may be on its way behind this payload.
            if link.receiving or (came is not None and is_bulk(came)):
                self.decisions.apply(Learner.on_receiving)
            self.decisions.apply(Learner.on_tick)
        if delivery is None:
            return
        if delivery.kind == "disconnected":
            self._reconnect(delivery.reason)
        else:
            self.inbox.take(delivery.message, delivery.payload)  # type: ignore[arg-type]

    def _reconnect(self, reason: str) -> None:
        """Connect again, without a limit of attempts, because training continues meanwhile."""
        self.decisions.apply(Learner.on_disconnected)
        # The step thread may wait for a fragment of this link.
        self.decisions.signals.woken.set()
        self.decisions.close_link(0.0)
        for attempt in itertools.count(1):
            self.decisions.signals.stop.wait(RECONNECT_DELAYS_S[min(attempt, len(RECONNECT_DELAYS_S)) - 1])
            # A syncer whose run is complete ends its connections, and the step thread learns of both meanwhile.
            if self.decisions.over:
                return
            if attempt == 1:
                log.info(f"connection lost ({reason}); reconnecting, steps need no connection")
            try:
                return self.connect()
            except Rejected as error:
                if OTHER_RUN in str(error):
                    # Only a new process may join the syncer's run.
                    raise RefusedForGood(str(error)) from None
                raise
            # A ValueError comes from a certificate that has expired; it may be renewed.
            except (TransportError, ValueError) as error:
                log.info(f"attempt {attempt}: {error}")
