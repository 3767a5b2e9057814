"""A learner over all lives of its process, the process itself, and the interface of those who watch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from diloco_jax.protocol.effects import AdoptState, Effect
from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.protocol.learner.mailbox import Mailbox
from diloco_jax.protocol.learner.start import Saved
from diloco_jax.protocol.leases import Batch
from diloco_jax.protocol.messages import GlobalFragment, LearnerMessage, SyncerMessage
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.sim.engine import NEVER_S
from diloco_jax.sim.holdings import Holdings, Value
from diloco_jax.sim.network import Garbled, SimulatedLink
from diloco_jax.sim.pace import StepPace

NO_BATCH = Batch((), 0)
Effects = list[Effect]


class SavedCopy(NamedTuple):
    """A learner's own state on its disk."""

    described: Saved
    incarnation: int
    local_step: int
    anchors: dict[int, Value]  # of the fragments that its parameters are based on


@dataclass(slots=True, eq=False)
class InnerStep:
    """The inner step that a process is in, or was in last."""

    runs: bool = False
    began_s: float = 0.0
    clock: int = 0  # the machine's schedule step then
    batch: Batch = NO_BATCH  # what it reads
    ahead: Batch | None = None  # what the next one reads, if that is drawn already


@dataclass(slots=True, eq=False)
class LearnerProcess:
    """One process of a learner."""

    node: Node
    name: str
    incarnation: int
    machine: Learner
    mailbox: Mailbox[None]
    holdings: Holdings
    step: InnerStep = field(default_factory=InnerStep)
    ended: bool = False  # events that were planned for it are stale
    finished: str = ""  # why its machine has nothing left to do
    loading: bool = False  # it has no hardware to step on
    waking: bool = False  # its step thread is about to see its mail
    paused_s: float = 0.0  # when the pause ends
    held: list[SyncerMessage | Garbled] = field(default_factory=list)  # waits for the end of a pause
    tick_s: float = NEVER_S  # the earliest tick that is on the heap
    link: SimulatedLink | None = None
    linked_s: float = NEVER_S  # since when
    attempts: int = 0  # to connect, since there was a link
    greeted: bool = False  # there was a link

    @property
    def key(self) -> tuple[str, int]:
        """The learner's name and the process's incarnation."""
        return self.name, self.incarnation


@dataclass(slots=True, eq=False)
class Node:
    """A learner's hardware, its disk and the faults that it suffers: what outlives its processes."""

    name: str
    pace: StepPace
    step_samples: int  # in an inner step
    factor: float = 1.0  # of a slow phase
    poisoned: int = 0  # phases, under way now, in which its values are of no use
    incarnation: int = 0  # of the newest process
    process: LearnerProcess | None = None  # that runs
    gone: bool = False  # it left, or was told to stop
    saved: list[SavedCopy] = field(default_factory=list)  # oldest first

    @property
    def life(self) -> tuple[int, bool]:
        """A value that changes when a process starts or ends."""
        return self.incarnation, self.process is not None


class Observer:
    """Sees everything that happens and changes nothing. Checkers and timelines derive from it."""

    def on_fault(self, fault: Any, now_s: float) -> None:
        """See a fault begin, where there are any."""

    def on_read(self, process: LearnerProcess, message: GlobalFragment, ok: bool, now_s: float) -> None:
        """See that a learner has read a global fragment that its machine wants; ok: with the right digest."""

    def on_merged(self, global_step: int, left_out: tuple[str, ...], now_s: float) -> None:
        """See that the syncer is about to hear how a merge ended."""

    def on_delivery(self, message: LearnerMessage, now_s: float) -> None:
        """See a message that is about to be given to the syncer."""

    def on_syncer(self, given: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        """See what the syncer was given, None if it was no message, and what its driver has done, if it did not die."""

    def on_learner(self, process: LearnerProcess, given: SyncerMessage | None, effects: Effects, now_s: float) -> None:
        """See what a learner was given, None if it was no message, and what its driver has done."""

    def on_step(self, process: LearnerProcess, began: bool, now_s: float) -> None:
        """See an inner step begin, or one that has ended and is about to be reported."""

    def on_state(self, process: LearnerProcess, effect: AdoptState, ok: bool, now_s: float) -> None:
        """See that a learner is about to take over a whole state, or to find that it cannot be used."""

    def on_settled(self, process: LearnerProcess, now_s: float) -> None:
        """See that the driver has done all that it can do now for this running learner."""

    def on_syncer_died(self, machine: Syncer, now_s: float) -> None:
        """See that the syncer's process is gone, and with it what it held in memory."""

    def on_syncer_back(self, machine: Syncer, rewound_to: int, now_s: float) -> None:
        """See a new process that is about to tell its machine of the restart, or of the rewind.

        Args:
            machine: after a restart what the tape made of it.
            rewound_to: global step of the snapshot to which the run goes back, -1 for a restart.
        """

    def end(self) -> None:
        """See that the last event is over."""
