"""Whole states in the hands of one learner: a donor's that arrives, its own on disk, and copies of the present one."""

from __future__ import annotations

import logging

from diloco_jax.protocol.effects import AdoptState
from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.runtime.island.host import SAVING, Host
from diloco_jax.runtime.island.whole_state import ReceivedState, SavedState, SavedStates, StateName
from diloco_jax.runtime.learner.tape import LearnerTape

log = logging.getLogger(__name__)


class States:
    """The states of one learner. Called under the lock of `Decisions`, but for `load`."""

    def __init__(
        self, machine: Learner, host: Host, tape: LearnerTape, disk: SavedStates, saved: SavedState | None
    ) -> None:
        self.received = ReceivedState(host.island.state_layout.num_bytes)  # the parts of a donor's
        # the one that the machine wants to be taken over; the step thread does it, outside of the lock
        self.wanted: AdoptState | None = None
        self._machine = machine
        self._host = host
        self._tape = tape
        self._disk = disk
        self._saved = saved

    def stage(self, local_step: int) -> None:
        """Copy the present state for a receiver."""
        self._tape.note("staged_state", local_step)
        self._host.stage_state(local_step)

    def save(self, global_step: int) -> None:
        """Begin to write a copy of the present state to disk, unless the one before is still being written."""
        if not self._disk.kept:
            return
        if self._disk.busy:
            log.info(f"the state of global step {global_step} is not saved: the one before is still being written")
            return
        machine = self._machine
        self._tape.note("saved", machine.local_step, global_step)
        name = StateName(machine.incarnation, machine.local_step, global_step, tuple(machine.digests))
        self._disk.save(self._host.stage_state(SAVING), lambda: self._host.unstage_state(SAVING), name)

    def load(self, effect: AdoptState) -> tuple[int, int]:
        """Take a whole state over; returns incarnation and local step of the life that it is of.

        Raises:
            ValueError: it is not of this island's model and optimizer.
        """
        self.wanted, saved = None, self._saved
        self.forget_saved()
        if effect.donor:
            told = (self.received.donor_incarnation, effect.donor_step)
            self._host.load_state(self.received.take(), effect.fragments)
        else:
            assert saved is not None, "an own state was adopted without one"
            told = (saved.name.incarnation, saved.name.local_step)
            self._host.load_state(saved.values, effect.fragments)
        return told

    def forget_saved(self) -> None:
        """Free the memory of the saved state, taken over or not."""
        self._saved = None

    def close(self) -> None:
        """Wait for what is being written to disk."""
        self._disk.close(wait=True)
