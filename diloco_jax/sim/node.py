"""The learner and its processes, the pace of its steps, the interface of observers, and the state that all share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple, Protocol

from diloco_jax.protocol.effects import AdoptState, Effect
from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.protocol.learner.mailbox import Mailbox
from diloco_jax.protocol.learner.recovery import Saved
from diloco_jax.protocol.leases import Batch
from diloco_jax.protocol.messages import GlobalFragment, LearnerMessage, SyncerMessage
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.sim.engine import NEVER_S, Engine
from diloco_jax.sim.fault import Fault
from diloco_jax.sim.holdings import Holdings, Steps, Value
from diloco_jax.sim.network import Garbled, Network, SimulatedLink
from diloco_jax.sim.norms import DrawnNorms
from diloco_jax.sim.scenario import Scenario

NO_BATCH = Batch((), 0)
FINGERPRINT = (("model", "simulated"),)

# Both take the arguments of the class that they build.
MakeLearner = Callable[..., Learner]
MakeSyncer = Callable[..., Syncer]
Effects = list[Effect]


class StepPace(Protocol):
    """The pace of a learner's steps. `Steady` has no failures; in `goodput.hardware.Slices` chips fail."""

    @property
    def lost(self) -> bool:
        """True if the state is lost with the hardware: the process ends, and starts again at `begins_s`."""

    def begins_s(self, now_s: float) -> float:
        """Return when the next step can start, `now_s` at the earliest."""

    def takes_s(self) -> float:
        """Draw the seconds that a step takes which starts now."""

    def ended(self, began_s: float, now_s: float) -> None:
        """Record that a step has ended."""


class Steady:
    """Steps of similar length without a gap."""

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
    """A learner's own state on its disk; `anchors` are the global fragments that its parameters are based on."""

    described: Saved
    incarnation: int
    local_step: int
    anchors: dict[int, Value]


@dataclass(slots=True, eq=False)
class InnerStep:
    """The current inner step of a process, or its last one.

    `clock` is the machine's schedule step at its start. `ahead` is the batch of the next step if it is drawn already.
    """

    runs: bool = False
    began_s: float = 0.0
    clock: int = 0
    batch: Batch = NO_BATCH
    ahead: Batch | None = None

    @property
    def samples(self) -> int:
        """Samples of the step."""
        return sum(stop - start for start, stop in self.batch.ranges)


@dataclass(slots=True, eq=False)
class LearnerProcess:
    """One process of a learner.

    Attributes:
        ended: the process has ended, so events that were planned for it are void.
        finished: the reason why its machine has finished; "" until then.
        loading: it has no hardware to step on.
        waking: its step thread will look into the mailbox soon.
        tick_s: time of the earliest tick that is planned.
        linked_s: time since which it has a link.
        attempts: attempts to connect since it had a link.
        greeted: it has had a link.
        paused_s: end of its latest pause.
        held: messages that arrived during a pause.
    """

    node: Node
    name: str
    incarnation: int
    machine: Learner
    mailbox: Mailbox[None]
    holdings: Holdings
    step: InnerStep = field(default_factory=InnerStep)
    ended: bool = False
    finished: str = ""
    loading: bool = False
    waking: bool = False
    tick_s: float = NEVER_S
    link: SimulatedLink | None = None
    linked_s: float = NEVER_S
    attempts: int = 0
    greeted: bool = False
    paused_s: float = 0.0
    held: list[SyncerMessage | Garbled] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int]:
        """The learner's name and the process's incarnation."""
        return self.name, self.incarnation


