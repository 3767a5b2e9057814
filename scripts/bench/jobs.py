"""Run complete training jobs as a user does, and read their summaries."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
JOB_TIMEOUT_S = 3600


def train(config: str, *overrides: object) -> dict[str, Any]:
    """Run a config in configs/ with overrides such as "--seed", 1, and return its summary.

    Raises:
        SystemExit: the run failed; its message is on standard error.
    """
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder:
        command = [sys.executable, "-m", "diloco_jax", "train", str(ROOT / "configs" / f"{config}.yaml"), "--json"]
        command += ["--run-dir", f"{folder}/run", "--trackers", *map(str, overrides)]
        result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=JOB_TIMEOUT_S)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with status {result.returncode}")
    summary: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return summary
