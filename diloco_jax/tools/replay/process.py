"""A replay runs in the environment of an island: the same devices, and where they are emulated the same thread pool.

Both are part of the compiled program's arithmetic, and both are fixed when JAX starts. Which cores an island was pinned
to, and how many islands ran beside it, is not (docs/replay.md).
"""

import argparse
import os
import subprocess
import sys

from diloco_jax.runtime.local.machine import VISIBLE_GPUS
from diloco_jax.runtime.local.run import child_environment
from diloco_jax.settings.run import RunConfig

DECISIVE = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "NPROC", VISIBLE_GPUS)


def run_as_island(config: RunConfig, arguments: argparse.Namespace) -> int | None:
    """Do `diloco replay` in a process like those of the run's islands.

    Returns:
        Its exit status, or None if this process is like that already.
    """
    environment = dict(child_environment(config, config.islands.names[0]))
    if all(os.environ.get(name) == environment.get(name) for name in DECISIVE):
        return None
    command = [sys.executable, "-m", "diloco_jax", "replay", arguments.run]
    for name in ("config", "out", "until"):
        if getattr(arguments, name) is not None:
            command += [f"--{name}", str(getattr(arguments, name))]
    return subprocess.run(command + ["--json"] * arguments.json, env=environment, check=False).returncode
