"""The environment variables that tell a user's program its place in a run; `diloco train` sets them.

A program on several hosts calls jax.distributed.initialize with DILOCO_COORDINATOR, DILOCO_HOSTS (their number) and
DILOCO_HOST (its own) before it uses a device.
"""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from diloco_jax.runtime.own_loop.environment import SYNCER_ENV, place_of
from diloco_jax.settings.run import RunConfig, WatchdogConfig
from diloco_jax.settings.text import load
from diloco_jax.transport.link import TransportConfig

INCARNATION_ENV = "DILOCO_INCARNATION"  # this start
RUN_DIR_ENV, CONFIG_ENV = "DILOCO_RUN_DIR", "DILOCO_CONFIG"
COORDINATOR_ENV, HOSTS_ENV, HOST_ENV = "DILOCO_COORDINATOR", "DILOCO_HOSTS", "DILOCO_HOST"


class Surroundings(NamedTuple):
    """The place of a process in a run, from arguments and environment."""

    syncer: str  # host:port
    name: str  # island
    # Folder for tapes and saved states; None for the run's name below its folder of runs.
    run_dir: Path | None
    # host:port of JAX's coordination service, "" if unknown.
    coordinator: str
    incarnation: int  # grows with starts
    # Files and timeouts of this machine, if a config has them.
    transport: TransportConfig
    # The argument or variable that gave the address.
    given_by: str = "syncer="


def look(syncer: str | None, name: str | None, run_dir: str | Path | None, coordinator: str) -> Surroundings:
    """Read the arguments of `join`, then the environment; ValueError if neither names the syncer or the island."""
    config, folder = os.environ.get(CONFIG_ENV), run_dir or os.environ.get(RUN_DIR_ENV)
    address, island = place_of(syncer, name)
    return Surroundings(
        address,
        island,
        Path(folder) if folder else None,
        coordinator or os.environ.get(COORDINATOR_ENV, ""),
        int(os.environ.get(INCARNATION_ENV) or time.time() * 1000),
        load(config).transport if config else TransportConfig(),
        "syncer=" if syncer else SYNCER_ENV,
    )


def unless_typed(config: RunConfig) -> RunConfig:
    """Return the config without its watchdog in a notebook or at a prompt, where a person may take any time."""
    typed = not hasattr(sys.modules["__main__"], "__file__")
    return replace(config, watchdog=WatchdogConfig(least_s=0.0)) if typed else config
