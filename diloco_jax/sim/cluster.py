"""M real learner machines and a real syncer machine on virtual time, driven as the runtime drives them."""

from collections.abc import Collection, Mapping

from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.sim.engine import NEVER_S
from diloco_jax.sim.learner_driver import LearnerDriver
from diloco_jax.sim.node import MakeLearner, MakeSyncer, Node, Observer, Steady, StepPace, World
from diloco_jax.sim.scenario import Scenario
from diloco_jax.sim.syncer_host import SyncerHost


class Cluster:
    """The simulated run. Build it, let observers `watch` it, `run` it, read it.

    Args:
        make_learner, make_syncer: build these; tests and faults have others.
        taped: record the event tape, a line of JSON per input of the syncer.
        paces: of each learner; if not given, as the scenario's step times say.
        late: learners that do not start by themselves.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        make_learner: MakeLearner = Learner,
        make_syncer: MakeSyncer = Syncer,
        taped: bool = True,
        paces: Mapping[str, StepPace] | None = None,
        late: Collection[str] = (),
    ) -> None:
        self.scenario = scenario
        self.world = world = World(scenario)
        self.engine = world.engine
        self.end_s = NEVER_S  # until when it was simulated
        random = self.engine.random
        self.nodes: dict[str, Node] = {}
        for name in scenario.names:
            step_s = scenario.step_s * (1 + scenario.speed_spread * random.random())
            pace = paces[name] if paces is not None else Steady(step_s, scenario.step_noise, random)
            self.nodes[name] = Node(name, pace, random.randint(*scenario.step_samples))
        self._learners: Mapping[str, LearnerDriver] = {
            name: LearnerDriver(world, node, lambda *who: self.host.accept(*who), self._on_end, make_learner)
            for name, node in self.nodes.items()
        }
        self.host: SyncerHost = SyncerHost(world, self._learners, make_syncer, taped)
        for name, learner in self._learners.items():
            if name not in late:
                learner.start()

    @property
    def syncer(self) -> Syncer:
        """The syncer's machine, of a dead process too until there is a new one."""
        return self.host.process.machine

    def watch(self, *observers: Observer) -> None:
        """Add observers, before the run."""
        self.world.observers += observers

    def run(self, until_s: float) -> None:
        """Simulate until the run is complete and every learner knows, or until this time."""
        self.engine.run(until_s)
        self.end_s = self.engine.now_s if self.complete else until_s
        for observer in self.world.observers:
            observer.end()

    @property
    def finished_s(self) -> float:
        return self.host.process.finished_s

    @property
    def complete(self) -> bool:
        """True when the syncer is done, and no learner runs any more."""
        process = self.host.process
        done = process.alive and process.finished_s < NEVER_S and process.machine.over
        return done and all(node.process is None for node in self.nodes.values())

    def _on_end(self) -> None:
        if self.complete:
            self.engine.stop()
