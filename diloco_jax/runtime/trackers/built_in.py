"""The built-in trackers: TensorBoard, Weights & Biases, trackio, MLflow, and OpenTelemetry for rounds.

TensorBoard has a folder per group, so that islands share a chart. The other trackers have one run, and groups before
names. A syncer that restarts continues the same run, because the run's folder keeps the tracker's id of it. Environment
variables of each tracker set the address and the account; without them, trackio and MLflow write to disk.
"""

import importlib
import os
import time
import uuid
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from diloco_jax.settings.text import flat

PROJECT = "diloco"
# Limits of MLflow: parameters in one call, and characters of one parameter.
PARAMS_MAX, PARAM_LENGTH_MAX = 100, 500
# The parts of a round, each a span of OpenTelemetry.
PARTS = ("quorum", "grace", "pull", "merge")
NANOSECONDS = 1_000_000_000


class Tracker(Protocol):
    """The interface of a tracker; each process of the syncer has one object, and calls it from one thread."""

    def begin(self, run: str, config: Mapping[str, Any], folder: Path) -> None:
        """Start, or continue after a restart, with the run's name, settings, and folder for files."""

    def log(self, step: int, values: Mapping[str, float], group: str) -> None:
        """Take finite values at a global step; the group is "islands/NAME", or "merged" for the run as a whole."""

    def close(self) -> None:
        """End. A tracker may also have a method `round`, which gets each record of that kind (telemetry.py)."""


