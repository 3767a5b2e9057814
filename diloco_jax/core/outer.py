"""The outer optimizer: it moves a fragment along the merged outer gradient, with one state per fragment.

The outer gradient is `global - local`, a descent direction like any gradient, so every optax transformation can be an
outer optimizer. The interface is that of optax: `init` makes the state; `update` turns gradient, state and parameters
into a change and the next state. Gradient and change are not arrays but rules, which the loops of passes.py evaluate
block by block. So the loop that merges also computes DiLoCo's Nesterov momentum, the default. Neither the mean nor the
change of a whole fragment is ever in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import jax
import numpy as np
import optax
from jaxtyping import Float32

Flat = Float32[np.ndarray, "_"]
Views = Mapping[str, Float32[np.ndarray, "..."]]
OuterState = dict[str, np.ndarray]
OptimizerName = Literal["nesterov", "sgd", "adam"]
NOTHING = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterConfig:
    """The outer optimizer and its constants; they are the same for all fragments and do not change in time."""

    optimizer: OptimizerName = "nesterov"
    """'nesterov' (DiLoCo), 'sgd' (no momentum; with learning rate 1.0 the merged value replaces the global one), or
    'adam'. Leave it unless you compare outer optimizers. Without momentum, nesterov and sgd are equal."""
    learning_rate: float = 1.0
    """Size of the outer step, above 0. Below 1 the global model lags behind the learners, and above 1 it overshoots.
    With momentum mu a steady gradient moves 1 / (1 - mu) times as far; the defaults won the sweep in docs/log.md. Lower
    it if the global model's loss jumps after merges. Tune it again with every change of momentum."""
    momentum: float = 0.0
    """mu of 'nesterov' and first-moment decay of 'adam', at least 0 and below 1; 'sgd' does not use it. With a large
    value old rounds dominate. Raise it to 0.9 together with a lower learning_rate to repeat DiLoCo; momentum did not
    help at the sizes that we measured."""
    module: str = ""
    """Your own function as package.module:Name, which returns an optax.GradientTransformation that includes its rate;
    it replaces the settings before this one. Each fragment has a state. Set it to try another outer optimizer. Only the
    syncer imports the file with the function. The syncer holds the optimizer's state for the whole model."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that function. Set it if your function takes arguments."""

    def __post_init__(self) -> None:
        if self.optimizer not in get_args(OptimizerName):
            choices = ", ".join(get_args(OptimizerName))
            raise ValueError(f"outer optimizer is {self.optimizer!r}; choose one of {choices}")
        if not 0 < self.learning_rate < float("inf"):
            raise ValueError(f"outer learning_rate is {self.learning_rate}; it must be finite and above 0")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"outer momentum is {self.momentum}; it must be at least 0 and below 1")


@runtime_checkable
class Gradient(Protocol):
    """A merged outer gradient that the kernels compute where they use it."""

    def views(self) -> Views:
        """Compute the gradient as new arrays, with the names and shapes of the parameters."""

    def exactly(self, flat: Flat) -> Gradient:
        """Return a gradient with the values of `flat`."""

    def empty(self) -> Flat:
        """Return an uninitialised flat array of the gradient's size."""

    def leaf(self, number: int) -> tuple[Any, ...]:
        """Return the arguments that the kernels need to compute one leaf of the gradient."""


class Moves(NamedTuple):
    """The change of a fragment as a rule, which the kernels evaluate block by block.

    t' = g + momentum t;   change = -rate (g + momentum t')
    """

    # g
    gradient: Gradient
    # The size of the step.
    rate: float
    # The share of the trace that is kept.
    momentum: float = 0.0
    # t; empty without momentum.
    trace: Flat = NOTHING
    # The array that the kernels write t' to.
    next_trace: Flat = NOTHING
    # False if another part of the new state has NaN or infinity. If t' has, the new values have too, so that the check
    # of the values is enough for t'.
    finite: bool = True


@runtime_checkable
class Outer(Protocol):
    """The interface of an outer optimizer, shaped like optax's transformations."""

    def init(self, params: Views) -> OuterState:
        """Return the state before the first update."""

    def update(self, gradient: Gradient, state: Mapping[str, np.ndarray], params: Views) -> tuple[Moves, OuterState]:
        """Return the change of the parameters and the new state; the arguments stay unchanged.

        Args:
          gradient: the merged outer gradient, global - local.
          state: from `init` or the previous call.
          params: the fragment's global values, with the same names and shapes.
        """


@dataclass(frozen=True, slots=True)
class Nesterov:
    """Gradient descent with Nesterov's momentum, or plain if momentum is 0; equals optax.sgd(..., nesterov=True).

    trace <- g + momentum trace;   params <- params - rate (g + momentum trace)
    """

    rate: float
    momentum: float

    def init(self, params: Views) -> OuterState:
        size = sum(view.size for view in params.values())
        return {"trace": np.zeros(size, np.float32)} if self.momentum else {}

    def update(self, gradient: Gradient, state: Mapping[str, np.ndarray], params: Views) -> tuple[Moves, OuterState]:
        """Return the change as a rule (`Outer.update`); the kernels fill the new state when they apply it."""
        trace = state.get("trace", NOTHING)
        if not trace.size:
            return Moves(gradient, self.rate), {}
        fresh = gradient.empty()
        return Moves(gradient, self.rate, self.momentum, trace, fresh), {"trace": fresh}


class Optax:
    """Any optax gradient transformation, computed on the CPU.

    Results are bit-identical between runs on one kind of machine; on another kind the compiler may fuse multiply-adds.
    """

    def __init__(self, tx: optax.GradientTransformation) -> None:
        self._tx = tx
        self._update = jax.jit(tx.update)

    def init(self, params: Views) -> OuterState:
        """Return the leaves of optax's initial state by their paths."""
        with jax.default_device(_cpu()):
            return _leaves(self._tx.init(_to_cpu(dict(params))))

    def update(self, gradient: Gradient, state: Mapping[str, np.ndarray], params: Views) -> tuple[Moves, OuterState]:
        template = jax.eval_shape(self._tx.init, dict(params))
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(template)]
        tree = jax.tree.unflatten(jax.tree.structure(template), [state[jax.tree_util.keystr(path)] for path in paths])
        moves, tree = self._update(_to_cpu(dict(gradient.views())), _to_cpu(tree), _to_cpu(dict(params)))
        flat = np.concatenate([np.asarray(moves[name], np.float32).reshape(-1) for name in params])
        after = _leaves(tree)
        finite = all(np.isfinite(leaf).all() for leaf in after.values())
        return Moves(gradient.exactly(flat), -1.0, finite=bool(finite)), after


def make_outer(config: OuterConfig) -> Outer:
    """Return the built-in optimizer that `config` names."""
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
    # The copies matter: device_put may alias NumPy memory, on CPU even with may_alias=False.
    return jax.device_put(jax.tree.map(np.array, tree), _cpu())


def _leaves(tree: Any) -> OuterState:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
