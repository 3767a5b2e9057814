"""Measure what islands of different size and speed cost in goodput and quality, compared with equal islands.

For every seed there are two runs. The first trains configs/mixed.yaml on two islands with 2 and 4 emulated devices; the
second island is halted half of the time from its first step, so its steps take twice as long. The second run has two
equal islands of 2 devices, and trains on as many tokens as the first run did. `value` is the mean relative difference
of the evaluation loss over the seeds; above 0 the mixed islands are worse.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from jobs import train
from rich.console import Console

SLOW = "island-1"
# The island is halted for this time, and then runs for this time.
HALT_S = 0.05
Summary = dict[str, Any]
ALIKE = ("--islands.each.island-1.devices", 2, "--islands.each.island-1.mesh.fsdp", 1)
ALIKE += ("--islands.each.island-1.mesh.tensor", 1, "--islands.each.island-1.mesh.data", -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=600, help="global steps of the mixed run")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments, overrides = parser.parse_known_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="diloco-bench-programs-") as programs:
        # The comparison is about training, so the runs share compiled programs.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = programs
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        for variant in ((), ALIKE):
            train("mixed", *overrides, *variant, "--train.steps", 5, "--optimizer.warmup_steps", 1)
        for seed in arguments.seeds:
            rows.append(compare(seed, arguments.steps, overrides))
    report(rows, as_json=arguments.json)


def compare(seed: int, steps: int, overrides: list[str]) -> tuple[Summary, Summary, list[int]]:
    """Return both runs of one seed, and the number of steps of each mixed island."""
    common = ["--seed", seed, *overrides]
    with Halting(SLOW):
        mixed = train("mixed", *common, "--train.steps", steps)
    made = [each["local_steps"] for _, each in sorted(mixed["learners"].items())]
    equal = train("mixed", *common, *ALIKE, "--train.steps", round(sum(made) / 2))
    Console(stderr=True).print(
        f"seed {seed}: mixed {mixed['eval_loss']:.4f} ({mixed['tokens']:,} tokens, steps {made}, goodput "
        f"{mixed['goodput']:.4f}), equal {equal['eval_loss']:.4f} ({equal['tokens']:,} tokens, goodput "
        f"{equal['goodput']:.4f})"
    )
    return mixed, equal, made


def report(rows: list[tuple[Summary, Summary, list[int]]], *, as_json: bool) -> None:
    """Print the result of all seeds."""
    differences = [mixed["eval_loss"] / equal["eval_loss"] - 1 for mixed, equal, _ in rows]
    result = {
        "name": "mixed",
        "value": statistics.mean(differences),
        "unit": "relative difference of evaluation loss, mixed islands against equal ones",
        "low": min(differences),
        "high": max(differences),
        "runs": len(rows),
        "goodput": [mixed["goodput"] for mixed, _, _ in rows],
        "goodput_equal": [equal["goodput"] for _, equal, _ in rows],
        "mixed": [mixed["eval_loss"] for mixed, _, _ in rows],
        "equal": [equal["eval_loss"] for _, equal, _ in rows],
        "tokens": [[mixed["tokens"], equal["tokens"]] for mixed, equal, _ in rows],
        "steps": [steps for _, _, steps in rows],
        "contributors_per_round": [mixed["contributors_per_round"] for mixed, _, _ in rows],
    }
    if as_json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    Console().print(
        f"evaluation loss {100 * result['value']:+.2f} % ({100 * result['low']:+.2f} to {100 * result['high']:+.2f}), "
        f"goodput of mixed islands {min(result['goodput']):.4f} at least"
    )


class Halting:
    """Context that halts every process of an island half of the time, from its first step."""

    def __init__(self, island: str) -> None:
        self._island = island
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        found: list[int] = []
        looked_s = 0.0
        while not self._over.is_set():
            if time.monotonic() - looked_s > 1.0:
                looked_s, found = time.monotonic(), training_processes(self._island)
            _send(found, signal.SIGSTOP)
            time.sleep(HALT_S)
            _send(found, signal.SIGCONT)
            time.sleep(HALT_S)


def _send(processes: list[int], number: signal.Signals) -> None:
    for process in processes:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue


def training_processes(island: str) -> list[int]:
    """Return this user's processes of a learner that has started to train."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            mine = folder.stat().st_uid == os.getuid()
        except OSError:
            continue
        if mine and b"learner" in words and island.encode() in words and b"--run-dir" in words:
            run_dir = Path(words[words.index(b"--run-dir") + 1].decode())
            log = run_dir / "logs" / f"{island}.log"
            if log.exists() and "the first step begins" in log.read_text(encoding="utf-8", errors="replace"):
                found.append(int(folder.name))
    return found


if __name__ == "__main__":
    main()
