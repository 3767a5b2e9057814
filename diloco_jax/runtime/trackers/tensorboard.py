"""TensorBoard files without TensorFlow: a folder per group, so that islands share a chart.

tensorboardX's own SummaryWriter is a process's queue of ten events with a thread behind it; this has a thread already.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary

FOLDER = "tensorboard"


class TensorboardTracker:
    """A run's values as TensorBoard scalars over the global step: an island's local steps begin again at zero."""

    def begin(self, run: str, config: Mapping[str, Any], folder: Path) -> None:
        """Choose the folder; its files are made as groups come."""
        self._folder = folder / FOLDER
        self._writers: dict[str, Any] = {}

    def log(self, step: int, values: Mapping[str, float], group: str) -> None:
        """Write one event, and hand it to the operating system."""
        writer = self._writers.get(group)
        if writer is None:
            (self._folder / group).mkdir(parents=True, exist_ok=True)
            writer = self._writers[group] = EventsWriter(str(self._folder / group / "events"))
        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        writer.write_event(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))
        writer.flush()

    def close(self) -> None:
        """Close every file."""
        for writer in self._writers.values():
            writer.close()
