"""PyTorch islands in real runs: beside a JAX island of the same model, and killed and brought back."""

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.limits import HANGS_S
from tests.runtime.helpers import ROOT, island_pid, kill_processes, merged, notes, run, start, wait_for

pytestmark = [pytest.mark.extra("parity"), pytest.mark.net]

HERE = Path(__file__).parent
OWN: dict[str, Any] = {
    "name": "own",
    "islands": {"count": 2, "devices": 1, "restart_delay_s": 0.1},
    "model": {"module": "own"},
    "train": {"eval_every": 0},
    "trackers": [],
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    kill_processes(tmp_path)


def write(folder: Path, loop: str, **changes: Any) -> Path:
    path, command = folder / "own.yaml", {"islands": {"command": [sys.executable, str(HERE / loop)]}}
    path.write_text(yaml.safe_dump(merged(merged(OWN, command), changes)), encoding="utf-8")
    return path


@pytest.mark.nightly
def test_a_jax_and_a_pytorch_island_learn_as_two_of_either(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In lockstep both islands make the same number of steps, so the runs differ in arithmetic alone.
    protocol = {"sync_every": 8, "num_fragments": 4, "quorum": 2, "overlap_steps": 0}
    path, held_out = write(tmp_path, "mixed_loop.py", train={"steps": 160}, protocol=protocol), {}
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for kinds in ("jax,jax", "jax,torch", "torch,torch"):
        monkeypatch.setenv("DILOCO_TEST_KINDS", kinds)
        folder = run_dir / kinds.replace(",", "-")
        ended = run("train", path, "--quiet", "--run-dir", folder)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        found = [json.loads((folder / f"island-{number}.json").read_text()) for number in range(2)]
        summary = json.loads((folder / "summary.json").read_text())
        assert [about["kind"] for about in found] == kinds.split(",") and summary["contributors_per_round"] == 2
        assert found[0]["digest"] == found[1]["digest"], "both hold the same global model, to the bit"
        assert abs(found[0]["held_out"] - found[1]["held_out"]) < 1e-3
        assert all(about["losses"][-1] < about["losses"][0] - 2 for about in found)
        held_out[kinds] = found[0]["held_out"]
    # Other first values change the held-out loss by 0.02 to 0.05.
    assert max(held_out.values()) - min(held_out.values()) < 0.01, held_out


@pytest.mark.long
def test_a_killed_pytorch_island_returns_with_its_moments_and_running_statistics(tmp_path: Path, run_dir: Path) -> None:
    # No round closes without the killed island, so the run is not over before its return.
    protocol = {"sync_every": 4, "num_fragments": 3, "snapshot_every": 20, "quorum": 2}
    path = write(tmp_path, "returning_loop.py", train={"steps": 200, "eval_every": 100}, protocol=protocol)
    process = start("train", path, "--quiet", "--run-dir", run_dir, step_s=0.04)
    wait_for(lambda: notes(run_dir, "merged", "island-1") > 3, "merges of island-1", process)
    wait_for(lambda: any((run_dir / "states" / "island-1").rglob("step_*.json")), "a saved state", process)
    os.kill(island_pid(run_dir, "island-1"), signal.SIGKILL)
    wait_for(lambda: notes(run_dir, "joined", "island-1") == 2, "the return of island-1", process)
    output, _ = process.communicate(timeout=HANGS_S)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert process.returncode == 0 and summary["complete"] and summary["evaluated"], output
    assert summary["eval_loss"] < 0.6
    log = (run_dir / "logs" / "island-1.log").read_text()
    starts = [[*map(int, found)] for found in re.findall(r"starts after (\d+) steps, (\d+) batches, (\d+) epochs", log)]
    assert len(starts) == 2 and starts[1][0] > 0, log
    # All parts of a state are of one step; the first start may have the state of the other island.
    assert all(len({*found}) == 1 for found in starts), starts
