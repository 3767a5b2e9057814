"""Injects faults into a simulated run at their times, and ends them."""

from collections.abc import Callable, Mapping
from functools import partial

from diloco_jax.protocol.messages import STOPPED_OUTSIDE
from diloco_jax.sim.engine import NEVER_S
from diloco_jax.sim.fault import ARMED, ARMED_S, KINDS, SYNCER_KINDS, Fault
from diloco_jax.sim.learner_driver import LearnerDriver
from diloco_jax.sim.node import LearnerProcess, Node, World
from diloco_jax.sim.syncer_node import SyncerNode

# How often a fault that waits for its moment looks for it.
SEEK_EVERY_S = 0.1


class FaultInjector:
    """The faults of one run.

    Args:
        world: time, network and observers.
        learners: all learners by name.
        syncer_node: the syncer over all its processes.
        on_event: is called after each start and end of a fault.

    Attributes:
        pending: number of starts and ends of faults that are still to come.
    """

    def __init__(
        self, world: World, learners: Mapping[str, LearnerDriver], syncer_node: SyncerNode, on_event: Callable[[], None]
    ) -> None:
        self.pending = 0
        self._world = world
        self._engine = world.engine
        self._network = world.network
        self._learners = learners
        self._syncer_node = syncer_node
        self._on_event = on_event

    def plan(self, fault: Fault) -> None:
        """Start a fault at its time.

        Raises:
            ValueError: the run cannot have such a fault.
        """
        if fault.kind not in KINDS:
            raise ValueError(f"the fault {fault.kind!r} is unknown; use one of {', '.join(KINDS)}")
        if unknown := [name for name in fault.learners if name not in self._learners]:
            raise ValueError(f"the fault {fault} hits {unknown[0]!r}; the learners are {', '.join(self._learners)}")
        if fault.kind in SYNCER_KINDS and not self._syncer_node.taped:
            raise ValueError(f"the fault {fault} needs the syncer's tape; build the cluster with taped=True")
        self.pending += 1
        self._network.expect_faults()
        self._engine.at(fault.at_s, self._start, fault)

    def _start(self, fault: Fault) -> None:
        self.pending -= 1
        for observer in self._world.observers:
            observer.on_fault(fault, self._engine.now_s)
        if fault.kind == "syncer_crash":
            self._syncer_node.crash()
            if fault.breaks_snapshot and not self._syncer_node.disk.final:
                self._syncer_node.disk.break_newest()
            self._plan_end(fault, self._syncer_node.restart)
        elif fault.kind == "ban":
            for name in fault.learners:
                self._syncer_node.ban(name)
                self._plan_end(fault, partial(self._admit, self._learners[name]))
        elif fault.kind in ARMED:
            self._seek(fault)
        else:
            for name in fault.learners:
                learner = self._learners[name]
                if fault.kind == "join":
                    learner.start()
                elif learner.node.process is not None:
                    self._hit(learner.node.process, fault)
        self._on_event()

    def _hit(self, process: LearnerProcess, fault: Fault) -> None:
        """Start a fault of one running learner, and plan its end."""
        node, network = process.node, self._network
        name, learner = node.name, self._learners[node.name]
        match fault.kind:
            case "leave":
                learner.leave(process, STOPPED_OUTSIDE)
            case "drain":
                self._syncer_node.drain(name)
            case "crash" | "donor_crash":
                learner.kill(process, fault.notice_s)
                self._plan_end(fault, learner.start, node)
            case "disconnect":
                learner.disconnect(process, fault.notice_s)
                self._plan_end(fault, partial(learner.reconnect, process), node)
            case "pause":
                learner.pause(process, self._engine.now_s + fault.duration_s)
                self._plan_end(fault, partial(learner.resume, process), node)
            case "slow":
                node.factor *= fault.factor
                self._plan_end(fault, partial(_end_slow, node, fault.factor))
            case "partition":
                network.partition(name)
                self._plan_end(fault, partial(network.heal, name))
            case "hold":
                network.hold(name, fault.direction)
                self._plan_end(fault, partial(network.release, name, fault.direction))
            case "narrow":
                network.narrow(name, fault.factor)
                self._plan_end(fault, partial(network.widen, name))
            case "mute" | "late":
                delay_s = NEVER_S if fault.kind == "mute" else fault.factor
                network.delay_values(name, delay_s)
                self._plan_end(fault, partial(network.speed_up_values, name, delay_s))
            case "corrupt":
                network.corrupt(name)
                self._plan_end(fault, partial(network.cure, name))
            case "hostile":
                self._syncer_node.hostile.names.add(name)
                self._plan_end(fault, partial(self._replace, learner))
            case "slice":
                lost = learner.lose_slices(process, round(fault.factor), leads=fault.leads, notice_s=fault.notice_s)
                self._plan_end(fault, partial(_end_loss, node, lost))
            case "poison":
                node.poisoned += 1
                self._plan_end(fault, partial(_end_poison, node))

    def _replace(self, learner: LearnerDriver) -> None:
        """End the process of a hostile learner, and start an honest one."""
        self._syncer_node.hostile.names.discard(learner.node.name)
        if learner.node.process is not None:
            learner.kill(learner.node.process, NEVER_S)
            learner.start()

    def _admit(self, learner: LearnerDriver) -> None:
        """Admit a banned learner and start it again; an operator without a syncer asks again later."""
        if not self._syncer_node.process.alive:
            self.pending += 1
            end = partial(self._admit, learner)
            self._engine.at(self._engine.now_s + SEEK_EVERY_S, self._end, (end, None, None))
            return
        node = learner.node
        if self._syncer_node.admit(node.name) and node.process is None and node.incarnation > 0 and not node.gone:
            learner.start()

    def _seek(self, fault: Fault) -> None:
        """Start a fault if its moment has come; otherwise look again soon, for a while."""
        engine = self._engine
        running = [learner.node.process for learner in self._learners.values() if learner.node.process is not None]
        donors = [process for process in running if process.holdings.copies]
        if fault.kind == "donor_crash" and donors:
            self._hit(engine.random.choice(donors), fault)
        elif fault.kind == "rewind" and self._syncer_node.end_all(fault):
            self._plan_end(fault, self._syncer_node.rewind)
        elif engine.now_s < fault.at_s + ARMED_S:
            self.pending += 1
            engine.at(engine.now_s + SEEK_EVERY_S, self._seek_again, fault)

    def _seek_again(self, fault: Fault) -> None:
        self.pending -= 1
        self._seek(fault)
        self._on_event()

    def _plan_end(self, fault: Fault, end: Callable[[], None], node: Node | None = None) -> None:
        """Plan the end of a fault if it has one.

        With a node, `end` is called only if no process of the learner has started or ended meanwhile.
        """
        if fault.duration_s < NEVER_S:
            self.pending += 1
            generation = node.generation if node is not None else None
            self._engine.at(self._engine.now_s + fault.duration_s, self._end, (end, node, generation))

    def _end(self, item: tuple[Callable[[], None], Node | None, tuple[int, bool] | None]) -> None:
        end, node, generation = item
        self.pending -= 1
        if node is None or node.generation == generation:
            end()
        self._on_event()


def _end_loss(node: Node, lost: int) -> None:
    """Return so many slices to their island."""
    node.missing -= lost


def _end_slow(node: Node, factor: float) -> None:
    """End a slow phase with this factor."""
    node.factor /= factor


def _end_poison(node: Node) -> None:
    """End a phase of unusable values."""
    node.poisoned -= 1
