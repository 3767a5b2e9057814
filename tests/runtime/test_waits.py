"""`protocol.wait_steps` in real runs: islands that are threads, islands of two hosts, and loops of a user's own."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.helpers import ROOT, call, json_lines, replayed, run, write_config
from tests.runtime.own_loop.test_join import write as write_own

pytestmark = pytest.mark.net

# The limit is long, so that also on a busy machine most fragments arrive within it.
PROTOCOL = {"wait_steps": 10.0, "quorum": 2}
STEP_S = 0.1


def train(config: Path, run_dir: Path) -> None:
    done = run("train", config, "--run-dir", run_dir, "--quiet", step_s=STEP_S)
    assert done.returncode == 0, done.stdout + done.stderr
    audited = json.loads(call("audit", run_dir, "--json").stdout)
    assert audited["violations"] == 0 and audited["rounds"] > 10, audited


def delays_of(run_dir: Path, name: str) -> list[int]:
    """Return, for each round with a value of an island, the steps that it made from this value to the new version."""
    step, sent, delays = 0, dict[int, int](), list[int]()
    for path in (run_dir / "tapes").glob(f"{name}.*"):
        for kind, *values in json_lines(path):
            if kind == "step":
                step = values[0]
            elif kind == "sent":
                sent[values[1]] = values[2]
            elif kind == "adopt" and values[1] in sent:
                delays.append(step - sent[values[1]])
    return delays


def assert_waited(run_dir: Path) -> None:
    for name in ("island-0", "island-1"):
        delays = delays_of(run_dir, name)
        # How many arrive in time depends on the load of this machine: most on an idle one, 5 of 24 on a busy one.
        assert len(delays) > 10 and delays.count(0) >= 3, delays


@pytest.mark.parametrize("islands", [{"controller": "single"}, {"devices": 4, "hosts": 2, "mesh": {"fsdp": 4}}])
@pytest.mark.long
def test_islands_wait_for_their_fragments(tmp_path: Path, islands: dict[str, Any]) -> None:
    train_config = {"steps": 24, "eval_every": 12}
    protocol = {**PROTOCOL, "num_fragments": 3, "sync_every": 3, "snapshot_every": 10}
    config = write_config(tmp_path, islands=islands, train=train_config, protocol=protocol)
    train(config, tmp_path / "run")
    assert_waited(tmp_path / "run")
    # Runs of islands with several hosts cannot be replayed.
    if "hosts" not in islands:
        replayed(tmp_path / "run")


@pytest.mark.nightly
def test_a_loop_of_your_own_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    train(write_own(tmp_path, train={"steps": 24}, protocol={**PROTOCOL, "sync_every": 3}), tmp_path / "run")
    assert_waited(tmp_path / "run")
