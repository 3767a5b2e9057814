"""A real run of a model with an RNN, dropout and batch statistics: an island dies and recovers; all is done again."""

import json
import os
import signal
from pathlib import Path

import pytest

from diloco_jax.runtime.model.evaluation import Evaluator
from diloco_jax.runtime.records.checkpoint import complete, load_parameters
from diloco_jax.settings.text import load
from tests.natural_models import HERE
from tests.runtime.helpers import call, kill_processes, processes_of, replayed, start, status, wait_for, write_config

# Its parts have fast tests: test_other_state.py (training), test_recovery.py, test_replay_run.py (replay).
pytestmark = [pytest.mark.net, pytest.mark.slow, pytest.mark.timeout(600)]

PATIENCE_S = 200.0


def tapes_of(run_dir: Path, name: str) -> list[str]:
    return [line for path in (run_dir / "tapes").glob(f"{name}.*") for line in path.read_text().splitlines()]


def test_it_trains_recovers_and_is_replayed_bit_for_bit(tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        islands={"count": 2, "devices": 1},
        train={"steps": 100_000, "eval_every": 12, "settle_batches": 40},
        model={"module": f"{HERE}:Everything", "args": {"vocab_size": 256, "dim": 32}},
        protocol={"sync_every": 6, "num_fragments": 3},
    )
    run_dir = tmp_path / "run"
    process = start("train", config, "--run-dir", run_dir, "--quiet", step_s=0.05)
    try:
        wait_for(lambda: status(run_dir).get("global_step", 0) > 24, "training", PATIENCE_S)
        victim = next(pid for pid, words in processes_of(run_dir).items() if " --island island-1 " in f"{words} ")
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: any('["state"' in line for line in tapes_of(run_dir, "island-1")), "recovery", PATIENCE_S)
        since = status(run_dir)["global_step"]
        wait_for(lambda: status(run_dir)["global_step"] > since + 18, "training after it", PATIENCE_S)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130, output
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
        kill_processes(tmp_path)
    state = next(line for line in tapes_of(run_dir, "island-1") if '["state"' in line)
    assert json.loads(state)[1] == "island-0", "the state, with its batch statistics, is a living island's"

    replayed(run_dir)
    evaluated = call("eval", run_dir, "--json")
    loss = json.loads(evaluated.stdout)["loss"]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert loss < 4.5, "below the uniform ln 256 = 5.5, with statistics that belong to the model"
    path = complete(run_dir / "checkpoints")[0]
    unsettled = Evaluator(load(config, ["--train.settle_batches", "0"])).evaluate(load_parameters(path)[0], 2)
    assert loss < unsettled["loss"], "the statistics that a model starts with are no use"
    assert summary["eval_loss"] < unsettled["loss"], "an island settles them too, earlier in the run"
