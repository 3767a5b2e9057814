"""Write a plan's files into a folder, and run its commands if somebody asked for that."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from diloco_jax.tools.launch import gke, gpu, vms
from diloco_jax.tools.launch.launcher import HEADER, Launcher, Plan

GOOGLE = (gke.LAUNCHER, vms.GCE, vms.TPU_VM)
WAYS: dict[str, Launcher | gpu.GpuLauncher] = {way.name: way for way in (*GOOGLE, gpu.SLURM, gpu.SKY)}
MARK = "variables.sh"  # a folder with this file was written by us
TOOLS = {  # what scripts call, and where it comes from
    "gcloud": "install the Google Cloud CLI",
    "kubectl": "gcloud components install kubectl gke-gcloud-auth-plugin",
    "sbatch": "call it on a login node of the cluster",
    "sky": "pip install skypilot",
}
OUTPUT_MAX = 4000  # characters of a failed command's output in the message


def write(plan: Plan, folder: Path, *, force: bool) -> list[Path]:
    """Write the files, over an earlier launch's with `force`; return their paths. ValueError if others are there."""
    if there := next((each for each in (folder, *folder.parents) if each.exists() and not each.is_dir()), None):
        raise ValueError(f"--out is {folder}, but {there} is no folder; choose another --out")
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / MARK).exists():
            raise ValueError(f"--out is {folder}, which holds files that are not of a launch; choose another --out")
        if not force:
            raise ValueError(f"{folder} is not empty; --force overwrites what is there, or choose another --out")
    for name, text in plan.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if text.startswith(HEADER):
            path.chmod(0o755)
    return [folder / name for name in plan.files]


def check_tools(plan: Plan) -> None:
    """Look for what the scripts call, before anything is made; ValueError if it is not in PATH."""
    scripts = "".join(text for text in plan.files.values() if text.startswith(HEADER))
    missing = [name for name in TOOLS if f"{name} " in scripts and shutil.which(name) is None]
    if missing:
        remedies = "; ".join(TOOLS[name] for name in missing)
        raise ValueError(
            f"--run calls {' and '.join(missing)}, not found in PATH; {remedies}, or write the files with --out only"
        )


def run(plan: Plan, folder: Path, say: Callable[[str], None]) -> None:
    """Run the commands in the folder of the files; `say` gets what they print. ConnectionError if one fails."""
    own = str(Path(sys.executable).parent)  # `diloco` is there, if the environment is not active
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
                f"Correct the cause and run {folder}/create.sh, which makes only what is missing; or undo what the "
                f"commands before it made: {folder}/delete.sh"
            )


def describe(plan: Plan) -> str:
    """Write the files as text, for people who only want to look."""
    parts = [f"==> {name} <==\n{text}" for name, text in plan.files.items()]
    commands = "\n".join(f"  {line}" for line in plan.create)
    return "\n".join(parts) + f"\nNothing was written or run. --out DIR writes these files; --run also runs\n{commands}"
