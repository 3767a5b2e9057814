"""The history of a run: whether its folder has a tape, the names of its snapshots, and what those are without it.

This module is light enough for processes that read no snapshot.
"""

from pathlib import Path

from diloco_jax.runtime.records.files import CHECKPOINTS, TAPE_FILE
from diloco_jax.runtime.records.segments import closed_segments
from diloco_jax.runtime.records.tape_file import last_line

_PREFIX = "step_"


def complete(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder whose writer came to its end, newest first."""
    steps = [p for p in folder.glob(f"{_PREFIX}*") if p.is_dir() and p.name.removeprefix(_PREFIX).isdigit()]
    return sorted(steps, key=global_step_of, reverse=True)


def global_step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(_PREFIX))


def how_to_use(run_dir: Path) -> str:
    """Say how people use a snapshot from which its run cannot go on."""
    return (
        f"write the newest snapshot for other programs (diloco export {run_dir} --out MODEL) and start a new run from "
        "it in another folder (diloco train CONFIG --model.weights MODEL --run-dir NEW)"
    )


def has_begun(run_dir: Path) -> bool:
    """Return whether the tape of a run has at least one whole line; without one there is no history to continue."""
    tape = run_dir / TAPE_FILE
    try:
        return last_line(tape) is not None or bool(closed_segments(tape))
    except FileNotFoundError:
        return False


def check_history(run_dir: Path, *, rewinds: bool = False) -> None:
    """Check that a syncer may start in a folder, or go back to one of its snapshots; ValueError says why it may not."""
    if has_begun(run_dir):
        return
    tape, snapshots = run_dir / TAPE_FILE, complete(run_dir / CHECKPOINTS)
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
