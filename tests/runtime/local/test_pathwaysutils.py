"""The tests of Pathways with the package pathwaysutils itself, in a separate environment."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.runtime.helpers import ROOT

PACKAGE = "pathwaysutils[gke]>=0.1.13"
PLACE = Path.home() / ".cache" / "diloco-trainers" / "pathways"
TESTS = ("tests/runtime/local/test_pathways.py", "tests/tools/launch/test_pathways.py")


@pytest.fixture(scope="module")
def python() -> Path:
    """Make the environment, which sees this one's packages; skips where no registry answers."""
    python = PLACE / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", PLACE], check=True)
    site = PLACE / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    (site / "base.pth").write_text("\n".join([sysconfig.get_paths()["purelib"], *sys.path[1:]]), encoding="utf-8")
    made = subprocess.run([python, "-m", "pip", "install", "-q", PACKAGE], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"{PACKAGE} cannot be installed: {made.stderr.strip().splitlines()[-1]}")
    return python


@pytest.mark.trainers
@pytest.mark.net
def test_the_package_agrees_with_its_stand_in(python: Path) -> None:
    words = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "-m", "", "-rs", *TESTS]
    done = subprocess.run(words, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout, done.stdout[-2000:]
