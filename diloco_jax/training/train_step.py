"""One inner step as a pure function: loss, gradient, update.

g = d loss(theta, batch) / d theta;   u, state = tx(g, state, theta);   theta = theta + learning_rate * u

The loss also takes the model's random streams, and takes and returns its other state (variables.py).
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Shaped

from diloco_jax.training.models.protocol import GraphDef, TrainableModel, join_model
from diloco_jax.training.sharding import constrain, current_layout
from diloco_jax.training.state import Batch, Metrics, Params, TrainState, Variables
from diloco_jax.training.variables import Draw, Streams, state_after
from diloco_jax.training.whole_state.packing import Packed, Packing

# Loss, metrics and gradient of a batch.
Found = tuple[Float[Array, ""], Metrics, Params]
NOTHING: Mapping[str, Array] = MappingProxyType({})
# The metric with the number of predictions in a batch; means over batches are weighted by it.
WEIGHT = "weight"


def model_loss(
    graphdef: GraphDef,
    params: Params,
    batch: Batch,
    other: Mapping[str, Array] = NOTHING,
    constant: Mapping[str, Array] = NOTHING,
    *,
    evaluate: bool = False,
) -> tuple[Float[Array, ""], tuple[Metrics, Variables]]:
    """Compute the model's loss from its flat parameters; return (loss, (metrics, other state afterwards)).

    Args:
      constant: random streams and frozen variables.
      evaluate: nothing is dropped, and batch statistics are used instead of updated.
    """
    model = join_model(graphdef, params, {**constant, **other})
    assert isinstance(model, TrainableModel), "load_model checks it"
    if evaluate:
        model.eval()
    loss, metrics = model.loss(batch)
    return loss, (metrics, state_after(model, other))


def make_gradient(
    graphdef: GraphDef,
    accumulate_steps: int = 1,
    shardings: Mapping[str, NamedSharding] | None = None,
    streams: Streams = Streams(),  # noqa: B008  a constant
) -> Callable[..., tuple[Found, Variables]]:
    """Return the first half of a step, a pure function of (parameters, other state, batch, draw, frozen variables).

    Args:
      accumulate_steps: micro-batches; they are computed in sequence, and the result is their mean.
      shardings: layout of every parameter and of its gradient, by path.
      streams: the model's random streams.

    Returns:
      A function that returns (loss, metrics, gradient) and the other state afterwards. Metrics are means over the
      micro-batches, weighted by the metric `weight` if there is one; `weight` itself is a sum.
    """

    def gradient_of(params: Params, other: Variables, batch: Batch, constant: Variables) -> tuple[Found, Variables]:
        found = jax.value_and_grad(lambda p: model_loss(graphdef, p, batch, other, constant), has_aux=True)
        (loss, (metrics, other)), gradient = found(params)
        if shardings is not None:
            gradient = jax.lax.with_sharding_constraint(gradient, dict(shardings))
        return (loss, metrics, gradient), other

    def gradient(
        params: Params,
        other: Variables,
        batch: Batch,
        draw: Draw | None = None,
        frozen: Mapping[str, Array] = NOTHING,
    ) -> tuple[Found, Variables]:
        def of(other: Variables, part: Batch, number: int | Array) -> tuple[Found, Variables]:
            return gradient_of(params, other, part, {**frozen, **streams.at(draw, number)})

        if accumulate_steps == 1:
            return of(other, batch, 0)
        return _mean_over(of, other, _micro_batches(batch, accumulate_steps))

    return gradient


def make_update(tx: optax.GradientTransformation) -> Callable[..., tuple[TrainState, Metrics]]:
    """Return the second half of a step, a pure function of (state, gradient, learning rate).

    Args:
      tx: optimizer built for learning rate 1.

    Returns:
      A function that returns the new state, with unchanged other state, and `grad_norm` before clipping.
    """

    def update(state: TrainState, gradient: Params, learning_rate: Float[Array, ""]) -> tuple[TrainState, Metrics]:
        updates, opt_state = tx.update(gradient, state.opt_state, state.params)
        params = {path: value + learning_rate * updates[path] for path, value in state.params.items()}
        # The float32 rate, or a mean of gradients, turns narrower parameters into float32, so they are cast back.
        kept = jax.tree.map(lambda new, old: new.astype(old.dtype), TrainState(params, opt_state, state.other), state)
        return kept, {"grad_norm": optax.tree.norm(gradient)}

    return update


def make_train_step(
    graphdef: GraphDef,
    tx: optax.GradientTransformation,
    accumulate_steps: int = 1,
    shardings: Mapping[str, NamedSharding] | None = None,
    streams: Streams = Streams(),  # noqa: B008  a constant
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Return the inner step as a pure function of (state, batch, learning rate, draw, frozen variables).

    Args:
      tx, accumulate_steps, shardings, streams: as for `make_gradient` and `make_update`.

    Returns:
      A function that returns the new state and the metrics: `loss`, `grad_norm` before clipping, and those that the
      model reports.
    """
    gradient_of, update = make_gradient(graphdef, accumulate_steps, shardings, streams), make_update(tx)

    def train_step(
        state: TrainState,
        batch: Batch,
        learning_rate: Float[Array, ""],
        draw: Draw | None = None,
        frozen: Mapping[str, Array] = NOTHING,
    ) -> tuple[TrainState, Metrics]:
        (loss, metrics, gradient), other = gradient_of(state.params, state.other, batch, draw, frozen)
        kept, norm = update(state._replace(other=other), gradient, learning_rate)
        return kept, {**metrics, "loss": loss, **norm}

    return train_step


