"""Metrics of an island, about once per second: means of its steps' reports, its speed and its memory.

The number of names is bounded for one incarnation of a learner, so that names with a counter in them cannot fill
trackers.
"""

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from diloco_jax.protocol.messages import METRIC_LENGTH_MAX, METRICS_MAX
from diloco_jax.protocol.watch.terms import WAITING
from diloco_jax.runtime.island.host import DATA_WAIT
from diloco_jax.runtime.trackers.outlets import Aside, close_all, find_callbacks
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.slices import DEVICE_PEAK_FLOPS

EVERY_S = 1.0
# Callbacks have this long at the end.
CLOSE_S = 5.0
OWN = (
    "step_s",
    "tokens_per_s",
    "model_flops_per_s",
    "mfu",
    "device_bytes",
    "device_bytes_peak",
    "host_bytes",
    "bucket_requests",
    "damaged_payloads",
)
# Steps may report this many names; time and process need three more.
NAMES_MAX = METRICS_MAX - len(OWN) - 3

log = logging.getLogger(__name__)


class IslandMetrics:
    """Sums of the metrics of an island's steps since the last report; for one thread.

    Args:
        devices: Devices of the island; those of this process report their memory.
        flops_per_token: Floating-point operations of the model per token, 0 if unknown.
        peak_flops: Operations per second of all its devices, 0 if unknown.
        callbacks: Classes with `on_step`, by name.
    """

    def __init__(
        self,
        island: str,
        devices: Sequence[jax.Device] = (),
        flops_per_token: float = 0.0,
        peak_flops: float = 0.0,
        callbacks: Mapping[str, type] | None = None,
    ) -> None:
        self._island = island
        self._devices = [device for device in devices if device.process_index == jax.process_index()]
        self._flops_per_token, self._peak_flops = flops_per_token, peak_flops
        self._callbacks = [Aside(f"the callback {name}", make) for name, make in (callbacks or {}).items()]
        self._names: set[str] = set()
        self._warned = False
        self._sums: dict[str, tuple[float, int]] = {}
        self._tokens, self._busy_s, self._steps, self._due_s = 0, 0.0, 0, 0.0

    def step(self, local_step: int, metrics: Mapping[str, Any], took_s: float, tokens: int) -> None:
        """Add a step: its number, its metrics (name -> scalar), its seconds, and its tokens."""
        values = {name: value for name, given in metrics.items() if (value := self._admit(name, given)) is not None}
        for name, value in values.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = (total + value, count + 1)
        self._tokens, self._busy_s, self._steps = self._tokens + tokens, self._busy_s + took_s, self._steps + 1
        for callback in self._callbacks:
            callback.call("on_step", self._island, local_step, {**values, "step_s": took_s})

    def _admit(self, name: str, given: Any) -> float | None:
        """Return a metric as a number; None if it is not usable, and warn about the first such metric."""
        value, why = None, ""
        if not 0 < len(name) <= METRIC_LENGTH_MAX:
            why = f"its name has {len(name)} characters, use 1 to {METRIC_LENGTH_MAX}"
        elif name not in self._names and len(self._names) >= NAMES_MAX:
            why = f"a learner reports at most {NAMES_MAX} names, use fewer"
        else:
            try:
                value = float(given)
                self._names.add(name)
            except (TypeError, ValueError) as error:
                why = f"it is not a scalar: {error}"
        if why and not self._warned:
            log.warning(f"metric {name[:METRIC_LENGTH_MAX]!r} is left out, and others like it: {why}")
            self._warned = True
        return value

    def due(self, now_s: float) -> dict[str, float] | None:
        """Return means over the steps since the last report, speed and memory; None if it is too early."""
        if not self._steps or now_s < self._due_s:
            return None
        values = {name: total / count for name, (total, count) in self._sums.items()}
        step_s, rate = self._busy_s / self._steps, self._tokens / max(self._busy_s, 1e-9)
        if (waited_s := values.pop(DATA_WAIT, None)) is not None:
            values[WAITING] = min(1.0, waited_s / max(step_s, 1e-9))
        values |= {"step_s": step_s, "tokens_per_s": rate}
        if flops_per_s := rate * self._flops_per_token:
            values["model_flops_per_s"] = flops_per_s
            values |= {"mfu": flops_per_s / self._peak_flops} if self._peak_flops else {}
        self._sums.clear()
        self._tokens, self._busy_s, self._steps, self._due_s = 0, 0.0, 0, now_s + EVERY_S
        return values | memory(self._devices)

    def close(self) -> None:
        close_all(self._callbacks, CLOSE_S)


def memory(devices: Sequence[Any]) -> dict[str, float]:
    """Return the known ones of: bytes in use and peak bytes on the fullest device, bytes of this process."""
    found = {}
    # Backends without these numbers raise errors of several kinds.
    with contextlib.suppress(Exception):
        told = [device.memory_stats() for device in devices]
        for name, key in (("device_bytes", "bytes_in_use"), ("device_bytes_peak", "peak_bytes_in_use")):
            found[name] = float(max(stats[key] for stats in told))
    # Not every system has /proc.
    with contextlib.suppress(OSError):
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        found["host_bytes"] = float(int(pages) * os.sysconf("SC_PAGE_SIZE"))
    return found


def own_metrics(config: RunConfig, name: str, devices: Sequence[jax.Device], flops_per_token: float) -> IslandMetrics:
    """Return the metrics of an island whose loop knows its operations per token.

    Raises:
        ValueError: A callback cannot be loaded.
    """
    callbacks = find_callbacks(config.callbacks, ("on_step",))
    # An island without JAX arrays has no devices that are known here; it counts as one.
    kind = devices[0].device_kind if devices else ""
    each = config.islands.peak_tflops * 1e12 or DEVICE_PEAK_FLOPS.get(kind, 0.0)
    return IslandMetrics(name, devices, flops_per_token, max(1, len(devices)) * each, callbacks)
