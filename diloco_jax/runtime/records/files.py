"""Names in a run's folder (README.md says what they hold)."""

import re
from pathlib import Path

RUN_DIRS_MAX = 10_000

CONFIG_FILE = "config.yaml"  # resolved settings
ADDRESS_FILE = "syncer.address"  # where the syncer listens
STATUS_FILE = "status.json"  # replaced twice a second
METRICS_FILE = "metrics.jsonl"
PAGE_TOKEN = "page.token"  # behind the # of the page's address
TAPE_FILE = "tape.jsonl"  # inputs of the syncer machine, written ahead
# Locks: of the process that writes tape, snapshots and status, and of the one that starts it (folder_lock.py).
SYNCER_LOCK, SUPERVISOR_LOCK = "syncer.lock", "supervisor.lock"
CLOCK_FILE = "clock.json"  # when the run began
SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"
CHECKPOINTS = "checkpoints"
STATES = "states"  # what each host of an island saved of itself
TAPES = "tapes"  # what each learner did
OFFERED = "offered"  # the initial model, if an island brought it
LOGS = "logs"
HEALTH = "health"  # signs of life of each process, for probes (pulse.py)
PROFILES = "profiles"  # what jax.profiler wrote of some steps of an island
PROGRAMS = "programs"  # compiled ones, so that a process that starts again need not compile


def new_run_dir(runs_dir: Path, name: str) -> Path:
    """Return a folder that does not exist yet: NAME, else NAME-2, NAME-3, ..."""
    for number in range(1, RUN_DIRS_MAX + 1):
        path = runs_dir / (name if number == 1 else f"{name}-{number}")
        if not path.exists():
            return path
    raise ValueError(f"{runs_dir} holds {RUN_DIRS_MAX} runs named {name}; delete some, or choose another name")


def newest_run_dir(runs_dir: Path, name: str) -> Path:
    """Return the folder of the run of this name that was active last; ValueError if there is none that has begun."""
    numbered = re.compile(re.escape(name) + r"(-[0-9]{1,5})?")
    folders = [p for p in runs_dir.iterdir() if numbered.fullmatch(p.name)] if runs_dir.is_dir() else []
    begun = [p for p in folders if (p / TAPE_FILE).exists()]
    if not begun:
        raise ValueError(f"{runs_dir} holds no run named {name} that could go on; name its folder with --run-dir")
    return max(begun, key=lambda p: ((p / TAPE_FILE).stat().st_mtime_ns, p.name))
