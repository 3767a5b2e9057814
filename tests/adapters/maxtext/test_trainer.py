"""MaxText itself as islands of real runs: the syncer in this environment, the islands in MaxText's of Python 3.12.

The results of longer runs are in docs/maxtext.md.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.adapters.maxtext.environment import clean_environment, corpus, maxtext_python, parquet_words, words
from tests.adapters.maxtext.runs import (
    log_of,
    notes_of_joining,
    own_steps,
    process_of,
    rows,
    score_in_maxtext,
    train,
    wait_until,
)
from tests.limits import SLOW_HANGS_S
from tests.runtime.helpers import ROOT

# Two islands on two busy cores need minutes to import MaxText.
pytestmark = [pytest.mark.trainers, pytest.mark.net]


@pytest.fixture(scope="module")
def python() -> Path:
    return maxtext_python()


@pytest.fixture(scope="module")
def data(python: Path) -> Path:
    return corpus(python)


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
