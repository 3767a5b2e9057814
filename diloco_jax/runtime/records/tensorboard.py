"""Records of a run as TensorBoard scalars, without TensorFlow.

tensorboardX's own SummaryWriter is a thread behind a queue of ten events: a slow disk would stall the thread that runs
the protocol. So this writes events itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary

GLOBAL = "global"  # sub-folder of the scalars that belong to no single learner


class Scalars:
    """Turns records into TensorBoard scalars over the global step, under the names that MaxText users know.

    Every learner's scalars use the global step too: local steps start again at zero with each incarnation.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, Any] = {}
        self._last: dict[str, tuple[float, int]] = {}  # learner -> time and tokens of its newest record

    def write(self, record: Mapping[str, Any]) -> None:
        """Add the scalars of one record."""
        kind = record["kind"]
        if kind == "step":
            values = {"learning/loss": record["loss"], "perf/step_time_seconds": record["step_s"]}
            values["perf/tokens_per_sec"] = self._tokens_per_s(record)
            self._add(record["learner"], record["global_step"], values)
        elif kind == "merged":
            self._add(GLOBAL, record["global_step"], {"diloco/contributors": len(record["members"])})
        elif kind == "wire":
            values = {"wan/up_bytes": record["up_bytes"], "wan/down_bytes": record["down_bytes"]}
            self._add(GLOBAL, record["global_step"], values)
        elif kind == "eval":
            values = {"evaluation/loss": record["loss"], "evaluation/bits_per_byte": record["bits_per_byte"]}
            values |= {"learning/tokens": record["tokens"]}
            values |= {f"evaluation/{name}": value for name, value in record.get("scores", {}).items()}
            self._add(GLOBAL, record["global_step"], values)

    def _tokens_per_s(self, record: Mapping[str, Any]) -> float | None:
        t, tokens = record["t"], record["tokens"]
        before_t, before_tokens = self._last.get(record["learner"], (t, tokens))
        self._last[record["learner"]] = (t, tokens)
        return (tokens - before_tokens) / (t - before_t) if t > before_t else None

    def _add(self, name: str, global_step: int, values: Mapping[str, float | None]) -> None:
        writer = self._writers.get(name)
        if writer is None:
            (self._folder / name).mkdir(parents=True, exist_ok=True)
            writer = self._writers[name] = EventsWriter(str(self._folder / name / "events"))
        scalars = [
            Summary.Value(tag=tag, simple_value=value)
            for tag, value in values.items()
            if value is not None and math.isfinite(value)
        ]
        writer.write_event(Event(wall_time=time.time(), step=global_step, summary=Summary(value=scalars)))

    def flush(self) -> None:
        """Hand every writer's events to the operating system."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Close every writer."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
