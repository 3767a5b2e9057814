"""The folder of a run: the names in it, how to find it, and whether it has a history that a syncer can continue.

docs/architecture.md describes what each file holds. This module is light enough for processes that read no snapshot.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from diloco_jax.runtime.records.segments import closed_segments
from diloco_jax.runtime.records.tape_file import last_line

if TYPE_CHECKING:
    from diloco_jax.protocol.syncer.progress import Limits

RUN_DIRS_MAX = 10_000

CONFIG_FILE = "config.yaml"  # resolved settings
ADDRESS_FILE = "syncer.address"  # syncer's listener
# The numbers of islands that asked for one.
ISLANDS_FILE = "islands.json"
# The run's id in its bucket.
LEADING_FILE = "leading.json"
STATUS_FILE = "status.json"  # twice a second
METRICS_FILE = "metrics.jsonl"
# The token after the # in the page's address.
PAGE_TOKEN = "page.token"
# The inputs of the syncer's machine, written before they take effect.
TAPE_FILE = "tape.jsonl"
# Locks of the process that writes tape, snapshots and status, and of its supervisor (folder_lock.py).
SYNCER_LOCK, SUPERVISOR_LOCK = "syncer.lock", "supervisor.lock"
CLOCK_FILE = "clock.json"  # run start
# The global step of the snapshot that `diloco rewind` chose, until a syncer has gone back to it.
REWIND_FILE = "rewind"
SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"
# Text that the merged model wrote after training.
SAMPLE_FILE = "sample.txt"
CHECKPOINTS = "checkpoints"
# States that each host of an island saved of itself.
STATES = "states"
TAPES = "tapes"  # one per learner
# The initial model, if an island sent it.
OFFERED = "offered"
LOGS = "logs"
# Signs of life of each process, for probes (pulse.py).
HEALTH = "health"
# The folder of `diloco chaos`: its faults, orders to its learners, and their measurements.
CHAOS, FAULTS_FILE = "chaos", "faults.jsonl"
# Profiles of steps by jax.profiler.
PROFILES = "profiles"
# Compiled programs, so that a process that starts again need not compile.
PROGRAMS = "programs"
_STEP = "step_"


def command(*words: object) -> str:
    """Return a shell command of the `diloco` program, with its path if the shell does not find it by its name."""
    path, found = Path(sys.executable).with_name("diloco"), shutil.which("diloco")
    program = ["diloco"]
    if not path.exists():
        program = [_short(Path(sys.executable)), "-m", "diloco_jax"]
    elif found is None or not os.path.samefile(found, path):
        program = [_short(path)]
    return shlex.join([*program, *map(str, words)])


def _short(path: Path) -> str:
    """Return the shorter one of the absolute and the relative path."""
    # The current folder may have been deleted.
    with contextlib.suppress(OSError):
        return min(str(path), os.path.relpath(path), key=len)
    return str(path)


def resume_command(run_dir: Path, program: str = "train") -> str:
    """Return the shell command that resumes a run that was stopped.

    Args:
        program: the command of `diloco` that runs the syncer, `train` or `syncer`.
    """
    return command(program, run_dir / CONFIG_FILE, "--run-dir", run_dir, *["--resume"] * (program == "train"))


def longer_options(limits: Limits) -> list[str]:
    """Return the options that double the limits of a run: of its syncer, and of an island with its own config."""
    more = ["--train.tokens", str(2 * limits.tokens)] if limits.tokens else []
    return more + (["--train.steps", str(2 * limits.steps)] if limits.steps else [])


def longer_command(run_dir: Path, limits: Limits, program: str = "train") -> str:
    """Return the shell command that trains a complete run for twice as long.

    Args:
        program: the command of `diloco` that runs the syncer, `train` or `syncer`.
    """
    resumes = "--resume" if program == "train" else "--rewind"
    return command(program, run_dir / CONFIG_FILE, "--run-dir", run_dir, resumes, *longer_options(limits))


def nothing_to_do(name: str, run_dir: Path) -> str:
    """Return the text for an island of a complete run, whose syncer may be on another machine."""
    result = f"; {run_dir / SUMMARY_FILE} has its result" if (run_dir / SUMMARY_FILE).exists() else ""
    longer = "to train longer, start its syncer again with --train.steps MORE"
    longer += " (diloco train --resume, or diloco syncer --rewind)"
    return f"the run is complete, so {name} has nothing to do{result}; {longer}"


def new_run_dir(runs_dir: Path, name: str) -> Path:
    """Return a folder that does not exist yet: NAME, else NAME-2, NAME-3, ..."""
    for number in range(1, RUN_DIRS_MAX + 1):
        path = runs_dir / (name if number == 1 else f"{name}-{number}")
        if not path.exists():
            return path
    raise ValueError(f"{runs_dir} holds {RUN_DIRS_MAX} runs named {name}; delete some, or choose another name")


def newest_run_dir(runs_dir: Path, name: str) -> Path:
    """Return the folder of the newest active run of this name; ValueError if none has started."""
    numbered = re.compile(re.escape(name) + r"(-[0-9]{1,5})?")
    folders = [p for p in runs_dir.iterdir() if numbered.fullmatch(p.name)] if runs_dir.is_dir() else []
    begun = [p for p in folders if (p / TAPE_FILE).exists()]
    if not begun:
        raise ValueError(f"{runs_dir} holds no run named {name} that could continue; name its folder with --run-dir")
    return max(begun, key=lambda p: ((p / TAPE_FILE).stat().st_mtime_ns, p.name))


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, newest first."""
    steps = [p for p in folder.glob(f"{_STEP}*") if p.is_dir() and p.name.removeprefix(_STEP).isdigit()]
    return sorted(steps, key=global_step_of, reverse=True)


