"""Loops of many kinds as two islands of a real run; one island is killed, returns, and losses fall."""

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.limits import HANGS_S
from tests.runtime.helpers import island_pid, kill_processes, notes, start, wait_for
from tests.runtime.own_loop import many_loops

LOOPS = Path(many_loops.__file__)
# A step over ten thousand arrays takes half a second; the other island makes more than a thousand steps in a minute.
STEPS = {"many_leaves": 60, "pauses": 3000}
pytestmark = [pytest.mark.slow, pytest.mark.net]


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    kill_processes(tmp_path)


def row(kind: str) -> object:
    return pytest.param(kind, marks=[pytest.mark.extra("examples")] if kind == "haiku_state" else [])


@pytest.mark.parametrize("kind", [row(each.__name__) for each in many_loops.KINDS])
def test_a_loop_is_killed_and_returns_with_its_state(
    kind: str, tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    islands = {"count": 2, "devices": 4 if kind == "four_devices" else 1, "restart_delay_s": 0.1}
    config = {
        "name": "own",
        "islands": islands | {"command": [sys.executable, str(LOOPS), kind]},
        "model": {"module": "own"},
        "train": {"steps": STEPS.get(kind, 300), "eval_every": 0},
        "protocol": {"sync_every": 6, "num_fragments": 3, "snapshot_every": 20},
        "trackers": [],
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    process = start("train", path, "--quiet", "--run-dir", run_dir, step_s=0.05)
    saved = run_dir / "states" / "island-1"
    wait_for(lambda: any(saved.rglob("step_*.json")), "a saved state", process, 10 * HANGS_S)
    os.kill(island_pid(run_dir, "island-1"), signal.SIGKILL)
    output, _ = process.communicate(timeout=20 * HANGS_S)
    assert process.returncode == 0, output
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["complete"] and summary["learners"]["island-1"]["restarts"] == 1, output
    assert notes(run_dir, "expelled", "") == 0
    if kind == "pauses":
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        merged = [record["members"] for record in records if record["kind"] == "merged"]
        assert sum("island-0" in members for members in merged[-100:]) > 80, "an island that rested is merged again"
    for name in ("island-0", "island-1"):
        log = (run_dir / "logs" / f"{name}.log").read_text()
        compiled, first, last = re.findall(r"(\d+) compiled step, \d+ steps, loss ([\d.]+) to ([\d.]+)", log)[-1]
        assert compiled == "1", log
        if name == "island-0":
            assert float(last) < 0.9 * float(first), log
        else:
            assert re.search(r"optimizer state: (own save|of|from)", log), log
