"""A replay runs in the environment of an island: as many emulated devices, and a thread pool of the same size.

Both are part of the compiled program's arithmetic, and both are fixed when JAX starts. Which cores an island was pinned
to, and how many islands ran beside it, is not (docs/replay.md).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from diloco_jax.runtime.local import child_environment
from diloco_jax.runtime.settings import RunConfig

DECISIVE = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "NPROC")


def run_as_island(config: RunConfig, arguments: argparse.Namespace) -> int | None:
    """Do `diloco replay` in a process like those of the run's islands.

    Args:
        config: of the run.
        arguments: of the command.

    Returns:
        Its exit status, or None if this process is like that already.
    """
    if not config.islands.devices:
        return None  # real accelerators: whatever this process sees
    environment = dict(child_environment(config, config.islands.names[0]))
    if all(os.environ.get(name) == environment[name] for name in DECISIVE):
        return None
    command = [sys.executable, "-m", "diloco_jax", "replay", arguments.run]
    for name in ("config", "out", "until"):
        if getattr(arguments, name) is not None:
            command += [f"--{name}", str(getattr(arguments, name))]
    return subprocess.run(command + ["--json"] * arguments.json, env=environment, check=False).returncode
