"""What several subcommands begin with: the config, and the folder of the run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diloco_jax.runtime.settings import RunConfig

FAILED, WRONG_INPUT, INTERRUPTED = 1, 2, 130  # exit statuses
COMPILER = "compile"  # a thread that compiles; it cannot be interrupted


def load_config(arguments: argparse.Namespace) -> RunConfig:
    from diloco_jax.config import load

    overrides = ["--help"] if arguments.settings else arguments.overrides
    command = f"{arguments.name} {arguments.way}" if arguments.name == "launch" else arguments.name
    return load(arguments.config, overrides, prog=f"diloco {command} {arguments.config}")


def learner_dir(arguments: argparse.Namespace, config: RunConfig) -> Path:
    """The run's folder, the same at every start of a learner: it finds its own saved state there."""
    from diloco_jax.runtime.files import ADDRESS_FILE, CONFIG_FILE

    path = Path(arguments.config)
    if arguments.run_dir:
        return Path(arguments.run_dir)
    if path.name == CONFIG_FILE and (path.parent / ADDRESS_FILE).exists():
        return path.parent
    return Path(config.runs_dir) / config.name
