"""The closing lines of a run: how far it came, its alarms, and the command that continues it or trains it longer."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco_jax.runtime.records.files import (
    SUMMARY_FILE,
    has_begun,
    longer_command,
    longer_options,
    resume_command,
)
from diloco_jax.settings.run import RunConfig
from diloco_jax.tools.terminal.words import alarm_line, ended_lines, scores_text, stands

ALARMS_SHOWN = 8


def ending(summary: Mapping[str, Any], config: RunConfig) -> str:
    """Describe how far a run came, and its newest evaluation."""
    loss, scores = summary["eval_loss"], scores_text(summary["eval_scores"])
    own = config.model.own
    if loss is not None:
        evaluation = f"evaluation loss {loss:.4f}{scores}"
    elif summary.get("evaluated", True):
        evaluation = f"evaluation loss not finite{scores}"
    elif summary["complete"]:
        evaluation = "no evaluation" + (": the loops give join() no evaluate=" if own else ", see the alarms")
    else:
        evaluation = "before the first evaluation"
    steps, spent = summary["global_steps"], f"{summary['tokens']:,} tokens in {summary['wall_s']:.0f} s"
    if summary.get("epoch", 1) > 1:
        # The run's clock counts the time between two processes too.
        spent += " with pauses"
    if summary["complete"]:
        # A short run may end before a slowly starting island was merged once.
        idle = [name for name, each in summary.get("learners", {}).items() if not each["participation"]]
        never = f"; never merged: {', '.join(idle)}" if idle else ""
        merged, count = summary.get("contributors_per_round"), len(summary.get("learners", {}))
        # A low share explains a high loss: a round of one island is a global step as well.
        share = f"; {merged:.2f} of {count} islands per round" if merged and count > 1 else ""
        return f"complete: {evaluation} after {steps} global steps and {spent}{share}{never}"
    of = f" of {config.train.steps}" if config.train.steps and not config.train.tokens else ""
    return f"stopped after {steps}{of} global steps and {spent}, {evaluation}"


def alarm_lines(summary: Mapping[str, Any], run_dir: Path) -> list[str]:
    """Return a line for each alarm of a run that has ended: those that still stood, then the others."""
    lines = [alarm_line(alarm) for alarm in summary["alarms"] if stands(alarm)]
    if more := lines[ALARMS_SHOWN:]:
        lines[ALARMS_SHOWN:] = [f"and {len(more)} more alarms in {run_dir / SUMMARY_FILE}"]
    return [*lines, *ended_lines(summary["alarms"])]


def onward(summary: Mapping[str, Any], config: RunConfig, run_dir: Path, program: str = "train") -> str:
    """Return a line with the command that continues a run or trains it longer; "" if the run never began.

    Args:
        program: the command of `diloco` that runs the syncer, `train` or `syncer`.
    """
    if summary["complete"]:
        # Islands with a built-in loop have a separate copy of the config.
        same = f"; then start each island again, with {shlex.join(longer_options(config.limits))} after its command"
        same *= program == "syncer" and not config.model.own
        return f"to train longer: {longer_command(run_dir, config.limits, program)}{same}"
    if not has_begun(run_dir):
        return ""
    # A supervisor starts its islands itself.
    again = "; then start each island again, because they ended with the syncer" if program == "syncer" else ""
    return f"to continue: {resume_command(run_dir, program)}{again}"
