"""A mixture of experts in place of a layer's MLP: a few of many gated MLPs compute each token.

Shapes: B batch, T length, D model width, F width of an expert, E experts, A experts per token, C slots of an expert for
one sequence.

    p = softmax(x R)              router, float32;  a token has its A most probable experts, whose weights w have sum 1
    y = sum_a w_a MLP_e(a)(x)     without the choices that got no slot

With biases, x R + r replaces x R, and each MLP adds biases after its three products.

With capacity, the tokens of a sequence get slots in their order, so no token's result depends on a later token. The
experts are sharded over the mesh axis `expert`. Tokens travel to them and back (two all-to-alls), while weights stay.

Without capacity (dropless) each device sorts its tokens by expert, and one ragged product computes all of them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from diloco_jax.training.models.layers import glu, keep
from diloco_jax.training.models.options import DecoderConfig
from diloco_jax.training.sharding import constrain, current_layout, gather
from diloco_jax.training.state import Metrics

# Every device has the whole router.
ROUTER_AXES = (None, None)
IN_AXES, OUT_AXES = ("expert", "embed", "mlp"), ("expert", "mlp", "embed")
# Biases are small, so only the experts' axis splits them.
BIAS_AXES = ("expert", None)


class Biases(NamedTuple):
    """The stored biases of a layer's experts."""

    gate: Float[Array, "e f"]
    up: Float[Array, "e f"]
    down: Float[Array, "e d"]


class Experts(NamedTuple):
    """The stored weights of a layer's experts."""

    gate: Float[Array, "e d f"]
    up: Float[Array, "e d f"]
    down: Float[Array, "e f d"]
    # A factor of each expert's results; None for 1.
    scale: Float[Array, " e"] | None = None
    biases: Biases | None = None

    def gathered(self, dtype: jnp.dtype) -> tuple[Float[Array, "e d f"], Float[Array, "e d f"], Float[Array, "e f d"]]:
        """Return the gate, up and down weights, cast and gathered."""
        gate, up = (gather(w.astype(dtype), *IN_AXES) for w in (self.gate, self.up))
        return gate, up, gather(self.down.astype(dtype), *OUT_AXES)


class Route(NamedTuple):
    """The assignment of one sequence's tokens to experts; without capacity there are no slots."""

    # Each token's experts, the likeliest first.
    experts: Int32[Array, "t a"]
    # The weight of each choice; 0 if it has no slot.
    weights: Float[Array, "t a"]
    # E sum_e (share of choices for e) (mean probability of e); 1 if the experts are used evenly.
    balance: Float[Array, ""]
    # The slot of each choice; `capacity` or more if no slot was free.
    slots: Int32[Array, "t a"] | None = None
    # The token in each slot; `length` if the slot is empty.
    tokens: Int32[Array, "e c"] | None = None
    # The share of choices without a slot.
    dropped: Float[Array, ""] | float = 0.0


def choose(logits: Float[Array, "t e"], experts_per_token: int, normalize: bool = True) -> Route:
    """Choose the experts of one sequence's tokens from the router's float32 logits."""
    num_experts = logits.shape[1]
    probabilities = jax.nn.softmax(logits, axis=-1)
    top, experts = jax.lax.top_k(probabilities, experts_per_token)
    share = jnp.mean(jax.nn.one_hot(experts.reshape(-1), num_experts, dtype=jnp.float32), axis=0)
    weights = top / jnp.sum(top, axis=-1, keepdims=True) if normalize else top
    return Route(experts, weights, num_experts * jnp.sum(share * jnp.mean(probabilities, axis=0)))


def route(logits: Float[Array, "t e"], experts_per_token: int, capacity: int, normalize: bool = True) -> Route:
    """Choose the experts of one sequence's tokens, and give the choices slots in the order of the tokens."""
    length, num_experts = logits.shape
    choice = choose(logits, experts_per_token, normalize)
    experts = choice.experts
    chosen = jax.nn.one_hot(experts.reshape(-1), num_experts, dtype=jnp.int32)  # [choices, experts]
    earlier = jnp.cumsum(chosen, axis=0) - chosen
    slots = jnp.sum(earlier * chosen, axis=-1).reshape(experts.shape)
    kept = slots < capacity
    token = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[:, None], experts.shape)
    tokens = jnp.full((num_experts, capacity), length, jnp.int32).at[experts, slots].set(token, mode="drop")
    weights = jnp.where(kept, choice.weights, 0.0)
    return Route(experts, weights, choice.balance, slots, tokens, 1 - jnp.mean(kept.astype(jnp.float32)))


