"""The driver of the syncer's machine, for one life of its process: as runtime/syncer/run.py.

What it sends goes to the connection on which a learner was last heard; a merge takes time and reports its end; every
input is on the tape before it is executed; snapshots are captured at once and written in the background, but what is in
them only `faults/` reads, where processes die.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from diloco_jax.protocol.effects import Effect, Merge, Restore, SaveSnapshot, Send
from diloco_jax.protocol.exclusion import Evidence
from diloco_jax.protocol.messages import AnchorValue, LearnerMessage, Stop
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.tape import TapedSyncer
from diloco_jax.sim.engine import NEVER_S
from diloco_jax.sim.holdings import Value, digest_of
from diloco_jax.sim.learner_driver import LearnerDriver
from diloco_jax.sim.network import Deliver, SimulatedLink
from diloco_jax.sim.node import FINGERPRINT, LearnerProcess, MakeSyncer, World

HANDLED = frozenset((Merge, Restore, SaveSnapshot))


class SyncerProcess:
    """One process."""

    def __init__(self, world: World, tape: list[str], machine: Syncer, values: list[Value], taped: bool) -> None:
        self.machine = machine
        self.values = values
        self.alive = True
        self.finished_s = NEVER_S
        self.taped = TapedSyncer(machine, tape.append)
        self.inputs: TapedSyncer | Syncer = self.taped if taped else machine
        self._world = world
        self._tape = tape
        self._engine = world.engine
        self._observers = world.observers
        self._send = world.network.send
        self.heard: dict[str, SimulatedLink] = {}  # where a learner was last heard
        self._tick_s = NEVER_S  # the earliest tick that is on the heap
        self._saving = False

    def accept(self, learner: LearnerProcess, down: Deliver) -> SimulatedLink:
        """Answer a learner that dials; `down` takes what is sent to it."""
        return SimulatedLink(learner.name, learner.incarnation, learner, self._arrive, down, self._lost)

    def _arrive(self, item: tuple[SimulatedLink, LearnerMessage]) -> None:
        link, message = item
        if not self.alive:
            return
        now_s = self._engine.now_s
        self.heard[link.learner_id] = link
        for observer in self._observers:
            observer.on_delivery(message, now_s)
        self.execute(self.inputs.on_message(message, now_s), message)

    def _lost(self, link: SimulatedLink) -> None:
        """Tell the machine that a link is gone, as the transport has found out."""
        if not self.alive:
            return
        name = link.learner_id
        if self.heard.get(name) is link:
            del self.heard[name]
        self.execute(self.inputs.on_disconnect(name, link.incarnation, "connection lost", self._engine.now_s))

    def _merged(self, merge: Merge) -> None:
        if not self.alive:
            return
        useless, fragment_id, now_s = self._world.useless, merge.fragment_id, self._engine.now_s
        names = tuple([part.learner_id for part in merge.parts])
        left_out: tuple[str, ...] = ()
        if useless:
            left_out = tuple(name for name in names if (name, merge.global_step) in useless)
        evidence: Evidence | None = None
        if self._world.norms is not None:
            left_out, evidence = self._world.norms.merge(merge, left_out, now_s)
        if len(left_out) < len(names):
            before, epoch, version = self.values[fragment_id], self.machine.epoch, merge.global_step
            self._renew(fragment_id, (version, digest_of(before, epoch, fragment_id, version, names, left_out)))
        for observer in self._observers:
            observer.on_merged(merge.global_step, left_out, now_s)
        outcome = (merge.global_step, self.values[fragment_id][1], left_out, now_s)
        taped = self.inputs is self.taped
        self.execute(self.taped.on_merged(*outcome, evidence) if taped else self.machine.on_merged(*outcome))

    def _renew(self, fragment_id: int, value: Value) -> None:
        self.values[fragment_id] = value

    def _tick(self, tick_s: float) -> None:
        if tick_s != self._tick_s or not self.alive:
            return  # an earlier one took its place
        self._tick_s = NEVER_S
        machine, now_s = self.machine, self._engine.now_s
        deadline_s = machine.next_deadline_s()
        if deadline_s is not None and deadline_s <= now_s:
            self.execute(self.inputs.on_tick(now_s))
            deadline_s = machine.next_deadline_s()
            assert deadline_s is None or deadline_s > now_s, "the syncer's driver would spin"
        if deadline_s is not None:
            self._plan_tick(deadline_s)

    def _plan_tick(self, deadline_s: float) -> None:
        if deadline_s < self._tick_s:
            self._tick_s = tick_s = max(deadline_s, self._engine.now_s)
            self._engine.at(tick_s, self._tick, tick_s)

    def execute(self, effects: list[Effect], message: LearnerMessage | None = None) -> None:
        """Do what the machine asks for; `message` is what it was given, if it was one."""
        lines = len(self._tape) if self._observers else 0  # that of the input is written
        if effects:
            self._carry_out(effects, message)
        if self._observers:
            now_s = self._engine.now_s
            for observer in self._observers:
                observer.on_syncer(message, effects, now_s)
                for _ in range(lines, len(self._tape)):  # that a snapshot was taken
                    observer.on_syncer(None, [], now_s)
        deadline_s = self.machine.next_deadline_s()
        if deadline_s is not None and deadline_s < self._tick_s:
            self._plan_tick(deadline_s)

    def _carry_out(self, effects: list[Effect], message: LearnerMessage | None, whole: bool = True) -> None:
        ends = self.machine.progress.finished and self.finished_s == NEVER_S
        heard, send = self.heard, self._send
        for effect in effects:
            kind = type(effect)
            if kind is Send:
                if ends and type(effect.message) is Stop:  # type: ignore[union-attr]
                    ends = False
                    self._save_last()  # before anybody hears of the end: until then learners hold what may be lost
                link = heard.get(effect.peer)  # type: ignore[union-attr]
                if link is not None:
                    send(link.down, effect.message)  # type: ignore[union-attr]
            elif kind in HANDLED:
                self._do(effect, message)
        if ends and whole:  # not in the middle
            self._save_last()

    def _do(self, effect: Effect, message: LearnerMessage | None) -> None:
        engine, scenario = self._engine, self._world.scenario
        if isinstance(effect, Merge):
            merge_s = scenario.merge_s * (0.5 + engine.random.random())
            engine.at(engine.now_s + merge_s, self._merged, effect)
        elif isinstance(effect, Restore):
            assert isinstance(message, AnchorValue), f"{effect} without an anchor that came"
            self.values[effect.fragment_id] = (effect.version, message.digest)
        elif isinstance(effect, SaveSnapshot) and not self._saving:
            self._saving = True
            snapshot = self._take_snapshot(effect.global_step)
            engine.at(engine.now_s + scenario.save_s * (0.5 + engine.random.random()), self._written, snapshot)

    def _take_snapshot(self, global_step: int) -> Any:
        """Capture this moment under the machine's name for it; the machine may have gone on in the same input."""
        if self.inputs is self.taped:
            self.taped.on_snapshot(global_step, self._engine.now_s)

    def _written(self, snapshot: Any) -> None:
        del snapshot
        self._saving = False

    def _save_last(self) -> Any:
        """Save the end of the run."""
        self.finished_s = self._engine.now_s
        return self._take_snapshot(self.machine.global_step)


