"""The outer optimizer: how the merged outer gradient of a fragment moves it, with one state per fragment.

The outer gradient is `global - local`, a descent direction like any gradient, so every optax transformation can be an
outer optimizer. The default is DiLoCo's Nesterov momentum, which merger.py computes in the pass that merges:

    v     <- g + mu v
    theta <- theta - lr (g + mu v)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import jax
import numpy as np
import optax
from jaxtyping import Float32

Views = Mapping[str, Float32[np.ndarray, "..."]]
OuterState = dict[str, np.ndarray]
OptimizerName = Literal["nesterov", "sgd", "adam"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterConfig:
    """The outer optimizer and its constants, equal for all fragments and constant in time."""

    optimizer: OptimizerName = "nesterov"
    """'nesterov' (DiLoCo), 'sgd' (no momentum; with learning rate 1.0 the merged value replaces the global one), or
    'adam'."""

    learning_rate: float = 1.0
    """Size of the outer step, above 0. Small: the global model lags behind the learners. Large: it overshoots. With
    momentum mu a steady gradient moves 1 / (1 - mu) times as far; the defaults won the sweep in docs/log.md."""

    momentum: float = 0.0
    """mu of 'nesterov' and first-moment decay of 'adam', at least 0 and below 1; 'sgd' does not use it. 0: no memory;
    near 1: old rounds dominate."""

    def __post_init__(self) -> None:
        if self.optimizer not in get_args(OptimizerName):
            choices = ", ".join(get_args(OptimizerName))
            raise ValueError(f"outer optimizer is {self.optimizer!r}; choose one of {choices}")
        if not 0 < self.learning_rate < float("inf"):
            raise ValueError(f"outer learning_rate is {self.learning_rate}; it must be finite and above 0")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"outer momentum is {self.momentum}; it must be at least 0 and below 1")


@dataclass(frozen=True, slots=True)
class Nesterov:
    """Stochastic gradient descent, with Nesterov's momentum if there is any; equals optax.sgd(..., nesterov=True)."""

    rate: float
    momentum: float

    def init(self, views: Views) -> OuterState:
        """Return the state before the first update.

        Args:
          views: the fragment's values; their order is that of its flat array.
        """
        size = sum(view.size for view in views.values())
        return {"trace": np.zeros(size, np.float32)} if self.momentum else {}


class Optax:
    """Any optax gradient transformation, computed on the host's CPU.

    Results are bit-identical between runs on one kind of machine; the compiler may fuse multiply-adds on another. Only
    a transformation that treats every element alike gives the same with every number of merge shards.

    Args:
      tx: the transformation.
    """

    def __init__(self, tx: optax.GradientTransformation) -> None:
        self._tx = tx
        self._update = jax.jit(tx.update)

    def init(self, views: Views) -> OuterState:
        """Return the state before the first update: the leaves of optax's state by their paths.

        Args:
          views: the fragment's values.
        """
        with jax.default_device(_cpu()):
            leaves = jax.tree_util.tree_leaves_with_path(self._tx.init(_to_cpu(dict(views))))
        return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}

    def updates(
        self, gradient: Views, state: Mapping[str, np.ndarray], params: Views
    ) -> tuple[Float32[np.ndarray, "n"], OuterState]:
        """Return what to add to the parameters, as one flat array, and the new state. Changes none of its arguments.

        Args:
          gradient: the merged outer gradient, `global - local`.
          state: from `init` or the previous call.
          params: the fragment's global values, with the same names and shapes.
        """
        template = jax.eval_shape(self._tx.init, dict(params))
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(template)]
        tree = jax.tree.unflatten(jax.tree.structure(template), [state[jax.tree_util.keystr(path)] for path in paths])
        moves, after = self._update(_to_cpu(dict(gradient)), _to_cpu(tree), _to_cpu(dict(params)))
        leaves = jax.tree_util.tree_leaves_with_path(after)
        flat = np.concatenate([np.asarray(moves[name], np.float32).reshape(-1) for name in params])
        return flat, {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


Outer: TypeAlias = Nesterov | Optax


def make_outer(config: OuterConfig) -> Outer:
    """Return the optimizer that `config` names."""
    match config.optimizer:
        case "nesterov":
            return Nesterov(config.learning_rate, config.momentum)
        case "sgd":
            return Nesterov(config.learning_rate, 0.0)
        case "adam":
            return Optax(optax.adam(config.learning_rate, b1=config.momentum))


def _cpu() -> jax.Device:
    return jax.local_devices(backend="cpu")[0]


def _to_cpu(tree: Any) -> Any:
    # Copies of our own: device_put may alias NumPy memory, on CPU even with may_alias=False.
    return jax.device_put(jax.tree.map(np.array, tree), _cpu())
