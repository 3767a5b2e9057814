"""Real trainers of google-tunix as islands of real runs: tunix_sft.py and tunix_dpo.py of docs/examples."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from diloco_jax.runtime.records.checkpoint import complete, load_parameters
from diloco_jax.runtime.records.telemetry import read_metrics
from tests.adapters.tunix.environment import tunix_python
from tests.limits import SLOW_HANGS_S
from tests.runtime.helpers import ROOT, island_pid, kill_processes, notes, start, wait_for

pytestmark = [pytest.mark.trainers, pytest.mark.net]

EXAMPLE = ROOT / "docs" / "examples" / "tunix_sft.py"
NAMES = ("island-0", "island-1")
# The example's model.
NUM_PARAMETERS = 90_496
# The model of tunix_dpo.py.
NUM_PREFERENCE = 17_536


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for runs; their processes are gone at the end."""
    folder = tmp_path_factory.mktemp("tunix")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder
    kill_processes(folder)


def config(folder: Path, name: str, command: list[Any], steps: int, **protocol: int) -> Path:
    """Write the config of a run of two islands with this command."""
    words = {
        "name": name,
        "islands": {"count": 2, "devices": 1, "command": [str(word) for word in command], "restart_delay_s": 0.1},
        "model": {"module": "own"},
        "train": {"steps": steps, "eval_every": 50},
        "protocol": {"sync_every": 6, "num_fragments": 6, **protocol},
        "trackers": [],
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(words), encoding="utf-8")
    return path


def losses(run_dir: Path, name: str) -> list[float]:
    """What an island reported, step by step, over all its starts."""
    return [
        row["loss"]
        for row in read_metrics(run_dir / "metrics.jsonl")
        if row["kind"] == "step" and name == row["learner"]
    ]


def evaluations(run_dir: Path) -> list[float]:
    """Held-out losses of the global model, from early to late."""
    return [row["loss"] for row in read_metrics(run_dir / "metrics.jsonl") if row["kind"] == "eval"]


def members(run_dir: Path) -> list[list[str]]:
    """The islands of each merge."""
    return [row["members"] for row in read_metrics(run_dir / "metrics.jsonl") if row["kind"] == "merged"]


def ended(process: subprocess.Popen[str], run_dir: Path) -> dict[str, Any]:
    """Wait for a complete run; its summary."""
    output, _ = process.communicate(timeout=SLOW_HANGS_S)
    assert process.returncode == 0, output
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    assert summary["complete"] and not summary["unmerged_fragments"], output
    return summary


