"""Measure the recovery from a SIGKILL of one of three workers, in torchft and here.

Both jobs alternate with one kill per job, so that other load disturbs both equally. All figures are seconds:

    survivor_gap      from the kill to the first round without the victim, as a survivor observes it
    survivor_delay    additional time between two rounds of the survivors because of the kill
    victim_ready      from the time when the victim's new process can step to its first contribution
    victim_total      from the kill to the victim's first contribution; the restart waits 1 s on both sides

With --standby there is a third side: ours with a spare process for each island (islands.standby), which starts at once.
With --ours, our side without spares replaces torchft.

The first start makes torchft's environment in .bench/torchft. One JSON line per figure goes to standard output (or
--out), for both sides and as the ratio torchft / diloco_jax. Above 1, diloco_jax is faster. The bench needs Linux.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from environments import python_with
from recovery_jobs import WORKERS, DilocoJob, Job, JobFailed, Setting, TorchftJob
from rich.console import Console
from rich.table import Table

PINS = ("torch==2.13.0", "torchft==0.2.0")
FIGURES = ("survivor_gap", "survivor_delay", "victim_ready", "victim_total")
TORCHFT, OURS, STANDBY = "torchft", "diloco_jax", "diloco_jax_standby"
CONTEXT = ("round_interval", "contributors")
REST_ROUNDS = 3
Sample = dict[str, float]
Samples = dict[str, list[Sample]]


def measure(job: Job, phase: float) -> Sample:
    """Kill the victim of a warm job, wait for its return, and return figures and milestones in seconds after the kill.

    Raises:
        JobFailed: the job did not reach the end of the measurement.
    """
    job.wait_for(job.is_warm, "rounds with all workers")
    interval_s = job.interval_s()
    before = job.rounds()
    job.kill_at(phase)
    killed_s = job.killed_s
    job.wait_for(lambda: job.back() is not None, "the victim's contribution")
    known = len(job.rounds())
    job.wait_for(lambda: len(job.rounds()) >= known + REST_ROUNDS, "rounds after the victim's return")
    rounds, victim, back = job.rounds(), job.victim(), job.back()
    assert back is not None, "wait_for has waited for it"
    without = next(i for i, r in enumerate(rounds) if r.t > killed_s and not r.with_victim)
    sample = {
        "survivor_gap": rounds[without].t - killed_s,
        "survivor_delay": rounds[without].t - rounds[without - 1].t - interval_s,
        "victim_ready": back.t - victim["ready"],
        "victim_total": back.t - killed_s,
        "round_interval": interval_s,
        "contributors": statistics.mean(r.contributors for r in before[-12:]),
    }
    order = sorted((t, name) for name, t in victim.items())
    return sample | {f"at {name}": t - killed_s for t, name in order if t > killed_s}


def figure(name: str, values: Sequence[float], unit: str) -> dict[str, Any]:
    """Return one line of the result."""
    rounded = [round(value, 4) for value in values]
    middle = round(statistics.median(values), 4)
    return {"name": name, "value": middle, "unit": unit, "low": min(rounded), "high": max(rounded)} | {
        "runs": len(rounded),
        "values": rounded,
    }


def results(samples: Samples) -> list[dict[str, Any]]:
    """Return medians with their spread: first figures and ratios, then the context."""
    lines = []
    for name in FIGURES:
        sides = {side: [sample[name] for sample in rows] for side, rows in samples.items()}
        lines += [figure(f"{side}_{name}", values, "s") for side, values in sides.items()]
        (first, theirs), *others = sides.items()
        for side, ours in others:
            if min(ours) > 0:
                both = [a / b for a, b in zip(theirs, ours, strict=True)]
                ratio = figure(f"{name}_ratio" + "_standby" * (side == STANDBY), both, f"{first} / {side}")
                lines.append(ratio | {"value": round(statistics.median(theirs) / statistics.median(ours), 4)})
    for side in samples:
        rows = samples[side]
        for name in [*CONTEXT, *(key for key in rows[0] if key.startswith("at "))]:
            values = [row[name] for row in rows if name in row]
            what = name.replace("at ", "victim_at_").replace(" ", "_")
            lines.append(figure(f"{side}_{what}", values, "per round" if name == "contributors" else "s"))
    return lines


def show(lines: list[dict[str, Any]], console: Console) -> None:
    table = Table("", "median", "low", "high", "unit", title=f"SIGKILL of one of {WORKERS}")
    for line in lines:
        table.add_row(line["name"], *(f"{line[key]:.3f}" for key in ("value", "low", "high")), line["unit"])
    console.print(table)


def run_all(sides: dict[str, Callable[[Path], Job]], repeats: int, base: Path, console: Console) -> Samples:
    """Measure all sides in turn, `repeats` times; the kills are spread evenly over the time between two rounds."""
    samples: Samples = {side: [] for side in sides}
    for repeat in range(repeats):
        for side, make in sides.items():
            with make(base / f"repeat-{repeat}" / side) as job:
                sample = measure(job, (repeat + 0.5) / repeats)
            samples[side].append(sample)
            console.print(f"{repeat} {side}: " + ", ".join(f"{key} {value:.3f}" for key, value in sample.items()))
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="kills on each side")
    parser.add_argument("--fragments", type=int, default=1, help="P on our side; torchft always has 1")
    parser.add_argument("--step-s", type=float, default=0.02, help="least seconds of an inner step")
    parser.add_argument("--sync-every", type=int, default=20, help="H of both sides")
    parser.add_argument("--standby", action="store_true", help="include our side with spare processes")
    parser.add_argument(
        "--ours", action="store_true", help="our side with and without spare processes, without torchft"
    )
    parser.add_argument("--out", type=Path, help="file for the JSON lines; default: standard output")
    parser.add_argument("--keep", type=Path, help="folder that keeps the jobs' logs; default: a temporary one")
    arguments = parser.parse_args()
    setting = Setting(step_s=arguments.step_s, sync_every=arguments.sync_every, fragments=arguments.fragments)
    if arguments.repeats < 1 or not 1 <= setting.fragments <= setting.sync_every:
        parser.error(f"use --repeats of at least 1 and --fragments from 1 to {setting.sync_every}")
    console = Console(stderr=True)
    sides: dict[str, Callable[[Path], Job]] = {}
    if not arguments.ours:
        python = python_with("torchft", PINS)
        sides[TORCHFT] = lambda folder: TorchftJob(folder, setting, python)
    sides[OURS] = lambda folder: DilocoJob(folder, setting)
    if arguments.standby or arguments.ours:
        sides[STANDBY] = lambda folder: DilocoJob(folder, replace(setting, standby=True))
    try:
        with tempfile.TemporaryDirectory(prefix="diloco-bench-") as temporary:
            base = arguments.keep.resolve() if arguments.keep else Path(temporary)
            samples = run_all(sides, arguments.repeats, base, console)
    except JobFailed as error:
        raise SystemExit(f"{error} (--keep FOLDER keeps them)") from None
    lines = results(samples)
    show(lines, console)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
