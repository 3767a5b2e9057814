"""Whole states in the hands of one learner: a donor's that arrives, its own on disk, and copies of the present one."""

import logging

from diloco_jax.protocol.effects import AdoptState
from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.runtime.island.adoptions import ReceivedState
from diloco_jax.runtime.island.host import Host
from diloco_jax.runtime.island.saved_states import StateName
from diloco_jax.runtime.learner.tape import LearnerTape

log = logging.getLogger(__name__)


class States:
    """The states of one learner. Called under the lock of `Decisions`, but for `load`."""

    def __init__(self, machine: Learner, host: Host, tape: LearnerTape, saved: StateName | None) -> None:
        self.received = ReceivedState(host.moving.bytes.num_bytes)  # the parts of a donor's
        # the one that the machine wants to be taken over; the step thread does it, outside of the lock
        self.wanted: AdoptState | None = None
        self._machine = machine
        self._host = host
        self._tape = tape
        self._saved = saved

    def stage(self, local_step: int) -> None:
        self._tape.note("staged_state", local_step)
        self._host.stage_state(local_step)

    def save(self, global_step: int) -> None:
        """Begin to write a copy of the present state to disk, unless the one before is still being written."""
        machine = self._machine
        name = StateName(machine.incarnation, machine.local_step, global_step, tuple(machine.digests))
        if self._host.save(name):
            self._tape.note("saved", machine.local_step, global_step)
        else:
            log.info(f"the state of global step {global_step} is not saved: the one before is still being written")

    def load(self, effect: AdoptState) -> tuple[int, int]:
        """Take a whole state over; returns incarnation and local step of the life that it is of.

        Raises:
            ValueError: it is not of this island's model and optimizer.
        """
        self.wanted, saved, self._saved = None, self._saved, None
        if effect.donor:
            told = (self.received.donor_incarnation, effect.donor_step)
            self._host.load_state(self.received.take())
        else:
            assert saved is not None, "an own state was adopted without one"
            told = (saved.incarnation, saved.local_step)
            self._host.restore(effect.fragments)
        return told

    def forget_saved(self) -> None:
        self._saved = None
        self._host.forget_saved()

    def close(self) -> None:
        self._host.close()