class TensorboardTracker:
    """TensorBoard files over the global step, because local steps of a restarted island start at zero."""

    def begin(self, run: str, config: Mapping[str, Any], folder: Path) -> None:
        # The import is late because tensorboardX imports PyTorch if that is installed, which takes seconds.
        self._files = importlib.import_module("tensorboardX.event_file_writer")
        self._summaries = importlib.import_module("tensorboardX.proto.summary_pb2")
        self._folder = folder / "tensorboard"
        self._writers: dict[str, Any] = {}

    def log(self, step: int, values: Mapping[str, float], group: str) -> None:
        writer = self._writers.get(group)
        if writer is None:
            (self._folder / group).mkdir(parents=True, exist_ok=True)
            writer = self._writers[group] = self._files.EventsWriter(str(self._folder / group / "events"))
        scalars = [self._summaries.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        summary = self._summaries.Summary(value=scalars)
        writer.write_event(self._files.event_pb2.Event(wall_time=time.time(), step=step, summary=summary))
        writer.flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


class WandbTracker:
    """A run at Weights & Biases: project WANDB_PROJECT, else "diloco"; WANDB_MODE=offline writes to its folder only."""

    def begin(self, run: str, config: Mapping[str, Any], folder: Path) -> None:
        name, _ = _kept(folder / "wandb" / "run_id", lambda: uuid.uuid4().hex)
        where = {"project": os.environ.get("WANDB_PROJECT", PROJECT), "name": run, "dir": folder}
        self._run = importlib.import_module("wandb").init(**where, config=dict(config), id=name, resume="allow")
        # Islands are at different global steps, and the step of wandb itself may only grow.
        self._run.define_metric("*", step_metric="global_step")

    def log(self, step: int, values: Mapping[str, float], group: str) -> None:
        self._run.log({**_named(values, group), "global_step": step})

    def close(self) -> None:
        self._run.finish()


class TrackioTracker:
    """A run of trackio: project TRACKIO_PROJECT, else "diloco", in TRACKIO_DIR or its usual place."""

    def begin(self, run: str, config: Mapping[str, Any], folder: Path) -> None:
        name, _ = _kept(folder / "trackio" / "run_id", lambda: f"{run}-{uuid.uuid4().hex[:8]}")
        where = {"project": os.environ.get("TRACKIO_PROJECT", PROJECT), "name": name, "embed": False}
        self._run = importlib.import_module("trackio").init(**where, config=dict(config), resume="allow")

    def log(self, step: int, values: Mapping[str, float], group: str) -> None:
        self._run.log(_named(values, group), step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """A run of MLflow: experiment MLFLOW_EXPERIMENT_NAME, else "diloco", at MLFLOW_TRACKING_URI or in its folder."""

    def begin(self, run: str, config: Mapping[str, Any], folder: Path) -> None:
        # Without this variable, MLflow requires a database.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow = importlib.import_module("mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlflow" / "store").resolve().as_uri()
        self._entities, self._client = mlflow.entities, mlflow.MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)

        def make() -> str:
            found = self._client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else self._client.create_experiment(name)
            return str(self._client.create_run(experiment, run_name=run).info.run_id)

        self._id, new = _kept(folder / "mlflow" / "run_id", make)
        params = [self._entities.Param(key, str(value)[:PARAM_LENGTH_MAX]) for key, value in flat(config)]
        for start in range(0, len(params) if new else 0, PARAMS_MAX):
            self._client.log_batch(self._id, params=params[start : start + PARAMS_MAX])

    def log(self, step: int, values: Mapping[str, float], group: str) -> None:
        now_ms = round(time.time() * 1000)
        metrics = [self._entities.Metric(key, value, now_ms, step) for key, value in _named(values, group).items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class OpenTelemetryTracker:
    """Traces of rounds by OTLP over HTTP, in wall-clock time, to the address in the variables OTEL_..."""

    def begin(self, run: str, config: Mapping[str, Any], folder: Path) -> None:
        trace, resources = (importlib.import_module(f"opentelemetry.sdk.{name}") for name in ("trace", "resources"))
        export = importlib.import_module("opentelemetry.sdk.trace.export")
        resource = resources.Resource.create({"service.name": "diloco", "diloco.run": run})
        self._provider = trace.TracerProvider(resource=resource)
        self._provider.add_span_processor(export.BatchSpanProcessor(self.exporter()))
        self._tracer = self._provider.get_tracer("diloco")
        self._within = importlib.import_module("opentelemetry.trace").set_span_in_context
        # Start of the run in seconds since 1970.
        self._began_s: float | None = None

    def exporter(self) -> Any:
        return importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter()

    def log(self, step: int, values: Mapping[str, float], group: str) -> None:
        """Drop the values, because traces have none."""

    def round(self, record: Mapping[str, Any]) -> None:
        """Trace a round: its wait for a quorum, its grace window, its pull, its merge, and each island's value."""
        closed_s, ends_s = record["closed_s"], record["t"]
        if self._began_s is None:
            # The record was written just now.
            self._began_s = time.time() - ends_s
        times_s = [record[name] for name in ("opened_s", "met_s", "closed_s", "pulled_s")] + [ends_s]
        attributes = {"diloco.global_step": record["global_step"], "diloco.fragment": record["fragment_id"]}
        whole = self._tracer.start_span("round", attributes=attributes, start_time=self._ns(times_s[0]))
        inside = self._within(whole)

        def part(name: str, from_s: float, until_s: float, **attributes: str) -> None:
            span = self._tracer.start_span(name, inside, attributes=attributes, start_time=self._ns(from_s))
            span.end(self._ns(max(from_s, until_s)))

        for name, (from_s, until_s) in zip(PARTS, pairwise(times_s), strict=True):
            part(name, from_s, until_s)
        for island, took_s in record["values"].items():
            part("value", closed_s, closed_s + took_s, island=island)
        whole.end(self._ns(ends_s))

    def _ns(self, run_s: float) -> int:
        return round(((self._began_s or 0.0) + run_s) * NANOSECONDS)

    def close(self) -> None:
        self._provider.shutdown()


def _named(values: Mapping[str, float], group: str) -> dict[str, float]:
    return {f"{group}/{name}": value for name, value in values.items()}


def _kept(path: Path, make: Callable[[], str]) -> tuple[str, bool]:
    """Return the id in a file, and whether this call made it."""
    if path.exists():
        return path.read_text(encoding="utf-8").strip(), False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(made := make(), encoding="utf-8")
    return made, True
