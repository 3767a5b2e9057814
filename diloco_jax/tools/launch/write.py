"""Writing of a plan's files into a folder, and running of its commands."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from diloco_jax.tools.launch.launcher import HEADER, Plan

# The file that marks a folder as written by `diloco launch`.
MARK = "variables.sh"
# The programs that scripts call, with the way to get each.
TOOLS = {
    "gcloud": "install the Google Cloud CLI",
    "kubectl": "gcloud components install kubectl gke-gcloud-auth-plugin",
    "sbatch": "call it on a login node of the cluster",
    "sky": "pip install skypilot",
}
# The most characters of a failed command's output in a message.
OUTPUT_MAX = 4000


def write(plan: Plan, folder: Path, *, force: bool) -> list[Path]:
    """Write the files of a plan, and return their paths; with `force`, overwrite the files of an earlier launch.

    Raises:
      ValueError: the folder has other files, or an earlier launch's without `force`.
    """
    if there := next((each for each in (folder, *folder.parents) if each.exists() and not each.is_dir()), None):
        raise ValueError(f"--out is {folder}, but {there} is not a folder; choose another --out")
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / MARK).exists():
            raise ValueError(f"--out is {folder}, which has files of another origin; choose another --out")
        if not force:
            raise ValueError(f"{folder} is not empty; overwrite its files with --force, or choose another --out")
    for name, text in plan.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if text.startswith(HEADER):
            path.chmod(0o755)
    return [folder / name for name in plan.files]


def check_tools(plan: Plan) -> None:
    """Check that the programs that scripts call are in PATH; ValueError names the missing ones.

    A command of the plan that is guarded by `command -v NAME` does without the program.
    """
    scripts = "".join(text for text in plan.files.values() if text.startswith(HEADER))
    needed = [name for name in TOOLS if f"{name} " in scripts and f"command -v {name} " not in "".join(plan.create)]
    missing = [name for name in needed if shutil.which(name) is None]
    if missing:
        remedies = "; ".join(TOOLS[name] for name in missing)
        raise ValueError(
            f"--run calls {' and '.join(missing)}, not found in PATH; {remedies}, or write the files with --out only"
        )


def run(plan: Plan, folder: Path, say: Callable[[str], None]) -> None:
    """Run the commands in the folder of the files; `say` gets their output. ConnectionError if a command fails."""
    # `diloco` is in this folder, even if the environment is not active.
    own = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": os.environ.get("PATH", os.defpath) + os.pathsep + own}
    for number, line in enumerate(plan.create, 1):
        say(f"[{number}/{len(plan.create)}] {line}")
        with subprocess.Popen(
            ["bash", "-c", line],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            heard = ""
            for text in process.stdout:
                say(text.rstrip("\n"))
                heard = (heard + text)[-OUTPUT_MAX:]
        if process.returncode:
            raise ConnectionError(
                f"command {number} of {len(plan.create)}, `{line}`, ended with status {process.returncode}:\n"
                f"{heard.rstrip()}\n"
                f"Correct the cause and run {folder}/create.sh, which creates only what is missing; or run "
                f"{folder}/delete.sh, which deletes what the earlier commands created"
            )


def describe(plan: Plan) -> str:
    """Return the files and commands of a plan as text."""
    parts = [f"==> {name} <==\n{text}" for name, text in plan.files.items()]
    commands = "\n".join(f"  {line}" for line in plan.create)
    return "\n".join(parts) + f"\nNothing was written or run. --out DIR writes these files; --run also runs\n{commands}"
