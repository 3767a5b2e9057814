"""One inner step: loss, gradient, update. A pure function; the island decides where it runs.

g = d loss(theta, batch) / d theta;   u, state = tx(g, state, theta);   theta = theta + learning_rate * u
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import optax
from jaxtyping import Array, Float

from diloco_jax.training.models.protocol import Batch, GraphDef, Metrics, Params, TrainableModel, join_model


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
    graphdef: GraphDef, tx: optax.GradientTransformation
) -> Callable[[TrainState, Batch, Float[Array, ""]], tuple[TrainState, Metrics]]:
    """The inner step as a pure function of (state, batch, learning rate).

    Args:
      graphdef: static structure of the model.
      tx: optimizer made for learning rate 1.

    Returns:
      A function that gives the new state and the metrics `loss` and `grad_norm` (before clipping), and what else the
      model's `loss` reports.
    """

    def train_step(state: TrainState, batch: Batch, learning_rate: Float[Array, ""]) -> tuple[TrainState, Metrics]:
        (loss, extra), gradient = jax.value_and_grad(lambda p: model_loss(graphdef, p, batch), has_aux=True)(
            state.params
        )
        updates, opt_state = tx.update(gradient, state.opt_state, state.params)
        params = {path: value + learning_rate * updates[path] for path, value in state.params.items()}
        return TrainState(params, opt_state), {**extra, "loss": loss, "grad_norm": optax.tree.norm(gradient)}

    return train_step
