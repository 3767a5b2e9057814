"""The decoder with a mixture of experts instead of every MLP: a few of many gated MLPs compute each token.

Shapes as in decoder.py, and E experts, A experts per token, C slots that an expert has for one sequence.

    p = softmax(x R)              router, float32;  a token takes its A most probable experts, with weights of sum 1
    y = sum_a w_a MLP_e(a)(x)     without the choices that found no free slot

With capacity, the tokens of a sequence get slots in their order, so no token's result depends on a later token. The
experts are sharded over the mesh axis `expert`. Tokens travel to them and back (two all-to-alls), while weights stay.

Without capacity (dropless) each device sorts its tokens by expert, and one ragged product computes all of them.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from diloco_jax.training.models.config import DECODER, MOE, ModelConfig
from diloco_jax.training.models.decoder import ACTIVATIONS, Block, Decoder
from diloco_jax.training.models.layers import keep
from diloco_jax.training.models.options import DecoderConfig
from diloco_jax.training.models.protocol import config_from_args
from diloco_jax.training.sharding import constrain, current_layout, gather
from diloco_jax.training.state import Batch, Metrics

# Every device has the whole router.
ROUTER_AXES = (None, None)
IN_AXES, OUT_AXES = ("expert", "embed", "mlp"), ("expert", "mlp", "embed")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig(DecoderConfig):
    """Sizes and options of the mixture; mlp_dim is the width of one expert."""

    num_experts: int = 8
    """E: experts of a layer; a multiple of the mesh axis `expert`."""
    experts_per_token: int = 2
    """A: experts that compute each token."""
    normalize_weights: bool = True
    """Normalise the weights of a token's experts to the sum 1; otherwise they are the router's probabilities."""
    routing: Literal["capacity", "dropless"] = "capacity"
    """capacity: an expert has slots, and tokens without a free slot are dropped; dropless: an expert computes all its
    tokens (not with the mesh axis `expert`)."""
    capacity_factor: float = 1.25
    """Slots of an expert as a multiple of its fair share of a sequence's choices; with num_experts / experts_per_token
    no choice is ever dropped."""
    balance_coefficient: float = 0.01
    """Weight of the load-balancing term in the gradient; the reported loss is the cross-entropy alone."""

    def __post_init__(self) -> None:
        DecoderConfig.__post_init__(self)
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"model.args.experts_per_token is {self.experts_per_token}; use 1 to num_experts ({self.num_experts})"
            )
        if not (0 < self.capacity_factor < math.inf and 0 <= self.balance_coefficient < math.inf):
            raise ValueError(
                f"model.args.capacity_factor {self.capacity_factor} must be > 0, and balance_coefficient "
                f"{self.balance_coefficient} at least 0, both finite"
            )

    def capacity(self, length: int) -> int:
        """Return the number of slots of an expert for a sequence of `length` tokens."""
        return min(length, math.ceil(self.capacity_factor * self.experts_per_token * length / self.num_experts))


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


class MoeBlock(Block):
    """One layer: attention and a mixture of experts."""

    config: MoeConfig

    def init_mlp(self, rngs: nnx.Rngs) -> None:
        c = self.config
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ROUTER_AXES)
        each = nnx.initializers.lecun_normal(batch_axis=0)
        into, out = nnx.with_partitioning(each, IN_AXES), nnx.with_partitioning(each, OUT_AXES)
        self.router = nnx.Param(init(rngs.params(), (c.dim, c.num_experts)))
        self.experts_gate = nnx.Param(into(rngs.params(), (c.num_experts, c.dim, c.mlp_dim)))
        self.experts_up = nnx.Param(into(rngs.params(), (c.num_experts, c.dim, c.mlp_dim)))
        self.experts_down = nnx.Param(out(rngs.params(), (c.num_experts, c.mlp_dim, c.dim)))

    def mlp(self, x: Float[Array, "b t d"]) -> tuple[Float[Array, "b t d"], Metrics]:
        """Apply the mixture to the normalised stream; return the result, and `balance` and `dropped` of this layer."""
        c = self.config
        logits = x.astype(jnp.float32) @ self.router[...]
        if c.routing == "dropless":
            return self._dropless(x, logits)
        capacity = c.capacity(x.shape[1])
        routes = jax.vmap(lambda one: route(one, c.experts_per_token, capacity, c.normalize_weights))(logits)
        # The index in an empty slot is beyond the sequence, so it reads as zeros.
        slots = jax.vmap(lambda one, tokens: one.at[tokens].get(mode="fill", fill_value=0))(x, routes.tokens)
        slots = constrain(constrain(slots, "batch", None, None, None), "expert_batch", "expert", None, None)
        results = constrain(self._experts(slots), "expert_batch", "expert", None, None)
        results = constrain(results, "batch", None, None, None)
        back = jax.vmap(lambda one, e, s: one.at[e, s].get(mode="fill", fill_value=0))
        choices = back(results, routes.experts, routes.slots)
        y = jnp.einsum("btad,bta->btd", choices, routes.weights.astype(x.dtype))
        return y, {"balance": jnp.mean(routes.balance), "dropped": jnp.mean(routes.dropped)}

    def _dropless(
        self, x: Float[Array, "b t d"], logits: Float[Array, "b t e"]
    ) -> tuple[Float[Array, "b t d"], Metrics]:
        c = self.config
        choice = jax.vmap(lambda one: choose(one, c.experts_per_token, c.normalize_weights))(logits)

        def local(x: Array, experts: Array, weights: Array, gate: Array, up: Array, down: Array) -> Array:
            order = jnp.argsort(experts.reshape(-1))
            sizes = jnp.bincount(experts.reshape(-1), length=c.num_experts).astype(jnp.int32)
            rows = x.reshape(-1, x.shape[2])[order // c.experts_per_token]
            hidden = ACTIVATIONS[c.activation](jax.lax.ragged_dot(rows, gate, sizes))
            rows = jax.lax.ragged_dot(hidden * jax.lax.ragged_dot(rows, up, sizes), down, sizes)
            choices = rows[jnp.argsort(order)].reshape(*experts.shape, -1)
            y = jnp.einsum("btad,bta->btd", choices, weights.astype(x.dtype))
            return jax.lax.psum(y, split) if split else y

        layout, spread, split = current_layout(), local, None
        if layout is not None:
            assert layout.mesh.shape["expert"] == 1, "RunConfig refuses dropless routing with the mesh axis expert"
            shape = self.experts_gate[...].shape
            batch = layout.sharding(x.shape, ("batch", None, None)).spec
            into = layout.gathered(shape, IN_AXES).spec
            out = layout.gathered((shape[0], shape[2], shape[1]), OUT_AXES).spec
            # The mesh axes that split the experts' width.
            split = into[2]
            specs = (batch, batch, batch, into, into, out)
            spread = jax.shard_map(local, mesh=layout.mesh, in_specs=specs, out_specs=batch, check_vma=False)
        y = spread(x, choice.experts, choice.weights, *self._weights(x.dtype))
        return y, {"balance": jnp.mean(choice.balance), "dropped": jnp.zeros(())}

    def _weights(self, dtype: jnp.dtype) -> tuple[Float[Array, "e d f"], Float[Array, "e d f"], Float[Array, "e f d"]]:
        """Return the experts' gate, up and down weights, cast and gathered."""
        gate, up = (gather(w[...].astype(dtype), *IN_AXES) for w in (self.experts_gate, self.experts_up))
        return gate, up, gather(self.experts_down[...].astype(dtype), *OUT_AXES)

    def _experts(self, slots: Float[Array, "b e c d"]) -> Float[Array, "b e c d"]:
        gate, up, down = self._weights(slots.dtype)
        gated, raised = (keep(jnp.einsum("becd,edf->becf", slots, w), "gated") for w in (gate, up))
        return jnp.einsum("becf,efd->becd", ACTIVATIONS[self.config.activation](gated) * raised, down)


class MoeDecoder(Decoder):
    """The decoder with experts; implements `TrainableModel`."""

    config: MoeConfig
    config_class = MoeConfig
    block_class = MoeBlock

    def loss(self, batch: Batch) -> tuple[Float[Array, ""], Metrics]:
        """Return the mean cross-entropy in nats per token, and `balance` and `dropped` as means over the layers.

        The balance enters only the gradient, so that losses of different models can be compared.
        """
        loss, metrics = super().loss(batch)
        balance = metrics["balance"]
        return loss + self.config.balance_coefficient * (balance - jax.lax.stop_gradient(balance)), metrics


def decoder_of(model: ModelConfig) -> DecoderConfig | None:
    """Return the configuration of a built-in decoder; None for other models."""
    if model.module == DECODER:
        return config_from_args(DecoderConfig, model.args)
    return config_from_args(MoeConfig, model.args) if model.module == MOE else None
