"""A simulated run to which faults happen."""

from collections.abc import Callable, Mapping
from functools import partial

from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.engine import NEVER_S
from diloco_jax.sim.fault import ARMED, ARMED_S, Fault
from diloco_jax.sim.learner_driver import LearnerDriver
from diloco_jax.sim.node import LearnerProcess, MakeLearner, MakeSyncer, Node, StepPace
from diloco_jax.sim.scenario import Scenario

SEEK_EVERY_S = 0.1  # how often a fault that waits for its moment looks for it


class FaultyCluster(Cluster):
    """A simulated run with the faults of its scenario, and those that are planned later.

    Args:
        scenario: what to simulate.
        make_learner: builds a learner; tests put broken ones here.
        make_syncer: builds the syncer, likewise.
        paces: of each learner; if not given, as the scenario's step times say.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        make_learner: MakeLearner = Learner,
        make_syncer: MakeSyncer = Syncer,
        paces: Mapping[str, StepPace] | None = None,
    ) -> None:
        self._later = 0  # faults, restarts and the like that are still to come
        super().__init__(
            scenario,
            make_learner=make_learner,
            make_syncer=make_syncer,
            paces=paces,
            late={name for fault in scenario.faults if fault.kind == "join" for name in fault.learners},
        )
        for fault in scenario.faults:
            self.plan(fault)

    @property
    def complete(self) -> bool:
        """True when besides no fault is to come."""
        return not self._later and super().complete

    def plan(self, fault: Fault) -> None:
        """Let a fault happen at its time."""
        self._later += 1
        self.world.network.expect_faults()
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
            self.host.drain(node.name)
        elif kind in ("crash", "donor_crash"):
            learner.kill(process, fault.notice_s)
            self._plan_heal(fault, learner.start, node)
        elif kind == "disconnect":
            learner.disconnect(process, fault.notice_s)
            self._plan_heal(fault, partial(learner.reconnect, process), node)
        elif kind == "pause":
            learner.pause(process, self.engine.now_s + fault.duration_s)
            self._plan_heal(fault, partial(learner.resume, process), node)
        elif kind == "slow":
            node.factor *= fault.factor
            self._plan_heal(fault, partial(_hasten, node, fault.factor))
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
        elif kind == "hostile":
            self.host.hostile.names.add(node.name)
            self._plan_heal(fault, partial(self._replace, learner))
        else:
            assert kind == "poison", f"unknown fault {kind}"
            node.poisoned += 1
            self._plan_heal(fault, partial(_detoxify, node))

    def _replace(self, learner: LearnerDriver) -> None:
        """End the process of a hostile learner, and start an honest one."""
        self.host.hostile.names.discard(learner.node.name)
        if learner.node.process is not None:
            learner.kill(learner.node.process, NEVER_S)
            learner.start()

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


def _hasten(node: Node, factor: float) -> None:
    """End a slow phase of this factor."""
    node.factor /= factor


def _detoxify(node: Node) -> None:
    """End a phase in which values are of no use."""
    node.poisoned -= 1
