"""Names in a run's folder (docs/architecture.md lists who writes what)."""

from __future__ import annotations

from pathlib import Path

RUN_DIRS_MAX = 10_000

CONFIG_FILE = "config.yaml"  # resolved settings
ADDRESS_FILE = "syncer.address"  # where the syncer listens
STATUS_FILE = "status.json"  # replaced twice a second
METRICS_FILE = "metrics.jsonl"
TAPE_FILE = "tape.jsonl"  # inputs of the syncer machine
SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"
CHECKPOINTS = "checkpoints"
LOGS = "logs"
TENSORBOARD = "tensorboard"


def new_run_dir(runs_dir: Path, name: str) -> Path:
    """A folder that does not exist yet: NAME, else NAME-2, NAME-3, ..."""
    for number in range(1, RUN_DIRS_MAX + 1):
        path = runs_dir / (name if number == 1 else f"{name}-{number}")
        if not path.exists():
            return path
    raise ValueError(f"{runs_dir} holds {RUN_DIRS_MAX} runs named {name}; delete some, or choose another name")
