"""Counts that a syncer reads from the status of the process before it.

This module is separate from status.py because it imports the alarms, which would slow `diloco status`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from diloco_jax.protocol.watch.alarms import Standing
from diloco_jax.runtime.records.status import last_status


class Earlier(NamedTuple):
    """Facts that only the status of an earlier process has; they may be half a second old."""

    wire: dict[str, int]
    eval_loss: float | None
    episodes: Sequence[Standing] = ()
    # Global step of the evaluated model.
    eval_step: int | None = None
    # Requests to a bucket and their bytes, by name; {} without a bucket.
    requests: Mapping[str, int] = MappingProxyType({})
    # Bytes from and to each island.
    by_island: Mapping[str, Mapping[str, int]] = MappingProxyType({})
    # Results of the newest evaluation beside its loss, by name; None if not finite.
    eval_scores: Mapping[str, float | None] = MappingProxyType({})


NOTHING_EARLIER = Earlier({"up_bytes": 0, "down_bytes": 0}, None)


def read_earlier(run_dir: Path) -> Earlier:
    """Return the counts of the last process that wrote this folder's status; zeros if the status cannot be read."""
    said = last_status(run_dir)
    try:
        wire = _both_ways(said["wire"])
        episodes = [Standing.of(told) for told in said.get("episodes", ())]
        # Statuses of older versions do not have these keys.
        by_island = {str(name): _both_ways(moved) for name, moved in said["wire"].get("by_island", {}).items()}
        requests = {str(name): int(count) for name, count in said.get("requests", {}).items()}
        scores = dict(said.get("eval_scores", {}))
        step = said.get("eval_step")
        return Earlier(wire, said["eval_loss"], episodes, step, requests, by_island, scores)
    except (ValueError, KeyError, TypeError, AttributeError):
        return NOTHING_EARLIER


def _both_ways(wire: Mapping[str, Any]) -> dict[str, int]:
    return {key: int(wire[key]) for key in ("up_bytes", "down_bytes")}
