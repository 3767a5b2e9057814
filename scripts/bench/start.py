"""Measure the start of a run: `diloco train` from its command to the first inner step of an island.

Each run has a new folder, and is stopped after its first step. All runs of a checkout share one cache for compiled
programs and merges, so every run but the first, which is not counted, starts with a warm cache. `--cold` gives each run
an empty one. `--beside` runs another checkout in turn with this one, and `ratio` is the median of the pairs. Processor
time covers all processes of the run until the first step; load changes it less than the wall time. Linux only.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jobs import JOB_TIMEOUT_S, ROOT

POLL_S = 0.05


class Start(NamedTuple):
    """Seconds until the first inner step."""

    wall_s: float
    cpu_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="quickstart", help="a file, or the name of one in configs/")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--beside", type=Path, help="another checkout of this project")
    parser.add_argument("--cold", action="store_true", help="give each run an empty cache")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments, overrides = parser.parse_known_args()
    trees = [ROOT] + ([arguments.beside] if arguments.beside else [])
    starts: list[list[Start]] = [[] for _ in trees]
    with tempfile.TemporaryDirectory(prefix="diloco-bench-start-") as folder:
        caches = [Path(folder) / f"cache-{number}" for number in range(len(trees))]
        for run in range(0 if arguments.cold else -1, arguments.runs):
            for number in range(len(trees)) if run % 2 else reversed(range(len(trees))):
                cache = caches[number] / str(run) if arguments.cold else caches[number]
                made = measure(trees[number], arguments.config, Path(folder) / f"run-{run}-{number}", cache, overrides)
                sys.stderr.write(f"run {run} of {trees[number]}: {made}, load {os.getloadavg()[0]:.1f}\n")
                if run >= 0:
                    starts[number].append(made)
    result = figures(starts)
    if arguments.json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    beside = f", {result['ratio']:.2f} of the other checkout's" if "ratio" in result else ""
    sys.stdout.write(
        f"{result['value']:.1f} s of processor time to the first step ({result['low']:.1f} to {result['high']:.1f})"
        f"{beside}; {result['wall_s']:.1f} s\n"
    )


def figures(starts: Sequence[Sequence[Start]]) -> dict[str, object]:
    """Return the figures of this checkout, and the ratio of pairs if there is another one."""
    cpu_s = [start.cpu_s for start in starts[0]]
    result: dict[str, object] = {"name": "start", "value": statistics.median(cpu_s), "unit": "s of processor time"}
    result |= {"low": min(cpu_s), "high": max(cpu_s), "runs": len(cpu_s)}
    result["wall_s"] = statistics.median(start.wall_s for start in starts[0])
    if len(starts) > 1:
        pairs = zip(*starts, strict=True)
        result["ratio"] = statistics.median(ours.cpu_s / theirs.cpu_s for ours, theirs in pairs)
    return result


def measure(tree: Path, config: str, run_dir: Path, cache: Path, overrides: Sequence[str]) -> Start:
    """Start a run, wait for its first inner step, and stop it; SystemExit if it makes none."""
    cache.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_", "NPROC", "NUMBA_"))}
    environment = kept | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(tree)}
    command = [sys.executable, "-m", "diloco_jax", "train", config, "--json", "--run-dir", str(run_dir), "--trackers"]
    began_s = time.monotonic()
    process = subprocess.Popen([*command, *overrides], cwd=tree, env=environment, stdout=subprocess.DEVNULL)
    try:
        while not trains(run_dir):
            if process.poll() is not None or time.monotonic() > began_s + JOB_TIMEOUT_S:
                raise SystemExit(f"{' '.join(command)} made no step; its status is {process.poll()}")
            time.sleep(POLL_S)
        return Start(time.monotonic() - began_s, used_s(process.pid))
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=JOB_TIMEOUT_S)


def trains(run_dir: Path) -> bool:
    """Tell whether an island has reported a step."""
    path = run_dir / "metrics.jsonl"
    return path.exists() and '"kind":"step"' in path.read_text(encoding="utf-8").replace(" ", "")


def used_s(pid: int) -> float:
    """Return the processor time of a process and of its present and past children, in seconds."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        except OSError:
            # The process has ended.
            continue
        children.setdefault(int(fields[1]), []).append(int(path.parent.name))
        ticks[int(path.parent.name)] = sum(map(int, fields[11:15]))
    found, waiting = 0, [pid]
    while waiting:
        one = waiting.pop()
        found += ticks.get(one, 0)
        waiting += children.get(one, [])
    return found / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
