"""The learner's machine as its threads use it: one input at a time, with its effects executed before the next one."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from diloco_jax.protocol import effects as asked
from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.protocol.learner.mailbox import Given
from diloco_jax.protocol.messages import AnchorValue, FragmentValue, GlobalFragment, StatePart, SyncerMessage
from diloco_jax.runtime.island.adoptions import ReceivedState, Values
from diloco_jax.runtime.island.host import Host
from diloco_jax.runtime.island.payloads import PayloadSender
from diloco_jax.runtime.island.saved_states import StateName
from diloco_jax.runtime.learner.tape import LearnerTape
from diloco_jax.transport.link import Link, LinkClosed

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


class Decisions:
    """The machine with its effects, and the lock that guards both; any thread may give it an input.

    Whole states and evaluations are the step thread's, outside of the lock.
    """

    def __init__(
        self,
        machine: Learner,
        host: Host,
        tape: LearnerTape,
        payloads: PayloadSender,
        saved: StateName | None,
        signals: Signals,
    ) -> None:
        self.machine = machine
        self.finished = ""  # the reason that the machine gave when it ended; "" before
        self.examination: asked.EvaluateModel | None = None  # that is wanted
        self.state: asked.AdoptState | None = None  # the whole state that is wanted
        self.link: Link | None = None  # over which a learner sends; without one nothing is sent
        self._received = ReceivedState(host.moving.bytes.num_bytes)  # the parts of a donor's
        self._host = host
        self._tape = tape
        self._payloads = payloads
        self._saved = saved
        self._signals = signals
        self._lock = threading.Lock()

    @property
    def over(self) -> bool:
        """Tell if the machine has ended, or shall."""
        return bool(self.finished) or self._signals.stop.is_set()

    def ask(self, question: Callable[[Learner], T]) -> T:
        """Call the machine for an answer without effects."""
        with self._lock:
            return question(self.machine)

    def apply(self, decide: Callable[[Learner, float], list[asked.Effect]]) -> None:
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
            staged = self._host.send(message)
            self._tape.note("sent", message.fragment_id, message.global_step, message.local_step)
            self._payloads.value(link, message, staged)
        elif isinstance(message, AnchorValue):
            self._payloads.anchor(link, message, self._host.anchors[message.fragment_id])
        elif isinstance(message, StatePart):
            self._payloads.part(link, message, self._host.moving_state(message.local_step, message.receiver))
        else:
            with contextlib.suppress(LinkClosed):  # the link thread learns of it too, and reconnects
                link.send(message)  # type: ignore[arg-type]

    def _execute(self, effects: Sequence[asked.Effect], arrived: Mail | None = None) -> None:
        """Execute effects in their order; `arrived` is the message that was the input, if it was one."""
        for effect in effects:
            match effect:
                case asked.Send(_, message):
                    self.send(message)
                case asked.Stage(fragment_id, local_step):
                    self._host.stage(fragment_id, local_step)
                case asked.Unstage(fragment_id, local_step):
                    self._host.unstage(fragment_id, local_step)
                case asked.Adopt():
                    assert arrived is not None, "a fragment was adopted that did not come"
                    message, values = arrived.message, arrived.values
                    assert values is not None and isinstance(message, GlobalFragment), "a fragment came without values"
                    self._tape.adopt(message)
                    self._host.adopt(message, values)
                case asked.StageState(local_step):
                    self._tape.note("staged_state", local_step)
                    self._host.stage_state(local_step)
                case asked.UnstageState(local_step):
                    self._host.unstage_state(local_step)
                case asked.KeepPart(part, parts):
                    assert arrived is not None and isinstance(arrived.message, StatePart), "a kept part did not come"
                    self._received.keep(part, parts, arrived.payload, arrived.message.incarnation)
                case asked.DropParts():
                    self._received.drop()
                case asked.AdoptState():
                    self.state = effect
                case asked.EvaluateModel():
                    self.examination = effect
                case asked.SaveState(global_step):
                    self._save(global_step)
                case asked.Finish(reason):
                    self.finished = reason
                case asked.Drop(peer, reason):
                    log.info(f"dropped a message of {peer}: {reason}")
                case _:
                    raise AssertionError(f"the learner has no effect {effect}")

    def _save(self, global_step: int) -> None:
        """Begin to write a copy of the present state to disk, unless the one before is still being written."""
        machine = self.machine
        name = StateName(machine.incarnation, machine.local_step, global_step, tuple(machine.digests))
        if self._host.save(name):
            self._tape.note("saved", machine.local_step, global_step)
        else:
            log.info(f"the state of global step {global_step} is not saved: the one before is still being written")

    def load_state(self, effect: asked.AdoptState) -> tuple[int, int]:
        """Take a whole state over, and return incarnation and local step of its life; ValueError if it does not fit."""
        self.state, saved, self._saved = None, self._saved, None
        if effect.donor:
            self._host.load_state(self._received.take())
            return self._received.donor_incarnation, effect.donor_step
        assert saved is not None, "an own state was adopted without one"
        self._host.restore(effect.fragments)
        return saved.incarnation, saved.local_step

    def forget_saved(self) -> None:
        self._saved = None
        self._host.forget_saved()
