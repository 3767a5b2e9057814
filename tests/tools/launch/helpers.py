"""Configs, plans, and stand-ins for gcloud and kubectl that write down how they were called."""

import os
import stat
import subprocess
from pathlib import Path

from diloco_jax.settings.text import load
from diloco_jax.tools.launch.launcher import Plan
from diloco_jax.tools.launch.sites import WAYS
from diloco_jax.tools.launch.write import write
from tests.limits import HANGS_S

TESTDATA = Path(__file__).parent / "testdata"
CONFIGS = Path(__file__).parents[3] / "configs"

# Every call is words ended by NUL, the last of them a record separator. What is "there" is what $THERE says: all, or
# nothing.
RECORD = "\x1e\0"
GPU = ("--islands.each", "{}", "--islands.devices", "4", "--islands.hosts", "2", "--gpu.accelerator", "H100")
PATHWAYS = ("--islands.each", "{}", "--islands.topology", "v5p:2x2x2", "--islands.zone", "us-east5-a")
PATHWAYS += (
    "--islands.controller",
    "single",
    "--islands.pathways",
    "True",
    "--cloud.head_machine_type",
    "n2-highmem-64",
)
STAND_IN = (TESTDATA / "stand_in.sh").read_text(encoding="utf-8")


def plan(way: str, *overrides: str) -> Plan:
    """Make the plan of testdata/small.yaml; for Pathways its islands are alike, in one place and one process."""
    alike = PATHWAYS if way == "pathways" else ()
    return WAYS[way].plan(load(TESTDATA / "small.yaml", (*alike, *overrides)))


def stand_ins(folder: Path) -> Path:
    """Make a folder with gcloud, kubectl and diloco that only write down their calls."""
    folder.mkdir(exist_ok=True)
    for name in ("gcloud", "kubectl", "diloco"):
        path = folder / name
        path.write_text(STAND_IN, encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return folder


class Stage:
    """Written plan whose scripts run with stand-ins for the cloud's commands.

    Args:
      folder: empty.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.plan, self.out, self._calls = plan, folder / "out", folder / "calls"
        self._bin = stand_ins(folder / "bin")
        write(plan, self.out, force=True)

    def environment(self, there: str = "nothing", **more: str) -> dict[str, str]:
        """Make the environment of a process that finds the stand-ins first."""
        path = f"{self._bin}{os.pathsep}{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "CALLS": str(self._calls), "THERE": there, **more}

    def run(self, *words: str, there: str = "nothing", **more: str) -> subprocess.CompletedProcess[str]:
        """Run one of the scripts."""
        self._calls.unlink(missing_ok=True)
        environment = self.environment(there, **more)
        return subprocess.run(words, cwd=self.out, env=environment, capture_output=True, text=True, timeout=HANGS_S)

    @property
    def calls(self) -> list[list[str]]:
        """List the words of every call of a stand-in since the last run began."""
        if not self._calls.exists():
            return []
        return [each.split("\0")[:-1] for each in self._calls.read_text(encoding="utf-8").split(RECORD)[:-1]]
