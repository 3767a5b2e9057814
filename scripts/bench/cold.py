"""Measure the cost of a cold cache: the first merge beside the others, and the lead of islands over rounds.

Each run trains configs/parity.yaml with a new run folder and an empty cache, so nothing is compiled. `value` is the
time from the close of the first round to its merge, over the median of all rounds, in the worst run. `steps_per_round`
is the number of steps of the fastest island over global steps, at global step `--at`.
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

from jobs import JOB_TIMEOUT_S, ROOT

from diloco_jax.runtime.records.files import METRICS_FILE
from diloco_jax.runtime.records.telemetry import read_metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="global steps of a run")
    parser.add_argument("--at", type=int, default=50, help="global step when the steps of islands are counted")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments, overrides = parser.parse_known_args()
    rows = []
    for seed in range(arguments.runs):
        words = ["--seed", str(seed), "--train.steps", str(arguments.steps), "--optimizer.warmup_steps", "10"]
        rows.append(measure([*words, *overrides], arguments.at))
        sys.stderr.write(f"run {seed}: {json.dumps(rows[-1])}\n")
    ratios = [row["first_merge_s"] / row["median_merge_s"] for row in rows]
    result = {"name": "cold", "value": max(ratios), "unit": "first merge / median merge, cold cache, worst run"}
    result |= {"low": min(ratios), "high": max(ratios), "runs": len(rows)}
    result |= {name: [row[name] for row in rows] for name in rows[0]}
    if arguments.json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    sys.stdout.write(
        f"the first merge takes {result['low']:.2f} to {result['high']:.2f} times the median; at global step "
        f"{arguments.at} islands have made at most {max(result['steps_per_round']):.2f} times as many steps\n"
    )


def measure(words: Sequence[str], at: int) -> dict[str, float]:
    """Make a run without any cache, and return its figures."""
    with tempfile.TemporaryDirectory(prefix="diloco-bench-cold-") as folder:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_", "NPROC"))}
        environment = kept | {"NUMBA_CACHE_DIR": f"{folder}/cache", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "diloco_jax", "train", str(ROOT / "configs" / "parity.yaml"), "--json"]
        command += ["--run-dir", f"{folder}/run", "--trackers", *words]
        ran = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=JOB_TIMEOUT_S
        )
        if ran.returncode != 0:
            raise SystemExit(f"{' '.join(command)} ended with status {ran.returncode}")
        summary: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
        return figures(Path(folder) / "run" / METRICS_FILE, at) | {"tokens": summary["tokens"]}


def figures(path: Path, at: int) -> dict[str, float]:
    """Return the times of merges, and the steps per round after `at` closed rounds."""
    closed_s: dict[int, float] = {}
    merges_s: list[float] = []
    steps: dict[str, int] = {}
    most = 0
    for record in read_metrics(path):
        if record["kind"] == "step":
            steps[record["learner"]] = record["local_step"]
        elif record["kind"] == "closed":
            closed_s[record["global_step"]] = record["t"]
            if record["global_step"] == at:
                most = max(steps.values())
        elif record["kind"] == "merged":
            merges_s.append(record["t"] - closed_s[record["global_step"]])
    return {
        "first_merge_s": merges_s[0],
        "median_merge_s": statistics.median(merges_s),
        "steps_per_round": most / at,
    }


if __name__ == "__main__":
    main()
