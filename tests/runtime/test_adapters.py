"""A run of two islands that train adapters above a public model: killed as a whole, resumed, and replayed."""

import json
from pathlib import Path

import numpy as np
import pytest

from diloco_jax.runtime.model.evaluation import Evaluator
from diloco_jax.runtime.records.checkpoint import complete, load_parameters
from diloco_jax.settings.text import load
from tests.runtime.helpers import (
    SLOW_STEP_S,
    call,
    kill_processes,
    replayed,
    run,
    start,
    wait_for,
    write_config,
)
from tests.tools.export.folders import model_of, public

STEPS = 60


@pytest.mark.long
@pytest.mark.net
def test_a_killed_run_of_adapters_is_resumed_and_replayed_bit_for_bit(tmp_path: Path) -> None:
    model = public(tmp_path / "public", model_of("llama"))
    files = {path: path.read_bytes() for path in (tmp_path / "public").iterdir()}
    lora = {"rank": 4, "targets": ["q", "v", "down"], "base_dtype": "bfloat16"}
    config = write_config(
        tmp_path,
        islands={"count": 2, "devices": 1},
        train={"steps": STEPS, "batch_size": 16, "seq_len": 64, "eval_every": 0},
        model={"module": model.module, "args": dict(model.args), "weights": model.weights, "lora": lora},
        # Steps take so long that the run is killed before its end.
        callbacks=["tests.runtime.paced:Pace"],
        optimizer={"learning_rate": 0.01},
        protocol={"sync_every": 6, "num_fragments": 3, "snapshot_every": 10},
    )
    run_dir = tmp_path / "run"
    process = start("train", config, "--run-dir", run_dir, "--quiet", step_s=SLOW_STEP_S)
    try:
        wait_for(lambda: complete(run_dir / "checkpoints"), "a snapshot", process)
    finally:
        process.kill()
        process.communicate()
        kill_processes(run_dir)
    assert not (run_dir / "summary.json").exists(), "it was over before it was killed: more steps are needed"
    kept, meta = load_parameters(complete(run_dir / "checkpoints")[0])
    assert kept and all("/adapter/" in path for path in kept), "a snapshot holds nothing else"
    assert all(np.abs(value).max() > 0 for value in kept.values()), "they were trained before the kill"

    done = run("train", config, "--run-dir", run_dir, "--resume", "--quiet")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["complete"] and summary["global_steps"] == STEPS > meta["global_step"]
    assert f"the run continues from step_{meta['global_step']:08d}" in (run_dir / "logs" / "syncer.log").read_text()
    assert summary["num_parameters"] == sum(value.size for value in kept.values())
    assert {path: path.read_bytes() for path in (tmp_path / "public").iterdir()} == files

    evaluator = Evaluator(load(config))
    start_loss = evaluator.evaluate(dict(evaluator.initial_parameters()), 2)["loss"]
    kept_loss = evaluator.evaluate(kept, 2)["loss"]
    evaluated = json.loads(call("eval", run_dir, "--json").stdout)
    assert evaluated["loss"] == pytest.approx(summary["eval_loss"], abs=1e-4), "islands evaluate the same model"
    assert evaluated["loss"] < kept_loss < start_loss
    assert call("sample", run_dir, "--tokens", "8", "--json").returncode == 0
    replayed(run_dir)
