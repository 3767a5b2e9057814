"""The learning rate by the run's clock: MaxText's schedule reads a counter in the optimizer's state.

The counter of an island that was away has stopped meanwhile, and a faster island counts more steps than the run.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import nnx

from diloco_jax.training.sharding import put_array

COUNT = "count"
# A state with these has moments, so its counter also counts their updates.
MOMENTS = {"mu", "nu"}
Keys = tuple[Any, ...]


def schedule_counters(optimizer: nnx.State) -> dict[Keys, nnx.Variable[Any]]:
    """Return the counters that the optimizer's schedules read, by the keys of the optimizer's state.

    optax keeps a schedule's counter in a separate state. Adam in one piece, such as MaxText's adam_pax, has one
    counter for both schedule and moments, which is returned only if there is no other one.
    """
    leaves = dict(nnx.to_flat_state(optimizer))
    beside: dict[Keys, set[Any]] = {}
    for keys in leaves:
        for depth in range(1, len(keys) + 1):
            beside.setdefault(keys[: depth - 1], set()).add(keys[depth - 1])
    counters = {keys: leaf for keys, leaf in leaves.items() if keys[-1] == COUNT}
    alone = {keys: leaf for keys, leaf in counters.items() if beside[keys[:-1]] == {COUNT}}
    return alone or {keys: leaf for keys, leaf in counters.items() if beside[keys[:-1]] >= MOMENTS}


class OptimizerClock:
    """Sets the counters of an optimizer's schedules to the run's clock, when they differ from it.

    Args:
        optimizer: State of the optimizer, as MaxText's loop holds it.

    Raises:
        ValueError: The optimizer's state has no counter of a schedule.
    """

    def __init__(self, optimizer: nnx.State) -> None:
        self._paths = list(schedule_counters(optimizer))
        if not self._paths:
            raise ValueError("the optimizer's state has no counter that a schedule reads; use an optimizer of MaxText")
        # The counters' value before the next step, as far as it is known without reading from a device.
        self._value: int | None = None

    def set(self, optimizer: nnx.State, step: int) -> None:
        """Let the next step use the learning rate of this step of the schedule."""
        if self._value != step:
            for path in self._paths:
                leaf = _leaf(optimizer, path)
                old = leaf.get_raw_value()
                leaf.set_raw_value(put_array(np.asarray(step, old.dtype), old.sharding))
        # The step increments the counters.
        self._value = step + 1

    def forget(self) -> None:
        """Set the counters before the next step in any case, because the optimizer's state was replaced."""
        self._value = None


def _leaf(optimizer: Any, path: Keys) -> nnx.Variable[Any]:
    node: Mapping[Any, Any] = optimizer
    for key in path[:-1]:
        node = node[key]
    leaf: nnx.Variable[Any] = node[path[-1]]
    return leaf
