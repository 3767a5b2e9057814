"""One inner step: loss, gradient, update. A pure function; the island decides where it runs.

g = d loss(theta, batch) / d theta;   u, state = tx(g, state, theta);   theta = theta + learning_rate * u
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Shaped

from diloco_jax.training.models.protocol import Batch, GraphDef, Metrics, Params, TrainableModel, join_model
from diloco_jax.training.sharding import constrain, current_layout

T = TypeVar("T")


class TrainState(NamedTuple):
    """Everything an inner step changes."""

    params: Params
    opt_state: optax.OptState


def model_loss(graphdef: GraphDef, params: Params, batch: Batch) -> tuple[Float[Array, ""], Metrics]:
    """The model's own loss as a function of the flat parameters."""
    model = join_model(graphdef, params)
    assert isinstance(model, TrainableModel), "load_model checks it"
    return model.loss(batch)


def make_train_step(
    graphdef: GraphDef,
    tx: optax.GradientTransformation,
    accumulate_steps: int = 1,
    shardings: Mapping[str, NamedSharding] | None = None,
) -> Callable[[TrainState, Batch, Float[Array, ""]], tuple[TrainState, Metrics]]:
    """The inner step as a pure function of (state, batch, learning rate).

    Args:
      graphdef: static structure of the model.
      tx: optimizer made for learning rate 1.
      accumulate_steps: micro-batches, one after the other, whose mean gradient makes the update; it saves memory.
      shardings: layout of every parameter, by path, which its gradient gets too.

    Returns:
      A function that gives the new state and the metrics `loss` and `grad_norm` (before clipping), and what else the
      model's `loss` reports (the mean over the micro-batches).
    """

    def gradient_of(params: Params, batch: Batch) -> tuple[tuple[Float[Array, ""], Metrics], Params]:
        found = jax.value_and_grad(lambda p: model_loss(graphdef, p, batch), has_aux=True)
        value, gradient = found(params)
        return value, gradient if shardings is None else jax.lax.with_sharding_constraint(gradient, dict(shardings))

    def train_step(state: TrainState, batch: Batch, learning_rate: Float[Array, ""]) -> tuple[TrainState, Metrics]:
        if accumulate_steps == 1:
            (loss, extra), gradient = gradient_of(state.params, batch)
        else:
            (loss, extra), gradient = _mean_over(
                lambda part: gradient_of(state.params, part), _micro_batches(batch, accumulate_steps)
            )
        updates, opt_state = tx.update(gradient, state.opt_state, state.params)
        params = {path: value + learning_rate * updates[path] for path, value in state.params.items()}
        return TrainState(params, opt_state), {**extra, "loss": loss, "grad_norm": optax.tree.norm(gradient)}

    return train_step


def _micro_batches(batch: Batch, count: int) -> Batch:
    """[b, ...] as [count, b / count, ...]; every device deals out the sequences that it has."""

    layout = current_layout()
    parts = 1 if layout is None else layout.batch_parts
    size = len(next(iter(batch.values())))
    if size % (parts * count):
        raise ValueError(
            f"a batch of {size} sequences cannot be split over {parts} devices in optimizer.accumulate_steps {count}; "
            f"make the batch size a multiple of {parts * count}"
        )

    def deal_out(x: Shaped[Array, "b ..."]) -> Shaped[Array, "n m ..."]:
        micro = x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1)
        return constrain(micro, None, "batch", *(None,) * (x.ndim - 1))

    return {name: deal_out(x) for name, x in batch.items()}


def _mean_over(function: Callable[[Batch], T], parts: Batch) -> T:
    """The mean of the function's results, float32, over the leading axis of its argument; one part at a time."""
    count = len(next(iter(parts.values())))
    first = jax.eval_shape(function, {name: x[0] for name, x in parts.items()})
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), first)
    total, _ = jax.lax.scan(lambda sums, part: (jax.tree.map(jnp.add, sums, function(part)), None), zeros, parts)
    mean: T = jax.tree.map(lambda leaf: leaf / count, total)
    return mean
