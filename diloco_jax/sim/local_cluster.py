"""A cluster whose processes take as long as those of a local run, and what it has done, counted as of a real run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from diloco_jax.protocol.effects import Effect, Note
from diloco_jax.protocol.messages import SYNCER, FragmentValue, LearnerMessage, Message, StepReport
from diloco_jax.protocol.stats import RunStats
from diloco_jax.protocol.syncer import Syncer
from diloco_jax.sim.calibration import Calibration
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.faults import Fault
from diloco_jax.sim.learner_process import LearnerProcess
from diloco_jax.sim.network import Link, NetworkOptions
from diloco_jax.sim.node import Node, Observer
from diloco_jax.sim.pace import Pace, Steady
from diloco_jax.sim.real_run import RunSettings
from diloco_jax.sim.scenario import Scenario
from diloco_jax.sim.world import MakeLearner, World


def restart_s(settings: RunSettings, calibration: Calibration) -> float:
    """From the end of an island's process to the greeting of the next one, in seconds."""
    return calibration.notice_s + settings.restart_delay_s + calibration.boot_s


class LocalPace(Steady):
    """Steps of about equal length; before the first one of a process something is loaded."""

    __slots__ = ("ready_s",)

    def __init__(self, step_s: float, noise: float, random: Random) -> None:
        super().__init__(step_s / (1 + noise / 2), noise, random)
        self.ready_s = 0.0

    def begins_s(self, now_s: float) -> float:
        return max(now_s, self.ready_s)


class LocalProcess(LearnerProcess):
    """A learner's process that needs time to start, and may be told to send so many bad values.

    Args:
        pace: of its steps; it is told when a process is ready.
        calibration: how long things take.
        settings: of the run.
    """

    __slots__ = ("_attempts", "_calibration", "_greeted", "_settings", "_steps", "bad_values")

    def __init__(
        self,
        name: str,
        world: World,
        accept: Callable[[LearnerProcess], Link | None],
        ended: Callable[[], None],
        make: MakeLearner,
        pace: LocalPace,
        calibration: Calibration,
        settings: RunSettings,
    ) -> None:
        super().__init__(name, world, accept, ended, make, pace, 1)
        self._steps = pace
        self._calibration = calibration
        self._settings = settings
        self._attempts = 0
        self._greeted = False  # since it started
        self.bad_values = 0

    def start(self) -> None:
        """A new process. It ends again if no syncer answers for a while."""
        now_s, again = self._engine.now_s, self.incarnation > 0
        self._steps.ready_s = now_s + (self._calibration.ready_s if again else 0.0)
        self.bad_values, self._attempts, self._greeted = 0, 0, False
        super().start()
        self._engine.at(now_s + self._settings.connect_timeout_s, self._give_up, self.life)

    def _give_up(self, life: int) -> None:
        if self.life == life and self.machine is not None and not self._greeted:
            self.forget()
            self.start_again(self.life)

    def start_again(self, life: int) -> None:
        """The supervisor's way: it waits, then Python starts."""
        self._engine.at(self._engine.now_s + restart_s(self._settings, self._calibration), super().start_again, life)

    def redial_s(self) -> float:
        """As runtime/run_learner.py waits between its attempts."""
        pauses_s = self._calibration.reconnects_s
        self._attempts += 1
        return pauses_s[min(self._attempts, len(pauses_s)) - 1]

    def _connect(self, life: int) -> None:
        super()._connect(life)
        if self.link is not None:
            self._attempts, self._greeted = 0, True

    def filled(self, message: Any) -> Message | None:
        if self.bad_values and isinstance(message, FragmentValue):
            self.bad_values -= 1
            self._world.useless.add((self.name, message.global_step))
        return super().filled(message)


class LocalCluster(Cluster):
    """A cluster like a local run.

    Args:
        settings: of the run.
        calibration: how long things take.
        faults: what goes wrong, times counted from the first step.
        seed: of everything that is drawn.
    """

    def __init__(
        self, settings: RunSettings, calibration: Calibration, faults: Sequence[Fault] = (), seed: int = 0
    ) -> None:
        self.settings = settings
        self.calibration = calibration
        joins = [Fault(after_s, "join", (name,)) for name, after_s in calibration.first_step_s.items()]
        super().__init__(
            Scenario(
                config=settings.protocol,
                learners=len(settings.names),
                total_steps=settings.total_steps,
                network=NetworkOptions(delay_s=calibration.delay_s),
                faults=tuple(sorted([*joins, *faults])),
                merge_s=calibration.merge_s,
                payload_bytes=calibration.value_bytes,
                seed=seed,
            ),
            paces={
                name: LocalPace(step_s, calibration.step_noise, Random(f"{seed} {name}"))
                for name, step_s in calibration.step_s.items()
            },
        )

    def _new_node(self, name: str, make: MakeLearner, pace: Pace, step_samples: int) -> LocalProcess:
        assert isinstance(pace, LocalPace) and step_samples == 1, f"{name} is no island of a local run"
        return LocalProcess(name, self, self.accept, self._on_end, make, pace, self.calibration, self.settings)

    def inflict(self, fault: Fault) -> None:
        """Begin a fault now, of which the scenario knows nothing."""
        self._later += 1
        self._fault(fault._replace(at_s=self.engine.now_s))

    def _hit(self, node: LearnerProcess, fault: Fault) -> None:
        if fault.kind == "bad_values":
            assert isinstance(node, LocalProcess), f"{node.name} is no local process"
            node.bad_values = round(fault.factor)
        else:
            super()._hit(node, fault)


class Meter(Observer):
    """Counts a simulated run as the syncer of a real one counts (protocol/stats.py)."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.began_s: float | None = None
        self._cluster = cluster
        self._names = cluster.settings.names
        self._stats = RunStats(self._names, 0, cluster.syncer)

    def on_step(self, node: Node, began: bool, now_s: float) -> None:
        if self.began_s is None:
            self.began_s = now_s

    def on_delivery(self, message: LearnerMessage, now_s: float) -> None:
        if isinstance(message, StepReport):
            gap_s = self._cluster.calibration.gap_s
            self._stats.on_report(message._replace(step_s=max(0.0, message.step_s - gap_s)), now_s)

    def on_effects(self, source: str, incarnation: int, effects: list[Effect], now_s: float) -> None:
        if source == SYNCER:
            for effect in effects:
                if isinstance(effect, Note) and effect.kind == "merged":
                    self._stats.on_merged(effect.members, effect.global_step)

    def on_syncer_back(self, machine: Syncer, rewound_to: int, now_s: float) -> None:
        counted = self._stats.state()
        self._stats = RunStats(self._names, 0, machine)
        self._stats.restore(counted)

    def measured(self) -> dict[str, float]:
        """What is compared, after the run.

        Raises:
            ValueError: the run did not come to its end.
        """
        cluster = self._cluster
        if not cluster.syncer.finished or self.began_s is None:
            raise ValueError(
                f"the simulated run stood still at global step {cluster.syncer.global_step} of "
                f"{cluster.settings.total_steps}; are the faults survivable?"
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
