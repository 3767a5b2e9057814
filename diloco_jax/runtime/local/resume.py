"""Checks before a run is resumed: its folder, and the settings that may differ.

A run's tape and snapshots are valid only with the settings of the run. Settings without effect on decisions, such as
the frequency of evaluations or the place of the data, may change from one process to the next. The limits of a run
(train.steps, train.tokens) may be raised when it returns to a snapshot; the tape then records it (`raise_limits`).
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from diloco_jax.protocol.syncer.progress import Limits
from diloco_jax.protocol.syncer.tape import limits_after, limits_line
from diloco_jax.runtime.records.files import (
    CONFIG_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    TAPE_FILE,
    check_history,
    has_begun,
    longer_command,
    resume_command,
)
from diloco_jax.runtime.records.tape_file import LineFile, last_time_s, read_lines
from diloco_jax.runtime.records.telemetry import read_object
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import flat, load

MAY_CHANGE = {"runs_dir", "trackers", "callbacks", "syncer", "checkpoints", "watchdog", "transport", "evaluation"}
MAY_CHANGE_IN = {
    "data": ("evaluation", "prefetch", "tokenizer"),
    "model": ("weights",),
    "islands": (
        "peak_tflops",
        "restarts_max",
        "restart_delay_s",
        "standby",
        "slices_least",
        "straggler_s",
        "ray",
        "resources",
    ),
    "train": ("eval_every", "eval_batches", "final_eval_batches", "eval_batch_size"),
}
LIMITS = ("train.steps", "train.tokens")


def check_same_run(
    began: RunConfig, config: RunConfig, run_dir: Path, *, rewinds: bool = False, program: str = "train"
) -> None:
    """Check that a run which started with one config may resume with another; ValueError names a setting that differs.

    Args:
        rewinds: whether the run returns to a snapshot, so that it may get higher limits.
        program: the command of `diloco` that resumes the run, `train` or `syncer`.
    """
    ours, theirs = dict(flat(asdict(began))), dict(flat(asdict(config)))
    found = []
    for name in sorted(ours.keys() | theirs.keys()):
        section, _, rest = name.partition(".")
        may_change = section in MAY_CHANGE or rest.partition(".")[0] in MAY_CHANGE_IN.get(section, ())
        of_place = section == "data" and name.endswith(".path")
        raised = rewinds and name in LIMITS and config.limits.above(began.limits)
        if ours.get(name) != theirs.get(name) and not (may_change or of_place or raised):
            found.append(f"{name} is {theirs.get(name)!r}, but the run in {run_dir} started with {ours.get(name)!r}")
    if found:
        more = f", and {len(found) - 1} more settings differ" if len(found) > 1 else ""
        raise ValueError(
            f"{found[0]}{more}; continue with the run's own settings ({resume_command(run_dir, program)}), or "
            "start a new run"
        )


def check_no_run(run_dir: Path) -> None:
    """Check that a new run may start in a folder; ValueError if it holds one already."""
    if has_begun(run_dir):
        raise ValueError(
            f"{run_dir} holds a run already; continue it (--resume), choose another --run-dir, or remove that folder"
        )
    check_history(run_dir)
    if _has_records(run_dir):
        raise ValueError(
            f"{run_dir} holds a run already, which cannot continue; choose another --run-dir, or remove that folder"
        )


def check_resumable(run_dir: Path, config: RunConfig) -> None:
    """Check that the run in a folder can continue to the limits of a config; ValueError has the reason if it cannot."""
    check_history(run_dir)
    if not has_begun(run_dir):
        what = "no run that has started"
        if _has_records(run_dir):
            lost = (run_dir / TAPE_FILE).exists()
            what = "a run whose tape is empty" if lost else "a data-parallel run"
            what += ", which cannot continue"
        raise ValueError(f"{run_dir} holds {what}; leave out --resume, or name another folder with --run-dir")
    try:
        summary = read_object(run_dir / SUMMARY_FILE)
    except (OSError, ValueError):
        # The run was killed, perhaps while it wrote the summary.
        return
    if summary.get("complete") and not _allows_more(config.limits, summary):
        raise ValueError(
            f"{run_dir} holds a run that is complete, after {summary.get('global_steps')} global steps; train it "
            f"longer ({longer_command(run_dir, config.limits)}), or leave out "
            "--resume and name another folder with --run-dir to start a new one"
        )


def _has_records(run_dir: Path) -> bool:
    metrics = run_dir / METRICS_FILE
    return metrics.exists() and metrics.stat().st_size > 0


def _allows_more(limits: Limits, summary: Mapping[str, Any]) -> bool:
    steps, tokens = int(summary.get("global_steps") or 0), int(summary.get("merged_tokens") or 0)
    return limits.allow(steps + 1, tokens)


def config_of_run(run_dir: Path) -> RunConfig:
    """Load the config in a run's folder; ValueError if the file lost its content."""
    path = run_dir / CONFIG_FILE
    check_content(path)
    return load(path)


def check_content(path: Path) -> None:
    """Check that the config of a run's folder has content; an empty file would silently mean the defaults."""
    if path.exists() and not path.read_bytes().strip():
        raise ValueError(
            f"{path} is empty: the settings of this run are lost there; write them back from the config that the run "
            f"started with (cp CONFIG.yaml {path})"
        )


def raise_limits(run_dir: Path, began: Limits, limits: Limits) -> None:
    """Record new limits of the run on its tape, before its config has them; do nothing if the tape has them already.

    Only the process that holds the locks of the folder may call it.
    """
    before = limits_after(read_lines(run_dir / TAPE_FILE)) or began
    if before == limits:
        return
    tape = LineFile(run_dir / TAPE_FILE)
    try:
        tape.append(limits_line(before, limits, last_time_s(run_dir / TAPE_FILE) or 0.0).encode() + b"\n")
    finally:
        tape.close()
