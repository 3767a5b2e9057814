"""Real chaos runs beside the same faults on virtual time: ./scripts/twin/compare [RUN --calibrate CALM KILLS].

Without RUN the program makes all runs itself. They train a job whose islands mostly sleep, so that the islands do not
compete for the processor: one run without faults, and for each seed one run with kills and one chaos run. A seed takes
about eight minutes. Settings of a simulation come from the run's config.yaml, faults and times from its records.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diloco_jax.runtime.records.files import CONFIG_FILE
from diloco_jax.settings.text import load
from twin.like import compare, describe
from twin.made_runs import Job, RunFailed, make_calm, make_chaos, make_kills
from twin.real_run import RealRun, RunSettings, read_run

KINDS = ("kill", "stop", "cut", "black-hole", "kill-syncer")
# The quantities that are compared, with the unit of their difference.
DIFFERENCES = {
    "goodput_points": "points",
    "uptime_points": "points",
    "contributors_per_round": "learners",
    "rounds_per_s_percent": "%",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare real with simulated runs, print the result, and return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if (options.run is None) != (options.calibrate is None):
        parser.error("RUN and --calibrate belong together; name both, or neither to make new runs")
    try:
        if options.run is not None:
            compared = [_compare(options.run, options.calibrate, options.simulations)]
        else:
            with tempfile.TemporaryDirectory() as temporary:
                compared = _make_and_compare(options.folder or Path(temporary), options)
    except (OSError, ValueError, RunFailed) as error:
        parser.error(str(error))
    _print(compared, options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/twin/compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, nargs="?", help="folder of a run of `diloco chaos`; its faults are simulated")
    parser.add_argument(
        "--calibrate",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="runs of the same config that show how long things take: one without faults, then one with kills",
    )
    parser.add_argument("--simulations", type=int, default=5, help="simulations of each kind for a run; default: 5")
    parser.add_argument("--json", action="store_true", help="print JSON: one object, or one per result of made runs")
    made = parser.add_argument_group("runs that this program makes")
    made.add_argument("--folder", type=Path, help="keep the runs here, and use the runs that are there already")
    made.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="seeds of the chaos runs; default: 1 2")
    made.add_argument("--islands", type=int, default=4)
    made.add_argument("--step-s", type=float, default=0.4, help="seconds of an inner step")
    made.add_argument("--steps", type=int, default=600, help="global steps of a chaos run")
    made.add_argument("--faults", type=int, default=24, help="faults of a chaos run")
    made.add_argument("--kinds", default=",".join(KINDS), help="kinds of faults, separated by commas")
    return parser


def _make_and_compare(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Make all runs, then simulate each chaos run."""
    job = Job(options.islands, options.step_s, options.steps, options.faults)
    calibration, runs = [make_calm(folder, job)], []
    for seed in options.seeds:
        calibration.append(make_kills(folder, job, seed))
        runs.append(make_chaos(folder, job, options.kinds.split(","), seed))
    return [_compare(run, calibration, options.simulations) for run in runs]


def _compare(run: Path, calibration: Sequence[Path], simulations: int) -> dict[str, Any]:
    return {"run": str(run), **compare(_read(run), [_read(folder) for folder in calibration], simulations)}


def _read(folder: Path) -> RealRun:
    if not (folder / CONFIG_FILE).exists():
        raise ValueError(f"{folder} has no {CONFIG_FILE}; name the folder of a run that has ended")
    config = load(folder / CONFIG_FILE)
    settings = RunSettings(
        protocol=config.protocol,
        names=config.islands.names,
        total_steps=config.planned_steps,
        restart_delay_s=config.islands.restart_delay_s,
        syncer_restart_delay_s=config.syncer.restart_delay_s,
        connect_timeout_s=config.transport.connect_timeout_s,
    )
    return read_run(folder, settings)


def _print(compared: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    if options.run is not None:
        print(json.dumps(compared[0]) if options.json else describe(compared[0]))
        return
    for result in results(compared):
        print(
            json.dumps(result)
            if options.json
            else "{name}: {value:.4g} {unit} ({low:.4g} to {high:.4g}, {runs} runs)".format(**result)
        )


def results(compared: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one object per quantity: its real value, and the distance of each kind of simulation from it."""
    found = [
        _row(f"real_{name}", unit, [each["real"][name] for each in compared])
        for name, unit in (("goodput", "share"), ("rounds_per_s", "1/s"), ("contributors_per_round", "learners"))
    ]
    for way in ("given", "schedule", "none"):
        if all(way in each["difference"] for each in compared):
            for name, unit in DIFFERENCES.items():
                found.append(_row(f"{name}_off_{way}", unit, [each["difference"][way][name] for each in compared]))
    return found


def _row(name: str, unit: str, values: list[float]) -> dict[str, Any]:
    result = {"name": name, "value": statistics.median(values), "unit": unit, "low": min(values), "high": max(values)}
    return {**result, "runs": len(values), "cores": os.cpu_count()}


if __name__ == "__main__":
    sys.exit(main())
