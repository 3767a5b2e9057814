"""A decoder-only transformer in the style of Gemma, small enough to read in one sitting.

Shapes: B batch, T length, D model width, N query heads, K key and value heads, G = N / K queries per key head,
H head width, F width of the MLP, V vocabulary, L layers.

    x = E[tokens] sqrt(D);   x += Attention(RMSNorm(x));   x += MLP(RMSNorm(x));   logits = RMSNorm(x) E^T
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32, Key

from diloco_jax.training.models.attention import Attention, apply_rope, attend
from diloco_jax.training.models.layers import Linear, Remat, checkpoint
from diloco_jax.training.models.losses import TABLE_AXES, chunked_cross_entropy, cross_entropy, logits_of
from diloco_jax.training.models.protocol import Batch, Metrics, config_from_args
from diloco_jax.training.sharding import constrain, gather

Activation = Literal["gelu", "silu", "relu2"]

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
    """einsum (fastest on CPU), dot_product (jax.nn.dot_product_attention), or splash (Pallas kernel for TPUs, which
    keeps no length x length matrix; einsum where the devices are none)."""

    scan_layers: bool = False
    """Stack the blocks' parameters and scan over them: compiles in constant time, one tensor per kind of weight."""

    remat: str = "none"
    """What the backward pass computes again: none, full (whole blocks), or all but what the policies dots_saveable or
    dots_with_no_batch_dims_saveable of jax.checkpoint_policies keep."""

    loss_chunk: int = 0
    """Token ids whose logits exist at a time, a divisor of vocab_size; 0 = all. Saves memory if there are many."""

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
        if self.seq_len_max < 1 or not 0 < self.rope_theta < math.inf:
            raise ValueError(
                f"model.args: seq_len_max {self.seq_len_max} and rope_theta {self.rope_theta} must be finite and > 0"
            )
        if self.loss_chunk < 0 or (self.loss_chunk and self.vocab_size % self.loss_chunk):
            raise ValueError(
                f"model.args.loss_chunk is {self.loss_chunk}; it must divide vocab_size ({self.vocab_size}), or be 0"
            )
        for name, choices in (
            ("activation", get_args(Activation)),
            ("attention", get_args(Attention)),
            ("remat", get_args(Remat)),
            ("dtype", ("float32", "bfloat16")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"model.args.{name} is '{getattr(self, name)}'; choose from {', '.join(choices)}")


def _norm(config: DecoderConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    # Named, though by no mesh axis: only to axes that have names does a scan add that of the layers.
    init = nnx.with_partitioning(nnx.initializers.ones_init(), (None,))
    return nnx.RMSNorm(config.dim, dtype=config.dtype, scale_init=init, rngs=rngs)


class Block(nnx.Module):
    """One layer: attention and gated MLP, each behind its norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        c = self.config = config
        self.norm_attention = _norm(c, rngs)
        self.q = Linear(c.dim, c.num_heads * c.head_dim, ("embed", "heads"), c.dtype, rngs=rngs)
        self.k = Linear(c.dim, c.num_kv_heads * c.head_dim, ("embed", "heads"), c.dtype, rngs=rngs)
        self.v = Linear(c.dim, c.num_kv_heads * c.head_dim, ("embed", "heads"), c.dtype, rngs=rngs)
        self.out = Linear(c.num_heads * c.head_dim, c.dim, ("heads", "embed"), c.dtype, rngs=rngs)
        self.norm_mlp = _norm(c, rngs)
        self.init_mlp(rngs)

    def init_mlp(self, rngs: nnx.Rngs) -> None:
        """Draw the parameters of the MLP."""
        c = self.config
        self.gate = Linear(c.dim, c.mlp_dim, ("embed", "mlp"), c.dtype, rngs=rngs)
        self.up = Linear(c.dim, c.mlp_dim, ("embed", "mlp"), c.dtype, rngs=rngs)
        self.down = Linear(c.mlp_dim, c.dim, ("mlp", "embed"), c.dtype, rngs=rngs)

    def mlp(self, x: Float[Array, "b t d"]) -> tuple[Float[Array, "b t d"], Metrics]:
        """Apply the MLP to the normalised stream, and scalars of this layer."""
        return self.down(ACTIVATIONS[self.config.activation](self.gate(x)) * self.up(x)), {}

    def __call__(self, x: Float[Array, "b t d"]) -> tuple[Float[Array, "b t d"], Metrics]:
        """Apply the layer to the residual stream; also the scalars of its MLP."""
        c = self.config
        b, t, _ = x.shape
        y = self.norm_attention(x)
        q = apply_rope(self.q(y).reshape(b, t, c.num_heads, c.head_dim), c.rope_theta)
        k = apply_rope(self.k(y).reshape(b, t, c.num_kv_heads, c.head_dim), c.rope_theta)
        v = self.v(y).reshape(b, t, c.num_kv_heads, c.head_dim)
        x = constrain(x + self.out(attend(q, k, v, c.attention).reshape(b, t, -1)), "batch", None, None)
        y, metrics = self.mlp(self.norm_mlp(x))
        return constrain(x + y, "batch", None, None), metrics


class Decoder(nnx.Module):
    """The built-in language model; implements `TrainableModel`."""

    config_class: type[DecoderConfig] = DecoderConfig
    block_class: type[Block] = Block

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        # Axis names must not ask for a mesh here: the island, or nobody, places the parameters.
        with nnx.use_eager_sharding(False):
            init = nnx.with_partitioning(nnx.initializers.normal(0.02), TABLE_AXES)
            self.embed = nnx.Embed(config.vocab_size, config.dim, dtype=config.dtype, embedding_init=init, rngs=rngs)
            self.blocks: Block | nnx.List[Block] = (
                self._stacked_blocks(rngs)
                if config.scan_layers
                else nnx.List(self.block_class(config, rngs=rngs) for _ in range(config.num_layers))
            )
            self.norm_final = _norm(config, rngs)

    def _stacked_blocks(self, rngs: nnx.Rngs) -> Block:
        """Return blocks as one module whose parameters have a leading `layers` axis."""

        # One layer after the other: all at once (vmap) is the same numbers, and fifty times the compiler's work on TPU.
        @nnx.split_rngs(splits=self.config.num_layers)
        @nnx.scan(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def create(layer_rngs: nnx.Rngs) -> Block:
            return self.block_class(self.config, rngs=layer_rngs)

        return create(rngs)

    @classmethod
    def from_config(cls, args: Mapping[str, Any], *, rngs: nnx.Rngs) -> Decoder:
        """Build from the fields of the model's configuration; an unknown or ill-typed one is a ValueError."""
        return cls(config_from_args(cls.config_class, args), rngs=rngs)

    def __call__(self, tokens: Int32[Array, "b t"]) -> Float[Array, "b t v"]:
        """Return logits of the next token at every position, float32.

        Raises:
          ValueError: the sequence is longer than `seq_len_max`.
        """
        table = self._table()
        return logits_of(self._hidden(tokens, table)[0], table)

    def loss(self, batch: Batch) -> tuple[Float[Array, ""], Metrics]:
        """Compute the mean cross-entropy in nats per token of tokens[:, 1:], from tokens[:, :-1]; scalars of layers."""
        inputs, labels = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        table = self._table()
        x, metrics = self._hidden(inputs, table)
        if self.config.loss_chunk:
            return chunked_cross_entropy(x, self.embed.embedding[...], labels, self.config.loss_chunk), metrics
        return cross_entropy(logits_of(x, table), labels), metrics

    def generate(
        self,
        prompt: Int32[Array, " n"],
        count: int,
        key: Key[Array, ""],
        *,
        length: int | Int32[Array, ""] | None = None,
        context: int,
        temperature: float,
        top_p: float = 1.0,
        ids: int,
    ) -> Int32[Array, " count"]:
        """Continue a text token by token; each one is drawn given at most `context` tokens before it.

        Args:
          prompt: the beginning, at least one token.
          count: how many tokens to add.
          key: of all draws.
          context: tokens that the model sees, at most seq_len_max.
          temperature: divides the logits; at 0 the likeliest token is taken.
          ids: tokens of this id and above are never drawn.
        """

        def add(at: Int32[Array, ""], tokens: Int32[Array, " total"]) -> Int32[Array, " total"]:
            start = jnp.maximum(at - context, 0)
            window = jax.lax.dynamic_slice(tokens, (start,), (context,))  # what follows `at` changes nothing before it
            logits = self(window[None])[0, at - 1 - start, :ids]
            if temperature == 0:
                return tokens.at[at].set(jnp.argmax(logits).astype(jnp.int32))
            drawn = jax.random.categorical(jax.random.fold_in(key, at), logits / temperature)
            return tokens.at[at].set(drawn.astype(jnp.int32))

        length = len(prompt) if length is None else length
        tokens = jnp.zeros(max(len(prompt) + count, context), jnp.int32).at[: len(prompt)].set(prompt)
        tokens = jax.lax.fori_loop(length, length + count, add, tokens)
        return jax.lax.dynamic_slice(tokens, (length,), (count,))

    def _table(self) -> Float[Array, "v d"]:
        # Whole rows on every device; looking up split rows would move activations.
        return gather(self.embed.embedding[...].astype(self.config.dtype), *TABLE_AXES)

    def _hidden(self, tokens: Int32[Array, "b t"], table: Float[Array, "v d"]) -> tuple[Float[Array, "b t d"], Metrics]:
        """Return what the logits are made of, and the mean over the layers of their scalars."""
        c = self.config
        if tokens.shape[1] > c.seq_len_max:
            raise ValueError(f"a sequence of {tokens.shape[1]} tokens exceeds model.args.seq_len_max {c.seq_len_max}")
        x = constrain(jnp.take(table, tokens, axis=0) * c.dim**0.5, "batch", None, None)
        if isinstance(self.blocks, Block):
            graphdef, stacked = nnx.split(self.blocks)
            apply = checkpoint(lambda x, layer: nnx.merge(graphdef, layer)(x), c.remat, scanned=True)
            x, metrics = jax.lax.scan(apply, x, stacked)
        else:
            parts = []
            for block in self.blocks:
                graphdef, layer = nnx.split(block)
                apply = checkpoint(lambda x, layer, of=graphdef: nnx.merge(of, layer)(x), c.remat, scanned=False)
                x, part = apply(x, layer)
                parts.append(part)
            metrics = jax.tree.map(lambda *values: jnp.stack(values), *parts)
        return self.norm_final(x), jax.tree.map(jnp.mean, metrics)
