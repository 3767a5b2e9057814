"""What is known of a learner's place in the cluster, and the interface of those who watch."""

from __future__ import annotations

from typing import NamedTuple

from diloco_jax.protocol.effects import AdoptState, Effect
from diloco_jax.protocol.learner import Learner, Saved
from diloco_jax.protocol.leases import Batch
from diloco_jax.protocol.messages import GlobalFragment, LearnerMessage, StatePart, SyncerMessage
from diloco_jax.protocol.syncer import Syncer
from diloco_jax.sim.faults import NEVER_S, Fault
from diloco_jax.sim.network import Garbled, Link
from diloco_jax.sim.pace import Pace

REDIAL_S = 0.5
Value = tuple[int, int]  # version of a fragment, and the digest of its bytes


class SavedCopy(NamedTuple):
    """A learner's own state on its disk."""

    described: Saved
    incarnation: int
    local_step: int
    anchors: dict[int, Value]  # of the fragments that its parameters are based on


class Node:
    """A learner's process, if one runs, its link, if one stands, what it holds, and what is on its disk."""

    __slots__ = (
        "anchors",
        "batch",
        "began_s",
        "clock",
        "copies",
        "factor",
        "finished",
        "gone",
        "held",
        "inbox",
        "incarnation",
        "kept",
        "life",
        "link",
        "linked_s",
        "loading",
        "machine",
        "name",
        "next_batch",
        "pace",
        "paused_s",
        "poisoned",
        "saved",
        "step_samples",
        "stepping",
        "tick_s",
    )

    def __init__(self, name: str, pace: Pace, step_samples: int) -> None:
        self.name = name
        self.pace = pace
        self.step_samples = step_samples
        self.factor = 1.0  # of a slow phase
        self.incarnation = 0
        self.link: Link | None = None
        self.linked_s = NEVER_S  # since when
        self.gone = False  # it left, or was told to stop
        self.poisoned = 0  # phases, under way now, in which its values are of no use
        self.saved: list[SavedCopy] = []  # oldest first
        self.began_s = 0.0  # when the newest step began
        self.clock = 0  # the machine's global step then
        self.batch = Batch((), 0)  # what that step reads
        self.life = 0  # changes when a process starts or dies: events of an earlier life are stale
        self.forget()

    def redial_s(self) -> float:
        """Seconds until the next attempt to connect, when the connection broke or nobody listens."""
        return REDIAL_S

    def forget(self) -> None:
        """No process runs (any more), and what one held in memory is gone."""
        self.life += 1
        self.machine: Learner | None = None
        self.finished = ""  # why its machine has nothing left to do
        self.stepping = False
        self.loading = False  # its step thread takes a state over, or has no hardware to step on
        self.next_batch: Batch | None = None  # what the step after this one reads, if that is drawn already
        self.inbox: list[SyncerMessage] = []  # waits for the end of the step
        self.held: list[SyncerMessage | Garbled] = []  # waits for the end of a pause
        self.paused_s = 0.0  # when the pause ends
        self.tick_s = NEVER_S  # the earliest tick that is on the heap
        self.anchors: dict[int, Value] = {}  # fragment -> global value that was adopted last
        self.copies: dict[int, dict[int, Value]] = {}  # local step of a whole copied state -> anchors at that time
        self.kept: dict[int, StatePart] = {}  # part -> as it came


class Observer:
    """Sees everything that happens and changes nothing. Checkers and timelines derive from it.

    `source` is a learner's id, or "syncer", whose incarnation is 0.
    """

    def on_fault(self, fault: Fault, now_s: float) -> None:
        """A fault begins."""

    def on_delivery(self, message: LearnerMessage, now_s: float) -> None:
        """A message is about to be given to the syncer."""

    def on_read(self, node: Node, message: GlobalFragment, ok: bool, now_s: float) -> None:
        """A learner has read a global fragment that its machine wants; ok: the value has the digest that it should."""

    def on_arrival(self, node: Node, message: SyncerMessage, now_s: float) -> None:
        """A message is about to be given to a learner."""

    def on_merged(self, global_step: int, left_out: tuple[str, ...], now_s: float) -> None:
        """The syncer is about to hear how a merge ended."""

    def on_effects(self, source: str, incarnation: int, effects: list[Effect], now_s: float) -> None:
        """A machine was given an input, and asks for these. The driver has done them, if it did not die meanwhile."""

    def on_step(self, node: Node, began: bool, now_s: float) -> None:
        """An inner step begins, or has ended and is about to be reported."""

    def on_state(self, node: Node, effect: AdoptState, ok: bool, now_s: float) -> None:
        """A learner is about to take over a whole state, or to find that it cannot be used."""

    def on_settled(self, node: Node, now_s: float) -> None:
        """The driver has done for this running learner all that it can do now."""

    def on_syncer_died(self, machine: Syncer, now_s: float) -> None:
        """The syncer's process is gone, and with it what it held in memory."""

    def on_syncer_back(self, machine: Syncer, rewound_to: int, now_s: float) -> None:
        """A new process is about to tell its machine of the restart, or of the rewind.

        Args:
            machine: after a restart what the tape made of it.
            rewound_to: global step of the snapshot to which the run goes back, -1 for a restart.
            now_s: the time.
        """

    def end(self) -> None:
        """After the last event."""
