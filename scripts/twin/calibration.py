"""Durations on a machine, measured in runs that are not the one to be predicted."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from twin.real_run import Life, RealRun, deaths, syncer_deaths

DELAY_S = 0.001  # one way over loopback, through a relay; metrics do not tell it
RECONNECTS_S = (0.2, 0.1, 0.16, 0.26, 0.41, 0.66, 1.0)  # first that of runtime/learner/run.py, then gRPC's own backoff
MERGE_MIN_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Settings of a simulated local run. Each is a median, so that what else a machine does now and then drops out."""

    step_s: dict[str, float]
    """From one step's end to the next, for each island."""
    gap_s: float
    """How much of that is between two steps."""
    step_noise: float
    """Between the shortest and the longest steps, without the twentieth at each end, as a share of a step."""
    first_step_s: dict[str, float]
    """When each island's first step begins, counted from that of the first one."""
    merge_s: float
    """From the end of a round to the new version, without the network."""
    value_bytes: int
    """Of one encoded fragment."""
    delay_s: float = DELAY_S
    """One way between an island and the syncer."""
    notice_s: float = 0.05
    """Until the supervisor sees a death: half of its poll. Its restart delay comes on top."""
    boot_s: float = 0.0
    """From an island's start to its greeting: Python, JAX, the model."""
    ready_s: float = 0.0
    """From there to its first step at the earliest: what was compiled is loaded."""
    syncer_boot_s: float = 0.0
    """From the syncer's start to its machine's."""
    restarts: int = 0
    """Deaths of islands that were measured."""
    syncer_restarts: int = 0
    """Deaths of the syncer that were measured."""
    reconnects_s: tuple[float, ...] = field(default=RECONNECTS_S)
    """Pauses before attempts to connect; the last one goes on."""


def calibrate(runs: Sequence[RealRun]) -> Calibration:
    """Measure: steps and merges in the first run, which should have no faults, restarts in whichever has any.

    Args:
        runs: complete runs of one config, of the same islands.

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
    islands = [(fault, life, run) for run in runs for fault, life in deaths(run)]
    syncers = [back_s - fault.at_s - _syncer_delay_s(run) for run in runs for fault, back_s in syncer_deaths(run)]
    notices = [life.started_s - fault.at_s - run.settings.restart_delay_s for fault, life, run in islands]
    notice_s = max(0.0, _median(notices, 0.05))
    return Calibration(
        step_s=step_s,
        gap_s=max(0.0, median(gaps)),
        step_noise=noise,
        first_step_s=_first_steps_s(calm),
        merge_s=max(MERGE_MIN_S, _median(calm.syncs_s, 0.0) - 2 * DELAY_S),
        value_bytes=round(calm.value_bytes),
        notice_s=notice_s,
        boot_s=_median([life.joined_s - life.started_s for _, life, _ in islands if life.joined_s is not None], 0.0),
        ready_s=_median([_ready_s(life) for _, life, _ in islands if life.stepped_s is not None], 0.0),
        syncer_boot_s=max(0.0, _median(syncers, 0.0) - notice_s),
        restarts=len(islands),
        syncer_restarts=len(syncers),
    )


def _syncer_delay_s(run: RealRun) -> float:
    return run.settings.syncer_restart_delay_s


def _ready_s(life: Life) -> float:
    assert life.joined_s is not None and life.stepped_s is not None, f"{life} stepped before it joined"
    return life.stepped_s - life.joined_s


def _spread(ordered: Sequence[float]) -> float:
    twentieth = len(ordered) // 20
    return ordered[-1 - twentieth] - ordered[twentieth]


def _first_steps_s(run: RealRun) -> dict[str, float]:
    first: dict[str, float] = {}
    for life in run.lives.values():
        if life.stepped_s is not None:
            first[life.name] = min(life.stepped_s - run.began_s, first.get(life.name, float("inf")))
    return first


def _median(values: Iterable[float], default: float) -> float:
    measured = list(values)
    return median(measured) if measured else default
