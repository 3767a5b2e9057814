"""Checks before a run is resumed: its folder, and the settings that may differ.

A run's tape and snapshots mean something under the settings that they were made with. What decides nothing, such as how
often the model is evaluated or where the data lies, may change from one process to the next.
"""

from dataclasses import asdict
from pathlib import Path

from diloco_jax.runtime.records.files import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE, TAPE_FILE
from diloco_jax.runtime.records.telemetry import read_object
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import flat

MAY_CHANGE = {"runs_dir", "trackers", "callbacks", "syncer", "checkpoints", "watchdog", "transport", "evaluation"}
MAY_CHANGE_IN = {
    "data": ("evaluation", "prefetch", "tokenizer"),
    "model": ("weights",),
    "islands": ("peak_tflops", "restarts_max", "restart_delay_s", "standby"),
    "train": ("eval_every", "eval_batches", "final_eval_batches", "eval_batch_size"),
}


def check_same_run(began: RunConfig, config: RunConfig, run_dir: Path) -> None:
    """Check that a run which began with one config may go on with another; ValueError names what must not differ."""
    ours, theirs = dict(flat(asdict(began))), dict(flat(asdict(config)))
    found = []
    for name in sorted(ours.keys() | theirs.keys()):
        section, _, rest = name.partition(".")
        may_change = section in MAY_CHANGE or rest.partition(".")[0] in MAY_CHANGE_IN.get(section, ())
        of_place = section == "data" and name.endswith(".path")
        if ours.get(name) != theirs.get(name) and not (may_change or of_place):
            found.append(f"{name} is {theirs.get(name)!r}, but the run in {run_dir} began with {ours.get(name)!r}")
    if found:
        more = f", and {len(found) - 1} more settings differ" if len(found) > 1 else ""
        raise ValueError(
            f"{found[0]}{more}; go on with the run's own settings (diloco train {run_dir / CONFIG_FILE} --run-dir "
            f"{run_dir} --resume), or start a new run"
        )


def check_resumable(run_dir: Path) -> None:
    """Check that a folder holds a run that ended early; ValueError if it holds none, or one that is complete."""
    if not (run_dir / TAPE_FILE).exists():
        what = "a data-parallel run, which cannot go on" if (run_dir / METRICS_FILE).exists() else "no run"
        raise ValueError(f"{run_dir} holds {what}; leave out --resume, or name another folder with --run-dir")
    try:
        summary = read_object(run_dir / SUMMARY_FILE)
    except (OSError, ValueError):
        return  # it was killed, perhaps while it wrote this
    if summary.get("complete"):
        raise ValueError(f"{run_dir} holds a run that is complete; leave out --resume to start another one")
