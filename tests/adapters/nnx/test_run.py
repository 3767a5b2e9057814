"""A real run of a module and a split state: both are killed and return with all that stays on an island."""

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

from diloco_jax.runtime.records.checkpoint import complete, load_parameters
from tests.runtime.helpers import interrupted, island_pid, kill_processes, notes, start, wait_for

LOOP = Path(__file__).with_name("loop.py")


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    kill_processes(tmp_path)


def starts(run_dir: Path, name: str) -> list[list[int]]:
    """Optimizer's count, statistic, random count and global step at each start of an island's loop."""
    path = run_dir / "logs" / f"{name}.log"
    lines = path.read_text().splitlines() if path.exists() else ()
    return [json.loads(line.removeprefix("began ")) for line in lines if line.startswith("began ")]


@pytest.mark.long
@pytest.mark.net
def test_a_module_and_a_split_state_are_killed_and_return_with_moments_and_statistics(
    tmp_path: Path, run_dir: Path
) -> None:
    config = {
        "name": "nnx",
        "islands": {"count": 2, "devices": 1, "command": [sys.executable, str(LOOP)], "restart_delay_s": 0.1},
        "model": {"module": "own"},
        "train": {"steps": 1_000_000, "eval_every": 0},
        "protocol": {"sync_every": 4, "num_fragments": 3, "snapshot_every": 20},
        "trackers": [],
    }
    (tmp_path / "nnx.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    process = start("train", tmp_path / "nnx.yaml", "--quiet", "--run-dir", run_dir, step_s=0.04)
    for name in ("island-1", "island-0"):
        wait_for(lambda: notes(run_dir, "merged", name) > 3, f"merges of {name}", process)  # noqa: B023
        states = run_dir / "states" / name
        wait_for(lambda: any(states.rglob("step_*.json")), f"a save of {name}", process)  # noqa: B023
        os.kill(island_pid(run_dir, name), signal.SIGKILL)
        wait_for(lambda: len(starts(run_dir, name)) == 2, f"the return of {name}", process)  # noqa: B023
    interrupted(process)
    began = {name: starts(run_dir, name) for name in ("island-0", "island-1")}
    # An island that arrives after the other one's first steps gets its moments.
    assert [0, 0, 0] in [first[:3] for first, _ in began.values()]
    for (*first, _), (*second, global_step) in began.values():
        # All of one moment: the optimizer's state, a statistic of the model and a random stream.
        assert first == first[:1] * 3, first
        assert second[0] > first[0] and second == second[:1] * 3, second
        assert global_step > 0
    values, _ = load_parameters(complete(run_dir / "checkpoints")[0])
    assert sorted(values) == [
        *("first/bias", "first/kernel", "last/bias", "last/kernel", "norm/bias", "norm/scale"),
        "scale",
    ]
    # The mean square of standard normal numbers.
    np.testing.assert_allclose(values["scale"], 1.0, atol=0.5)
    for name in ("island-0", "island-1"):
        log = (run_dir / "logs" / f"{name}.log").read_text()
        ended = re.findall(r"(?m)^ended (\d+) (.+)$", log)
        # Whatever an island loads, its step is compiled once.
        assert [compiled for compiled, _ in ended] == ["1"], log
        np.testing.assert_allclose(json.loads(ended[0][1]), values["scale"], atol=0.2)
