"""The outer optimizer: one optax update of a fragment of the global parameters, with one state per fragment.

The outer gradient is `global - local`, a descent direction like any gradient, so every optax transformation can be an
outer optimizer. The default is DiLoCo's Nesterov momentum:

    v     <- g + mu v
    theta <- theta - lr (g + mu v)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import numpy as np
import optax
from jaxtyping import Float32

Values = Mapping[str, Float32[np.ndarray, "..."]]
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


def make_outer(config: OuterConfig) -> optax.GradientTransformation:
    """Return the optax transformation that `config` names."""
    match config.optimizer:
        case "nesterov":
            return optax.sgd(config.learning_rate, momentum=config.momentum, nesterov=True)
        case "sgd":
            return optax.sgd(config.learning_rate)
        case "adam":
            return optax.adam(config.learning_rate, b1=config.momentum)


class OuterOptimizer:
    """Applies an optax transformation to fragments: NumPy in, NumPy out, computed on the host's CPU.

    Holds no state but compiled programs, one per fragment layout. The caller keeps one optimizer state per fragment.
    Results are bit-identical between runs on one kind of machine; the compiler may fuse multiply-adds on another.

    Args:
      tx: any optax gradient transformation.
    """

    def __init__(self, tx: optax.GradientTransformation) -> None:
        self._tx = tx
        # Both are donated: `step` hands in private copies, and donation halves the memory traffic.
        self._update = jax.jit(self._apply, donate_argnums=(0, 2))

    def init(self, params: Values) -> Any:
        """Return the state of one fragment before its first update, a tree of NumPy arrays.

        Args:
          params: the fragment's global values, by key.
        """
        with jax.default_device(_cpu()):
            return _to_host(self._tx.init(_to_cpu(dict(params))))

    def step(self, params: Values, gradient: Values, state: Any) -> tuple[dict[str, np.ndarray], Any]:
        """Return the fragment's new values and state. The arguments stay as they are; the results are read-only.

        Args:
          params: the fragment's global values, by key.
          gradient: the merged outer gradient, `global - local`, with the same keys and shapes.
          state: of this fragment, from `init` or the previous `step`.

        Raises:
          ValueError: keys or shapes of `params` and `gradient` differ.
        """
        if different := sorted(params.keys() ^ gradient.keys()):
            raise ValueError(f"parameters and outer gradient differ in key {different[0]!r}")
        for key, value in params.items():
            if value.shape != gradient[key].shape:
                raise ValueError(f"{key!r} has shape {value.shape}, its outer gradient {gradient[key].shape}")
        new_params, new_state = self._update(_to_cpu(dict(params)), _to_cpu(dict(gradient)), _to_cpu(state))
        return {key: np.asarray(new_params[key]) for key in params}, _to_host(new_state)

    def _apply(self, params: Any, gradient: Any, state: Any) -> tuple[Any, Any]:
        updates, state = self._tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state


def _cpu() -> jax.Device:
    return jax.local_devices(backend="cpu")[0]


def _to_cpu(tree: Any) -> Any:
    # device_put may alias NumPy memory, on CPU even with may_alias=False, and the donated update would overwrite it.
    return jax.device_put(jax.tree.map(np.array, tree), _cpu())


def _to_host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)
