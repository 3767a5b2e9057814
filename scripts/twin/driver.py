"""A driver of a schedule on virtual time; its rules are those of `diloco chaos` (tools/chaos/ledger.py)."""

from collections.abc import Sequence

from diloco_jax.protocol.effects import Note
from diloco_jax.protocol.messages import SYNCER, LearnerMessage, StepReport
from diloco_jax.sim.node import Effects, Observer
from diloco_jax.tools.chaos.ledger import Ledger
from diloco_jax.tools.chaos.schedule import ChaosFault
from twin.cluster import LocalRun
from twin.faults import simulated
from twin.real_run import RealFault

# The driver of a real run reads what the syncer has written, and the syncer writes at this interval.
LOOK_S = 0.5


class ScheduleDriver(Observer):
    """Observer of a simulated run that inflicts each fault when it is due.

    A fault is due at a global step. It waits until its target has recovered from the fault before, and until another
    island is well.

    Args:
        run: the run that the faults hit.
        schedule: faults in the order of their global steps.
    """

    def __init__(self, run: LocalRun, schedule: Sequence[RealFault]) -> None:
        self.inflicted: list[tuple[float, RealFault]] = []
        self._run = run
        self._cluster = run.cluster
        self._waiting = [(fault, fault.scheduled()) for fault in schedule]
        self._ledger = Ledger(run.settings.protocol.silence_s)
        run.cluster.engine.at(LOOK_S, self._look)

    @property
    def skipped(self) -> int:
        """Return the number of faults that the run was too short for."""
        return len(self._waiting)

    def on_syncer(self, given: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        if isinstance(given, StepReport):
            step = {"kind": "step", "learner": given.learner_id, "incarnation": given.incarnation}
            self._ledger.feed({**step, "t": now_s})
        for effect in effects:
            if isinstance(effect, Note):
                facts = {"kind": effect.kind, "members": effect.members, "global_step": effect.global_step}
                self._ledger.feed({**facts, "t": now_s})

    def _look(self, _: None) -> None:
        now_s = self._cluster.engine.now_s
        while self._waiting and self._may_begin(self._waiting[0][1]):
            self._begin(*self._waiting.pop(0), now_s)
        if not self._cluster.syncer.finished:
            self._cluster.engine.at(now_s + LOOK_S, self._look)

    def _may_begin(self, fault: ChaosFault) -> bool:
        if not self._ledger.allows(fault, self._run.settings.names):
            return False
        if fault.target == SYNCER:
            return self._cluster.syncer_node.process.alive
        return self._cluster.nodes[fault.target].process is not None

    def _begin(self, real: RealFault, fault: ChaosFault, now_s: float) -> None:
        self.inflicted.append((now_s, real))
        self._ledger.begin(fault, fault.target, now_s, killed=fault.kills)
        if fault.duration_s and not fault.kills:
            self._cluster.engine.at(now_s + fault.duration_s, self._end, fault)
        for each in simulated(real, now_s, self._run.settings, self._run.calibration):
            self._run.inflict(each)

    def _end(self, fault: ChaosFault) -> None:
        self._ledger.end(fault, self._cluster.engine.now_s)
