"""The trackers and callbacks of a run, fed with its records. Neither can delay or end the run (aside.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from diloco_jax.runtime.trackers.aside import Aside, close_all
from diloco_jax.runtime.trackers.load import find_callbacks, find_trackers
from diloco_jax.settings.run import RunConfig

MERGED = "merged"  # group of what belongs to no single island
QUIET = ("step", "closed")  # records that are neither values nor events


class Outlets:
    """All of a run's trackers and callbacks, those of steps excepted: these are in the learners' processes.

    Args:
        config: the run.
        folder: of the run.

    Raises:
        ValueError: one of them cannot be loaded.
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        trackers, callbacks = find_trackers(config.trackers), find_callbacks(config.callbacks)
        self._trackers = [Aside(f"the tracker {name}", make) for name, make in trackers.items()]
        self._callbacks = [Aside(f"the callback {name}", make) for name, make in callbacks.items()]
        for tracker in self._trackers:
            tracker.call("begin", config.name, asdict(config), folder)

    def write(self, record: Mapping[str, Any]) -> None:
        """Hand on what a record tells."""
        kind, step = record["kind"], record["global_step"]
        if kind == "metrics":
            self._log(step, record["values"], f"islands/{record['learner']}")
        elif kind == "merged_metrics":
            self._log(step, record["values"], MERGED)
        elif kind == "wire":
            self._log(step, {key: record[key] for key in ("up_bytes", "down_bytes")}, MERGED)
        elif kind == "eval":
            values = {f"eval_{key}": record[key] for key in ("loss", "bits_per_byte")} | {"tokens": record["tokens"]}
            self._log(step, values, MERGED)
            self._tell("on_eval", step, values)
        elif kind == "merged":
            self._log(step, {"contributors": len(record["members"])}, MERGED)
            self._tell("on_round", step, record["fragment_id"], tuple(record["members"]))
        elif kind not in QUIET:
            who = ", ".join(record["members"]) or f"round {step}"
            self._tell("on_event", kind, f"{who} {kind}: {record['reason']}")

    def _log(self, step: int, values: Mapping[str, float | None], group: str) -> None:
        finite = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
        for tracker in self._trackers:
            tracker.call("log", step, finite, group)

    def _tell(self, method: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            callback.call(method, *arguments)

    def close(self) -> None:
        """Let all of them end what they have to do, as far as there is time."""
        for tracker in self._trackers:
            tracker.call("close")
        close_all([*self._trackers, *self._callbacks])
