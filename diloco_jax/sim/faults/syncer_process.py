"""A syncer's process that can die, and the snapshots that it leaves behind."""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from diloco_jax.protocol.bounds import objection, without_value
from diloco_jax.protocol.effects import Drop, Effect
from diloco_jax.protocol.exclusion import RateHistory
from diloco_jax.protocol.messages import LearnerMessage, Refuse
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.sim.engine import NEVER_S
from diloco_jax.sim.faults.hostile import Hostile
from diloco_jax.sim.faults.network import Garbled
from diloco_jax.sim.faults.scenario import FaultyScenario
from diloco_jax.sim.holdings import Step, Value
from diloco_jax.sim.network import SimulatedLink
from diloco_jax.sim.node import World
from diloco_jax.sim.syncer_process import SyncerProcess

SNAPSHOTS_KEPT = 3


class SyncerSnapshot(NamedTuple):
    """The run at one moment."""

    global_step: int
    machine: str  # JSON of the machine's state
    values: tuple[Value, ...]
    tape_lines: int  # where on the tape the inputs begin that came later
    histories: tuple[RateHistory, ...] | None  # of the fragments' rates, if norms are drawn

    def state(self) -> Mapping[str, Any]:
        """Return the machine's state."""
        plain: Mapping[str, Any] = json.loads(self.machine)
        return plain


class Disk:
    """Snapshots of the syncer."""

    def __init__(self) -> None:
        self.snapshots: list[SyncerSnapshot] = []  # oldest first
        self.broken: set[int] = set()  # global steps of those that cannot be read
        self.final: tuple[Value, ...] = ()  # the model of the end

    def keep(self, snapshot: SyncerSnapshot) -> None:
        """Write a snapshot; old ones go."""
        self.snapshots = [s for s in self.snapshots if s.global_step != snapshot.global_step] + [snapshot]
        self.broken.discard(snapshot.global_step)
        del self.snapshots[:-SNAPSHOTS_KEPT]

    def newest_readable(self) -> SyncerSnapshot | None:
        """Return the snapshot from which a process goes on."""
        return next((s for s in reversed(self.snapshots) if s.global_step not in self.broken), None)

    def break_newest(self) -> None:
        """Make the newest snapshot unreadable, if there is another one."""
        readable = [each.global_step for each in self.snapshots if each.global_step not in self.broken]
        if len(readable) > 1:
            self.broken.add(readable[-1])


class MortalSyncer(SyncerProcess):
    """A process that keeps its snapshots on a disk, and may `die` in the middle of what an input asks for."""

    def __init__(
        self,
        world: World,
        tape: list[str],
        machine: Syncer,
        values: list[Value],
        taped: bool,
        disk: Disk,
        die: Callable[[], None],
        hostile: Hostile,
    ) -> None:
        super().__init__(world, tape, machine, values, taped)
        self.steps: dict[int, Value] = {}  # fragment -> the value from which it has a step to its newest one
        self.dies_after: int | None = None  # so many effects of the next input are executed, then it is dead
        self._dying = False
        self._disk = disk
        self._die = die
        self._hostile = hostile

    def _arrive(self, item: tuple[SimulatedLink, LearnerMessage | Garbled]) -> None:
        link, message = item
        if not isinstance(message, Garbled):
            hostile = link.learner_id in self._hostile.names
            for arrived in self._hostile.sent(message) if hostile else (message,):
                if objection(arrived):
                    self._refuse(link, arrived)
                else:
                    super()._arrive((link, arrived))
        elif self.alive:  # an anchor, or a part of a state that its receiver would not take either
            self.heard[link.learner_id] = link

    def _refuse(self, link: SimulatedLink, message: LearnerMessage) -> None:
        """Give the machine a message that is out of bounds: it changes nothing, and leaves no trace on the tape.

        A value is the exception: its round takes it as an answer that holds nothing.
        """
        if not self.alive:
            return
        if (answer := without_value(message)) is not None:
            super()._arrive((link, answer))
            return
        lines, before = len(self._tape), repr(self.machine.membership.members.get(link.learner_id))
        self.heard[link.learner_id] = link
        effects = self.inputs.on_message(message, self._engine.now_s)
        refused = all(isinstance(getattr(each, "message", None), Refuse) or isinstance(each, Drop) for each in effects)
        same = repr(self.machine.membership.members.get(link.learner_id)) == before
        assert refused and same and len(self._tape) == lines, f"{message} led to {effects}"
        self._carry_out(effects, message)

    def _renew(self, fragment_id: int, value: Value) -> None:
        scenario, before = self._world.scenario, self.values[fragment_id]
        if isinstance(scenario, FaultyScenario) and scenario.step_bytes is not None:
            self.steps[fragment_id] = before
            self._world.steps[self.machine.epoch, fragment_id, value[0]] = Step(before[1], value[1])
        super()._renew(fragment_id, value)

    def execute(self, effects: list[Effect], message: LearnerMessage | None = None) -> None:
        self._dying = bool(effects) and self.dies_after is not None
        super().execute(effects, message)
        if self._dying:
            self._dying = False
            self._die()

    def _carry_out(self, effects: list[Effect], message: LearnerMessage | None, whole: bool = True) -> None:
        super()._carry_out(effects[: self.dies_after] if self._dying else effects, message, not self._dying)

    def _plan_tick(self, deadline_s: float) -> None:
        if not self._dying:
            super()._plan_tick(deadline_s)

    def _take_snapshot(self, global_step: int) -> SyncerSnapshot:
        super()._take_snapshot(global_step)
        norms, state = self._world.norms, json.dumps(self.machine.state())
        histories = norms.histories if norms is not None else None
        return SyncerSnapshot(global_step, state, tuple(self.values), len(self._tape), histories)

    def _written(self, snapshot: SyncerSnapshot) -> None:
        if self.alive and self.finished_s == NEVER_S:  # else it is half-written, or was written before the last one
            super()._written(snapshot)
            self._disk.keep(snapshot)

    def _save_last(self) -> None:
        """Save the end of the run, as far as this process has it."""
        if not self.machine.restoring:  # else learners have yet to bring some of it
            self._disk.final = tuple(self.values)
            self._disk.keep(super()._save_last())
