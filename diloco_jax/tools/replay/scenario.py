"""A simulation as a run: what its tapes were made with (scenario.json, written by sim/tapes.py), put into a config."""

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.progress import Budget
from diloco_jax.settings.run import RunConfig

SCENARIO_FILE = "scenario.json"
SCENARIO_BYTES_MAX = 1 << 22


class SimulatedRun(NamedTuple):
    """The settings of a simulation that a replay needs."""

    protocol: ProtocolConfig
    total_steps: int
    learners: int
    budget: Budget


def read_scenario(folder: Path) -> SimulatedRun | None:
    """Read the scenario of the tapes in a folder, None for a run's folder; ValueError if it cannot be read."""
    path = folder / SCENARIO_FILE
    if not path.exists():
        return None
    try:
        if path.stat().st_size > SCENARIO_BYTES_MAX:
            raise ValueError(f"more than {SCENARIO_BYTES_MAX} bytes")
        values = json.loads(path.read_text(encoding="utf-8"))
        protocol = TypeAdapter(ProtocolConfig).validate_python(values["protocol"])
        budget = Budget(*map(int, values.get("budget", ())))
        return SimulatedRun(protocol, int(values["total_steps"]), int(values["learners"]), budget)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}: {error}); write it again: diloco simulate --tapes"
        ) from error


def as_simulated(config: RunConfig, folder: Path) -> RunConfig:
    """Put protocol, global steps and learners of the simulation in a folder into a config, if there is one.

    A sample of the simulation stands for as many sequences as an island of the config has in a step.

    Raises:
        ValueError: the scenario cannot be read, or does not go with the config; names the setting.
    """
    scenario = read_scenario(folder)
    if scenario is None:
        return config
    islands = replace(config.islands, count=scenario.learners, batch_size=config.island("").batch_size)
    return replace(
        config, islands=islands, protocol=scenario.protocol, train=replace(config.train, steps=scenario.total_steps)
    )