def make_part(
    gradient_of: Callable[..., tuple[Found, Variables]], packing: Packing
) -> Callable[..., tuple[Packed, Metrics]]:
    """Return a function of (parameters, batch, draw, frozen variables) with a packed gradient and float32 metrics.

    Args:
      gradient_of: the result of `make_gradient` for a model without other state.
    """

    def part(
        params: Params, batch: Batch, draw: Draw | None = None, frozen: Mapping[str, Array] = NOTHING
    ) -> tuple[Packed, Metrics]:
        (loss, metrics, gradient), _ = gradient_of(params, {}, batch, draw, frozen)
        exact: tuple[Params, Metrics] = jax.tree.map(
            lambda leaf: leaf.astype(jnp.float32), (gradient, {**metrics, "loss": loss})
        )
        return packing.pack(exact[0]), exact[1]

    return part


def make_packed_update(tx: optax.GradientTransformation, packing: Packing) -> Callable[..., tuple[TrainState, Metrics]]:
    """Return `make_update` as a function of (state, packed gradient, learning rate)."""
    update = make_update(tx)
    return lambda state, packed, learning_rate: update(state, packing.unpack(packed), learning_rate)


def _micro_batches(batch: Batch, count: int) -> Batch:
    """Reshape [b, ...] to [count, b / count, ...], so that each device splits only its own sequences."""

    layout = current_layout()
    parts = 1 if layout is None else layout.batch_parts
    size = len(next(iter(batch.values())))
    if size % (parts * count):
        raise ValueError(
            f"a batch of {size} samples cannot be split over {parts} devices and optimizer.accumulate_steps {count}; "
            f"make the batch size a multiple of {parts * count}"
        )

    def deal_out(x: Shaped[Array, "b ..."]) -> Shaped[Array, "n m ..."]:
        micro = x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1)
        return constrain(micro, None, "batch", *(None,) * (x.ndim - 1))

    return {name: deal_out(x) for name, x in batch.items()}


def _mean_over(
    function: Callable[[Variables, Batch, int | Array], tuple[Found, Variables]], other: Variables, parts: Batch
) -> tuple[Found, Variables]:
    """Return the float32 mean of the function's results over parts, computed one part at a time.

    Parts are weighted by the metric `weight` if there is one, otherwise equally; `weight` itself is summed.

    Args:
      function: takes the model's other state, a part and its number; returns results and the other state.
      other: other state for the first part; each part passes it to the next.
      parts: arrays whose first axis counts the parts.
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
