"""A learner's place in the cluster, and the interface of those who watch."""

from __future__ import annotations

from diloco_jax.protocol.learner import Learner
from diloco_jax.protocol.messages import Effect, LearnerMessage, SyncerMessage
from diloco_jax.sim.faults import NEVER_S, Fault
from diloco_jax.sim.network import Link


class Node:
    """A learner's process, if one runs, and its link, if one stands."""

    __slots__ = (
        "began_s",
        "factor",
        "gone",
        "held",
        "inbox",
        "incarnation",
        "life",
        "link",
        "linked_s",
        "machine",
        "name",
        "paused_s",
        "step_s",
        "stepping",
        "tick_s",
    )

    def __init__(self, name: str, step_s: float) -> None:
        self.name = name
        self.step_s = step_s
        self.factor = 1.0  # of a slow phase
        self.machine: Learner | None = None
        self.incarnation = 0
        self.life = 0  # changes when a process starts or dies: events of an earlier life are stale
        self.link: Link | None = None
        self.linked_s = NEVER_S  # since when
        self.stepping = False
        self.began_s = 0.0  # when the newest step began
        self.inbox: list[SyncerMessage] = []  # waits for the end of the step
        self.held: list[SyncerMessage] = []  # waits for the end of a pause
        self.paused_s = 0.0  # when the pause ends
        self.tick_s = NEVER_S  # the earliest tick that is on the heap
        self.gone = False  # it left, or was told to stop


class Observer:
    """Sees everything that happens and changes nothing. Checkers and timelines derive from it.

    `source` is a learner's id, or "syncer", whose incarnation is 0.
    """

    def on_fault(self, fault: Fault, now_s: float) -> None:
        """A fault begins."""

    def on_delivery(self, message: LearnerMessage, now_s: float) -> None:
        """A message is about to be given to the syncer."""

    def on_effects(self, source: str, incarnation: int, effects: list[Effect], now_s: float) -> None:
        """A machine was given an input, and asks for these."""

    def on_step(self, node: Node, began: bool, now_s: float) -> None:
        """An inner step begins or ends."""

    def on_settled(self, node: Node, now_s: float) -> None:
        """The driver has done for this running learner all that it can do now."""

    def end(self) -> None:
        """After the last event."""
