"""A simulation's settings meet a config's model."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from invariants.__main__ import main as simulate

from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.settings.text import parse
from diloco_jax.tools.replay.scenario import as_simulated, read_scenario
from tests.runtime.helpers import SMALL, merged

PROTOCOL = ProtocolConfig(sync_every=4, num_fragments=3)


def write_scenario(folder: Path, **changes: Any) -> Path:
    values = {"protocol": asdict(PROTOCOL), "total_steps": 60, "learners": 5} | changes
    path = folder / "scenario.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


def test_protocol_steps_and_learners_are_the_simulations(tmp_path: Path) -> None:
    config = parse(merged(SMALL, {"islands": {"devices": 1}, "train": {"batch_size": 12}}), "the test")
    assert as_simulated(config, tmp_path) is config, "a run's folder has no scenario"
    write_scenario(tmp_path)
    simulated = as_simulated(config, tmp_path)
    assert simulated.protocol == PROTOCOL and simulated.train.steps == 60 and simulated.islands.count == 5
    assert simulated.island("").batch_size == config.island("").batch_size == 6
    assert simulated.model == config.model and simulated.optimizer == config.optimizer


def test_what_does_not_go_together_is_named(tmp_path: Path) -> None:
    config = parse(merged(SMALL, {"transport": {"queue_payloads_max": 8}}), "the test")
    write_scenario(tmp_path, protocol=asdict(ProtocolConfig(sync_every=24, num_fragments=20)))
    with pytest.raises(ValueError, match="queue_payloads_max is 8"):
        as_simulated(config, tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"protocol": {}}', '{"protocol": {"speed": 1}, "total_steps": 1}'])
def test_broken_scenario_is_named(tmp_path: Path, text: str) -> None:
    write_scenario(tmp_path).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"scenario\.json cannot be read"):
        read_scenario(tmp_path)


def test_a_simulation_writes_what_is_read_here(tmp_path: Path) -> None:
    assert simulate(["--seed", "1", "--quiet", "--tapes", str(tmp_path)]) == 0
    scenario = read_scenario(tmp_path)
    assert scenario is not None and scenario.learners >= 1 and scenario.total_steps >= 1
