"""Trackers and callbacks by name: `package.module:Class`, or one of the built-in trackers."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from diloco_jax.runtime.trackers.services import MlflowTracker, TrackioTracker, WandbTracker
from diloco_jax.runtime.trackers.tensorboard import TensorboardTracker


class Tracker(Protocol):
    """The interface of a tracker. One object per run and process; all calls come from one thread, in order."""

    def begin(self, run: str, config: Mapping[str, Any], folder: Path) -> None:
        """Begin, or go on after a restart.

        Args:
            run: its name.
            config: its settings, as in config.yaml.
            folder: of the run; what is written to disk belongs there.
        """

    def log(self, step: int, values: Mapping[str, float], group: str) -> None:
        """Take values of one moment.

        Args:
            step: global step.
            values: by name, finite.
            group: "islands/NAME", or "merged" for the run as a whole.
        """

    def close(self) -> None:
        """End; nothing comes after."""


# name -> class, and the package that it needs
BUILT_IN: dict[str, tuple[type, str]] = {
    "tensorboard": (TensorboardTracker, "tensorboardX"),
    "wandb": (WandbTracker, "wandb"),
    "trackio": (TrackioTracker, "trackio"),
    "mlflow": (MlflowTracker, "mlflow"),
}
TRACKER_METHODS = ("begin", "log", "close")
CALLBACK_METHODS = ("on_step", "on_round", "on_eval", "on_event")


def find_trackers(names: Sequence[str]) -> dict[str, type]:
    """Return the classes of these trackers, by name.

    Raises:
        ValueError: one is not installed, cannot be imported, or lacks a method.
    """
    found = {}
    for name in names:
        if name in BUILT_IN:
            found[name], package = BUILT_IN[name]
            if importlib.util.find_spec(package) is None:
                raise ValueError(
                    f'trackers has {name}, but its package is not installed; pip install "diloco-jax[{name}]", or '
                    "take it out of trackers"
                )
            continue
        found[name] = load_named("trackers", name, f", or one of {', '.join(BUILT_IN)}")
        if missing := [method for method in TRACKER_METHODS if not callable(getattr(found[name], method, None))]:
            raise ValueError(f"trackers: '{name}' lacks {' and '.join(missing)}; docs/metrics.md says what they get")
    return found


def find_callbacks(names: Sequence[str]) -> dict[str, type]:
    """Return the classes of these callbacks, by name.

    Raises:
        ValueError: one cannot be imported, or has no method that is ever called.
    """
    found = {name: load_named("callbacks", name) for name in names}
    for name, each in found.items():
        if not any(callable(getattr(each, method, None)) for method in CALLBACK_METHODS):
            raise ValueError(f"callbacks: '{name}' has none of {', '.join(CALLBACK_METHODS)}; give it one of them")
    return found


def callbacks_with(method: str, names: Sequence[str]) -> dict[str, type]:
    """Return the callbacks that have this method."""
    return {name: each for name, each in find_callbacks(names).items() if callable(getattr(each, method, None))}


def load_named(setting: str, name: str, others: str = "") -> type:
    """Import `package.module:Class`.

    Raises:
        ValueError: there is no such class; names the setting and the remedy.
    """
    package, _, attribute = name.partition(":")
    if not package or not attribute:
        raise ValueError(f"{setting} has '{name}'; write package.module:Class{others}")
    try:
        found = getattr(importlib.import_module(package), attribute)
    except Exception as error:  # a module of the user's own may raise anything
        raise ValueError(
            f"{setting}: '{name}' cannot be loaded ({type(error).__name__}: {error}); install or correct it"
        ) from error
    if not isinstance(found, type):
        raise ValueError(f"{setting}: '{name}' is no class; name a class that is called without arguments")
    return found
