"""The facts that figures are computed from: those of one island, and those of a run.

They come from `status.json`, from `summary.json`, or straight from the syncer. All of these are mappings with the names
of the fields below. A fact that a mapping lacks is None, so that files of older versions can be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandFacts:
    """One island's entry in the `learners` of a status.

    Attributes:
        state: joining, active, silent or gone.
        condition: a word of protocol/watch/health.py, with `reason` and the seconds since it began.
        finished: whether the island trained until the end of a complete run.
        mean_tokens_per_s: speed over all its steps.
        staleness: global steps that the island is behind.
        broadcast_s: time that a new version takes to the island.
        drift_norm_ratio: length of its contributions over the median of their rounds, moving average (core/drift.py).
        drift_cosine: cosine of its contributions with the others' mean direction, moving average.
        up_bytes: bytes from the island, over all its hosts; a status and a summary have it in `wire.by_island`.
        down_bytes: bytes to the island.
        up_bytes_per_s: bytes from the island per second, lately.
        down_bytes_per_s: bytes to the island per second, lately.
        metrics: the newest values that the island measured itself, by name (docs/metrics.md).
    """

    learner: str
    state: str = ""
    condition: str = ""
    reason: str = ""
    since_s: float | None = None
    finished: bool | None = None
    local_step: int | None = None
    tokens: int | None = None
    tokens_per_s: float | None = None
    mean_tokens_per_s: float | None = None
    loss: float | None = None
    step_s: float | None = None
    staleness: int | None = None
    broadcast_s: float | None = None
    last_merged_round: int | None = None
    participation: float | None = None
    restarts: int | None = None
    drift_norm_ratio: float | None = None
    drift_cosine: float | None = None
    up_bytes: int | None = None
    down_bytes: int | None = None
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> IslandFacts:
        """Return the facts of an entry of `learners`; a summary calls the steps `local_steps`."""
        known = {"local_step": row.get("local_steps"), **row}
        return cls(**{name: known[name] for name in _ISLAND_NAMES if name in known})

    def measured(self, name: str) -> float | None:
        """Return the newest value that the island measured under this name; None if it has none."""
        return self.metrics.get(name)


_ISLAND_NAMES = tuple(each.name for each in fields(IslandFacts))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """A run as a whole.

    Attributes:
        tokens_per_s: speed now as a status tells it; None where the islands' speeds give it.
        merged_parts: values in merged rounds; per round, its contributors.
        data_parallel_bytes: what averaging gradients in every step would have moved.
        span_s: time since the first inner step of the run.
        round_s: time from one merge to the next, lately.
    """

    global_step: int | None = None
    total_steps: int | None = None
    wall_s: float | None = None
    span_s: float | None = None
    round_s: float | None = None
    tokens: int | None = None
    tokens_per_s: float | None = None
    merged_tokens: int | None = None
    merged_rounds: int | None = None
    merged_parts: int | None = None
    contributors_per_round: float | None = None
    eval_loss: float | None = None
    eval_bits_per_byte: float | None = None
    goodput: float | None = None
    uptime: float | None = None
    waiting_for_data: float | None = None
    steps_per_round: float | None = None
    up_bytes: int | None = None
    down_bytes: int | None = None
    data_parallel_bytes: int | None = None
    islands: tuple[IslandFacts, ...] = ()

    @classmethod
    def of(cls, *sources: Mapping[str, Any]) -> RunFacts:
        """Return the facts of a status, a summary or both; a known fact of a later source replaces an earlier one."""
        known: dict[str, Any] = {}
        for source in sources:
            wire = source.get("wire", {})
            found = {"global_step": source.get("global_steps"), **source, **wire}
            if learners := source.get("learners"):
                found["islands"] = _islands(learners, wire.get("by_island", {}))
            known |= {each.name: found[each.name] for each in fields(cls) if found.get(each.name) is not None}
        return cls(**known)


def _islands(learners: Any, moved: Mapping[str, Mapping[str, int]]) -> tuple[IslandFacts, ...]:
    """Return the islands of a status, which lists them, or of a summary, which has them by name.

    Args:
        moved: bytes from and to each island, by name.
    """
    if isinstance(learners, Mapping):
        learners = [{"learner": name, **row} for name, row in learners.items()]
    return tuple(IslandFacts.of({**row, **moved.get(row["learner"], {})}) for row in learners)