def mixture(
    x: Float[Array, "b t d"], logits: Float[Array, "b t e"], experts: Experts, c: DecoderConfig
) -> tuple[Float[Array, "b t d"], Metrics]:
    """Compute each token with its experts; return the results, and the metrics `balance` and `dropped` of this layer.

    Args:
      x: the experts' input.
      logits: the router's float32 results.
    """
    if c.routing == "dropless":
        return _dropless(x, logits, experts, c)
    capacity = c.capacity(x.shape[1])
    routes = jax.vmap(lambda one: route(one, c.experts_per_token, capacity, c.normalize_weights))(logits)
    # The index in an empty slot is beyond the sequence, so it reads as zeros.
    slots = jax.vmap(lambda one, tokens: one.at[tokens].get(mode="fill", fill_value=0))(x, routes.tokens)
    slots = constrain(constrain(slots, "batch", None, None, None), "expert_batch", "expert", None, None)
    gate, up, down = experts.gathered(slots.dtype)
    both = [jnp.einsum("becd,edf->becf", slots, w) for w in (gate, up)]
    if experts.biases is not None:
        both = [y + b[None, :, None].astype(y.dtype) for y, b in zip(both, experts.biases[:2], strict=True)]
    hidden = glu(keep(both[0], "gated"), keep(both[1], "gated"), c.activation, c.glu_limit)
    results = jnp.einsum("becf,efd->becd", hidden, down)
    results = constrain(results, "expert_batch", "expert", None, None)
    results = constrain(results, "batch", None, None, None)
    back = jax.vmap(lambda one, e, s: one.at[e, s].get(mode="fill", fill_value=0))
    choices = back(results, routes.experts, routes.slots)
    weights = _weights(routes, experts).astype(x.dtype)
    y = _with_biases(jnp.einsum("btad,bta->btd", choices, weights), routes, weights, experts)
    return y, {"balance": jnp.mean(routes.balance), "dropped": jnp.mean(routes.dropped)}


def _weights(routes: Route, experts: Experts) -> Float[Array, "b t a"]:
    return routes.weights if experts.scale is None else routes.weights * experts.scale[routes.experts]


def _with_biases(
    y: Float[Array, "b t d"], routes: Route, weights: Float[Array, "b t a"], experts: Experts
) -> Float[Array, "b t d"]:
    """Add the weighted biases of each token's experts; a choice without a slot has the weight 0."""
    if experts.biases is None:
        return y
    down = experts.biases.down.astype(y.dtype)
    shares = jnp.einsum("bta,btae->bte", weights, jax.nn.one_hot(routes.experts, len(down), dtype=y.dtype))
    return y + jnp.einsum("bte,ed->btd", shares, down)


def _dropless(
    x: Float[Array, "b t d"], logits: Float[Array, "b t e"], experts: Experts, c: DecoderConfig
) -> tuple[Float[Array, "b t d"], Metrics]:
    choice = jax.vmap(lambda one: choose(one, c.experts_per_token, c.normalize_weights))(logits)

    biases = () if experts.biases is None else tuple(each.astype(x.dtype) for each in experts.biases[:2])

    def local(x: Array, chosen: Array, weights: Array, gate: Array, up: Array, down: Array, *biases: Array) -> Array:
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=c.num_experts).astype(jnp.int32)
        rows = x.reshape(-1, x.shape[2])[order // c.experts_per_token]
        both = [jax.lax.ragged_dot(rows, w, sizes) for w in (gate, up)]
        if biases:
            both = [y + b[chosen.reshape(-1)[order]] for y, b in zip(both, biases, strict=True)]
        rows = jax.lax.ragged_dot(glu(both[0], both[1], c.activation, c.glu_limit), down, sizes)
        choices = rows[jnp.argsort(order)].reshape(*chosen.shape, -1)
        y = jnp.einsum("btad,bta->btd", choices, weights.astype(x.dtype))
        return jax.lax.psum(y, split) if split else y

    layout, spread, split = current_layout(), local, None
    if layout is not None:
        assert layout.mesh.shape["expert"] == 1, "RunConfig refuses dropless routing with the mesh axis expert"
        batch = layout.sharding(x.shape, ("batch", None, None)).spec
        into = layout.gathered(experts.gate.shape, IN_AXES).spec
        out = layout.gathered(experts.down.shape, OUT_AXES).spec
        # The mesh axes that split the experts' width.
        split = into[2]
        specs = (batch, batch, batch, into, into, out, *(PartitionSpec(None, split) for _ in biases))
        spread = jax.shard_map(local, mesh=layout.mesh, in_specs=specs, out_specs=batch, check_vma=False)
    weights = _weights(choice, experts)
    y = spread(x, choice.experts, weights, *experts.gathered(x.dtype), *biases)
    y = _with_biases(y, choice, weights.astype(x.dtype), experts)
    return y, {"balance": jnp.mean(choice.balance), "dropped": jnp.zeros(())}
