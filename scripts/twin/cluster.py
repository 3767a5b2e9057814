"""A simulated cluster whose processes take as long as those of a local run, and the count of its figures."""

from collections.abc import Sequence
from random import Random
from typing import Any

from diloco_jax.protocol.effects import Note, Send
from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.protocol.messages import FragmentValue, LearnerMessage, StepReport, SyncerMessage
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.watch.stats import RunStats
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.fault import Fault
from diloco_jax.sim.network import LinkFaults, NetworkOptions
from diloco_jax.sim.node import Effects, LearnerProcess, Observer, Steady
from diloco_jax.sim.scenario import Scenario
from twin.calibration import Calibration
from twin.real_run import RunSettings

# A fault that only these simulations have; its `factor` is the number of unusable values of a process.
BAD_VALUES = "bad_values"


def restart_s(settings: RunSettings, calibration: Calibration) -> float:
    """Return the seconds from the end of an island's process to the greeting of the next one."""
    return calibration.notice_s + settings.restart_delay_s + calibration.boot_s


class LocalPace(Steady):
    """The pace of steps of about equal length; a restarted process loads compiled programs before its first step."""

    __slots__ = ("ready_s",)

    def __init__(self, step_s: float, noise: float, random: Random) -> None:
        super().__init__(step_s / (1 + noise / 2), noise, random)
        self.ready_s = 0.0

    def begins_s(self, now_s: float) -> float:
        return max(now_s, self.ready_s)


class BadValues(Observer):
    """Observer that makes the next values of a process unusable, and counts them where they are sent."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        # The number of bad values that a process still sends, by its name and incarnation.
        self._left: dict[tuple[str, int], int] = {}

    def begin(self, fault: Fault) -> None:
        """Make the next values of the fault's running processes bad."""
        for name in fault.learners:
            process = self._cluster.nodes[name].process
            if process is not None:
                self._left[process.key] = round(fault.factor)

    def on_learner(self, process: LearnerProcess, given: SyncerMessage | None, effects: Effects, now_s: float) -> None:
        if not self._left.get(process.key) or process.link is None:
            return
        for effect in effects:
            sent = effect.message if isinstance(effect, Send) else None
            if isinstance(sent, FragmentValue) and self._left[process.key]:
                self._left[process.key] -= 1
                self._cluster.world.useless.add((process.name, sent.global_step))


class LocalRun:
    """A simulated run like a local one; add observers with `cluster.watch`, then run `cluster`.

    Args:
        settings: settings of the run.
        calibration: how long things take.
        faults: faults with their times in seconds after the first step.
        seed: seed of everything that is drawn.
    """

    def __init__(
        self, settings: RunSettings, calibration: Calibration, faults: Sequence[Fault] = (), seed: int = 0
    ) -> None:
        self.settings = settings
        self.calibration = calibration
        self._paces = {
            name: LocalPace(step_s, calibration.step_noise, Random(f"{seed} {name}"))
            for name, step_s in calibration.step_s.items()
        }
        joins = [Fault(after_s, "join", (name,)) for name, after_s in calibration.first_step_s.items()]
        known = [fault for fault in faults if fault.kind != BAD_VALUES]
        self.cluster = Cluster(
            Scenario(
                config=settings.protocol,
                learners=len(settings.names),
                total_steps=settings.total_steps,
                network=NetworkOptions(delay_s=calibration.delay_s, faults=LinkFaults()),
                faults=tuple(sorted([*joins, *known])),
                merge_s=calibration.merge_s,
                payload_bytes=calibration.value_bytes,
                redials_s=calibration.reconnects_s,
                restart_s=restart_s(settings, calibration),
                connect_timeout_s=settings.connect_timeout_s,
                seed=seed,
            ),
            make_learner=self._boot,
            paces=self._paces,
        )
        self._bad_values = BadValues(self.cluster)
        self.cluster.watch(self._bad_values)
        for fault in faults:
            if fault.kind == BAD_VALUES:
                self.inflict(fault)

    def _boot(self, name: str, incarnation: int, *args: Any, **described: Any) -> Learner:
        """Build a learner's machine; a restarted learner first loads its compiled programs."""
        if incarnation > 1:
            self._paces[name].ready_s = self.cluster.engine.now_s + self.calibration.ready_s
        return Learner(name, incarnation, *args, **described)

    def inflict(self, fault: Fault) -> None:
        """Plan a fault that is not part of the scenario, at its time."""
        if fault.kind == BAD_VALUES:
            self.cluster.engine.at(fault.at_s, self._bad_values.begin, fault)
        else:
            self.cluster.plan(fault)


class Meter(Observer):
    """Observer that counts a simulated run with the same code as a real syncer (protocol/watch/stats.py)."""

    def __init__(self, run: LocalRun) -> None:
        self.began_s: float | None = None
        self._run = run
        self._stats = RunStats(run.settings.names, 0, run.cluster.syncer)

    def on_step(self, process: LearnerProcess, began: bool, now_s: float) -> None:
        if self.began_s is None:
            self.began_s = now_s

    def on_delivery(self, message: LearnerMessage, now_s: float) -> None:
        if isinstance(message, StepReport):
            gap_s = self._run.calibration.gap_s
            self._stats.on_report(message._replace(step_s=max(0.0, message.step_s - gap_s)), now_s)

    def on_syncer(self, given: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        for effect in effects:
            if isinstance(effect, Note) and effect.kind == "merged":
                self._stats.on_merged(effect.members, effect.global_step)

    def on_syncer_back(self, machine: Syncer, rewound_to: int, now_s: float) -> None:
        counted = self._stats.state()
        self._stats = RunStats(self._run.settings.names, 0, machine)
        self._stats.restore(counted)

    def measured(self) -> dict[str, float]:
        """Return the figures for the comparison, after the run.

        Raises:
            ValueError: the run did not end.
        """
        cluster, total_steps = self._run.cluster, self._run.settings.total_steps
        if not cluster.syncer.finished or self.began_s is None:
            raise ValueError(
                f"the simulated run stood still at global step {cluster.syncer.global_step} of "
                f"{total_steps}; compare with a run of fewer or shorter faults"
            )
        summary = self._stats.summary({}, cluster.finished_s)
        rounds = cluster.syncer.merged_rounds
        wall_s = cluster.finished_s - self.began_s
        return {
            "goodput": summary["goodput"],
            "uptime": summary["uptime"],
            "contributors_per_round": summary["contributors_per_round"],
            "rounds": rounds,
            "rounds_per_s": rounds / wall_s,
            "wall_s": wall_s,
        }
