"""Trackers of others: Weights & Biases, trackio, MLflow. Each sees one run, with the groups before the names.

A syncer that starts again goes on in the same run: its id is kept in the run's folder. Where they send it, and as whom,
say their own environment variables; without any, trackio and MLflow write to disk.
"""

from __future__ import annotations

import importlib
import os
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from diloco_jax.settings.text import flat

PROJECT = "diloco"
PARAMS_MAX = 100  # in one call of MLflow
PARAM_LENGTH_MAX = 500


def _kept(path: Path, make: Callable[[], str]) -> tuple[str, bool]:
    """Return what a file says, and False; or what `make` says, which the file keeps, and True."""
    if path.exists():
        return path.read_text(encoding="utf-8").strip(), False
    path.parent.mkdir(parents=True, exist_ok=True)
    made = make()
    path.write_text(f"{made}\n", encoding="utf-8")
    return made, True


def _named(values: Mapping[str, float], group: str) -> dict[str, float]:
    return {f"{group}/{name}": value for name, value in values.items()}


class WandbTracker:
    """A run at Weights & Biases: project WANDB_PROJECT, else "diloco"; WANDB_MODE=offline writes to its folder only."""

    def begin(self, run: str, config: Mapping[str, Any], folder: Path) -> None:
        """Begin the run, or go on with it."""
        wandb = importlib.import_module("wandb")
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        name, _ = _kept(folder / "wandb" / "run_id", lambda: uuid.uuid4().hex)
        self._run = wandb.init(
            project=project, name=run, dir=folder, config=dict(config), id=name, resume="allow", reinit="create_new"
        )
        # islands differ in their global step, and its own step may only grow
        self._run.define_metric("*", step_metric="global_step")

    def log(self, step: int, values: Mapping[str, float], group: str) -> None:
        """Log one row."""
        self._run.log({**_named(values, group), "global_step": step})

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


class TrackioTracker:
    """A run of trackio: project TRACKIO_PROJECT, else "diloco", in TRACKIO_DIR or its usual place."""

    def begin(self, run: str, config: Mapping[str, Any], folder: Path) -> None:
        """Begin the run, or go on with it."""
        trackio = importlib.import_module("trackio")
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        name, new = _kept(folder / "trackio" / "run_id", lambda: f"{run}-{uuid.uuid4().hex[:8]}")
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        resume = "never" if new else "allow"
        self._run = trackio.init(project=project, name=name, config=dict(config), resume=resume, **quiet)

    def log(self, step: int, values: Mapping[str, float], group: str) -> None:
        """Log one row."""
        self._run.log(_named(values, group), step=step)

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()


class MlflowTracker:
    """A run of MLflow: experiment MLFLOW_EXPERIMENT_NAME, else "diloco", at MLFLOW_TRACKING_URI or in its folder."""

    def begin(self, run: str, config: Mapping[str, Any], folder: Path) -> None:
        """Begin the run, or go on with it."""
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # it prefers a database, which takes ten seconds
        mlflow = importlib.import_module("mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlflow" / "store").resolve().as_uri()
        self._entities, self._client = mlflow.entities, mlflow.MlflowClient(tracking_uri=uri)

        def make() -> str:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            found = self._client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else self._client.create_experiment(name)
            return str(self._client.create_run(experiment, run_name=run).info.run_id)

        self._id, new = _kept(folder / "mlflow" / "run_id", make)
        if not new:
            self._client.update_run(self._id, status="RUNNING")
            return
        params = [self._entities.Param(key, str(value)[:PARAM_LENGTH_MAX]) for key, value in flat(config)]
        for start in range(0, len(params), PARAMS_MAX):
            self._client.log_batch(self._id, params=params[start : start + PARAMS_MAX])

    def log(self, step: int, values: Mapping[str, float], group: str) -> None:
        """Log one row."""
        now_ms = round(time.time() * 1000)
        metrics = [self._entities.Metric(key, value, now_ms, step) for key, value in _named(values, group).items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        """Say that the run has ended."""
        self._client.set_terminated(self._id)
