"""Inflicts the faults of a schedule when they are due, by the rules of tools/chaos/driver.py, on virtual time.

A fault is due at a global step. It waits until its target has recovered from the one before, and until one island would
still be left alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from diloco_jax.protocol.effects import Note
from diloco_jax.protocol.messages import SYNCER, LearnerMessage, StepReport
from diloco_jax.sim.node import Effects, Observer
from twin.cluster import LocalRun
from twin.faults import simulated
from twin.real_run import RealFault

LOOK_S = 0.5  # the driver sees what the syncer wrote, which it does so often
SETTLE_S = 1.0  # a recovery counts when nothing went wrong for so long after it
NOTICED_LATE = {"corrupt", "duplicate", "black-hole"}  # only when the lease is over, at worst
DISRUPTIONS = {"left", "silent", "strike", "expelled"}


@dataclass(slots=True)
class Hit:
    """An island, or the syncer, that was hit and has not recovered."""

    ended_s: float  # when the fault itself is over
    settle_s: float
    stepped: bool = False
    merged_s: float | None = None


class ScheduleDriver(Observer):
    """The driver of a schedule: an observer of its run.

    Args:
        run: in which the faults happen.
        schedule: in the order in which they are due.
    """

    def __init__(self, run: LocalRun, schedule: Sequence[RealFault]) -> None:
        self.inflicted: list[tuple[float, RealFault]] = []
        self._run = run
        self._cluster = run.cluster
        self._waiting = list(schedule)
        self._hits: dict[str, Hit] = {}
        self._merged_once: set[str] = set()
        self._global_step = 0
        run.cluster.engine.at(LOOK_S, self._look)

    @property
    def skipped(self) -> int:
        """Faults for which the run was too short."""
        return len(self._waiting)

    def on_syncer(self, given: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        hit = self._hits.get(given.learner_id) if isinstance(given, StepReport) else None
        if hit is not None and now_s >= hit.ended_s:
            hit.stepped = True  # of a new life, if it was killed: what the old one sent went with its connection
        for effect in effects:
            if isinstance(effect, Note) and effect.kind == "merged":
                self._on_merged(effect, now_s)
            elif isinstance(effect, Note) and effect.kind in DISRUPTIONS:
                for name in effect.members:
                    if name in self._hits:
                        self._hits[name].stepped, self._hits[name].merged_s = False, None

    def _on_merged(self, note: Note, now_s: float) -> None:
        self._global_step = max(self._global_step, note.global_step)
        self._merged_once.update(note.members)
        for target, hit in self._hits.items():
            back = now_s > hit.ended_s if target == SYNCER else hit.stepped and target in note.members
            if hit.merged_s is None and back:
                hit.merged_s = now_s

    def _look(self, _: None) -> None:
        now_s = self._cluster.engine.now_s
        for target, hit in list(self._hits.items()):
            if hit.merged_s is not None and now_s >= hit.merged_s + hit.settle_s:
                del self._hits[target]
        while self._waiting and self._may_begin(self._waiting[0]):
            self._begin(self._waiting.pop(0), now_s)
        if not self._cluster.syncer.finished:
            self._cluster.engine.at(now_s + LOOK_S, self._look)

    def _may_begin(self, fault: RealFault) -> bool:
        names = self._run.settings.names
        if not self._merged_once.issuperset(names) or self._global_step < fault.at_step or fault.target in self._hits:
            return False
        if fault.target == SYNCER:
            return self._cluster.host.process.alive
        islands = len(set(self._hits) - {SYNCER})
        return islands + 1 < len(names) and self._cluster.nodes[fault.target].process is not None

    def _begin(self, fault: RealFault, now_s: float) -> None:
        run = self._run
        silence_s = run.settings.protocol.silence_s
        settle_s = SETTLE_S + (silence_s if fault.kind in NOTICED_LATE else 0.0)
        lasts_s = 0.0 if fault.kind.startswith("kill") else fault.duration_s
        self._hits[fault.target] = Hit(now_s + lasts_s, settle_s)
        self.inflicted.append((now_s, fault))
        for each in simulated(fault, now_s, run.settings, run.calibration):
            run.inflict(each)
