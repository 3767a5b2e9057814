"""M real learner machines and one real syncer machine, driven on virtual time as the runtime drives them.

Like the runtime (runtime/run_learner.py, run_syncer.py)
  * a learner answers pulls at once, and takes every other message between two inner steps;
  * what the syncer sends goes to the connection on which the learner was last heard;
  * a merge takes time and reports its end.
"""

from __future__ import annotations

from collections.abc import Callable

from diloco_jax.protocol.learner import STOPPED, Learner
from diloco_jax.protocol.messages import (
    SYNCER,
    Effect,
    Finish,
    LearnerMessage,
    Merge,
    PullRequest,
    Send,
    SyncerMessage,
)
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer import Syncer
from diloco_jax.protocol.tape import TapedSyncer
from diloco_jax.sim.engine import Engine
from diloco_jax.sim.faults import NEVER_S, Fault
from diloco_jax.sim.network import Link, Network
from diloco_jax.sim.node import Node, Observer
from diloco_jax.sim.scenario import Scenario

FINGERPRINT = (("model", "simulated"),)
DIAL_S = 0.01  # from dialling to a link that stands

MakeLearner = Callable[[str, int, ProtocolConfig, tuple[tuple[str, str], ...]], Learner]
MakeSyncer = Callable[[ProtocolConfig, int, tuple[tuple[str, str], ...]], Syncer]


