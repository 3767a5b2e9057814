"""The hand actions that a rehearsal showed to be needed, each with its evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco_jax.runtime.records.files import SUMMARY_FILE
from diloco_jax.runtime.records.telemetry import read_object

LOSS_FALLS = 0.8  # the last evaluation is below this share of the first losses
TRACE = "Traceback (most recent call last)"


def needs(
    root: Path, result: Mapping[str, Any], given_up: Sequence[str], failures: Sequence[str]
) -> dict[str, list[str]]:
    """List what somebody would have had to do, and what the run had warned of."""
    summary = root / "run" / SUMMARY_FILE
    told = read_object(summary) if summary.exists() else {}
    needed = [f"look after the run: {problem}" for problem in result["problems"]]
    needed += [f"start an island by hand: {words}" for words in given_up]
    needed += [f"renew certificates by hand: {words}" for words in failures]
    for name, row in told.get("learners", {}).items():
        if not row["participation"]:
            needed.append(f"find out why {name} was in no round")
    traces = {path.name: path.read_text(errors="replace").count(TRACE) for path in sorted((root / "logs").iterdir())}
    needed += [f"read {count} stack traces in {root / 'logs' / name}" for name, count in traces.items() if count]
    return {"needed": needed, "alarms": list(told.get("alarms", []))}
