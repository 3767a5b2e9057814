"""The driver of the syncer's machine, for one life of its process: as runtime/syncer/run.py.

What it sends goes to the connection on which a learner was last heard; a merge takes time and reports its end; every
input is on the tape before it is executed; snapshots are captured at once and written in the background.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from diloco_jax.protocol.effects import Effect, Merge, Restore, SaveSnapshot, Send
from diloco_jax.protocol.messages import AnchorValue, LearnerMessage, Stop
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.tape import TapedSyncer
from diloco_jax.sim.engine import NEVER_S
from diloco_jax.sim.holdings import Step, Value, digest_of
from diloco_jax.sim.learner_driver import LearnerDriver
from diloco_jax.sim.network import Deliver, Garbled, SimulatedLink
from diloco_jax.sim.node import FINGERPRINT, LearnerProcess, MakeSyncer, World

SNAPSHOTS_KEPT = 3
HANDLED = frozenset((Merge, Restore, SaveSnapshot))


class SyncerSnapshot(NamedTuple):
    """The run at one moment."""

    global_step: int
    machine: str  # JSON of the machine's state
    values: tuple[Value, ...]
    tape_lines: int  # where on the tape the inputs begin that came later

    def state(self) -> Mapping[str, Any]:
        """Return the machine's state."""
        plain: Mapping[str, Any] = json.loads(self.machine)
        return plain


class Disk:
    """Files of the syncer."""

    def __init__(self) -> None:
        self.tape: list[str] = []
        self.snapshots: list[SyncerSnapshot] = []  # oldest first
        self.broken: set[int] = set()  # global steps of those that cannot be read
        self.final: tuple[Value, ...] = ()  # the model of the end

    def keep(self, snapshot: SyncerSnapshot) -> None:
        """Write a snapshot; old ones go."""
        self.snapshots = [s for s in self.snapshots if s.global_step != snapshot.global_step] + [snapshot]
        self.broken.discard(snapshot.global_step)
        del self.snapshots[:-SNAPSHOTS_KEPT]


class SyncerProcess:
    """One process."""

    def __init__(
        self, world: World, disk: Disk, machine: Syncer, values: list[Value], taped: bool, die: Callable[[], None]
    ) -> None:
        self.machine = machine
        self.values = values
        self.steps: dict[int, Value] = {}  # fragment -> the value from which it has a step to its newest one
        self.alive = True
        self.finished_s = NEVER_S
        self.taped = TapedSyncer(machine, disk.tape.append)
        self.inputs: TapedSyncer | Syncer = self.taped if taped else machine
        self.dies_after: int | None = None  # so many effects of the next input are executed, then it is dead
        self._die = die
        self._world = world
        self._disk = disk
        self._engine = world.engine
        self._observers = world.observers
        self._send = world.network.send
        self.heard: dict[str, SimulatedLink] = {}  # where a learner was last heard
        self._tick_s = NEVER_S  # the earliest tick that is on the heap
        self._saving = False

    def accept(self, learner: LearnerProcess, down: Deliver) -> SimulatedLink:
        """Answer a learner that dials; `down` takes what is sent to it."""
        return SimulatedLink(learner.name, learner.incarnation, learner, self._arrive, down, self._lost)

    def _arrive(self, item: tuple[SimulatedLink, LearnerMessage | Garbled]) -> None:
        link, message = item
        if not self.alive:
            return
        now_s = self._engine.now_s
        self.heard[link.learner_id] = link
        if type(message) is Garbled:
            return  # an anchor, or a part of a state that its receiver would not take either
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
        if len(left_out) < len(names):
            before = self.values[fragment_id]
            epoch, version = self.machine.epoch, merge.global_step
            made = digest_of(before, epoch, fragment_id, version, names, left_out)
            self.values[fragment_id] = (version, made)
            if self._world.scenario.step_bytes is not None:
                self.steps[fragment_id] = before
                self._world.steps[epoch, fragment_id, version] = Step(before[1], made)
        for observer in self._observers:
            observer.on_merged(merge.global_step, left_out, now_s)
        self.execute(self.inputs.on_merged(merge.global_step, self.values[fragment_id][1], left_out, now_s))

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
        lines = len(self._disk.tape) if self._observers else 0  # that of the input is written
        if effects:
            done = effects if self.dies_after is None else effects[: self.dies_after]
            ends = self.machine.progress.finished and self.finished_s == NEVER_S
            heard, send = self.heard, self._send
            for effect in done:
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
            if ends and self.dies_after is None:
                self._save_last()
        if self._observers:
            now_s = self._engine.now_s
            for observer in self._observers:
                observer.on_syncer(message, effects, now_s)
                for _ in range(lines, len(self._disk.tape)):  # that a snapshot was taken
                    observer.on_syncer(None, [], now_s)
        if effects and self.dies_after is not None:
            self._die()
            return
        deadline_s = self.machine.next_deadline_s()
        if deadline_s is not None and deadline_s < self._tick_s:
            self._plan_tick(deadline_s)

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

    def _take_snapshot(self, global_step: int) -> SyncerSnapshot:
        """Capture this moment under the machine's name for it; the machine may have gone on in the same input."""
        if self.inputs is self.taped:
            self.taped.on_snapshot(global_step, self._engine.now_s)
        return SyncerSnapshot(global_step, json.dumps(self.machine.state()), tuple(self.values), len(self._disk.tape))

    def _written(self, snapshot: SyncerSnapshot) -> None:
        if self.alive and self.finished_s == NEVER_S:  # else it is half-written, or was written before the last one
            self._saving = False
            self._disk.keep(snapshot)

    def _save_last(self) -> None:
        """Save the end of the run, as far as this process has it."""
        if self.machine.restoring:
            return  # learners have yet to bring some of it
        self.finished_s = self._engine.now_s
        self._disk.final = tuple(self.values)
        self._disk.keep(self._take_snapshot(self.machine.global_step))


class SyncerHost:
    """The syncer's disk, and the process that runs beside it or ran there last."""

    def __init__(
        self, world: World, learners: Mapping[str, LearnerDriver], make_syncer: MakeSyncer, taped: bool
    ) -> None:
        self.disk = Disk()
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
        steps = dict.fromkeys(fragments, scenario.step_bytes) if scenario.step_bytes is not None else {}
        settings = (scenario.config, scenario.total_steps, FINGERPRINT, whole, steps, scenario.budget)
        return self._make_syncer(*settings, plan=scenario.plan)

    def _initial(self) -> list[Value]:
        return [
            (0, digest_of("initial", fragment_id)) for fragment_id in range(self._world.scenario.config.num_fragments)
        ]

    def _new_process(self, machine: Syncer, values: Sequence[Value]) -> SyncerProcess:
        return SyncerProcess(self._world, self.disk, machine, list(values), self._taped, self._on_death)

    def accept(self, learner: LearnerProcess, down: Deliver) -> SimulatedLink | None:
        """Answer a learner that dials, if a process runs."""
        return self.process.accept(learner, down) if self.process.alive else None

    def _on_death(self) -> None:
        """Take note that the process has died; without faults it never does."""
