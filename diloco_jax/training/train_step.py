"""One inner step: loss, gradient, update. A pure function; the island decides where it runs.

g = d loss(theta, batch) / d theta;   u, state = tx(g, state, theta);   theta = theta + learning_rate * u

What a model holds beside its parameters goes through the loss: streams in, state in and out (models/variables.py).
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Shaped

from diloco_jax.training.models.protocol import Batch, GraphDef, Metrics, Params, TrainableModel, join_model
from diloco_jax.training.models.variables import Draw, Streams, Variables, state_after
from diloco_jax.training.sharding import constrain, current_layout

Found = tuple[Float[Array, ""], Metrics, Params]  # loss, metrics and gradient of a batch
NOTHING: Mapping[str, Array] = MappingProxyType({})
WEIGHT = "weight"  # metric of a model: the number of what it predicted, by which means over batches are weighted


class TrainState(NamedTuple):
    """Everything an inner step changes."""

    params: Params  # what is trained, and exchanged with other islands
    opt_state: optax.OptState  # of the inner optimizer
    other: Variables = {}  # state of the model that is no parameter, by path


def model_loss(
    graphdef: GraphDef,
    params: Params,
    batch: Batch,
    other: Mapping[str, Array] = NOTHING,
    streams: Mapping[str, Array] = NOTHING,
    *,
    evaluate: bool = False,
) -> tuple[Float[Array, ""], tuple[Metrics, Variables]]:
    """Return the model's own loss as a function of its flat parameters; its metrics, and `other` after the call.

    In the mode of an evaluation (`evaluate`) nothing is dropped, and batch statistics are used.
    """
    model = join_model(graphdef, params, {**other, **streams})
    assert isinstance(model, TrainableModel), "load_model checks it"
    if evaluate:
        model.eval()
    loss, metrics = model.loss(batch)
    return loss, (metrics, state_after(model, other))


def make_train_step(
    graphdef: GraphDef,
    tx: optax.GradientTransformation,
    accumulate_steps: int = 1,
    shardings: Mapping[str, NamedSharding] | None = None,
    streams: Streams = Streams(),  # noqa: B008  a constant: no streams
) -> Callable[[TrainState, Batch, Float[Array, ""], Draw | None], tuple[TrainState, Metrics]]:
    """Return the inner step as a pure function of (state, batch, learning rate, what to draw from).

    Args:
      tx: optimizer made for learning rate 1.
      accumulate_steps: micro-batches, one after the other, whose mean gradient makes the update; it saves memory.
      shardings: layout of every parameter, by path, which its gradient gets too.

    Returns:
      A function that gives the new state and the metrics `loss` and `grad_norm` (before clipping), and what else the
      model's `loss` reports: the mean over the micro-batches, weighted by `weight` if that is reported, which is a sum.
    """

    def gradient_of(params: Params, other: Variables, batch: Batch, drawn: Variables) -> tuple[Found, Variables]:
        found = jax.value_and_grad(lambda p: model_loss(graphdef, p, batch, other, drawn), has_aux=True)
        (loss, (metrics, other)), gradient = found(params)
        if shardings is not None:
            gradient = jax.lax.with_sharding_constraint(gradient, dict(shardings))
        return (loss, metrics, gradient), other

    def train_step(
        state: TrainState, batch: Batch, learning_rate: Float[Array, ""], draw: Draw | None = None
    ) -> tuple[TrainState, Metrics]:
        def of(other: Variables, part: Batch, number: int | Array) -> tuple[Found, Variables]:
            return gradient_of(state.params, other, part, streams.at(draw, number))

        if accumulate_steps == 1:
            (loss, extra, gradient), other = of(state.other, batch, 0)
        else:
            (loss, extra, gradient), other = _mean_over(of, state.other, _micro_batches(batch, accumulate_steps))
        updates, opt_state = tx.update(gradient, state.opt_state, state.params)
        params = {path: value + learning_rate * updates[path] for path, value in state.params.items()}
        # A rate in float32 would turn narrower parameters into float32 ones, and so would a mean of their gradients.
        kept = jax.tree.map(lambda new, old: new.astype(old.dtype), TrainState(params, opt_state, other), state)
        return kept, {**extra, "loss": loss, "grad_norm": optax.tree.norm(gradient)}

    return train_step


def _micro_batches(batch: Batch, count: int) -> Batch:
    """Reshape [b, ...] as [count, b / count, ...]; every device deals out the sequences that it has."""

    layout = current_layout()
    parts = 1 if layout is None else layout.batch_parts
    size = len(next(iter(batch.values())))
    if size % (parts * count):
        raise ValueError(
            f"a batch of {size} samples cannot be split over {parts} devices in optimizer.accumulate_steps {count}; "
            f"make the batch size a multiple of {parts * count}"
        )

    def deal_out(x: Shaped[Array, "b ..."]) -> Shaped[Array, "n m ..."]:
        micro = x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1)
        return constrain(micro, None, "batch", *(None,) * (x.ndim - 1))

    return {name: deal_out(x) for name, x in batch.items()}


def _mean_over(
    function: Callable[[Variables, Batch, int | Array], tuple[Found, Variables]], other: Variables, parts: Batch
) -> tuple[Found, Variables]:
    """Return the mean of the function's results, float32, over the leading axis of its argument; one part at a time.

    Parts are weighted by the metric `weight`, or alike without it; of `weight` itself it is the sum. The function is
    given the model's other state, a part and its number; the state goes from part to part.
    """
    count = len(next(iter(parts.values())))
    first = jax.eval_shape(function, other, {name: x[0] for name, x in parts.items()}, 0)[0]
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), first)

    weighted = WEIGHT in first[1]

    def add(carry: tuple[Found, Variables], numbered: tuple[Array, Batch]) -> tuple[tuple[Found, Variables], None]:
        (sums, before), (number, part) = carry, numbered
        result, after = function(before, part, number)
        if weighted:
            weight = result[1][WEIGHT].astype(jnp.float32)
            loss, metrics, gradient = jax.tree.map(lambda leaf: leaf * weight, result)
            result = loss, {**metrics, WEIGHT: weight}, gradient
        return (jax.tree.map(jnp.add, sums, result), after), None

    (total, other), _ = jax.lax.scan(add, (zeros, other), (jnp.arange(count), parts))
    if not weighted:
        mean: Found = jax.tree.map(lambda leaf: leaf / count, total)
        return mean, other
    weight = total[1][WEIGHT]
    loss, metrics, gradient = jax.tree.map(lambda leaf: leaf / jnp.where(weight > 0, weight, 1.0), total)
    return (loss, {**metrics, WEIGHT: weight}, gradient), other
