"""Runs with MaxText as islands, and what tests read of them."""

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.adapters.maxtext.environment import clean_environment
from tests.limits import SLOW_HANGS_S

EVALUATED = re.compile(r"Completed eval after train step (\d+), loss=([0-9.]+)")
OWN_STEP = re.compile(r"completed step: (\d+),")


def train(
    folder: Path,
    command: list[Any],
    changes: dict[str, dict[str, Any]],
    meanwhile: Callable[[Path], None] = lambda _: None,
) -> Path:
    """Run `diloco train` with MaxText as islands, to its end; return the run's folder."""
    config: dict[str, dict[str, Any]] = {
        "model": {"module": "own"},
        "train": {"steps": 40, "eval_every": 20},
        "protocol": {"sync_every": 8, "num_fragments": 4, "snapshot_every": 10, "overlap_steps": 4},
        "islands": {"count": 2, "devices": 1, "command": [str(word) for word in command]},
    }
    for part, settings in changes.items():
        config[part] = {**config[part], **settings}
    path, run_dir = folder / "config.yaml", folder / "run"
    path.write_text(yaml.safe_dump({"name": "mx", **config}))
    call = [sys.executable, "-m", "diloco_jax", "train", path, "--run-dir", run_dir]
    with (folder / "train.log").open("w") as log:
        process = subprocess.Popen(call, env=clean_environment(), stdout=log, stderr=log, cwd=folder)
    try:
        meanwhile(run_dir)
        assert process.wait(SLOW_HANGS_S) == 0, (folder / "train.log").read_text()[-4000:]
    finally:
        process.terminate()
        process.wait(SLOW_HANGS_S)
    return run_dir


def wait_until(happened: Callable[[], bool], what: str) -> None:
    ends_s = time.monotonic() + SLOW_HANGS_S
    while not happened():
        assert time.monotonic() < ends_s, f"no {what}"
        time.sleep(0.2)


def log_of(run_dir: Path, island: str) -> str:
    path = run_dir / "logs" / f"{island}.log"
    return path.read_text(errors="replace") if path.exists() else ""


def own_steps(run_dir: Path, island: str) -> list[int]:
    return [int(number) for number in OWN_STEP.findall(log_of(run_dir, island))]


def rows(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    every = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [row for row in every if row["kind"] == kind]


def notes_of_joining(run_dir: Path, island: str) -> int:
    return sum(island in row["members"] for row in rows(run_dir, "joined"))


def process_of(run_dir: Path, island: str) -> int:
    """Return the process of an island of this run."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            around, command = (place / "environ").read_bytes().split(b"\0"), (place / "cmdline").read_bytes()
        # Processes end meanwhile.
        except OSError:
            continue
        named = {f"DILOCO_ISLAND={island}".encode(), f"DILOCO_RUN_DIR={run_dir}".encode()}
        if named <= set(around) and b"diloco_jax.maxtext" in command:
            return int(place.name)
    raise AssertionError(f"{island} has no process")


def score_in_maxtext(python: Path, run_dir: Path, arguments: list[str], folder: Path) -> float:
    """Export the global model of a run, and return the loss that MaxText's own evaluation prints for it."""
    here = {"env": clean_environment(), "cwd": folder, "capture_output": True, "text": True, "timeout": SLOW_HANGS_S}
    made = subprocess.run([python, "-m", "diloco_jax.maxtext.export", run_dir, folder / "exported", *arguments], **here)
    assert made.returncode == 0, made.stderr[-2000:]
    evaluation = shlex.split(made.stdout.splitlines()[-1])
    checked = subprocess.run([python, *evaluation[1:]], **here)
    found = EVALUATED.findall(checked.stdout + checked.stderr)
    assert found, (checked.stdout + checked.stderr)[-3000:]
    return float(found[0][1])
