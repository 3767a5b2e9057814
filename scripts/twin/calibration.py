"""How long things take on a machine, measured in other runs than the one that is predicted."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from twin.real_run import Incarnation, RealRun, restarts, syncer_restarts

# The delay of one way over loopback through a relay; the metrics of a run do not contain it.
DELAY_S = 0.001
# The first pause is that of runtime/learner/run.py; the others are the backoff of gRPC.
RECONNECTS_S = (0.2, 0.1, 0.16, 0.26, 0.41, 0.66, 1.0)
MERGE_MIN_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Durations of a simulated local run, as medians, so that rare disturbances of the machine have no effect.

    All durations are in seconds.
    """

    # The time between the ends of two steps, by island.
    step_s: dict[str, float]
    # The part of `step_s` that is between two steps.
    gap_s: float
    # The difference between the longest and the shortest steps without the twentieth at each end, as a share of a step.
    step_noise: float
    # The start of each island's first step; 0 is the start of the first one of all.
    first_step_s: dict[str, float]
    # The time from the end of a round to the new version, without the network.
    merge_s: float
    # The size of one encoded fragment.
    value_bytes: int
    # The delay of one way between an island and the syncer.
    delay_s: float = DELAY_S
    # The time until the supervisor notices that a process ended; the default is half of its poll interval. The
    # supervisor's restart delay follows it.
    notice_s: float = 0.05
    # The time from an island's start to its greeting: Python, JAX and the model start.
    boot_s: float = 0.0
    # The least time from the greeting to the first step: compiled programs are loaded.
    ready_s: float = 0.0
    # The time from the start of the syncer's process to the start of its machine.
    syncer_boot_s: float = 0.0
    # The numbers of measured restarts of islands and of the syncer.
    restarts: int = 0
    syncer_restarts: int = 0
    # The pauses before attempts to connect; the last pause repeats.
    reconnects_s: tuple[float, ...] = field(default=RECONNECTS_S)


def calibrate(runs: Sequence[RealRun]) -> Calibration:
    """Measure steps and merges in the first run, which should have no faults, and restarts in all runs.

    Args:
        runs: complete runs of one config with the same islands.

    Raises:
        ValueError: an island of the first run made too few steps.
    """
    calm = runs[0]
    for name in calm.settings.names:
        if len(calm.periods_s.get(name, [])) < 20:
            raise ValueError(f"{name} made fewer than 21 steps in {calm.folder}; calibrate with a longer run")
    names = calm.settings.names
    periods = {name: sorted(calm.periods_s[name]) for name in names}
    gaps = [median(calm.periods_s[name]) - median(calm.steps_s[name]) for name in names]
    step_s = {name: median(periods[name]) for name in names}
    noise = median(_spread(periods[name]) / step_s[name] for name in names)
    islands = [(fault, incarnation, run) for run in runs for fault, incarnation in restarts(run)]
    syncers = [back_s - fault.at_s - _syncer_delay_s(run) for run in runs for fault, back_s in syncer_restarts(run)]
    notices = [incarnation.started_s - fault.at_s - run.settings.restart_delay_s for fault, incarnation, run in islands]
    notice_s = max(0.0, _median(notices, 0.05))
    return Calibration(
        step_s=step_s,
        gap_s=max(0.0, median(gaps)),
        step_noise=noise,
        first_step_s=_first_steps_s(calm),
        merge_s=max(MERGE_MIN_S, _median(calm.syncs_s, 0.0) - 2 * DELAY_S),
        value_bytes=round(calm.value_bytes),
        notice_s=notice_s,
        boot_s=_median(
            [
                incarnation.joined_s - incarnation.started_s
                for _, incarnation, _ in islands
                if incarnation.joined_s is not None
            ],
            0.0,
        ),
        ready_s=_median(
            [_ready_s(incarnation) for _, incarnation, _ in islands if incarnation.stepped_s is not None], 0.0
        ),
        syncer_boot_s=max(0.0, _median(syncers, 0.0) - notice_s),
        restarts=len(islands),
        syncer_restarts=len(syncers),
    )


def _syncer_delay_s(run: RealRun) -> float:
    return run.settings.syncer_restart_delay_s


def _ready_s(incarnation: Incarnation) -> float:
    assert incarnation.joined_s is not None and incarnation.stepped_s is not None, (
        f"{incarnation} stepped before it joined"
    )
    return incarnation.stepped_s - incarnation.joined_s


def _spread(ordered: Sequence[float]) -> float:
    twentieth = len(ordered) // 20
    return ordered[-1 - twentieth] - ordered[twentieth]


def _first_steps_s(run: RealRun) -> dict[str, float]:
    first: dict[str, float] = {}
    for incarnation in run.incarnations.values():
        if incarnation.stepped_s is not None:
            first[incarnation.name] = min(
                incarnation.stepped_s - run.began_s, first.get(incarnation.name, float("inf"))
            )
    return first


def _median(values: Iterable[float], default: float) -> float:
    measured = list(values)
    return median(measured) if measured else default
