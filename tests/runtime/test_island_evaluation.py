"""Evaluations by real islands: one that is killed while it evaluates, and training with them and without."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_jax.runtime.records.checkpoint import complete, load_parameters
from diloco_jax.runtime.records.telemetry import read_metrics
from tests.runtime.helpers import processes_of, run, start, status, trained, wait_for, write_config

pytestmark = [pytest.mark.slow, pytest.mark.net, pytest.mark.timeout(900)]


def test_the_island_that_evaluates_the_final_model_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = write_config(tmp_path, train={"steps": 20, "eval_every": 0, "final_eval_batches": 3000})
    process = start("train", config, "--run-dir", folder, "--quiet")

    def evaluating() -> str:
        rows = status(folder).get("learners", [])
        return next((row["learner"] for row in rows if row["condition"] == "evaluating"), "")

    name = wait_for(evaluating, "an evaluation", 400)
    assert status(folder)["state"] == "evaluating"
    os.kill(next(pid for pid, command in processes_of(folder).items() if f"--island {name}" in command), signal.SIGKILL)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["complete"] and summary["alarms"] == [] and summary["learners"][name]["restarts"] == 1
    asked = [record["members"] for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "evaluating"]
    assert asked == [[name], [name]], "it came back, and was asked again"
    found = json.loads(run("eval", folder, "--json", timeout_s=300).stdout)
    assert found["loss"] == pytest.approx(summary["eval_loss"], abs=1e-5)


def test_in_lockstep_evaluations_do_not_change_a_bit(tmp_path: Path) -> None:
    def evaluated(every: int) -> dict[str, np.ndarray]:
        folder = tmp_path / str(every)
        folder.mkdir()
        protocol: dict[str, Any] = {"overlap_steps": 0, "quorum": 2}
        run_dir = trained(folder, train={"steps": 18, "eval_every": every}, protocol=protocol, timeout_s=400)
        records = [r for r in read_metrics(run_dir / "metrics.jsonl") if r["kind"] == "eval"]
        assert len(records) > (3 if every else 0)
        return load_parameters(complete(run_dir / "checkpoints")[0])[0]

    with_them, without = evaluated(3), evaluated(0)
    assert with_them.keys() == without.keys()
    assert all(np.array_equal(with_them[path], without[path]) for path in without)
