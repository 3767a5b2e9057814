"""Return of a stopped run to an older snapshot by choice.

A run that resumes continues from its newest snapshot (runtime/syncer/begin.py). So everything newer moves into a
separate folder: the snapshots, the states that islands saved since then, and the summary of a complete run. The tape
stays whole. A file in the run's folder tells the next syncer to go back, and the syncer deletes this file once the tape
records it.
"""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from diloco_jax.runtime.records.files import (
    CHECKPOINTS,
    HEALTH,
    METRICS_FILE,
    REWIND_FILE,
    SAMPLE_FILE,
    STATES,
    SUMMARY_FILE,
    SUPERVISOR_LOCK,
    SYNCER_LOCK,
    complete_checkpoints,
    global_step_of,
    has_begun,
    new_run_dir,
)
from diloco_jax.runtime.records.folder_lock import FolderLock, refuse_if_locked
from diloco_jax.runtime.records.telemetry import read_metrics, replace_text

# Start of the name of each folder with what became void.
KEPT = "before_rewind_to_"
# Snapshots that an error names.
NAMED_MAX = 8
# The files of a state that an island saved (runtime/island/saved_states.py).
_SAVED = re.compile(r"step_(\d+)\.\w+")


class SnapshotFacts(NamedTuple):
    """A snapshot that a run can go back to.

    Attributes:
        loss: newest evaluation loss of the global model up to this global step; None without an evaluation.
    """

    global_step: int
    written_unix_s: float
    loss: float | None


def list_snapshots(run_dir: Path) -> list[SnapshotFacts]:
    """List the snapshots of a run, the newest first.

    Raises:
        ValueError: the folder holds no run that has started.
    """
    if not has_begun(run_dir):
        raise ValueError(f"{run_dir} holds no run that has started; name the folder of a run, such as runs/NAME")
    losses = dict[int, float]()
    with suppress(OSError):
        for record in read_metrics(run_dir / METRICS_FILE):
            if record.get("kind") == "eval" and isinstance(loss := record.get("loss"), int | float):
                _forget_later(losses, step := int(record["global_step"]))
                losses[step] = loss
    return [
        SnapshotFacts(step, path.stat().st_mtime, losses[max(before)] if (before := _up_to(losses, step)) else None)
        for path in complete_checkpoints(run_dir / CHECKPOINTS)
        for step in [global_step_of(path)]
    ]


def _up_to(losses: dict[int, float], global_step: int) -> list[int]:
    return [step for step in losses if step <= global_step]


def _forget_later(losses: dict[int, float], global_step: int) -> None:
    """Remove the losses of rounds that became void when the run went back before `global_step`."""
    for step in [each for each in losses if each >= global_step]:
        del losses[step]


def go_back(run_dir: Path, global_step: int, states: Path | None = None) -> list[Path]:
    """Make the snapshot of a global step the newest one of a stopped run.

    Args:
        states: folder outside the run's where its islands save their states, too; None if there is none.

    Returns:
        The folders with everything newer; moved back from there, it counts again. The run's folder has one, and so has
        each other file system, because a rename works within one only. Empty if nothing is newer.

    Raises:
        ValueError: there is no such snapshot, the folder holds no run, or a process of the run uses the folder.
    """
    steps = [facts.global_step for facts in list_snapshots(run_dir)]
    if global_step not in steps:
        listed = ", ".join(map(str, steps[:NAMED_MAX])) + ", ..." * (len(steps) > NAMED_MAX)
        raise ValueError(
            f"{run_dir} has no snapshot of global step {global_step}; "
            + (
                f"choose one of {listed}"
                if steps
                else "it has none at all, and protocol.snapshot_every decides how often one is written"
            )
        )
    refuse_if_locked(run_dir, SUPERVISOR_LOCK)
    refuse_if_locked(run_dir, SYNCER_LOCK)
    for lock in sorted((run_dir / HEALTH).glob("*.lock")):
        refuse_if_locked(run_dir, f"{HEALTH}/{lock.name}")
    with FolderLock(run_dir, SYNCER_LOCK):
        # The file has no effect until this snapshot is the newest one.
        replace_text(run_dir / REWIND_FILE, f"{global_step}\n")
        return _move(_newer(run_dir, global_step, states), f"{KEPT}{global_step}")


class _Newer(NamedTuple):
    """A file or folder that is newer than a snapshot.

    Attributes:
        root: folder on the same file system that gets the folder with what became void.
    """

    path: Path
    root: Path


def _newer(run_dir: Path, global_step: int, states: Path | None) -> list[_Newer]:
    """List what is newer than a global step, so that a move that ends early leaves the newest snapshots out first."""
    root = _root(run_dir / CHECKPOINTS, run_dir)
    snapshots = complete_checkpoints(run_dir / CHECKPOINTS)
    found = [_Newer(path, root) for path in snapshots if global_step_of(path) > global_step]
    for folder in (run_dir / STATES, states):
        if folder is None or not folder.is_dir():
            continue
        root = _root(folder, run_dir)
        for path in sorted(folder.rglob("step_*")):
            kept = path.relative_to(folder).parts[0].startswith(KEPT)
            if not kept and (saved := _SAVED.fullmatch(path.name)) and int(saved[1]) > global_step:
                found.append(_Newer(path, root))
    ended = [run_dir / name for name in (SUMMARY_FILE, SAMPLE_FILE)]
    return found + [_Newer(path, run_dir) for path in ended if path.exists()]


def _root(folder: Path, run_dir: Path) -> Path:
    """Return the run's folder if `folder` is below it and on its file system, else `folder` itself."""
    below = folder.is_relative_to(run_dir) and folder.stat().st_dev == run_dir.stat().st_dev
    return run_dir if below else folder


def _move(found: list[_Newer], name: str) -> list[Path]:
    targets = {root: new_run_dir(root, name) for _, root in found}
    for path, root in found:
        place = targets[root] / path.relative_to(root)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.rename(path, place)
    return list(targets.values())