def written(folder: Path, name: str) -> dict[str, np.ndarray]:
    """What an island wrote at its end: the trained parameters by path."""
    with np.load(folder / f"{name}.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def full(folder: Path) -> Path:
    """A run that trains all parameters; island-1 is killed in it, and returns."""
    run_dir = folder / "full"
    program = [tunix_python(), Path(__file__).with_name("paced_sft.py")]
    path = config(folder, "full", program, 1200, snapshot_every=20)
    process = start("train", path, "--quiet", "--run-dir", run_dir, step_s=0.1)
    both = lambda: sum(len(each) == 2 for each in members(run_dir))  # noqa: E731
    wait_for(lambda: (run_dir / "metrics.jsonl").exists() and both() > 30, "merges of both", within_s=SLOW_HANGS_S)
    wait_for(
        lambda: any((run_dir / "states" / "island-1").rglob("step_*.json")), "a saved state", within_s=SLOW_HANGS_S
    )
    os.kill(island_pid(run_dir, "island-1"), signal.SIGKILL)
    before = both()
    wait_for(lambda: notes(run_dir, "joined", "island-1") == 2, "the return of island-1", within_s=SLOW_HANGS_S)
    wait_for(lambda: both() > before + 30, "merges of both after the return", within_s=SLOW_HANGS_S)
    summary = ended(process, run_dir)
    assert summary["num_parameters"] == NUM_PARAMETERS
    return run_dir


def test_a_killed_trainer_returns_with_its_moments(full: Path) -> None:
    """The optimizer's count shows the moments: it is saved with them."""
    counts = {}
    for name in NAMES:
        log = (full / "logs" / f"{name}.log").read_text()
        found = re.findall(rf"{name}: (\d+) updates in this process, (\d+) in all", log)
        assert len(found) == 1, log
        counts[name] = [int(count) for count in found[0]]
    own, all_ = counts["island-0"]
    assert own == all_
    own, all_ = counts["island-1"]
    assert all_ - own >= 15, f"moments of {all_ - own} updates came back"
    alone = sum(each == ["island-0"] for each in members(full))
    assert alone > 0, "island-0 was merged while island-1 was away"
    print("full:", counts, {"alone": alone, "both": sum(len(each) == 2 for each in members(full))}, evaluations(full))


def test_losses_fall_and_all_islands_end_with_the_global_model(full: Path) -> None:
    snapshot, _ = load_parameters(complete(full / "checkpoints")[0])
    assert sum(value.size for value in snapshot.values()) == NUM_PARAMETERS
    for name in NAMES:
        reported = losses(full, name)
        assert 5.0 < reported[0] < 6.0 and np.mean(reported[-10:]) < 3.0, (name, reported[0], reported[-10:])
        found = written(full.parent, name)
        assert found.keys() == snapshot.keys()
        for path, value in snapshot.items():
            np.testing.assert_array_equal(found[path], value, err_msg=path)
    assert evaluations(full)[-1] < 3.0


def test_two_islands_with_adapters_merge(full: Path, folder: Path) -> None:
    run_dir = folder / "lora"
    path = config(folder, "lora", [tunix_python(), EXAMPLE, full], 150, quorum=2, snapshot_every=50)
    summary = ended(start("train", path, "--quiet", "--run-dir", run_dir), run_dir)
    assert members(run_dir) == [list(NAMES)] * 150, "every merge has both islands"
    assert summary["contributors_per_round"] == 2.0
    snapshot, _ = load_parameters(complete(run_dir / "checkpoints")[0])
    assert {path.rpartition("_lora_")[2] for path in snapshot} == {"a", "b"}, "only adapters travel"
    assert summary["num_parameters"] == sum(value.size for value in snapshot.values()) < NUM_PARAMETERS / 2
    # The adapters begin with a zero product, so the first evaluation is close to that of the base.
    held_out = evaluations(run_dir)
    assert held_out[-1] < held_out[0]
    for name in NAMES:
        reported = losses(run_dir, name)
        assert np.mean(reported[-10:]) < 0.9 * np.mean(reported[:3]), (name, reported[:3], reported[-10:])
        found = written(folder, name)
        for path, value in snapshot.items():
            np.testing.assert_array_equal(found[path], value, err_msg=path)
            assert "lora_b" not in path or np.any(value), f"{path} was never trained"
    print(
        "lora:", summary["num_parameters"], "held out:", held_out, {name: len(losses(run_dir, name)) for name in NAMES}
    )


def test_two_islands_of_a_preference_trainer_merge(folder: Path) -> None:
    run_dir = folder / "dpo"
    path = config(folder, "dpo", [tunix_python(), EXAMPLE.with_name("tunix_dpo.py")], 100, quorum=2, snapshot_every=50)
    summary = ended(start("train", path, "--quiet", "--run-dir", run_dir), run_dir)
    assert members(run_dir) == [list(NAMES)] * 100, "every merge has both islands"
    snapshot, _ = load_parameters(complete(run_dir / "checkpoints")[0])
    # The policy of one layer; its reference has the same size and is not exchanged.
    assert summary["num_parameters"] == sum(value.size for value in snapshot.values()) == NUM_PREFERENCE
    for name in NAMES:
        reported = losses(run_dir, name)
        # It starts as the reference: with margin zero, and so with a loss of log 2.
        np.testing.assert_allclose(reported[0], np.log(2), rtol=1e-5)
        assert reported[-1] < 0.2
        found = written(folder, name)
        for tensor, value in snapshot.items():
            np.testing.assert_array_equal(found[tensor], value, err_msg=tensor)
    assert evaluations(run_dir)[-1] < 0.1
    print("dpo:", evaluations(run_dir), {name: len(losses(run_dir, name)) for name in NAMES})


def test_a_real_trainer_in_its_own_process(tmp_path: Path) -> None:
    """The tests of inside.py, with real trainers, hooks and checkpoints of tunix."""
    python = tunix_python()
    words = [
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
        Path(__file__).with_name("inside.py"),
    ]
    done = subprocess.run([str(word) for word in words], cwd=ROOT, capture_output=True, text=True, timeout=SLOW_HANGS_S)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_the_example_becomes_an_island_in_at_most_ten_lines() -> None:
    text = EXAMPLE.read_text()
    lines = text.count("  # island\n")
    assert lines == 4 and "four lines" in (ROOT / "docs" / "tunix.md").read_text()
