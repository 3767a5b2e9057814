"""Real runs of models and settings that are less usual: other state, periods of classes, a death while it evaluates."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_jax.runtime.model.evaluation import Evaluator
from diloco_jax.runtime.records.checkpoint import complete, load_parameters
from diloco_jax.runtime.records.telemetry import read_metrics
from diloco_jax.settings.text import load
from tests.limits import HANGS_S
from tests.natural_models import HERE
from tests.runtime.helpers import (
    call,
    kill_processes,
    processes_of,
    replayed,
    run,
    start,
    status,
    trained,
    wait_for,
    write_config,
)


def tapes_of(run_dir: Path, name: str) -> list[str]:
    return [line for path in (run_dir / "tapes").glob(f"{name}.*") for line in path.read_text().splitlines()]


# Its parts have fast tests: test_other_state.py (training), test_recovery.py, test_replay_run.py (replay).
@pytest.mark.net
@pytest.mark.slow
def test_a_model_with_other_state_trains_recovers_and_is_replayed_bit_for_bit(tmp_path: Path) -> None:
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
        wait_for(lambda: status(run_dir).get("global_step", 0) > 24, "training")
        victim = next(pid for pid, words in processes_of(run_dir).items() if " --island island-1 " in f"{words} ")
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: any('["state"' in line for line in tapes_of(run_dir, "island-1")), "recovery")
        since = status(run_dir)["global_step"]
        wait_for(lambda: status(run_dir)["global_step"] > since + 18, "training after it")
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=HANGS_S)
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


@pytest.mark.net
@pytest.mark.slow
def test_the_island_that_evaluates_the_final_model_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = write_config(tmp_path, train={"steps": 20, "eval_every": 0, "final_eval_batches": 3000})
    process = start("train", config, "--run-dir", folder, "--quiet")

    def evaluating() -> str:
        rows = status(folder).get("learners", [])
        return next((row["learner"] for row in rows if row["condition"] == "evaluating"), "")

    name = wait_for(evaluating, "an evaluation")
    assert status(folder)["state"] == "evaluating"
    os.kill(next(pid for pid, command in processes_of(folder).items() if f"--island {name}" in command), signal.SIGKILL)
    output, _ = process.communicate(timeout=HANGS_S)
    assert process.returncode == 0, output
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["complete"] and summary["alarms"] == [] and summary["learners"][name]["restarts"] == 1
    asked = [record["members"] for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "evaluating"]
    assert asked == [[name], [name]], "it came back, and was asked again"
    found = json.loads(run("eval", folder, "--json").stdout)
    assert found["loss"] == pytest.approx(summary["eval_loss"], abs=1e-5)


@pytest.mark.net
@pytest.mark.slow
def test_in_lockstep_evaluations_do_not_change_a_bit(tmp_path: Path) -> None:
    def evaluated(every: int) -> dict[str, np.ndarray]:
        folder = tmp_path / str(every)
        folder.mkdir()
        protocol: dict[str, Any] = {"overlap_steps": 0, "quorum": 2}
        subtract = {"subtract": bool(every)}
        train = {"steps": 18, "eval_every": every}
        run_dir = trained(folder, train=train, protocol=protocol, evaluation=subtract)
        records = [r for r in read_metrics(run_dir / "metrics.jsonl") if r["kind"] == "eval"]
        assert len(records) > (3 if every else 0)
        gains = {name for record in records for name in record["scores"] if name.startswith("gain of ")}
        assert gains == ({"gain of island-0", "gain of island-1"} if every else set())
        return load_parameters(complete(run_dir / "checkpoints")[0])[0]

    with_them, without = evaluated(3), evaluated(0)
    assert with_them.keys() == without.keys()
    assert all(np.array_equal(with_them[path], without[path]) for path in without)


PERIODS = {"sync_every": {"mlp": 4, "rest": 12}, "sync_later": {36: {"mlp": 8, "rest": 8}}, "num_fragments": 24}


@pytest.mark.nightly
def test_a_run_in_base_3_is_replayed_bit_for_bit(tmp_path: Path) -> None:
    run_dir = trained(
        tmp_path,
        train={"steps": 36, "eval_every": 0},
        protocol={"num_fragments": 3, "quorum": 2, "snapshot_every": 10},
        wire={"up": "ternary", "down": "ternary"},
    )
    replayed(run_dir)
    audited = json.loads(call("audit", run_dir, "--json").stdout)
    assert audited["violations"] == 0 and audited["rounds"] > 10, audited


@pytest.mark.long
def test_each_class_is_merged_at_its_turns_and_the_run_is_replayed_bit_for_bit(
    tmp_path: Path,
) -> None:
    run_dir = trained(
        tmp_path,
        islands={"count": 2, "devices": 1},
        train={"steps": 60, "eval_every": 0},
        protocol=PERIODS | {"quorum": 2, "grace_steps_max": 2.0, "snapshot_every": 25},
        adopt={"mode": "rebase"},
        wire={"up": "int2", "down": "int2"},
    )
    merged = [row for row in read_metrics(run_dir / "metrics.jsonl") if row["kind"] == "merged"]
    turns = {row["global_step"]: row["fragment_id"] for row in merged}
    # 12,288 elements of the MLP every 4 steps and 14,496 others every 12 are 4,280 per step on average: three fragments
    # each, of 4,096 and 4,832, as then every step has one
    first = {0: 0, 1: 1, 2: 2, 3: 3, 4: 0, 5: 1, 6: 2, 7: 4, 8: 0, 9: 1, 10: 2, 11: 5}  # modulo 12
    second = {0: 0, 1: 3, 2: 1, 3: 4, 5: 2, 6: 5}  # modulo 8
    expected = {step: first[step % 12] for step in range(1, 36)}
    expected |= {step: second[step % 8] for step in range(36, 61) if step % 8 in second}
    assert turns == expected

    replayed(run_dir)
    audited = json.loads(call("audit", run_dir, "--json").stdout)
    assert audited["violations"] == 0 and audited["rounds"] == len(merged), audited


@pytest.mark.nightly
def test_islands_that_are_alike_compile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_TEST_PROGRAMS", str(tmp_path / "programs"))
    config = write_config(tmp_path, model={"module": "diloco_jax.training.models.decoder:Decoder"})
    kept = []
    for island in ("island-0", "island-1"):
        result = run("compile", config, "--island", island, "--run-dir", tmp_path)
        assert result.returncode == 0, result.stderr
        kept.append({path.name for path in (tmp_path / "programs").glob("*-cache")})
    assert kept[0] == kept[1] and any(name.startswith("jit_train_step") for name in kept[0])
