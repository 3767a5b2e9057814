"""A learner over all lives of its process, its pace, the interface of those who watch, and what all processes share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple, Protocol

from diloco_jax.protocol.effects import AdoptState, Effect
from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.protocol.learner.mailbox import Mailbox
from diloco_jax.protocol.leases import Batch
from diloco_jax.protocol.messages import GlobalFragment, LearnerMessage, SyncerMessage
from diloco_jax.protocol.recovery import Saved
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.sim.engine import NEVER_S, Engine
from diloco_jax.sim.holdings import Holdings, Steps, Value
from diloco_jax.sim.network import Network, SimulatedLink
from diloco_jax.sim.scenario import Scenario

NO_BATCH = Batch((), 0)
FINGERPRINT = (("model", "simulated"),)

MakeLearner = Callable[..., Learner]  # as Learner(...)
MakeSyncer = Callable[..., Syncer]  # as Syncer(...)
MakeNetwork = Callable[..., Network]  # as Network(...)
Effects = list[Effect]


class StepPace(Protocol):
    """Pace of steps. Steady is a plain one; the chips of hardware.Slices fail."""

    @property
    def lost(self) -> bool:
        """True when the learner's state is gone with its hardware: its process ends, and begins again at `begins_s`."""

    def begins_s(self, now_s: float) -> float:
        """Return when the next step can begin, `now_s` at the earliest."""

    def takes_s(self) -> float:
        """Draw what a step takes that begins now, in seconds."""

    def ended(self, began_s: float, now_s: float) -> None:
        """Take note that a step has ended."""


class Steady:
    """Steps of about equal length, one after the other."""

    __slots__ = ("_noise", "_random", "_step_s")
    lost = False

    def __init__(self, step_s: float, noise: float, random: Random) -> None:
        self._step_s = step_s
        self._noise = noise
        self._random = random

    def begins_s(self, now_s: float) -> float:
        return now_s

    def takes_s(self) -> float:
        return self._step_s * (1.0 + self._noise * self._random.random())

    def ended(self, began_s: float, now_s: float) -> None:
        del began_s, now_s


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
        """See a new process that is about to tell its machine of a restart (-1), or of the snapshot it goes back to."""

    def end(self) -> None:
        """See that the last event is over."""


class World:
    """Time, network and bytes of one simulation; with faults `make_network` builds another network."""

    def __init__(self, scenario: Scenario, make_network: MakeNetwork = Network) -> None:
        self.scenario = scenario
        self.engine = Engine(scenario.seed)
        self.network = make_network(self.engine, scenario.network)
        self.observers: list[Observer] = []
        self.steps: Steps = {}
        self.useless: set[tuple[str, int]] = set()  # learner and round of values that cannot be used
