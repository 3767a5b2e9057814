"""A real chaos run beside the same faults on virtual time.

There are two predictions and one reference. `given` has the faults at their real times, with their real durations.
`schedule` has the faults that the seed of the chaos run drew, each at its global step. `none` has no faults; its
distance from the real run shows how much there was to predict. In all three, steps, merges and restarts take as long as
in the runs of the calibration.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from twin.calibration import Calibration, calibrate
from twin.cluster import LocalRun, Meter
from twin.driver import ScheduleDriver
from twin.faults import check_kinds, simulated
from twin.real_run import RealRun

# A simulated run may take this many times as long as the real one.
SLACK = 20.0
QUANTITIES = ("goodput", "uptime", "contributors_per_round", "rounds", "rounds_per_s")
TIMED, DRAWN, CALM = "given", "schedule", "none"


def compare(run: RealRun, calibration_runs: Sequence[RealRun], seeds: int) -> dict[str, Any]:
    """Simulate a real run with its faults at their times, with its faults when they are due, and without faults.

    Args:
        run: the real run.
        calibration_runs: other runs of the same islands; the first one has no faults.
        seeds: number of simulations of each kind.

    Returns:
        Plain values: `rows` (the mean of each kind of simulation, with low and high over the seeds), `real`,
        `difference` (simulated minus real), `calibration`.

    Raises:
        ValueError: a fault or a run cannot be simulated, or `run` is among the runs of the calibration.
    """
    for other in calibration_runs:
        if other.folder.resolve() == run.folder.resolve():
            raise ValueError(f"{run.folder} would be compared with itself; calibrate with other runs")
        if other.settings.names != run.settings.names:
            raise ValueError(
                f"{other.folder} has other islands than {run.folder}; calibrate with runs of the same config"
            )
    if seeds < 1:
        raise ValueError(f"--simulations is {seeds}; use at least 1")
    calibration = calibrate(calibration_runs)
    _check_measured(run, calibration)
    check_kinds(run.faults, timed=True)
    ways: dict[str, Callable[[RealRun, Calibration, int], dict[str, float]]] = {TIMED: timed, DRAWN: drawn, CALM: calm}
    try:
        check_kinds(run.faults, timed=False)
        note = ""
    except ValueError as error:
        del ways[DRAWN]
        note = str(error)
    real = {name: getattr(run, name) for name in QUANTITIES}
    rows, difference = [], {}
    for name, way in ways.items():
        row = {"faults": name, **_spread([way(run, calibration, seed) for seed in range(seeds)])}
        rows.append(row)
        difference[name] = {
            "goodput_points": 100 * (row["goodput"] - real["goodput"]),
            "uptime_points": 100 * (row["uptime"] - real["uptime"]),
            "contributors_per_round": row["contributors_per_round"] - real["contributors_per_round"],
            "rounds_per_s_percent": 100 * (row["rounds_per_s"] / real["rounds_per_s"] - 1),
        }
    found = {"rows": rows, "real": real, "difference": difference, "seeds": seeds, "faults": len(run.faults)}
    return {**found, "note": note, "calibration": asdict(calibration)}


def _check_measured(run: RealRun, calibration: Calibration) -> None:
    kinds = {fault.kind for fault in run.faults}
    if kinds & {"kill", "kill-donor"} and not calibration.restarts:
        raise ValueError("no island was killed in the runs of --calibrate; add a chaos run of other faults, with kills")
    if "kill-syncer" in kinds and not calibration.syncer_restarts:
        raise ValueError("the syncer was not killed in the runs of --calibrate; add a chaos run with kill-syncer")


def timed(run: RealRun, calibration: Calibration, seed: int) -> dict[str, float]:
    """Simulate with the faults at the times when they happened."""
    faults = []
    for fault in run.faults:
        faults += list(simulated(fault, max(0.0, fault.at_s - run.began_s), run.settings, calibration))
    return _measure(LocalRun(run.settings, calibration, faults, seed), run)


def drawn(run: RealRun, calibration: Calibration, seed: int) -> dict[str, float]:
    """Simulate with each fault at its global step."""
    twin = LocalRun(run.settings, calibration, (), seed)
    twin.cluster.watch(ScheduleDriver(twin, run.faults))
    return _measure(twin, run)


def calm(run: RealRun, calibration: Calibration, seed: int) -> dict[str, float]:
    """Simulate without faults."""
    return _measure(LocalRun(run.settings, calibration, (), seed), run)


def _measure(twin: LocalRun, run: RealRun) -> dict[str, float]:
    meter = Meter(twin)
    twin.cluster.watch(meter)
    twin.cluster.run(SLACK * (run.ended_s - run.began_s))
    return meter.measured()


def _spread(runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name in QUANTITIES:
        values = [each[name] for each in runs]
        row |= {name: fmean(values), f"{name}_low": min(values), f"{name}_high": max(values)}
    return row


def describe(result: dict[str, Any]) -> str:
    """Return the comparison as a table."""
    lines = [_line("", "goodput", "uptime", "contributors", "rounds/s")]
    real = result["real"]
    four = [f"{real[name]:.4f}" for name in ("goodput", "uptime", "contributors_per_round", "rounds_per_s")]
    lines.append(_line("real", *four))
    for row in result["rows"]:
        difference = result["difference"][row["faults"]]
        goodput = f"{row['goodput']:.4f} ({difference['goodput_points']:+.2f} points)"
        rounds = f"{row['rounds_per_s']:.4f} ({difference['rounds_per_s_percent']:+.1f} %)"
        shares = f"{row['uptime']:.4f}", f"{row['contributors_per_round']:.4f}"
        lines.append(_line(row["faults"], goodput, *shares, rounds))
    ways = f"{TIMED}: at their times, {DRAWN}: at their global steps, {CALM}: without them"
    lines.append(f"{result['faults']} faults ({ways}), each way simulated {result['seeds']} times")
    return "\n".join([*lines, *([result["note"]] if result["note"] else [])])


def _line(name: str, goodput: str, uptime: str, contributors: str, rounds: str) -> str:
    return f"{name:>8}  {goodput:>21}  {uptime:>7}  {contributors:>12}  {rounds:>18}"
