"""Does `diloco simulate` say what a real run does?

Chaos runs of a job whose islands mostly sleep, so that they do not compete for the processor, each beside simulations
of the same faults (docs/chaos.md). Steps, merges and restarts are measured in other runs: one without faults, and
before each chaos run one with kills. `given` has the faults at the times at which they happened, `schedule` when they
were due, `none` has none. Differences are simulated minus real. A seed takes about eight minutes, its calibration
included.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _reality_runs import ROOT, Job, calm, chaos, kills

KINDS = ("kill", "stop", "cut", "black-hole", "kill-syncer")
DIFFERENCES = {
    "goodput_points": "points",
    "uptime_points": "points",
    "contributors_per_round": "learners",
    "rounds_per_s_percent": "%",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="keep the runs here, and use those that are there already")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="of the schedules, a chaos run each")
    parser.add_argument("--islands", type=int, default=4)
    parser.add_argument("--step-s", type=float, default=0.4, help="seconds of an inner step")
    parser.add_argument("--steps", type=int, default=600, help="global steps of a chaos run")
    parser.add_argument("--faults", type=int, default=24, help="in a chaos run")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of faults, separated by commas")
    parser.add_argument("--simulations", type=int, default=5, help="of each run, and each way")
    parser.add_argument("--json", action="store_true", help="print one JSON object per result and line")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        compared = measure(Path(arguments.folder or temporary), arguments)
    for result in results(compared):
        if arguments.json:
            sys.stdout.write(json.dumps(result) + "\n")
        else:
            sys.stdout.write("{name}: {value:.4g} {unit} ({low:.4g} to {high:.4g}, {runs} runs)\n".format(**result))


def measure(folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Make all runs, then simulate: what `scripts/twin/compare --json` says of each."""
    job = Job(arguments.islands, arguments.step_s, arguments.steps, arguments.faults)
    calibration, runs = [calm(folder, job)], []
    for seed in arguments.seeds:
        calibration.append(kills(folder, job, seed))
        runs.append(chaos(folder, job, arguments.kinds.split(","), seed))
    return [compare(run, calibration, arguments.simulations) for run in runs]


def compare(run: Path, calibration: Sequence[Path], simulations: int) -> dict[str, Any]:
    """One run beside its simulations."""
    words = [str(run), "--calibrate", *map(str, calibration), "--seeds", str(simulations), "--json"]
    line = [str(ROOT / "scripts" / "twin" / "compare"), *words]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(done.stderr.strip())
    compared: dict[str, Any] = json.loads(done.stdout)
    return compared


def results(compared: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One object per quantity: what was real, and how far off each way of simulating it was."""
    found = [
        row(f"real_{name}", unit, [each["real"][name] for each in compared])
        for name, unit in (("goodput", "share"), ("rounds_per_s", "1/s"), ("contributors_per_round", "learners"))
    ]
    for way in ("given", "schedule", "none"):
        if all(way in each["difference"] for each in compared):
            for name, unit in DIFFERENCES.items():
                found.append(row(f"{name}_off_{way}", unit, [each["difference"][way][name] for each in compared]))
    return found


def row(name: str, unit: str, values: list[float]) -> dict[str, Any]:
    result = {"name": name, "value": statistics.median(values), "unit": unit, "low": min(values), "high": max(values)}
    return {**result, "runs": len(values), "cores": os.cpu_count()}


if __name__ == "__main__":
    main()