class SyncerHost:
    """The syncer's tape, and the process that writes it."""

    def __init__(
        self, world: World, learners: Mapping[str, LearnerDriver], make_syncer: MakeSyncer, taped: bool
    ) -> None:
        self.tape: list[str] = []
        self._world = world
        self._engine = world.engine
        self._learners = learners
        self._make_syncer = make_syncer
        self._taped = taped
        self.process = self._new_process(self.new_syncer(), self._initial())
        digests = [digest for _, digest in self.process.values]
        self.process.execute(self.process.inputs.on_begin(digests, 0.0))

    def new_syncer(self) -> Syncer:
        """Build a machine as that with which this run began."""
        scenario = self._world.scenario
        fragments = range(scenario.config.num_fragments)
        whole = dict.fromkeys(fragments, scenario.payload_bytes)
        return self._make_syncer(scenario.config, scenario.total_steps, FINGERPRINT, whole, budget=scenario.budget)

    def _initial(self) -> list[Value]:
        return [
            (0, digest_of("initial", fragment_id)) for fragment_id in range(self._world.scenario.config.num_fragments)
        ]

    def _new_process(self, machine: Syncer, values: Sequence[Value]) -> SyncerProcess:
        return SyncerProcess(self._world, self.tape, machine, list(values), self._taped)

    def accept(self, learner: LearnerProcess, down: Deliver) -> SimulatedLink | None:
        """Answer a learner that dials, if a process runs."""
        return self.process.accept(learner, down) if self.process.alive else None
