"""A decoder-only transformer in the style of Gemma, small enough to read in one sitting.

Shapes: B batch, T length, D model width, N query heads, K key and value heads, G = N / K queries per key head,
H head width, F width of the MLP, V vocabulary, L layers.

    x = E[tokens] sqrt(D);   x += Attention(RMSNorm(x));   x += MLP(RMSNorm(x));   logits = RMSNorm(x) E^T
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from diloco_jax.training.models.protocol import Batch, Metrics, config_from_args
from diloco_jax.training.sharding import constrain

Activation = Literal["gelu", "silu", "relu2"]
Attention = Literal["einsum", "dot_product"]

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and choices of the decoder; the defaults make about 1.0M parameters."""

    vocab_size: int = 256
    """Number of token ids (256 = bytes)."""

    dim: int = 128
    """Width of the residual stream."""

    num_layers: int = 4
    """Number of blocks."""

    num_heads: int = 4
    """Query heads; a multiple of num_kv_heads."""

    num_kv_heads: int = 2
    """Key and value heads; 1 = multi-query, num_heads = ordinary attention."""

    head_dim: int = 32
    """Width of one head; even, because rotary embedding turns pairs."""

    mlp_dim: int = 512
    """Width of the gated MLP."""

    seq_len_max: int = 2048
    """Longest sequence, tokens; a longer batch is an error."""

    rope_theta: float = 10_000.0
    """Base of the rotary wavelengths; larger reaches further."""

    activation: str = "gelu"
    """Gate of the MLP: gelu (Gemma), silu, or relu2 (squared relu, cheapest on CPU)."""

    attention: str = "einsum"
    """einsum (fastest on CPU) or dot_product (jax.nn.dot_product_attention)."""

    scan_layers: bool = False
    """Stack the blocks' parameters and scan over them: compiles in constant time, one tensor per kind of weight."""

    dtype: str = "float32"
    """Type of activations and matrix products, float32 or bfloat16; parameters and the loss are always float32."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.args.{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.args.num_heads is {self.num_heads}; make it a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"model.args.head_dim is {self.head_dim}; it must be even")
        if self.seq_len_max < 1 or self.rope_theta <= 0:
            raise ValueError(f"model.args: seq_len_max {self.seq_len_max} and rope_theta {self.rope_theta} must be > 0")
        for name, choices in (
            ("activation", get_args(Activation)),
            ("attention", get_args(Attention)),
            ("dtype", ("float32", "bfloat16")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"model.args.{name} is '{getattr(self, name)}'; choose from {', '.join(choices)}")


def apply_rope(x: Float[Array, "b t n h"], theta: float) -> Float[Array, "b t n h"]:
    """Rotate the pairs (x[i], x[i + H/2]) by the angle position * theta^(-2i/H)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequency[None, :]
    cos, sin = (f(angle)[None, :, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attend(
    q: Float[Array, "b t n h"], k: Float[Array, "b t k h"], v: Float[Array, "b t k h"], method: str
) -> Float[Array, "b t n h"]:
    """Causal grouped-query attention, softmax(q k^T / sqrt(H)) v; query head i reads key head i // (N / K)."""
    if method == "dot_product":
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)
    b, t, n, h = q.shape
    groups = n // k.shape[2]
    # One matrix product per (example, key head): the G query heads of a group are stacked along time. The softmax is
    # normalised after the product with v, on T x H instead of T x T numbers. Together 10 % of a training step on CPU.
    q = (q * h**-0.5).reshape(b, t, -1, groups, h).transpose(0, 2, 3, 1, 4).reshape(b, -1, groups * t, h)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    scores = jnp.einsum("bkqh,bksh->bkqs", q, k, preferred_element_type=jnp.float32)
    causal = jnp.tile(jnp.arange(t), groups)[:, None] >= jnp.arange(t)[None, :]
    scores = jnp.where(causal[None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    mixed = jnp.einsum("bkqs,bksh->bkqh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    mixed = (mixed / jnp.sum(weights, axis=-1, keepdims=True)).astype(v.dtype)
    return mixed.reshape(b, -1, groups, t, h).transpose(0, 3, 1, 2, 4).reshape(b, t, n, h)


def _linear(n_in: int, n_out: int, names: tuple[str, str], dtype: str, rngs: nnx.Rngs) -> nnx.Linear:
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
    return nnx.Linear(n_in, n_out, use_bias=False, kernel_init=init, dtype=dtype, rngs=rngs)


def _norm(config: DecoderConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(config.dim, dtype=config.dtype, rngs=rngs)


class Block(nnx.Module):
    """One layer: attention and gated MLP, each behind its norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        c = self.config = config
        self.norm_attention = _norm(c, rngs)
        self.q = _linear(c.dim, c.num_heads * c.head_dim, ("embed", "heads"), c.dtype, rngs)
        self.k = _linear(c.dim, c.num_kv_heads * c.head_dim, ("embed", "heads"), c.dtype, rngs)
        self.v = _linear(c.dim, c.num_kv_heads * c.head_dim, ("embed", "heads"), c.dtype, rngs)
        self.out = _linear(c.num_heads * c.head_dim, c.dim, ("heads", "embed"), c.dtype, rngs)
        self.norm_mlp = _norm(c, rngs)
        self.gate = _linear(c.dim, c.mlp_dim, ("embed", "mlp"), c.dtype, rngs)
        self.up = _linear(c.dim, c.mlp_dim, ("embed", "mlp"), c.dtype, rngs)
        self.down = _linear(c.mlp_dim, c.dim, ("mlp", "embed"), c.dtype, rngs)

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """Apply the layer to the residual stream."""
        c = self.config
        b, t, _ = x.shape
        y = self.norm_attention(x)
        q = apply_rope(self.q(y).reshape(b, t, c.num_heads, c.head_dim), c.rope_theta)
        k = apply_rope(self.k(y).reshape(b, t, c.num_kv_heads, c.head_dim), c.rope_theta)
        v = self.v(y).reshape(b, t, c.num_kv_heads, c.head_dim)
        x = constrain(x + self.out(attend(q, k, v, c.attention).reshape(b, t, -1)), "batch", None, None)
        y = self.norm_mlp(x)
        y = ACTIVATIONS[c.activation](self.gate(y)) * self.up(y)
        return constrain(x + self.down(y), "batch", None, None)


def _stacked_blocks(config: DecoderConfig, rngs: nnx.Rngs) -> Block:
    """Blocks as one module whose parameters have a leading `layers` axis."""

    @nnx.split_rngs(splits=config.num_layers)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def create(layer_rngs: nnx.Rngs) -> Block:
        return Block(config, rngs=layer_rngs)

    return create(rngs)


class Decoder(nnx.Module):
    """The built-in language model; implements `TrainableModel`."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        # Axis names must not ask for a mesh here: the island, or nobody, places the parameters.
        with nnx.use_eager_sharding(False):
            init = nnx.with_partitioning(nnx.initializers.normal(0.02), ("vocab", "embed"))
            self.embed = nnx.Embed(config.vocab_size, config.dim, dtype=config.dtype, embedding_init=init, rngs=rngs)
            self.blocks: Block | nnx.List[Block] = (
                _stacked_blocks(config, rngs)
                if config.scan_layers
                else nnx.List(Block(config, rngs=rngs) for _ in range(config.num_layers))
            )
            self.norm_final = _norm(config, rngs)

    @classmethod
    def from_config(cls, args: Mapping[str, Any], *, rngs: nnx.Rngs) -> Decoder:
        """Build from the fields of `DecoderConfig`; an unknown or ill-typed one is a ValueError."""
        return cls(config_from_args(DecoderConfig, args), rngs=rngs)

    def __call__(self, tokens: Int32[Array, "b t"]) -> Float[Array, "b t v"]:
        """Logits of the next token at every position, float32.

        Raises:
          ValueError: the sequence is longer than `seq_len_max`.
        """
        c = self.config
        if tokens.shape[1] > c.seq_len_max:
            raise ValueError(f"a sequence of {tokens.shape[1]} tokens exceeds model.args.seq_len_max {c.seq_len_max}")
        # Whole rows on every device, gathered once for both uses; looking up split rows would move activations.
        table = constrain(self.embed.embedding[...].astype(c.dtype), "vocab", None)
        x = constrain(jnp.take(table, tokens, axis=0) * c.dim**0.5, "batch", None, None)
        if isinstance(self.blocks, Block):
            graphdef, stacked = nnx.split(self.blocks)
            x, _ = jax.lax.scan(lambda carry, layer: (nnx.merge(graphdef, layer)(carry), None), x, stacked)
        else:
            for block in self.blocks:
                x = block(x)
        logits = jnp.einsum("btd,vd->btv", self.norm_final(x), table, preferred_element_type=jnp.float32)
        return constrain(logits, "batch", None, "vocab")

    def loss(self, batch: Batch) -> tuple[Float[Array, ""], Metrics]:
        """Mean cross-entropy in nats per token of predicting tokens[:, 1:] from tokens[:, :-1]."""
        tokens = batch["tokens"]
        logits = self(tokens[:, :-1])
        # A comparison with an iota instead of a gather: it fuses, shards over `vocab`, and has a cheap gradient.
        hit = jnp.arange(logits.shape[-1])[None, None, :] == tokens[:, 1:, None]
        label_logits = jnp.sum(jnp.where(hit, logits, 0.0), axis=-1)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - label_logits), {}
