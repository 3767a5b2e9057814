"""Metrics of a loop that dispatches its steps ahead: a report takes the newest ones that the devices have computed."""

from collections.abc import Mapping
from typing import Any

import jax

from diloco_jax.runtime.island.evaluation import scalars


class LaggingMetrics:
    """The metrics of the newest step, and those of the step before it while the newest step still runs.

    A report never waits for the step that it ends, so the host can dispatch the next step behind it. It waits for the
    step before, which bounds the unfinished steps to two.

    Args:
        waits: Whether reports wait for their own step. Emulated devices need this: several unfinished programs exhaust
            the thread pool where the devices meet, and the process aborts.
    """

    def __init__(self, waits: bool) -> None:
        self._waits = waits
        self._before: Any = None

    def take(self, metrics: Any) -> dict[str, float]:
        """Return a step's metrics if they are known, else those of the step before.

        Raises:
            ValueError: There is no loss, or a metric is not a scalar.
        """
        before, self._before = self._before, metrics
        for leaf in jax.tree.leaves(metrics):
            if isinstance(leaf, jax.Array) and not leaf.is_deleted():
                leaf.copy_to_host_async()
        # The first step has no previous one, and compiles anyway.
        if before is None or self._waits or _known(metrics):
            return scalars(metrics)
        if isinstance(metrics, Mapping) and "loss" not in metrics:
            return scalars(metrics)
        return scalars(before)


def _known(metrics: Any) -> bool:
    """Tell whether reading these metrics needs no wait."""
    return all(_is_known(leaf) for leaf in jax.tree.leaves(metrics))


def _is_known(leaf: Any) -> bool:
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        return True
    # A copy of another library's array says when it is complete; a number always is.
    return not hasattr(leaf, "is_ready") or leaf.is_ready()
