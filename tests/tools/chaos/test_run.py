"""A short chaos run with real processes: everything comes back, and nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diloco_jax.cli import main as cli
from tests.runtime.helpers import merged, processes_of, run, write_config

pytestmark = [pytest.mark.net, pytest.mark.timeout(1200)]

CHANGES = {
    "islands": {"devices": 1, "batch_size": 4},
    "protocol": {"lease_s": 2.0, "heartbeat_s": 0.5, "pull_timeout_s": 2.0, "resend_s": 0.5, "snapshot_every": 200},
    "transport": {"connect_timeout_s": 5.0, "keepalive_s": 2.0, "keepalive_timeout_s": 2.0},
}
QUICK = ("cut,corrupt,nan,stop,kill", 2, 1000, 5, 34)  # the kill comes first: it needs the most time to heal
ALL = ("kill,kill-syncer,kill-donor,stop-syncer,black-hole,duplicate,slow-link,full-disk", 3, 8000, 8, 3)


@pytest.mark.parametrize(
    ("kinds", "islands", "steps", "faults", "seed"), [QUICK, pytest.param(*ALL, marks=pytest.mark.slow)]
)
def test_everything_comes_back(tmp_path: Path, kinds: str, islands: int, steps: int, faults: int, seed: int) -> None:
    config = write_config(tmp_path, **merged(CHANGES, {"train": {"steps": steps}, "islands": {"count": islands}}))
    words = ("--faults", faults, "--seed", seed, "--kinds", kinds, "--run-dir", tmp_path / "run", "--json")
    result = run("chaos", config, *words, timeout_s=1100)
    assert result.returncode == 0, result.stdout + result.stderr
    told = json.loads(result.stdout)
    assert told["problems"] == []
    assert told["faults"] >= 1 and told["faults"] + told["skipped"] == faults  # a slow machine leaves no time for all
    assert told["recovered"] == told["recoveries"] >= told["faults"]
    samples = told["samples"]
    fates = sum(samples[fate] for fate in ("merged", "overwritten", "released", "out"))
    assert samples["leased"] == fates and not samples["violations"]
    assert told["participation"].keys() == {f"island-{index}" for index in range(islands)}
    assert processes_of(tmp_path / "run") == {}
    again = run("chaos", config, *words)
    assert again.returncode == 2 and "holds a run already" in again.stderr


def test_dry_run_prints_the_schedule_and_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["chaos", str(write_config(tmp_path)), "--dry-run", "--run-dir", str(tmp_path / "run")]
    told = []
    for _ in range(2):
        assert cli.main([*words, "--faults", "5", "--kinds", "cut,kill"]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1] and len(told[0].splitlines()) == 5
    assert not (tmp_path / "run").exists()
    assert cli.main([*words, "--kinds", "flood"]) == cli.WRONG_INPUT
    assert "flood; choose from kill" in capsys.readouterr().err
