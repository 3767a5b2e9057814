"""Metrics of an island: all that its steps report, its speed and its memory, about once per second to whoever asks.

What a step reports is averaged over the steps since the last time. Names are bounded for the life of a learner, so that
a name with a number in it cannot fill trackers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from diloco_jax.protocol.messages import METRIC_LENGTH_MAX, METRICS_MAX
from diloco_jax.runtime.trackers.aside import Aside, close_all
from diloco_jax.runtime.trackers.load import callbacks_with
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.slices import DEVICE_PEAK_FLOPS
from diloco_jax.training.flops import model_flops
from diloco_jax.training.island import Island

EVERY_S = 1.0
OWN = ("step_s", "tokens_per_s", "model_flops_per_s", "mfu", "device_bytes", "device_bytes_peak", "host_bytes")
NAMES_MAX = METRICS_MAX - len(OWN)  # of what steps report

log = logging.getLogger(__name__)


class IslandMetrics:
    """Sums of what an island's steps reported. One thread.

    Args:
        island: its name.
        devices: of the island; those of this process are asked for their memory.
        flops_per_token: that the model needs, 0 if nobody knows.
        peak_flops: operations per second of all its devices, 0 if nobody knows.
        callbacks: classes with `on_step`, by name; called for every step, in threads of their own.
    """

    def __init__(
        self,
        island: str,
        devices: Sequence[jax.Device],
        flops_per_token: float = 0.0,
        peak_flops: float = 0.0,
        callbacks: Mapping[str, type] | None = None,
    ) -> None:
        self._island = island
        self._devices = [device for device in devices if device.process_index == jax.process_index()]
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops
        self._asides = [Aside(name, make) for name, make in (callbacks or {}).items()]
        self._names: set[str] = set()
        self._warned = False
        self._sums: dict[str, tuple[float, int]] = {}
        self._tokens, self._busy_s, self._steps, self._due_s = 0, 0.0, 0, 0.0

    def step(self, local_step: int, metrics: Mapping[str, Any], took_s: float, tokens: int) -> None:
        """Count a step.

        Args:
            local_step: its number.
            metrics: name -> scalar.
            took_s: how long it took.
            tokens: that it trained on.
        """
        values = {name: value for name, given in metrics.items() if (value := self._admit(name, given)) is not None}
        for name, value in values.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = (total + value, count + 1)
        self._tokens, self._busy_s, self._steps = self._tokens + tokens, self._busy_s + took_s, self._steps + 1
        for aside in self._asides:
            aside.call("on_step", self._island, local_step, {**values, "step_s": took_s})

    def _admit(self, name: str, given: Any) -> float | None:
        """Return the value of a metric, None if it cannot be taken; the first of these is told."""
        why = ""
        if name not in self._names and len(self._names) >= NAMES_MAX:
            why = f"has no room: a learner reports at most {NAMES_MAX} names; use fewer, without numbers in them"
        elif not isinstance(name, str) or not 0 < len(name) <= METRIC_LENGTH_MAX:
            why = f"has no usable name: use 1 to {METRIC_LENGTH_MAX} characters"
        try:
            value = float(given)
        except (TypeError, ValueError) as error:
            why, value = why or f"is no scalar: {error}", 0.0
        if not why:
            self._names.add(name)
            return value
        if not self._warned:
            log.warning(f"the metric {str(name)[:METRIC_LENGTH_MAX]!r} {why}; it is left out, as others like it")
        self._warned = True
        return None

    def due(self, now_s: float) -> dict[str, float] | None:
        """Return means over the steps since the last time, and what they cost; None if it is too early."""
        if not self._steps or now_s < self._due_s:
            return None
        values = {name: total / count for name, (total, count) in self._sums.items()}
        rate = self._tokens / max(self._busy_s, 1e-9)
        flops_per_s = rate * self._flops_per_token
        values |= {"step_s": self._busy_s / self._steps, "tokens_per_s": rate}
        values |= {"model_flops_per_s": flops_per_s} if flops_per_s else {}
        values |= {"mfu": flops_per_s / self._peak_flops} if flops_per_s and self._peak_flops else {}
        self._sums.clear()
        self._tokens, self._busy_s, self._steps, self._due_s = 0, 0.0, 0, now_s + EVERY_S
        return values | device_memory(self._devices) | host_memory()

    def close(self) -> None:
        """Let callbacks end."""
        close_all(self._asides)


def device_memory(devices: Sequence[Any]) -> dict[str, float]:
    """Return the bytes in use, and the most that were, on the fullest device; nothing where a backend does not tell."""
    try:
        told = [stats for device in devices if (stats := device.memory_stats())]
    except Exception:  # a backend that cannot tell says so in its own way
        return {}
    keys = {"device_bytes": "bytes_in_use", "device_bytes_peak": "peak_bytes_in_use"}
    return {
        name: float(max(stats[key] for stats in told))
        for name, key in keys.items()
        if told and all(key in stats for stats in told)
    }


def host_memory() -> dict[str, float]:
    """Return the bytes of this process in memory; nothing where the system has no /proc."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return {}
    return {"host_bytes": float(int(pages) * os.sysconf("SC_PAGE_SIZE"))}


def metrics_of(config: RunConfig, name: str, island: Island) -> IslandMetrics:
    """Return the metrics of an island that trains the run's model.

    Raises:
        ValueError: a callback cannot be loaded.
    """
    batch, seq_len, devices = config.island(name).batch_size, config.train.seq_len, list(island.mesh.devices.flat)
    flops = model_flops(config.model, island.shapes, batch, seq_len).flops
    peak = config.islands.peak_tflops * 1e12 or DEVICE_PEAK_FLOPS.get(devices[0].device_kind, 0.0)
    callbacks = callbacks_with("on_step", config.callbacks)
    return IslandMetrics(name, devices, flops / (batch * seq_len), peak * len(devices), callbacks)
