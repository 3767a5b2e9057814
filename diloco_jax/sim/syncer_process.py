"""The driver of the syncer's machine, for one process: the counterpart of runtime/syncer/run.py.

Messages to a learner take the link of its newest message. A merge takes time and reports its end. Every input is
on the tape before its effects are executed. Snapshots are captured at once and written in the background.
"""

import json
from collections.abc import Callable

from diloco_jax.protocol.bounds import objection, without_value
from diloco_jax.protocol.effects import Drop, Effect, Merge, Restore, SaveSnapshot, Send
from diloco_jax.protocol.exclusion import Evidence
from diloco_jax.protocol.messages import AnchorValue, LearnerMessage, Refuse, Stop
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.tape import TapedSyncer
from diloco_jax.sim.disk import Disk, SyncerSnapshot
from diloco_jax.sim.engine import NEVER_S
from diloco_jax.sim.holdings import Step, Value, digest_of
from diloco_jax.sim.hostile import Hostile
from diloco_jax.sim.network import Deliver, Garbled, SimulatedLink
from diloco_jax.sim.node import LearnerProcess, World

HANDLED = frozenset((Merge, Restore, SaveSnapshot))


class SyncerProcess:
    """One process of the syncer.

    Args:
        world: time, network and observers.
        tape: takes a line of JSON per input.
        taped: record the inputs; a process without a tape keeps no snapshots, as only the tape makes them usable.
        machine: decides.
        values: the global fragments.
        disk: takes the snapshots.
        hostile: the learners whose messages are changed on arrival.
        die: is called when the process ends in the middle of an input.

    Attributes:
        heard: the link of each learner's newest message.
        steps: fragment -> the base of the encoded delta to its newest value.
        dies_after: number of effects of the next input until the process ends; None: it does not end.
    """

    def __init__(
        self,
        world: World,
        tape: list[str],
        machine: Syncer,
        values: list[Value],
        *,
        taped: bool,
        disk: Disk,
        hostile: Hostile,
        die: Callable[[], None],
    ) -> None:
        self.machine = machine
        self.values = values
        self.alive = True
        self.finished_s = NEVER_S
        self.taped = TapedSyncer(machine, tape.append)
        self.inputs: TapedSyncer | Syncer = self.taped if taped else machine
        self.heard: dict[str, SimulatedLink] = {}
        self.steps: dict[int, Value] = {}
        self.dies_after: int | None = None
        self._world = world
        self._tape = tape
        self._disk = disk
        self._hostile = hostile
        self._die = die
        self._engine = world.engine
        self._observers = world.observers
        self._send = world.network.send
        # Time of the earliest tick that is planned.
        self._tick_s = NEVER_S
        self._saving = False

    def accept(self, learner: LearnerProcess, down: Deliver) -> SimulatedLink:
        """Connect a learner that dials; `down` takes the messages to it."""
        return SimulatedLink(learner.name, learner.incarnation, learner, self._arrive, down, self._lost)

    def _arrive(self, item: tuple[SimulatedLink, LearnerMessage | Garbled]) -> None:
        link, message = item
        if type(message) is Garbled:
            # The receiver ignores a garbled anchor or part of a state, but it has heard the learner.
            if self.alive:
                self.heard[link.learner_id] = link
        elif link.learner_id in self._hostile.names:
            for arrived in self._hostile.sent(message):
                if objection(arrived):
                    self._refuse(link, arrived)
                else:
                    self._take(link, arrived)
        else:
            self._take(link, message)

    def _take(self, link: SimulatedLink, message: LearnerMessage) -> None:
        if not self.alive:
            return
        now_s = self._engine.now_s
        self.heard[link.learner_id] = link
        for observer in self._observers:
            observer.on_delivery(message, now_s)
        self.execute(self.inputs.on_message(message, now_s), message)

    def _refuse(self, link: SimulatedLink, message: LearnerMessage) -> None:
        """Give the machine a message that is out of bounds, and check that it changes nothing, not even the tape.

        A fragment's value is the exception: its round counts it as an answer without a value.
        """
        if not self.alive:
            return
        if (answer := without_value(message)) is not None:
            self._take(link, answer)
            return
        lines, before = len(self._tape), repr(self.machine.membership.members.get(link.learner_id))
        self.heard[link.learner_id] = link
        effects = self.inputs.on_message(message, self._engine.now_s)
        refused = all(isinstance(getattr(each, "message", None), Refuse) or isinstance(each, Drop) for each in effects)
        same = repr(self.machine.membership.members.get(link.learner_id)) == before
        assert refused and same and len(self._tape) == lines, f"{message} led to {effects}"
        self._carry_out(effects, message)

    def _lost(self, link: SimulatedLink) -> None:
        """Tell the machine that the transport has noticed the end of a link."""
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
        names = tuple([each.learner_id for each in merge.contributions])
        excluded: tuple[str, ...] = ()
        if useless:
            excluded = tuple(name for name in names if (name, merge.global_step) in useless)
        evidence: Evidence | None = None
        if self._world.norms is not None:
            excluded, evidence = self._world.norms.merge(merge, excluded, now_s)
        if len(excluded) < len(names):
            before, epoch, version = self.values[fragment_id], self.machine.epoch, merge.global_step
            digest = digest_of(before, epoch, fragment_id, version, names, excluded)
            if self._world.scenario.delta_bytes is not None:
                self.steps[fragment_id] = before
                self._world.steps[epoch, fragment_id, version] = Step(before[1], digest)
            self.values[fragment_id] = (version, digest)
        for observer in self._observers:
            observer.on_merged(merge.global_step, excluded, now_s)
        outcome = (merge.global_step, self.values[fragment_id][1], excluded, now_s)
        taped = self.inputs is self.taped
        self.execute(self.taped.on_merged(*outcome, evidence) if taped else self.machine.on_merged(*outcome))

    def _tick(self, tick_s: float) -> None:
        # An earlier tick may have replaced this one.
        if tick_s != self._tick_s or not self.alive:
            return
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
            tick_s = max(deadline_s, self._engine.now_s)
            if late_s := self._world.scenario.tick_late_s:
                tick_s += late_s * self._engine.random.random()
            self._tick_s = tick_s
            self._engine.at(tick_s, self._tick, tick_s)

    def execute(self, effects: list[Effect], message: LearnerMessage | None = None) -> None:
        """Execute the machine's effects; `message` is its input, None if the input was not a message.

        A process with `dies_after` executes only that many effects, and ends.
        """
        dies = self.dies_after is not None and bool(effects)
        # The line of the input is on the tape already. Each line that is added below records a snapshot.
        lines = len(self._tape) if self._observers else 0
        if effects:
            self._carry_out(effects[: self.dies_after] if dies else effects, message, whole=not dies)
        if self._observers:
            now_s = self._engine.now_s
            for observer in self._observers:
                observer.on_syncer(message, effects, now_s)
                for _ in range(lines, len(self._tape)):
                    observer.on_syncer(None, [], now_s)
        if dies:
            self._die()
            return
        deadline_s = self.machine.next_deadline_s()
        if deadline_s is not None and deadline_s < self._tick_s:
            self._plan_tick(deadline_s)

    def _carry_out(self, effects: list[Effect], message: LearnerMessage | None, whole: bool = True) -> None:
        """Execute effects; `whole` is False if the process ends before the rest of them."""
        ends = self.machine.progress.finished and self.finished_s == NEVER_S
        heard, send = self.heard, self._send
        for effect in effects:
            kind = type(effect)
            if kind is Send:
                if ends and type(effect.message) is Stop:  # type: ignore[union-attr]
                    # The final model is saved before any learner stops, because learners hold what a crash would lose.
                    ends = False
                    self._save_last()
                link = heard.get(effect.peer)  # type: ignore[union-attr]
                if link is not None:
                    send(link.down, effect.message)  # type: ignore[union-attr]
            elif kind in HANDLED:
                self._do(effect, message)
        if ends and whole:
            self._save_last()

    def _do(self, effect: Effect, message: LearnerMessage | None) -> None:
        engine, scenario = self._engine, self._world.scenario
        if isinstance(effect, Merge):
            merge_s = scenario.merge_s * (0.5 + engine.random.random())
            engine.at(engine.now_s + merge_s, self._merged, effect)
        elif isinstance(effect, Restore):
            assert isinstance(message, AnchorValue), f"{effect} without an anchor that arrived"
            self.values[effect.fragment_id] = (effect.version, message.digest)
        elif isinstance(effect, SaveSnapshot) and not self._saving:
            self._saving = True
            snapshot = self._take_snapshot(effect.global_step)
            engine.at(engine.now_s + scenario.save_s * (0.5 + engine.random.random()), self._written, snapshot)

    def _take_snapshot(self, global_step: int) -> SyncerSnapshot | None:
        """Capture this moment under the step that the machine names; None without a tape.

        The machine's own step may be later, because one input may lead to several steps.
        """
        if self.inputs is not self.taped:
            return None
        self.taped.on_snapshot(global_step, self._engine.now_s)
        histories = self._world.norms.histories if self._world.norms is not None else None
        state = json.dumps(self.machine.state())
        return SyncerSnapshot(global_step, state, tuple(self.values), len(self._tape), histories)

    def _written(self, snapshot: SyncerSnapshot | None) -> None:
        # A dead process leaves an incomplete file. After the end of the run, the final snapshot must stay the newest.
        if self.alive and self.finished_s == NEVER_S:
            self._saving = False
            if snapshot is not None:
                self._disk.keep(snapshot)

    def _save_last(self) -> None:
        """Save the end of the run, unless learners have yet to bring some of it."""
        if self.machine.restoring:
            return
        self.finished_s = self._engine.now_s
        self._disk.final = tuple(self.values)
        snapshot = self._take_snapshot(self.machine.global_step)
        if snapshot is not None:
            self._disk.keep(snapshot)
