"""M real learner machines and a real syncer machine on virtual time, driven as the runtime drives them, with faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.sim.faults import ARMED, ARMED_S, NEVER_S, Fault
from diloco_jax.sim.learner_driver import LearnerDriver
from diloco_jax.sim.node import LearnerProcess, Node, Observer
from diloco_jax.sim.pace import Steady, StepPace
from diloco_jax.sim.scenario import Scenario
from diloco_jax.sim.syncer_host import SyncerHost
from diloco_jax.sim.world import MakeLearner, MakeSyncer, World

SEEK_EVERY_S = 0.1  # how often a fault that waits for its moment looks for it


class Cluster:
    """The simulated run. Build it, let observers `watch` it, `run` it, read it.

    Args:
        scenario: what to simulate.
        make_learner: builds a learner; tests put broken ones here.
        make_syncer: builds the syncer, likewise.
        taped: record the event tape, a line of JSON per input of the syncer. Runs with faults need it.
        paces: of each learner; if not given, as the scenario's step times say.
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
        self.end_s = NEVER_S  # until when it was simulated
        self._later = 0  # faults, restarts and the like that are still to come
        random = self.engine.random
        self.nodes: dict[str, Node] = {}
        for name in scenario.names:
            step_s = scenario.step_s * (1 + scenario.speed_spread * random.random())
            pace = paces[name] if paces is not None else Steady(step_s, scenario.step_noise, random)
            self.nodes[name] = Node(name, pace, random.randint(*scenario.step_samples))
        self._learners = {
            name: LearnerDriver(world, node, lambda *who: self.host.accept(*who), self._on_end, make_learner)
            for name, node in self.nodes.items()
        }
        self.host = SyncerHost(world, self._learners, make_syncer, taped)
        late = {name for fault in scenario.faults if fault.kind == "join" for name in fault.learners}
        for name, learner in self._learners.items():
            if name not in late:
                learner.start()
        for fault in scenario.faults:
            self.plan(fault)

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
        """Time at which the syncer was done."""
        return self.host.process.finished_s

    @property
    def complete(self) -> bool:
        """True when the syncer is done, no fault is to come, and no learner runs any more."""
        done = self.host.process.alive and self.host.process.finished_s < NEVER_S and not self._later
        return done and all(node.process is None for node in self.nodes.values())

    def _on_end(self) -> None:
        if self.complete:
            self.engine.stop()

    # ---- faults -----------------------------------------------------------------------------------------------------

    def plan(self, fault: Fault) -> None:
        """Let a fault happen at its time."""
        self._later += 1
        self.engine.at(fault.at_s, self._fault, fault)

    def _fault(self, fault: Fault) -> None:
        self._later -= 1
        for observer in self.world.observers:
            observer.on_fault(fault, self.engine.now_s)
        if fault.kind == "syncer_crash":
            self.host.crash()
            if fault.breaks_snapshot and not self.host.disk.final:
                self.host.disk.break_newest()
            self._plan_heal(fault, self.host.restart)
        elif fault.kind in ARMED:
            self._seek(fault)
        else:
            for name in fault.learners:
                process = self.nodes[name].process
                if fault.kind == "join":
                    self._learners[name].start()
                elif process is not None:
                    self._hit(process, fault)
        self._on_end()

    def _hit(self, process: LearnerProcess, fault: Fault) -> None:
        """Begin one fault of one running learner, and plan its end."""
        kind, node, network = fault.kind, process.node, self.world.network
        learner = self._learners[node.name]
        if kind == "leave":
            learner.leave(process, "asked to")
        elif kind == "drain":
            if self.host.process.alive:
                self.host.process.drain(node.name)
        elif kind in ("crash", "donor_crash"):
            learner.kill(process, fault.notice_s)
            self._plan_heal(fault, learner.start, node)
        elif kind == "disconnect":
            learner.disconnect(process, fault.notice_s)
            self._plan_heal(fault, partial(learner.reconnect, process), node)
        elif kind == "pause":
            process.paused_s = max(process.paused_s, self.engine.now_s + fault.duration_s)
            self._plan_heal(fault, partial(learner.resume, process), node)
        elif kind == "slow":
            node.factor *= fault.factor
            self._plan_heal(fault, partial(node.hasten, fault.factor))
        elif kind == "partition":
            network.partition(node.name)
            self._plan_heal(fault, partial(network.heal, node.name))
        elif kind == "hold":
            network.hold(node.name, fault.direction)
            self._plan_heal(fault, partial(network.release, node.name, fault.direction))
        elif kind == "narrow":
            network.narrow(node.name, fault.factor)
            self._plan_heal(fault, partial(network.widen, node.name))
        elif kind == "corrupt":
            network.corrupt(node.name)
            self._plan_heal(fault, partial(network.cure, node.name))
        else:
            assert kind == "poison", f"unknown fault {kind}"
            node.poisoned += 1
            self._plan_heal(fault, node.detoxify)

    def _seek(self, fault: Fault) -> None:
        """Wait for the moment at which this fault can strike, for a while."""
        engine = self.engine
        running = [node.process for node in self.nodes.values() if node.process is not None]
        donors = [process for process in running if process.holdings.copies]
        if fault.kind == "donor_crash" and donors:
            self._hit(engine.random.choice(donors), fault)
        elif fault.kind == "rewind" and self.host.end_all(fault):
            self._plan_heal(fault, self.host.rewind)
        elif engine.now_s < fault.at_s + ARMED_S:
            self._later += 1
            engine.at(engine.now_s + SEEK_EVERY_S, self._seek_again, fault)

    def _seek_again(self, fault: Fault) -> None:
        self._later -= 1
        self._seek(fault)
        self._on_end()

    def _plan_heal(self, fault: Fault, heal: Callable[[], None], node: Node | None = None) -> None:
        """Plan the end of a fault, if it has one; with a node only in case that its process is the same by then."""
        if fault.duration_s < NEVER_S:
            self._later += 1
            life = node.life if node is not None else None
            self.engine.at(self.engine.now_s + fault.duration_s, self._heal, (heal, node, life))

    def _heal(self, item: tuple[Callable[[], None], Node | None, tuple[int, bool] | None]) -> None:
        heal, node, life = item
        self._later -= 1
        if node is None or node.life == life:
            heal()
        self._on_end()
