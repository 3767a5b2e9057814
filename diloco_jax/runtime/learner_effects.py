"""Executes what the learner machine asks for: on the island, the link, the tape, and what is staged.

It decides nothing, and knows no threads: the driver calls it under its lock (run_learner.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from diloco_jax.protocol.effects import (
    Adopt,
    AdoptState,
    Drop,
    DropParts,
    Effect,
    Finish,
    KeepPart,
    SaveState,
    Send,
    Stage,
    StageState,
    Unstage,
    UnstageState,
)
from diloco_jax.protocol.learner import Learner
from diloco_jax.protocol.messages import AnchorValue, FragmentValue, GlobalFragment, StatePart, SyncerMessage
from diloco_jax.runtime.global_values import Values
from diloco_jax.runtime.host import SAVING, Host
from diloco_jax.runtime.learner_payloads import PayloadSender
from diloco_jax.runtime.learner_state import ReceivedState, SavedStates
from diloco_jax.runtime.learner_tape import LearnerTape
from diloco_jax.transport.link import Link, LinkClosed

log = logging.getLogger(__name__)


class Arrived(NamedTuple):
    """A message of the syncer, with what its payload was decoded to."""

    message: SyncerMessage
    values: Values | None = None
    payload: bytes | memoryview = b""


class Effects:
    """What a learner has in its hands between two inputs of its machine.

    Args:
        machine: read for what a saved state is called.
        host: trains, stages, adopts.
        tape: what was done.
        payloads: sends what is heavy.
        saves: states on disk.
    """

    def __init__(
        self,
        machine: Learner,
        host: Host,
        tape: LearnerTape,
        payloads: PayloadSender,
        saves: SavedStates,
    ) -> None:
        self.link: Link | None = None
        self.finished = ""
        self.received = ReceivedState(host.island.state_layout.num_bytes)
        self.state_to_adopt: AdoptState | None = None  # the driver's step thread does it, outside of the lock
        self._machine = machine
        self._host = host
        self._tape = tape
        self._payloads = payloads
        self._saves = saves

    def execute(self, effects: Sequence[Effect], arrived: Arrived | None = None) -> None:
        """Execute effects in their order.

        Args:
            effects: of one input.
            arrived: the message that was the input, if it was one.
        """
        for effect in effects:
            match effect:
                case Send(_, message):
                    self._send(message)
                case Stage(fragment_id, local_step):
                    self._host.stage(fragment_id, local_step)
                case Unstage(fragment_id, local_step):
                    self._host.unstage(fragment_id, local_step)
                case Adopt():
                    assert arrived is not None, "a fragment was adopted that did not come"
                    self._adopt(arrived)
                case StageState(local_step):
                    self._tape.staged_state(local_step)
                    self._host.stage_state(local_step)
                case UnstageState(local_step):
                    self._host.unstage_state(local_step)
                case KeepPart(part, parts):
                    assert arrived is not None and isinstance(arrived.message, StatePart), "a kept part did not come"
                    self.received.keep(part, parts, arrived.payload, arrived.message.incarnation)
                case DropParts():
                    self.received.drop()
                case AdoptState():
                    self.state_to_adopt = effect
                case SaveState(global_step):
                    self._save_state(global_step)
                case Finish(reason):
                    self.finished = reason
                case Drop(peer, reason):
                    log.info(f"dropped a message of {peer}: {reason}")
                case _:
                    raise AssertionError(f"the learner has no effect {effect}")

    def _send(self, message: object) -> None:
        link = self.link
        if link is None:
            return
        if isinstance(message, FragmentValue):
            staged = self._host.send(message)
            self._tape.sent(message.fragment_id, message.global_step, message.local_step)
            self._payloads.value(link, message, staged)
        elif isinstance(message, AnchorValue):
            self._payloads.anchor(link, message, self._host.anchors[message.fragment_id])
        elif isinstance(message, StatePart):
            self._payloads.part(link, message, self._host.staged_state(message.local_step))
        else:
            try:
                link.send(message)  # type: ignore[arg-type]
            except LinkClosed:
                return  # the link thread learns of it too, and reconnects

    def _adopt(self, arrived: Arrived) -> None:
        values, message = arrived.values, arrived.message
        assert values is not None and isinstance(message, GlobalFragment), "a fragment was adopted without its values"
        self._tape.adopt(message)
        self._host.adopt(message, values)

    def _save_state(self, global_step: int) -> None:
        if not self._saves.kept:
            return
        if self._saves.busy:
            log.info(f"the state of global step {global_step} is not saved: the one before is still being written")
            return
        machine = self._machine
        self._tape.saved(machine.local_step, global_step)
        self._saves.save(
            self._host.stage_state(SAVING),
            lambda: self._host.unstage_state(SAVING),
            incarnation=machine.incarnation,
            local_step=machine.local_step,
            global_step=global_step,
            digests=machine.digests,
        )
