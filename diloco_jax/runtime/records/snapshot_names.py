"""Names of snapshots, and of other checkpoints, in their folder; light enough for processes that read none of them."""

from pathlib import Path

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
