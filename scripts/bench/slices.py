"""Measure the slowdown of an island's steps if its devices are cut into slices, or its pauses if it loses hosts.

Whole jobs alternate: one island of slices, and one island of a single process with all devices of these slices, on the
same samples. `value` is the median over pairs of the ratio of the median times between two step reports. `cpu_value` is
the ratio of the processor time per step of all processes of the island, which other load changes less. On one machine
the slices exchange gradients over loopback, and their exchange takes processor time from the steps of the others; so
`mb_per_step` says what crosses the network of a real island.

With --lose, two islands of two slices lose one process after the other instead; see _slices_lost.py. `value` is the
longest pause over its bar, two steps and 5 s.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# The steps before this one are not measured.
WARM = 20
READ_EVERY_S = 0.25
JOB_TIMEOUT_S = 1800


class Reading(NamedTuple):
    """How many steps an island has reported, and the processor time of its processes until then."""

    steps: int
    cpu_s: float


class Measured(NamedTuple):
    """One job: the median time between two steps and the processor time per step in seconds, and the model's size."""

    step_s: float
    cpu_s: float
    parameters: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slices", type=int, default=4, help="slices of the island")
    parser.add_argument("--devices", type=int, default=2, help="emulated devices of each slice")
    parser.add_argument("--batch-size", type=int, default=32, help="sequences of the island's step")
    parser.add_argument("--seq-len", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--dim", type=int, default=128, help="width of the decoder")
    parser.add_argument("--layers", type=int, default=2, help="layers of the decoder")
    parser.add_argument("--steps", type=int, default=120, help="steps of a job; the first 20 are not measured")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of jobs")
    parser.add_argument(
        "--lose", nargs="+", choices=("kill", "stop"), help="measure pauses after these signals instead"
    )
    parser.add_argument("--hosts", nargs="+", type=int, default=[1, 2], help="hosts of a slice, for --lose")
    parser.add_argument("--step-s", type=float, default=0.3, help="least seconds of a step, for --lose")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if arguments.lose:
        show_losses(arguments)
        return
    result = measure(arguments)
    if arguments.json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    sys.stdout.write(
        "{slices} slices of {devices} devices: step time x {value:.3f} of {step_s:.3f} s ({low:.3f} to {high:.3f}, "
        "{runs} pairs); processor time of the island x {cpu_value:.3f} ({cpu_low:.3f} to {cpu_high:.3f}); "
        "{mb_per_step:.1f} MB per step and slice, each way\n".format(**result)
    )


def show_losses(arguments: argparse.Namespace) -> None:
    """Print the pause of each loss as soon as it is over."""
    from _slices_lost import lose

    losses = []
    for loss in lose(arguments.hosts, arguments.lose, arguments.step_s):
        losses.append(loss)
        if not arguments.json:
            words = (
                "{hosts} hosts per slice, {signal} to {lost}: the island paused for {pause_s:.2f} s (bar {bar_s:.2f} "
                "s), the other one for {other_s:.2f} s; before it {before_s:.2f} s at most, steps of {step_s:.2f} s\n"
            )
            sys.stdout.write(words.format(**loss))
            sys.stdout.flush()
    if arguments.json:
        value = max(loss["pause_s"] / loss["bar_s"] for loss in losses)
        sys.stdout.write(
            json.dumps({"name": "slices lost", "unit": "pause / bar", "value": value, "losses": losses}) + "\n"
        )


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """Run the pairs, and return ratios with their spread."""
    cut, whole = [], []
    for _ in range(arguments.pairs):
        cut.append(job(arguments, arguments.slices, arguments.devices))
        whole.append(job(arguments, 1, arguments.slices * arguments.devices))
    ratios = [one.step_s / other.step_s for one, other in zip(cut, whole, strict=True)]
    cpu = [one.cpu_s / other.cpu_s for one, other in zip(cut, whole, strict=True)]
    share = 2 * (arguments.slices - 1) / arguments.slices
    return {
        "name": "slices",
        "unit": "step time of slices / of one process with the same devices",
        "value": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "cpu_value": statistics.median(cpu),
        "cpu_low": min(cpu),
        "cpu_high": max(cpu),
        "step_s": statistics.median(one.step_s for one in whole),
        "mb_per_step": share * 4 * whole[0].parameters / 1e6,
        "slices": arguments.slices,
        "devices": arguments.devices,
        "runs": arguments.pairs,
    }


def decoder(arguments: argparse.Namespace) -> dict[str, object]:
    return {
        "dim": arguments.dim,
        "num_layers": arguments.layers,
        "num_heads": max(1, arguments.dim // 32),
        "num_kv_heads": max(1, arguments.dim // 64),
        "head_dim": 32,
        "mlp_dim": 4 * arguments.dim,
        "seq_len_max": arguments.seq_len,
        "activation": "relu2",
    }


def job(arguments: argparse.Namespace, slices: int, devices: int) -> Measured:
    """Train one island, and return what its steps took."""
    settings = {
        "name": "slices",
        "islands": {"count": 1, "devices": devices, "slices": slices},
        "train": {
            "steps": arguments.steps,
            "batch_size": arguments.batch_size,
            "seq_len": arguments.seq_len,
            "eval_every": 0,
        },
        "model": {"args": decoder(arguments)},
        "optimizer": {"warmup_steps": 5},
        "protocol": {"quorum": 1, "snapshot_every": 0},
        "trackers": [],
    }
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder:
        config, run = Path(folder) / "slices.yaml", Path(folder) / "run"
        config.write_text(yaml.safe_dump(settings), encoding="utf-8")
        command = [sys.executable, "-m", "diloco_jax", "train", str(config), "--run-dir", str(run), "--quiet"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        readings = list(watch(process, run))
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}")
        times = reports(run)
        size = json.loads((run / "summary.json").read_text(encoding="utf-8"))["num_parameters"]
    gaps = [later - earlier for earlier, later in zip(times[WARM:], times[WARM + 1 :], strict=False)]
    if len(gaps) < 2 or len(readings) < 2:
        raise SystemExit(f"a job had {len(times)} step reports; give more than {WARM + 2} steps")
    first, last = readings[0], readings[-1]
    return Measured(statistics.median(gaps), (last.cpu_s - first.cpu_s) / max(1, last.steps - first.steps), size)


def watch(process: subprocess.Popen[bytes], run: Path) -> Iterator[Reading]:
    """Yield readings after the first WARM steps while the job trains.

    Raises:
        SystemExit: the job does not end.
    """
    ends_s = time.monotonic() + JOB_TIMEOUT_S
    last = 0
    while process.poll() is None:
        if time.monotonic() > ends_s:
            process.kill()
            raise SystemExit(f"a job did not end within {JOB_TIMEOUT_S} s")
        steps = len(reports(run))
        if steps > max(last, WARM) and (used := island_cpu_s(process.pid)):
            yield Reading(steps, used)
            last = steps
        time.sleep(READ_EVERY_S)


def reports(run: Path, island: str = "") -> list[float]:
    """Return when the syncer received each step report, of all islands or of one, in seconds."""
    tape = run / "tape.jsonl"
    if not tape.exists():
        return []
    lines = tape.read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines if line.startswith('["StepReport"') and line.endswith("]")]
    return [each[1] for each in found if island in ("", each[2])]


def island_cpu_s(supervisor: int) -> float:
    """Return the processor time of the learners that a supervisor started, in seconds."""
    used = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
            words = (stat.parent / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if int(fields[1]) == supervisor and b"learner" in words:
            used += int(fields[11]) + int(fields[12])
    return used / TICKS_PER_S


if __name__ == "__main__":
    main()