def global_step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(_STEP))


def rewind_chosen(run_dir: Path) -> bool:
    """Tell whether the next syncer must go back to the newest snapshot, because `diloco rewind` chose it."""
    try:
        chosen = int((run_dir / REWIND_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    # The choice does not count if someone moved the newer snapshots back.
    return [global_step_of(path) for path in complete_checkpoints(run_dir / CHECKPOINTS)[:1]] == [chosen]


def states_elsewhere(states: str, name: str) -> str:
    """Return the URL of the folder outside a run's where its islands save their states, too; "" if there is none.

    Args:
        states: the setting `checkpoints.states`.
        name: the run's name.
    """
    return "/".join((states.rstrip("/"), name)) if states else ""


def how_to_use(run_dir: Path) -> str:
    """Return the advice for a snapshot whose run cannot continue."""
    return (
        f"write the newest snapshot for other programs (diloco export {run_dir} --out MODEL) and start a new run from "
        "it in another folder (diloco train CONFIG --model.weights MODEL --run-dir NEW)"
    )


def has_begun(run_dir: Path) -> bool:
    """Tell whether the tape of a run has a whole line, so that there is a history to continue."""
    tape = run_dir / TAPE_FILE
    try:
        return last_line(tape) is not None or bool(closed_segments(tape))
    except FileNotFoundError:
        return False


def check_history(run_dir: Path, *, rewinds: bool = False) -> None:
    """Check that a syncer may start in a folder, or go back to one of its snapshots; ValueError if it may not."""
    if has_begun(run_dir):
        return
    tape, snapshots = run_dir / TAPE_FILE, complete_checkpoints(run_dir / CHECKPOINTS)
    what = "is empty" if tape.exists() else "is missing"
    if snapshots:
        raise ValueError(
            f"{tape} {what}, but {run_dir / CHECKPOINTS} holds {len(snapshots)} snapshots, the newest "
            f"{snapshots[0].name}: without its tape the run cannot continue. Put the tape back, or "
            f"{how_to_use(run_dir)}"
        )
    if rewinds:
        raise ValueError(
            f"{tape} {what}, so there is nothing to go back to; leave out --rewind to start a new run in {run_dir}, or "
            "name another folder with --run-dir"
        )
