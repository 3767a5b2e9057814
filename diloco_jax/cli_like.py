"""`diloco simulate --like`: the simulator beside a real run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diloco_jax.sim.real_run import RealRun

# what says what to simulate, or how: the run says it
NOT_BESIDE = [
    "preset",
    "methods",
    "learners",
    "chips",
    "hours",
    "fast",
    "tapes",
    "plot",
    "choose",
    "workers",
    "settings",
]


def like(arguments: argparse.Namespace) -> int:
    """Simulate the run whose folder is named, and compare."""
    from diloco_jax.sim.like import compare, describe

    if beside := [*(f"--{name}" for name in NOT_BESIDE if getattr(arguments, name)), *arguments.overrides]:
        raise ValueError(f"--like simulates the faults of {arguments.like}; leave {beside[0]} out, or --like")
    if not arguments.calibrate:
        raise ValueError(
            "--like needs --calibrate RUN [RUN ...]: first a run of the same config without faults, then one with kills"
        )
    others = [_read(Path(folder)) for folder in arguments.calibrate]
    result = compare(_read(Path(arguments.like)), others, arguments.seeds)
    print(json.dumps({"run": arguments.like, **result}) if arguments.json else describe(result))
    return 0


def _read(folder: Path) -> RealRun:
    from diloco_jax.config import load
    from diloco_jax.runtime.files import CONFIG_FILE
    from diloco_jax.sim.real_run import RunSettings, read_run

    if not (folder / CONFIG_FILE).exists():
        raise ValueError(f"{folder} has no {CONFIG_FILE}; name the folder of a run that has ended")
    config = load(folder / CONFIG_FILE)
    settings = RunSettings(
        protocol=config.protocol,
        names=config.islands.names,
        total_steps=config.train.steps,
        restart_delay_s=config.islands.restart_delay_s,
        syncer_restart_delay_s=config.syncer.restart_delay_s,
        connect_timeout_s=config.transport.connect_timeout_s,
    )
    return read_run(folder, settings)
