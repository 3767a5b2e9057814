"""MaxText itself as islands of real runs: the syncer in this environment, the islands in MaxText's of Python 3.12.

The results of longer runs are in docs/maxtext.md.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.limits import SLOW_HANGS_S
from tests.maxtext.environment import clean_environment, corpus, maxtext_python, parquet_words, words
from tests.runtime.helpers import ROOT

# Two islands on two busy cores need minutes to import MaxText.
pytestmark = [pytest.mark.trainers, pytest.mark.net]
EVALUATED = re.compile(r"Completed eval after train step (\d+), loss=([0-9.]+)")
OWN_STEP = re.compile(r"completed step: (\d+),")


@pytest.fixture(scope="module")
def python() -> Path:
    return maxtext_python()


@pytest.fixture(scope="module")
def data(python: Path) -> Path:
    return corpus(python)


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


def test_two_islands_one_killed_and_the_global_model_in_maxtext(python: Path, data: Path, tmp_path: Path) -> None:
    def kill(run_dir: Path) -> None:
        saved = run_dir / "states" / "island-1"
        wait_until(lambda: any(saved.rglob("step_*.loader")), "saved state of island-1")
        os.kill(process_of(run_dir, "island-1"), signal.SIGKILL)

    arguments = words(data, tmp_path / "outputs", per_device_batch_size="32")
    command = [python, "-m", "diloco_jax.maxtext", *arguments]
    run_dir = train(tmp_path, command, {"train": {"steps": 400, "eval_every": 100}}, kill)

    scores = [row["loss"] for row in rows(run_dir, "eval")]
    assert scores[-1] < scores[0] - 0.5, scores
    assert {member for row in rows(run_dir, "merged") for member in row["members"]} == {"island-0", "island-1"}
    log = log_of(run_dir, "island-1")
    (position,) = re.findall(r"the loader continues after step (\d+) of this island's incarnation", log)
    assert int(position) > 0
    assert max(own_steps(run_dir, "island-1")) > int(position)
    # Both islands read real text in different orders.
    first = [re.search(r"completed step: 0, .* loss: ([0-9.]+)", log_of(run_dir, f"island-{i}")) for i in range(2)]
    assert first[0] and first[1] and first[0][1] != first[1][1]

    # MaxText itself reads the result, and its own evaluation gives the same number. It prints three decimals.
    assert abs(score_in_maxtext(python, run_dir, arguments, tmp_path) - scores[-1]) < 2e-3
    here = {"env": clean_environment(), "cwd": tmp_path, "capture_output": True, "text": True, "timeout": SLOW_HANGS_S}
    other = [python, "-m", "diloco_jax.maxtext.export", run_dir, tmp_path / "other", *arguments, "scan_layers=false"]
    refused = subprocess.run(other, **here)
    assert refused.returncode == 2 and "is of another model" in refused.stderr and not (tmp_path / "other").exists()


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


@pytest.mark.parametrize(
    "workers", [{}, {"grain_worker_count": "0", "grain_worker_count_eval": "0"}], ids=["default", "0"]
)
def test_parquet_files_with_one_island_killed(
    workers: dict[str, str], python: Path, data: Path, tmp_path: Path
) -> None:
    """By default MaxText reads in worker processes; `hf` has no position, so a killed island reads from the start."""

    def kill(run_dir: Path) -> None:
        wait_until(lambda: len(own_steps(run_dir, "island-1")) > 10, "steps of island-1")
        os.kill(process_of(run_dir, "island-1"), signal.SIGKILL)

    arguments = [
        *parquet_words(python, data, tmp_path, per_device_batch_size="8"),
        *(f"{k}={v}" for k, v in workers.items()),
    ]
    run_dir = train(
        tmp_path, [python, "-m", "diloco_jax.maxtext", *arguments], {"train": {"steps": 300, "eval_every": 100}}, kill
    )
    scores = [row["loss"] for row in rows(run_dir, "eval")]
    assert scores[-1] < scores[0] - 0.3, scores
    log = log_of(run_dir, "island-1")
    assert log.count("dataset_type=hf of MaxText has no position") == 2
    assert notes_of_joining(run_dir, "island-1") == 2
    # Each evaluation begins with the first batch, as MaxText's own does in a new process.
    assert abs(score_in_maxtext(python, run_dir, arguments, tmp_path) - scores[-1]) < 2e-3


def test_leased_records_are_read_exactly_once(python: Path, data: Path, tmp_path: Path) -> None:
    arguments = words(data, tmp_path / "outputs")
    run_dir = train(tmp_path, [python, "-m", "diloco_jax.maxtext", "--data", "leased", *arguments], {})
    audit = subprocess.run(
        [sys.executable, "-m", "diloco_jax", "audit", run_dir],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=SLOW_HANGS_S,
    )
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert rows(run_dir, "eval")[-1]["loss"] < 6.0


def test_one_island_of_two_processes_with_checkpoints_of_maxtext(python: Path, data: Path, tmp_path: Path) -> None:
    arguments = words(data, tmp_path / "outputs", enable_checkpointing="true", checkpoint_period="10", packing="false")
    command = [python, "-m", "diloco_jax.maxtext", "--data", "shard", *arguments]
    run_dir = train(tmp_path, command, {"islands": {"count": 1, "hosts": 2, "devices": 2}})
    assert rows(run_dir, "eval")[-1]["loss"] < 6.0
    # MaxText's checkpoints are in a folder of this island.
    assert any((tmp_path / "outputs" / "mx-island-0" / "checkpoints").iterdir())


def test_wrong_arguments_end_with_one_line(python: Path, tmp_path: Path) -> None:
    for given, message in (
        (["base.yml", "steps"], "'steps' is not an argument of MaxText"),
        (["base.yml", "--syncer", "127.0.0.1:1"], "join() needs name="),
    ):
        ended = subprocess.run(
            [python, "-m", "diloco_jax.maxtext", *given], env=clean_environment(), cwd=tmp_path, capture_output=True,
            text=True, timeout=SLOW_HANGS_S,
        )  # fmt: skip
        assert ended.returncode == 2 and message in ended.stderr, ended.stderr[-2000:]
        assert "Traceback" not in ended.stderr
