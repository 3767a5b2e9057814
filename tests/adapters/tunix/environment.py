"""The environment of tunix, which the tests of this folder build once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import SLOW_HANGS_S
from tests.runtime.helpers import ROOT

VERSION = "0.1.7"
HOME = Path("~/.cache/diloco-trainers").expanduser() / f"tunix-{VERSION}-py{sys.version_info[0]}{sys.version_info[1]}"
# What tests of ours need in there.
TESTS = ("pytest", "pytest-timeout", "hypothesis", "beartype")


def tunix_python() -> Path:
    """Return the interpreter of an environment with tunix and what diloco_jax needs; skip the test if it cannot be."""
    python, done = HOME / "bin" / "python", HOME / "built"
    needs = f"google-tunix=={VERSION}"
    if done.exists() and done.read_text() == needs + (ROOT / "pyproject.toml").read_text():
        return python
    commands = [
        [sys.executable, "-m", "venv", "--clear", HOME],
        [python, "-m", "pip", "install", "-q", "uv"],
        [python, "-m", "uv", "pip", "install", "-q", "--python", python, needs, "-r", ROOT / "pyproject.toml"],
    ]
    HOME.parent.mkdir(parents=True, exist_ok=True)
    commands[-1] += TESTS
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    for command in commands:
        ended = subprocess.run(
            [str(word) for word in command], capture_output=True, text=True, env=clean, timeout=SLOW_HANGS_S
        )
        if ended.returncode:
            pytest.skip(f"no environment for {needs}: {' '.join(ended.stderr.split())[-400:]}")
    done.write_text(needs + (ROOT / "pyproject.toml").read_text())
    return python
