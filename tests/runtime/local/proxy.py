"""A stand-in for Pathways' proxy: emulated slices that can be taken away, and pathwaysutils or a copy of its tests.

A real proxy raises an error for every call of a lost slice, and for every array that was there before. So does this
one, in the methods of an island that use devices. The package's own test of a slice asks it too.
"""

import importlib
import threading
from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

# What pathwaysutils 0.1.13 takes for a lost slice: this type, with one of these words.
WORDS = ("DATA_LOSS", "DEADLINE_EXCEEDED", "NOT_FOUND", "INTERNAL")
LOST = "DATA_LOSS: the worker of a slice was taken away; its buffers are gone"
ISLAND = ("step", "wait", "put_batch", "place", "adopt", "overwrite", "warm_up")
ISLAND += ("stage_moments", "stage_shards", "load_shards")


class Proxy:
    """Emulated devices of slices that can be taken away."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lost: set[Any] = set()
        # Device -> how often it was taken away; arrays of before are lost.
        self._losses: Counter[Any] = Counter()
        # (name of the island, name of its thread) -> devices of an array that nobody placed
        self.placed: dict[tuple[str, str], set[Any]] = {}
        ready = jax.block_until_ready

        def block_until_ready(tree: Any) -> Any:
            self.check(device for array in jax.tree.leaves(tree) for device in array.devices())
            return ready(tree)

        monkeypatch.setattr(jax, "block_until_ready", block_until_ready)

    def take(self, devices: Iterable[Any]) -> None:
        self._lost.update(devices)
        self._losses.update(devices)

    def give_back(self, devices: Iterable[Any]) -> None:
        self._lost.difference_update(devices)

    def check(self, devices: Iterable[Any], before: Counter[Any] | None = None) -> None:
        """Raise the proxy's error if a device is away, or was taken away since `before`."""
        for device in devices:
            if device in self._lost or (before is not None and before[device] != self._losses[device]):
                raise jax.errors.JaxRuntimeError(LOST)

    def guard(self, name: str, island: Any, devices: Iterable[Any]) -> None:
        """Let an island's methods that use devices ask the proxy first."""
        before, devices = Counter(self._losses), list(devices)

        def guarded(method: Any) -> Any:
            def call(*values: Any, **named: Any) -> Any:
                self.check(devices, before)
                where = self.placed.setdefault((name, threading.current_thread().name), set())
                where.update(jnp.zeros(()).devices())
                return method(*values, **named)

            return call

        for method in ISLAND:
            setattr(island, method, guarded(getattr(island, method)))


def elastic() -> Any:
    """pathwaysutils.elastic.elastic, or where it is not installed the two functions of it that the program calls."""
    try:
        return importlib.import_module("pathwaysutils.elastic.elastic")
    except ImportError:
        return SimpleNamespace(is_error_due_to_slice_down=_is_slice_down, get_active_slice_indices=_active)


def _is_slice_down(error: Exception, log_traceback: bool = True) -> bool:
    return isinstance(error, jax.errors.JaxRuntimeError) and any(word in str(error) for word in WORDS)


def _active(slice_to_devices: dict[int, list[Any]]) -> frozenset[int]:
    active = set()
    for index, devices in slice_to_devices.items():
        try:
            jax.block_until_ready([jax.device_put(1.0, device) for device in devices])
            active.add(index)
        except jax.errors.JaxRuntimeError as error:
            if not _is_slice_down(error, log_traceback=False):
                raise
    return frozenset(active)
