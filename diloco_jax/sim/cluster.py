"""A simulated run: M real learner machines and a real syncer machine on virtual time, driven as the runtime does."""

from collections.abc import Mapping
from typing import Any

from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.sim.engine import NEVER_S
from diloco_jax.sim.fault import Fault
from diloco_jax.sim.injector import FaultInjector
from diloco_jax.sim.learner_driver import LearnerDriver
from diloco_jax.sim.node import MakeLearner, MakeSyncer, Node, Observer, Steady, StepPace, World
from diloco_jax.sim.scenario import Scenario
from diloco_jax.sim.syncer_node import SyncerNode


class Cluster:
    """A simulated run with the faults of its scenario. Let observers `watch` it, `run` it, and read it.

    Args:
        scenario: settings and faults.
        make_learner: builds a learner's machine; tests pass broken ones.
        make_syncer: builds the syncer's machine, likewise.
        taped: record the event tape, a line of JSON per input of the syncer.
        paces: pace of each learner; the scenario's step times by default.

    Attributes:
        end_s: time until which the run was simulated.

    Raises:
        ValueError: the run cannot have one of the scenario's faults.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        make_learner: MakeLearner = Learner,
        make_syncer: MakeSyncer = Syncer,
        taped: bool = True,
        paces: Mapping[str, StepPace] | None = None,
    ) -> None:
        self.scenario = scenario
        self.world = world = World(scenario)
        self.engine = world.engine
        self.end_s = NEVER_S
        random = self.engine.random
        self.nodes: dict[str, Node] = {}
        for name in scenario.names:
            step_s = scenario.step_s * (1 + scenario.speed_spread * random.random())
            pace = paces[name] if paces is not None else Steady(step_s, scenario.step_noise, random)
            samples = scenario.slices * random.randint(*scenario.step_samples)
            sliced: dict[str, Any] = {"slices": scenario.slices, "shrinks": scenario.shrinks}
            self.nodes[name] = Node(name, pace, samples, scenario.corpus_of(name), **sliced)
        learners = {
            name: LearnerDriver(
                world, node, lambda *who: self.syncer_node.accept(*who), self._stop_if_complete, make_learner
            )
            for name, node in self.nodes.items()
        }
        self.syncer_node = SyncerNode(world, learners, make_syncer, taped)
        self._injector = FaultInjector(world, learners, self.syncer_node, self._stop_if_complete)
        late = {name for fault in scenario.faults if fault.kind == "join" for name in fault.learners}
        for name, learner in learners.items():
            if name not in late:
                learner.start()
        for fault in scenario.faults:
            self.plan(fault)

    @property
    def syncer(self) -> Syncer:
        """The syncer's machine; after the end of its process, the old machine until a new process starts."""
        return self.syncer_node.process.machine

    def watch(self, *observers: Observer) -> None:
        """Add observers before the run."""
        self.world.observers += observers

    def plan(self, fault: Fault) -> None:
        """Add a fault that is not in the scenario.

        Raises:
            ValueError: the run cannot have such a fault.
        """
        self._injector.plan(fault)

    def run(self, until_s: float) -> None:
        """Simulate until the run is complete and every learner knows, or until this time."""
        self.engine.run(until_s)
        self.end_s = self.engine.now_s if self.complete else until_s
        for observer in self.world.observers:
            observer.end()

    @property
    def finished_s(self) -> float:
        """Time when the syncer saved the end of the run."""
        return self.syncer_node.process.finished_s

    @property
    def complete(self) -> bool:
        """True if the syncer is done, no learner runs any more, and no fault is pending."""
        process = self.syncer_node.process
        done = process.alive and process.finished_s < NEVER_S and process.machine.over
        return done and not self._injector.pending and all(node.process is None for node in self.nodes.values())

    def _stop_if_complete(self) -> None:
        if self.complete:
            self.engine.stop()
