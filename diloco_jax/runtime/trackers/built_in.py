"""The trackers that come along: TensorBoard, Weights & Biases, trackio, MLflow, and OpenTelemetry for rounds.

TensorBoard has a folder per group, so that islands share a chart; the others see one run, with groups before names.
A syncer that starts again goes on in the same run: its id is kept in the run's folder. Where they send it, and as whom,
is said by their own environment variables; without any, trackio and MLflow write to disk.
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
PARAMS_MAX, PARAM_LENGTH_MAX = 100, 500  # of MLflow: in one call; characters
PARTS = ("quorum", "grace", "pull", "merge")  # of a round, as spans of OpenTelemetry
NANOSECONDS = 1_000_000_000


class Tracker(Protocol):
    """The interface of a tracker: one object per process of the syncer, called from one thread."""

    def begin(self, run: str, config: Mapping[str, Any], folder: Path) -> None:
        """Begin, or go on after a restart, with the run's name, settings and folder: files belong there."""

    def log(self, step: int, values: Mapping[str, float], group: str) -> None:
        """Take finite values at a global step, of "islands/NAME" or, for the run as a whole, "merged"."""

    def close(self) -> None:
        """End; nothing comes after. A method `round`, if there is one, gets each record of that kind (telemetry.py)."""


class TensorboardTracker:
    """TensorBoard files without TensorFlow, over the global step: an island's local steps begin again at zero."""

    def begin(self, run: str, config: Mapping[str, Any], folder: Path) -> None:
        # here, since it imports PyTorch where that is installed, which takes seconds
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
        writer.flush()  # to the operating system

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


class WandbTracker:
    """A run at Weights & Biases: project WANDB_PROJECT, else "diloco"; WANDB_MODE=offline writes to its folder only."""

    def begin(self, run: str, config: Mapping[str, Any], folder: Path) -> None:
        name, _ = _kept(folder / "wandb" / "run_id", lambda: uuid.uuid4().hex)
        where = {"project": os.environ.get("WANDB_PROJECT", PROJECT), "name": run, "dir": folder}
        self._run = importlib.import_module("wandb").init(**where, config=dict(config), id=name, resume="allow")
        self._run.define_metric("*", step_metric="global_step")  # islands differ in it, and its own step may only grow

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
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # else it asks for a database
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
    """Traces of rounds by OTLP over HTTP, in wall-clock time, to where the standard variables OTEL_... say."""

    def begin(self, run: str, config: Mapping[str, Any], folder: Path) -> None:
        trace, resources = (importlib.import_module(f"opentelemetry.sdk.{name}") for name in ("trace", "resources"))
        export = importlib.import_module("opentelemetry.sdk.trace.export")
        resource = resources.Resource.create({"service.name": "diloco", "diloco.run": run})
        self._provider = trace.TracerProvider(resource=resource)
        self._provider.add_span_processor(export.BatchSpanProcessor(self.exporter()))
        self._tracer = self._provider.get_tracer("diloco")
        self._within = importlib.import_module("opentelemetry.trace").set_span_in_context
        self._began_s: float | None = None  # of the run, since 1970

    def exporter(self) -> Any:
        return importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter()

    def log(self, step: int, values: Mapping[str, float], group: str) -> None:
        """Drop them: they are metrics."""

    def round(self, record: Mapping[str, Any]) -> None:
        """Trace a round: the wait for its quorum, its grace window, its pull and its merge, and each island's value."""
        closed_s, ends_s = record["closed_s"], record["t"]
        if self._began_s is None:
            self._began_s = time.time() - ends_s  # a record is of this moment
        times_s = [record[name] for name in ("opened_s", "met_s", "closed_s", "pulled_s")] + [ends_s]
        told = {"diloco.global_step": record["global_step"], "diloco.fragment": record["fragment_id"]}
        whole = self._tracer.start_span("round", attributes=told, start_time=self._ns(times_s[0]))
        inside = self._within(whole)

        def part(name: str, from_s: float, until_s: float, **told: str) -> None:
            span = self._tracer.start_span(name, inside, attributes=told, start_time=self._ns(from_s))
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
    """Return the id in a file, and whether it was made just now."""
    if path.exists():
        return path.read_text(encoding="utf-8").strip(), False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(made := make(), encoding="utf-8")
    return made, True
