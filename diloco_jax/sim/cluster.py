"""M real learner machines and a real syncer machine on virtual time, driven as the runtime drives them, with faults."""

from __future__ import annotations

from collections.abc import Mapping

from diloco_jax.protocol.learner import Learner
from diloco_jax.protocol.syncer import Syncer
from diloco_jax.sim.failover import Failover
from diloco_jax.sim.faults import ARMED, ARMED_S, NEVER_S, Fault
from diloco_jax.sim.learner_process import LearnerProcess
from diloco_jax.sim.node import Observer
from diloco_jax.sim.pace import Pace, Steady
from diloco_jax.sim.scenario import Scenario
from diloco_jax.sim.world import MakeLearner, MakeSyncer

SEEK_EVERY_S = 0.1  # how often a fault that waits for its moment looks for it


class Cluster(Failover):
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
        paces: Mapping[str, Pace] | None = None,
    ) -> None:
        super().__init__(scenario, make_syncer, taped)
        self.end_s = NEVER_S  # until when it was simulated
        self._later = len(scenario.faults)  # faults, restarts and the like that are still to come
        random = self.engine.random
        for name in scenario.names:
            step_s = scenario.step_s * (1 + scenario.speed_spread * random.random())
            pace = paces[name] if paces is not None else Steady(step_s, scenario.step_noise, random)
            samples = random.randint(*scenario.step_samples)
            self.nodes[name] = self._new_node(name, make_learner, pace, samples)
        late = {name for fault in scenario.faults if fault.kind == "join" for name in fault.learners}
        for node in self.nodes.values():
            if node.name not in late:
                node.start()
        for fault in scenario.faults:
            self.engine.at(fault.at_s, self._fault, fault)

    def _new_node(self, name: str, make: MakeLearner, pace: Pace, step_samples: int) -> LearnerProcess:
        return LearnerProcess(name, self, self.accept, self._on_end, make, pace, step_samples)

    def watch(self, *observers: Observer) -> None:
        """Add observers, before the run."""
        self.observers += observers

    def run(self, until_s: float) -> None:
        """Simulate until the run is complete and every learner knows, or until this time."""
        self.engine.run(until_s)
        self.end_s = self.engine.now_s if self.complete else until_s
        for observer in self.observers:
            observer.end()

    @property
    def finished_s(self) -> float:
        """When the syncer was done."""
        return self.process.finished_s

    @property
    def complete(self) -> bool:
        """Whether the syncer is done, no fault is to come, and no learner runs any more."""
        done = self.process.alive and self.process.finished_s < NEVER_S and not self._later
        return done and all(node.machine is None for node in self.nodes.values())

    def _on_end(self) -> None:
        if self.complete:
            self.engine.stop()

    # ---- faults -----------------------------------------------------------------------------------------------------

    def _fault(self, fault: Fault) -> None:
        self._later -= 1
        for observer in self.observers:
            observer.on_fault(fault, self.engine.now_s)
        if fault.kind == "syncer_crash":
            self.crash()
            if fault.breaks_snapshot and not self.disk.final:
                self.disk.break_newest()
            self._plan_heal(None, fault)
        elif fault.kind in ARMED:
            self._seek(fault)
        else:
            for name in fault.learners:
                node = self.nodes[name]
                if fault.kind == "join":
                    node.start()
                elif node.machine is not None:
                    self._hit(node, fault)
        self._on_end()

    def _hit(self, node: LearnerProcess, fault: Fault) -> None:
        """Begin one fault of one running learner, and plan its end."""
        kind = fault.kind
        if kind == "leave":
            node.leave("asked to")
            return
        if kind == "drain":
            if self.process.alive:
                self.process.drain(node.name)
            return
        if kind in ("crash", "donor_crash"):
            node.kill(fault.notice_s)
        elif kind == "disconnect":
            node.disconnect(fault.notice_s)
        elif kind == "pause":
            node.paused_s = max(node.paused_s, self.engine.now_s + fault.duration_s)
        elif kind == "slow":
            node.factor *= fault.factor
        elif kind == "partition":
            self.network.partition(node.name)
        elif kind == "hold":
            self.network.hold(node.name, fault.direction)
        elif kind == "narrow":
            self.network.narrow(node.name, fault.factor)
        elif kind == "corrupt":
            self.network.corrupt(node.name)
        else:
            assert kind == "poison", f"unknown fault {kind}"
            node.poisoned += 1
        if fault.duration_s < NEVER_S:
            self._plan_heal(node, fault)

    def _seek(self, fault: Fault) -> None:
        """Wait for the moment at which this fault can strike, for a while."""
        engine = self.engine
        donors = [node for node in self.nodes.values() if node.copies]
        if fault.kind == "donor_crash" and donors:
            self._hit(engine.random.choice(donors), fault)
        elif fault.kind == "rewind" and self.end_all(fault):
            self._plan_heal(None, fault)
        elif engine.now_s < fault.at_s + ARMED_S:
            self._later += 1
            engine.at(engine.now_s + SEEK_EVERY_S, self._seek_again, fault)

    def _seek_again(self, fault: Fault) -> None:
        self._later -= 1
        self._seek(fault)
        self._on_end()

    def _plan_heal(self, node: LearnerProcess | None, fault: Fault) -> None:
        self._later += 1
        life = node.life if node is not None else 0
        self.engine.at(self.engine.now_s + fault.duration_s, self._heal, (node, life, fault))

    def _heal(self, item: tuple[LearnerProcess | None, int, Fault]) -> None:
        node, life, fault = item
        self._later -= 1
        if node is None:
            if fault.kind == "rewind":
                self.rewind()
            else:
                self.restart()
        elif fault.kind == "slow":
            node.factor /= fault.factor
        elif fault.kind == "partition":
            self.network.heal(node.name)
        elif fault.kind == "hold":
            self.network.release(node.name, fault.direction)
        elif fault.kind == "narrow":
            self.network.widen(node.name)
        elif fault.kind == "corrupt":
            self.network.cure(node.name)
        elif fault.kind == "poison":
            node.poisoned -= 1
        elif life == node.life:
            if fault.kind in ("crash", "donor_crash"):
                node.start()
            elif fault.kind == "disconnect" and node.link is None:
                node.dial(0.0)
            elif fault.kind == "pause":
                node.resume()
        self._on_end()
