"""The comparison from the command line: settings come from the run's config.yaml."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from twin.__main__ import main

from diloco_jax.settings.islands import IslandsConfig
from diloco_jax.settings.run import RunConfig, SyncerConfig, TrainConfig
from diloco_jax.settings.text import dump
from diloco_jax.transport.link import TransportConfig
from tests.twin.local_runs import PROTOCOL, SETTINGS, fault, simulate_run

CONFIG = RunConfig(
    protocol=PROTOCOL,
    islands=IslandsConfig(count=len(SETTINGS.names), restart_delay_s=SETTINGS.restart_delay_s),
    syncer=SyncerConfig(restart_delay_s=SETTINGS.syncer_restart_delay_s),
    train=TrainConfig(steps=SETTINGS.total_steps, batch_size=4 * len(SETTINGS.names)),
    transport=TransportConfig(connect_timeout_s=SETTINGS.connect_timeout_s),
)


def make(folder: Path, *kills: int) -> str:
    """A run whose island-1 dies at these times."""
    deaths = [fault("kill", "island-1", float(at_s), number=n, at_step=at_s) for n, at_s in enumerate(kills, 1)]
    simulate_run(folder, deaths, seed=len(kills))
    (folder / "config.yaml").write_text(dump(CONFIG), encoding="utf-8")
    return str(folder)


def test_real_and_simulated_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, calm, kills = make(tmp_path / "run", 20, 40), make(tmp_path / "calm"), make(tmp_path / "kills", 30)
    words = [run, "--calibrate", calm, kills, "--seeds", "2"]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["run"] == run and told["faults"] == 2 and told["calibration"]["restarts"] == 1
    assert abs(told["difference"]["given"]["goodput_points"]) < 1.0
    assert told["calibration"]["notice_s"] < 0.2, "the restart delay of the config is not part of it"
    assert main(words) == 0
    assert "schedule" in capsys.readouterr().out


def test_wrong_folders_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(tmp_path / "run", 20)
    for words, said in (([run], "required: --calibrate"), ([run, "--calibrate", str(tmp_path)], "has no config.yaml")):
        with pytest.raises(SystemExit, match="2"):
            main(words)
        assert said in capsys.readouterr().err