class Cluster:
    """The simulated run. Build it, let observers `watch` it, `run` it, read it.

    Args:
        scenario: what to simulate.
        make_learner: builds a learner; tests put broken ones here.
        make_syncer: builds the syncer, likewise.
        taped: record the event tape, a line of JSON per input of the syncer.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        make_learner: MakeLearner = Learner,
        make_syncer: MakeSyncer = Syncer,
        taped: bool = True,
    ) -> None:
        self.scenario = scenario
        self.engine = Engine(scenario.seed)
        self.network = Network(self.engine, scenario.network, faultless=not scenario.faults)
        self.tape: list[str] = []
        self._send = self.network.send
        self.finished_s = NEVER_S
        self.end_s = NEVER_S  # until when it was simulated
        self._make_learner = make_learner
        self._make_syncer = make_syncer
        self.syncer = self.new_syncer()
        self._inputs: TapedSyncer | Syncer = TapedSyncer(self.syncer, self.tape.append) if taped else self.syncer
        self._heard: dict[str, Link] = {}  # where a learner was last heard
        self._tick_s = NEVER_S  # the earliest tick of the syncer that is on the heap
        self._observers: list[Observer] = []
        self._later = len(scenario.faults)  # faults, restarts and the like that are still to come
        random = self.engine.random
        self.nodes = {
            name: Node(name, scenario.step_s * (1 + scenario.speed_spread * random.random())) for name in scenario.names
        }
        late = {name for fault in scenario.faults if fault.kind == "join" for name in fault.learners}
        for node in self.nodes.values():
            if node.name not in late:
                self._start(node)
        for fault in scenario.faults:
            self.engine.at(fault.at_s, self._fault, fault)

    def new_syncer(self) -> Syncer:
        """A fresh syncer, as this run began with one."""
        syncer = self._make_syncer(self.scenario.config, self.scenario.total_steps, FINGERPRINT)
        syncer.payload_bytes = dict.fromkeys(range(self.scenario.config.num_fragments), self.scenario.payload_bytes)
        return syncer

    def watch(self, *observers: Observer) -> None:
        """Add observers, before the run."""
        self._observers += observers

    def run(self, until_s: float) -> None:
        """Simulate until the run is complete and every learner knows, or until this time."""
        self.engine.run(until_s)
        self.end_s = self.engine.now_s if self.complete else until_s
        for observer in self._observers:
            observer.end()

    @property
    def complete(self) -> bool:
        """Whether the syncer is done, no fault is to come, and no learner runs any more."""
        return self.syncer.finished and not self._later and all(node.machine is None for node in self.nodes.values())

    # ---- the syncer's side ----------------------------------------------------------------------------------------

    def _arrive_up(self, item: tuple[Link, LearnerMessage]) -> None:
        link, message = item
        now_s = self.engine.now_s
        self._heard[link.learner_id] = link
        if self._observers:
            for observer in self._observers:
                observer.on_delivery(message, now_s)
        self._run_syncer(self._inputs.on_message(message, now_s))

    def _lost_up(self, link: Link) -> None:
        """The syncer's transport finds out that a link is gone."""
        name, now_s = link.learner_id, self.engine.now_s
        if self._heard.get(name) is link:
            del self._heard[name]
        self._run_syncer(self._inputs.on_disconnect(name, link.incarnation, "connection lost", now_s))

    def _merged(self, global_step: int) -> None:
        self._run_syncer(self._inputs.on_merged(global_step, self.engine.now_s))

    def _tick_syncer(self, tick_s: float) -> None:
        if tick_s != self._tick_s:
            return  # an earlier one took its place
        self._tick_s = NEVER_S
        deadline_s, now_s = self.syncer.next_deadline_s(), self.engine.now_s
        if deadline_s is not None and deadline_s <= now_s:
            self._run_syncer(self._inputs.on_tick(now_s))
            deadline_s = self.syncer.next_deadline_s()
            assert deadline_s is None or deadline_s > now_s, "the syncer's driver would spin"
        if deadline_s is not None:
            self._plan_tick_syncer(deadline_s)

    def _plan_tick_syncer(self, deadline_s: float) -> None:
        if deadline_s < self._tick_s:
            self._tick_s = tick_s = max(deadline_s, self.engine.now_s)
            self.engine.at(tick_s, self._tick_syncer, tick_s)

    def _run_syncer(self, effects: list[Effect]) -> None:
        engine = self.engine
        if effects:
            heard, send = self._heard, self._send
            for effect in effects:
                if isinstance(effect, Send):
                    link = heard.get(effect.peer)
                    if link is not None:
                        send(link.down, effect.message)
                elif isinstance(effect, Merge):
                    merge_s = self.scenario.merge_s * (0.5 + engine.random.random())
                    engine.at(engine.now_s + merge_s, self._merged, effect.global_step)
                elif isinstance(effect, Finish):
                    self.finished_s = engine.now_s
        if self._observers:
            for observer in self._observers:
                observer.on_effects(SYNCER, 0, effects, engine.now_s)
        deadline_s = self.syncer.next_deadline_s()
        if deadline_s is not None and deadline_s < self._tick_s:
            self._plan_tick_syncer(deadline_s)

    # ---- a learner's side -----------------------------------------------------------------------------------------

    def _arrive_down(self, item: tuple[Link, SyncerMessage]) -> None:
        link, message = item
        node: Node = self.nodes[link.learner_id]
        machine = node.machine
        if machine is None or link.owner is not machine:
            return  # that process is gone
        now_s = self.engine.now_s
        if node.paused_s > now_s:
            node.held.append(message)
        elif isinstance(message, PullRequest):
            self._run_learner(node, machine.on_pull(message, now_s))
        elif node.stepping:
            node.inbox.append(message)
        else:
            self._run_learner(node, machine.on_message(message, now_s))
            self._settle(node)

    def _end_step(self, item: tuple[Node, int]) -> None:
        node, life = item
        machine = node.machine
        if node.life != life or machine is None:
            return
        engine = self.engine
        now_s = engine.now_s
        if node.paused_s > now_s:
            engine.at(node.paused_s, self._end_step, item)
            return
        node.stepping = False
        if self._observers:
            for observer in self._observers:
                observer.on_step(node, False, now_s)
        self._run_learner(node, machine.on_step(self.scenario.step_tokens, now_s - node.began_s, 1.0, now_s))
        if node.inbox:
            inbox, node.inbox = node.inbox, []
            for message in inbox:
                self._run_learner(node, machine.on_message(message, now_s))
        self._settle(node)

    def _tick_learner(self, item: tuple[Node, int, float]) -> None:
        node, life, tick_s = item
        machine = node.machine
        if node.life != life or machine is None or tick_s != node.tick_s:
            return
        now_s = self.engine.now_s
        node.tick_s = NEVER_S
        if node.paused_s > now_s:
            self._plan_tick_learner(node, node.paused_s)
            return
        deadline_s = machine.next_deadline_s()
        if deadline_s is not None and deadline_s <= now_s:
            self._run_learner(node, machine.on_tick(now_s))
            deadline_s = machine.next_deadline_s()
            assert deadline_s is None or deadline_s > now_s, f"the driver of {node.name} would spin"
        self._settle(node)

    def _plan_tick_learner(self, node: Node, tick_s: float) -> None:
        node.tick_s = tick_s
        self.engine.at(tick_s, self._tick_learner, (node, node.life, tick_s))

    def _run_learner(self, node: Node, effects: list[Effect]) -> None:
        link = node.link
        if link is not None and effects:
            up, send = link.up, self._send
            for effect in effects:
                if isinstance(effect, Send):
                    send(up, effect.message)
        if self._observers:
            for observer in self._observers:
                observer.on_effects(node.name, node.incarnation, effects, self.engine.now_s)

    def _settle(self, node: Node) -> None:
        """Between two inputs: begin a step if none runs, plan the next tick, see off a learner that has finished."""
        machine, engine = node.machine, self.engine
        assert machine is not None
        now_s = engine.now_s
        if machine.state == STOPPED:
            self._leave(node)
            return
        if not node.stepping and machine.may_step():
            scenario = self.scenario
            node.stepping = True
            node.began_s = now_s
            step_s = node.step_s * node.factor * (1.0 + scenario.step_noise * engine.random.random())
            engine.at(now_s + step_s, self._end_step, (node, node.life))
            if self._observers:
                for observer in self._observers:
                    observer.on_step(node, True, now_s)
        deadline_s = machine.next_deadline_s()
        if deadline_s is not None and deadline_s < node.tick_s:
            self._plan_tick_learner(node, max(deadline_s, now_s))
        if self._observers:
            for observer in self._observers:
                observer.on_settled(node, now_s)

    # ---- processes and links ----------------------------------------------------------------------------------------

    def _start(self, node: Node) -> None:
        """A new process, that is a new incarnation, which dials."""
        node.life += 1
        node.incarnation += 1
        node.machine = machine = self._make_learner(node.name, node.incarnation, self.scenario.config, FINGERPRINT)
        machine.payload_bytes = dict.fromkeys(range(self.scenario.config.num_fragments), self.scenario.payload_bytes)
        self._dial(node)

    def _dial(self, node: Node) -> None:
        self.engine.at(self.engine.now_s + DIAL_S, self._connected, (node, node.life))

    def _connected(self, item: tuple[Node, int]) -> None:
        node, life = item
        if node.life != life or node.machine is None or node.link is not None:
            return
        now_s = self.engine.now_s
        if node.paused_s > now_s:
            self.engine.at(node.paused_s, self._connected, item)
            return
        node.link = Link(node.name, node.incarnation, node.machine, self._arrive_up, self._arrive_down)
        node.linked_s = now_s
        self._run_learner(node, node.machine.on_connected(now_s))
        self._settle(node)

    def _break(self, node: Node, notice_s: float) -> None:
        """The link is gone; the syncer's transport finds out later, or never."""
        link, node.link, node.linked_s = node.link, None, NEVER_S
        if link is not None:
            link.alive = False
            if notice_s < NEVER_S:
                self.engine.at(self.engine.now_s + notice_s, self._lost_up, link)

    def _kill(self, node: Node) -> None:
        node.life += 1
        node.machine = None
        node.stepping = False
        node.inbox, node.held = [], []
        node.paused_s = 0.0
        node.tick_s = NEVER_S

    def _leave(self, node: Node) -> None:
        """The machine has finished: the process closes its link when everything is sent, and ends."""
        node.gone = True
        if node.link is not None:
            self.engine.at(self.engine.now_s + 2 * self.scenario.network.delay_s, self._lost_up, node.link)
        node.link, node.linked_s = None, NEVER_S
        self._kill(node)
        if self.complete:
            self.engine.stop()

    # ---- faults -----------------------------------------------------------------------------------------------------

    def _fault(self, fault: Fault) -> None:
        self._later -= 1
        for observer in self._observers:
            observer.on_fault(fault, self.engine.now_s)
        for name in fault.learners:
            node = self.nodes[name]
            if fault.kind == "join":
                self._start(node)
            elif node.machine is not None:
                self._hit(node, fault)
        if self.complete:
            self.engine.stop()

    def _hit(self, node: Node, fault: Fault) -> None:
        """Begin one fault of one running learner, and plan its end."""
        kind, machine, now_s = fault.kind, node.machine, self.engine.now_s
        assert machine is not None
        if kind == "leave":
            self._run_learner(node, machine.leave("asked to", now_s))
            self._leave(node)
            return
        if kind == "crash":
            self._break(node, fault.notice_s)
            self._kill(node)
        elif kind == "disconnect":
            self._break(node, fault.notice_s)
            self._run_learner(node, machine.on_disconnected(now_s))
        elif kind == "pause":
            node.paused_s = max(node.paused_s, now_s + fault.duration_s)
        elif kind == "slow":
            node.factor *= fault.factor
        else:
            assert kind == "partition", f"unknown fault {kind}"
            self.network.partition(node.name)
        if fault.duration_s < NEVER_S:
            self._later += 1
            self.engine.at(fault.over_s, self._heal, (node, node.life, fault))

    def _heal(self, item: tuple[Node, int, Fault]) -> None:
        node, life, fault = item
        self._later -= 1
        if fault.kind == "slow":
            node.factor /= fault.factor
        elif fault.kind == "partition":
            self.network.heal(node.name)
        elif life == node.life:
            if fault.kind == "crash":
                self._start(node)
            elif fault.kind == "disconnect" and node.link is None:
                self._dial(node)
            elif fault.kind == "pause":
                self._resume(node)
        if self.complete:
            self.engine.stop()

    def _resume(self, node: Node) -> None:
        """Take what came during the pause; the step in progress goes on by itself."""
        if node.paused_s > self.engine.now_s:
            return  # another pause lasts longer
        held, node.held = node.held, []
        for message in held:
            if node.machine is not None and node.link is not None:
                self._arrive_down((node.link, message))
