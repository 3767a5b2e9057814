"""The effects that the learner machine asks for, executed on the island, the link, the tape and the whole states.

It decides nothing, and knows no threads: it is called under the lock of `Decisions`.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple

from diloco_jax.protocol.effects import (
    Adopt,
    AdoptState,
    Drop,
    DropParts,
    Effect,
    EvaluateModel,
    Finish,
    KeepPart,
    SaveState,
    Send,
    Stage,
    StageState,
    Unstage,
    UnstageState,
)
from diloco_jax.protocol.messages import AnchorValue, FragmentValue, GlobalFragment, StatePart, SyncerMessage
from diloco_jax.runtime.island.adoptions import Values
from diloco_jax.runtime.island.host import Host
from diloco_jax.runtime.island.payloads import PayloadSender
from diloco_jax.runtime.learner.states import States
from diloco_jax.runtime.learner.tape import LearnerTape
from diloco_jax.transport.link import Link, LinkClosed

log = logging.getLogger(__name__)


class Mail(NamedTuple):
    """A message of the syncer, with what its payload was decoded to."""

    message: SyncerMessage
    values: Values | None = None
    payload: bytes | memoryview = b""


class LearnerOutbox:
    """Everything that a learner sends, over its link of the moment; without one nothing is sent."""

    def __init__(self, host: Host, tape: LearnerTape, payloads: PayloadSender) -> None:
        self.link: Link | None = None
        self._host = host
        self._tape = tape
        self._payloads = payloads

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
            try:
                link.send(message)  # type: ignore[arg-type]
            except LinkClosed:
                return  # the link thread learns of it too, and reconnects


class Effects:
    """The hands of the learner's machine."""

    def __init__(self, host: Host, tape: LearnerTape, outbox: LearnerOutbox, states: States) -> None:
        self.finished = ""  # the reason that the machine gave when it ended; "" before
        self.examination: EvaluateModel | None = None  # that is wanted; the step thread does it, outside of the lock
        self._host = host
        self._tape = tape
        self._outbox = outbox
        self._states = states

    def execute(self, effects: Sequence[Effect], arrived: Mail | None = None) -> None:
        """Execute effects in their order.

        Args:
            arrived: the message that was the input, if it was one.
        """
        for effect in effects:
            match effect:
                case Send(_, message):
                    self._outbox.send(message)
                case Stage(fragment_id, local_step):
                    self._host.stage(fragment_id, local_step)
                case Unstage(fragment_id, local_step):
                    self._host.unstage(fragment_id, local_step)
                case Adopt():
                    assert arrived is not None, "a fragment was adopted that did not come"
                    self._adopt(arrived)
                case StageState(local_step):
                    self._states.stage(local_step)
                case UnstageState(local_step):
                    self._host.unstage_state(local_step)
                case KeepPart(part, parts):
                    assert arrived is not None and isinstance(arrived.message, StatePart), "a kept part did not come"
                    self._states.received.keep(part, parts, arrived.payload, arrived.message.incarnation)
                case DropParts():
                    self._states.received.drop()
                case AdoptState():
                    self._states.wanted = effect
                case EvaluateModel():
                    self.examination = effect
                case SaveState(global_step):
                    self._states.save(global_step)
                case Finish(reason):
                    self.finished = reason
                case Drop(peer, reason):
                    log.info(f"dropped a message of {peer}: {reason}")
                case _:
                    raise AssertionError(f"the learner has no effect {effect}")

    def _adopt(self, arrived: Mail) -> None:
        values, message = arrived.values, arrived.message
        assert values is not None and isinstance(message, GlobalFragment), "a fragment was adopted without its values"
        self._tape.adopt(message)
        self._host.adopt(message, values)
