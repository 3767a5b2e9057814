"""The trackers and callbacks of a run, which get its records; none of them can delay or end the run (`Aside`)."""

import contextlib
import importlib
import importlib.util
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from diloco_jax.protocol.releases import install_hint
from diloco_jax.runtime.figures import table
from diloco_jax.runtime.trackers import built_in
from diloco_jax.settings.run import RunConfig
from diloco_jax.training.named import load_named

# Calls that may wait for one object.
WAITING_MAX = 4096

log = logging.getLogger(__name__)
# Class of each tracker by name, and the package that it needs.
BUILT_IN: dict[str, tuple[type, str]] = {
    "tensorboard": (built_in.TensorboardTracker, "tensorboardX"),
    "wandb": (built_in.WandbTracker, "wandb"),
    "trackio": (built_in.TrackioTracker, "trackio"),
    "mlflow": (built_in.MlflowTracker, "mlflow"),
    "opentelemetry": (built_in.OpenTelemetryTracker, "opentelemetry.exporter.otlp.proto.http"),
}
TRACKER_METHODS = ("begin", "log", "close")
CALLBACK_METHODS = ("on_step", "on_round", "on_eval", "on_event")
# Time to close at the end of a run; some trackers send their last values then.
CLOSE_S = 30.0
# Group of the values of the run as a whole.
MERGED = "merged"
# Kinds of records that neither trackers nor callbacks get.
QUIET = ("step", "closed")


class Aside:
    """An object that is made and called in a separate thread; after its first exception, it is not called any more."""

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        self._name = name
        self._waiting: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue(WAITING_MAX)
        self._lost = 0
        self._thread = threading.Thread(target=self._run, args=(make,), name=name, daemon=True)
        self._thread.start()

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method soon, in the order of the calls; a method that the object lacks is not called."""
        if not self._thread.is_alive():
            return
        try:
            self._waiting.put_nowait((method, arguments))
        except queue.Full:
            if not self._lost:
                log.warning(f"{self._name} is too slow: {WAITING_MAX} calls wait, later ones are lost")
            self._lost += 1

    def _run(self, make: Callable[[], Any]) -> None:
        method = "its constructor"
        try:
            target = make()
            while (job := self._waiting.get()) is not None:
                method, arguments = job
                getattr(target, method, lambda *_: None)(*arguments)
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {error}"
            log.warning(f"{self._name} failed in {method} and is not called any more; the run continues: {reason}")

    def close(self, ends_s: float) -> None:
        """Let the object take the waiting calls until `ends_s` (`time.monotonic`); leave a thread that hangs."""
        while self._thread.is_alive() and time.monotonic() < ends_s:
            with contextlib.suppress(queue.Full):
                self._waiting.put(None, timeout=0.1)
                break
        self._thread.join(max(0.0, ends_s - time.monotonic()))
        waiting = self._waiting.qsize() if self._thread.is_alive() else 0
        if self._lost or waiting:
            log.warning(f"{self._name} did not get every call: {self._lost} were lost, {waiting} still waited")


def close_all(asides: Iterable[Aside], within_s: float) -> None:
    """Close all objects within this time together."""
    ends_s = time.monotonic() + within_s
    for aside in asides:
        aside.close(ends_s)


def find_trackers(names: Sequence[str], *, imports: bool = True) -> dict[str, type]:
    """Return the classes of trackers by name.

    Args:
        imports: import the packages of trackers, which may take seconds; otherwise only look whether they are here.

    Raises:
        ValueError: a tracker is not installed, cannot be loaded, or lacks a method.
    """
    found = {}
    for name in names:
        found[name], package = BUILT_IN[name] if name in BUILT_IN else (_class_of("trackers", name), "")
        if package and not (_imported(package) if imports else _installed(package)):
            raise ValueError(f"trackers has {name}, which is not installed; {install_hint(name)}")
        if missing := [method for method in TRACKER_METHODS if not hasattr(found[name], method)]:
            raise ValueError(f"trackers: '{name}' lacks {' and '.join(missing)}; see docs/metrics.md")
    return found


def _installed(package: str) -> bool:
    """Tell whether a package is here, without importing it."""
    # A folder of that name can be imported too, but it has no file.
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _imported(package: str) -> bool:
    """Import a package before the threads of trackers do, because two imports at once may fail in Python 3.11."""
    try:
        return importlib.import_module(package).__file__ is not None
    except ImportError:
        return False


def find_callbacks(names: Sequence[str], methods: Sequence[str] = CALLBACK_METHODS) -> dict[str, type]:
    """Return the classes of callbacks that have one of the methods, by name.

    Raises:
        ValueError: a class cannot be loaded, or has none of the methods of a callback.
    """
    found = {name: _class_of("callbacks", name) for name in names}
    for name, each in found.items():
        if not any(hasattr(each, method) for method in CALLBACK_METHODS):
            raise ValueError(f"callbacks: '{name}' has none of {', '.join(CALLBACK_METHODS)}; give it one of them")
    return {name: each for name, each in found.items() if any(hasattr(each, method) for method in methods)}


def _class_of(setting: str, name: str) -> type:
    package, _, attribute = name.partition(":")
    if not package or not attribute:
        known = f", or one of {', '.join(BUILT_IN)}" if setting == "trackers" else ""
        if known and (near := get_close_matches(name, BUILT_IN, 1)):
            known += f"; did you mean {near[0]}?"
        raise ValueError(f"{setting} has '{name}'; write package.module:Class{known}")
    found = load_named(setting, name)
    if not isinstance(found, type):
        raise ValueError(f"{setting}: '{name}' is not a class; name one that is called without arguments")
    return found


class Outlets:
    """All trackers and callbacks of a run, except `on_step`, which learners call in their processes."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        trackers, callbacks = find_trackers(config.trackers), find_callbacks(config.callbacks, CALLBACK_METHODS[1:])
        self._trackers = [Aside(f"the tracker {name}", make) for name, make in trackers.items()]
        self._callbacks = [Aside(f"the callback {name}", make) for name, make in callbacks.items()]
        for tracker in self._trackers:
            tracker.call("begin", config.name, asdict(config), folder)

    def write(self, record: Mapping[str, Any]) -> None:
        """Pass a record of telemetry to the trackers and callbacks that it is for."""
        kind, step = record["kind"], record["global_step"]
        if kind in ("metrics", "drift"):
            self._log(step, record["values"], f"islands/{record['learner']}")
        elif kind == "merged_metrics":
            self._log(step, record["values"], MERGED)
        elif kind == "wire":
            names = [figure.name for figure in table.RUN_FIGURES if figure.tracked]
            self._log(step, {name: record[name] for name in names if name in record}, MERGED)
        elif kind == "eval":
            values = {f"eval_{key}": record[key] for key in ("loss", "bits_per_byte")} | {"tokens": record["tokens"]}
            values |= {f"eval_{name}": value for name, value in record.get("scores", {}).items()}
            self._log(step, values, MERGED)
            self._tell("on_eval", step, values)
        elif kind == "merged":
            self._log(step, {"contributors": len(record["members"])}, MERGED)
            self._tell("on_round", step, record["fragment_id"], tuple(record["members"]))
        elif kind == "round":
            for tracker in self._trackers:
                tracker.call("round", record)
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
        """Close all trackers and callbacks."""
        for tracker in self._trackers:
            tracker.call("close")
        close_all([*self._trackers, *self._callbacks], CLOSE_S)