@dataclass(slots=True, eq=False)
class Node:
    """The part of a learner that outlives its processes: hardware, disk and current faults.

    Attributes:
        name: the learner's name.
        pace: pace of its steps.
        step_samples: samples in a whole inner step.
        corpus: name of the corpus whose samples it leases.
        factor: how many times longer its steps take in the current slow phases.
        poisoned: number of current phases that make its values unusable.
        incarnation: number of its newest process.
        process: the running process.
        gone: the learner left or was stopped, for good.
        saved: states on its disk, oldest first.
        slices: slices that it has while none is missing; each computes an equal part of a whole step.
        shrinks: steps have only the parts of the slices that are there.
        missing: slices that it has lost; at least one is left.
        memory: states after its newest steps that all its slices have had, oldest first.
        kept: the state in memory that its process started with; None if that started without one.
    """

    name: str
    pace: StepPace
    step_samples: int
    corpus: str = ""
    factor: float = 1.0
    poisoned: int = 0
    incarnation: int = 0
    process: LearnerProcess | None = None
    gone: bool = False
    saved: list[SavedCopy] = field(default_factory=list)
    slices: int = 1
    shrinks: bool = False
    missing: int = 0
    memory: list[SavedCopy] = field(default_factory=list)
    kept: SavedCopy | None = None

    @property
    def own(self) -> SavedCopy | None:
        """The state that its process found when it started: in memory, or the newest one on its disk."""
        return self.kept or (self.saved[-1] if self.saved else None)

    @property
    def next_samples(self) -> int:
        """Samples of the next step that is drawn."""
        part = self.step_samples // self.slices
        return part * (self.slices - self.missing) if self.shrinks else self.step_samples

    def parts_each(self, samples: int) -> int:
        """Return the most parts of a step of so many samples that a slice computes one after the other."""
        parts = samples * self.slices // self.step_samples
        return -(-parts // (self.slices - self.missing))

    @property
    def generation(self) -> tuple[int, bool]:
        """A value that changes when a process starts or ends."""
        return self.incarnation, self.process is not None


class Observer:
    """The interface of objects that see everything and change nothing, such as checkers and timelines."""

    def on_fault(self, fault: Fault, now_s: float) -> None:
        """See a fault start."""

    def on_read(self, process: LearnerProcess, message: GlobalFragment, ok: bool, now_s: float) -> None:
        """See that a learner has decoded a global fragment that its machine wants; ok: its digest is right."""

    def on_merged(self, global_step: int, excluded: tuple[str, ...], now_s: float) -> None:
        """See the end of a merge, before the syncer's machine gets it."""

    def on_delivery(self, message: LearnerMessage, now_s: float) -> None:
        """See a message, before the syncer's machine gets it."""

    def on_syncer(self, message: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        """See an input of the syncer, None if it was not a message, and the effects that its driver has executed."""

    def on_learner(
        self, process: LearnerProcess, message: SyncerMessage | None, effects: Effects, now_s: float
    ) -> None:
        """See an input of a learner, None if it was not a message, and the effects that its driver has executed."""

    def on_step(self, process: LearnerProcess, began: bool, now_s: float) -> None:
        """See an inner step start, or one that has ended, before the machine gets its end."""

    def on_state(self, process: LearnerProcess, effect: AdoptState, ok: bool, now_s: float) -> None:
        """See that a learner is about to load a whole state, or to find that it is unusable."""

    def on_settled(self, process: LearnerProcess, now_s: float) -> None:
        """See that the driver can do nothing more now for this running learner."""

    def on_syncer_died(self, machine: Syncer, now_s: float) -> None:
        """See that the syncer's process has ended, and its memory is lost."""

    def on_syncer_back(self, machine: Syncer, rewound_to: int, now_s: float) -> None:
        """See a new process of the syncer: a restart (`rewound_to` is -1), or a rewind to the snapshot of this step."""

    def end(self) -> None:
        """See the end of the simulation."""


class World:
    """Time, network and observers of one simulation; `useless` names learner and round of unusable values."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.engine = Engine(scenario.seed)
        self.network = Network(self.engine, scenario.network)
        self.observers: list[Observer] = []
        self.steps: Steps = {}
        self.useless: set[tuple[str, int]] = set()
        self.norms: DrawnNorms | None = None
        if scenario.norms is not None:
            self.norms = DrawnNorms(scenario.norms, scenario.seed, scenario.config.num_fragments)
