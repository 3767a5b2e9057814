"""A decoder-only transformer, small enough to read in one sitting; options turn it into public families (options.py).

Shapes: B batch, T length, D model width, N query heads, K key and value heads, G = N / K queries per key head,
H head width, F width of the MLP, V vocabulary, L layers.

    x = E[tokens] sqrt(D);   x += Attention(RMSNorm(x));   x += MLP(RMSNorm(x));   logits = RMSNorm(x) E^T
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32, Key

from diloco_jax.training.models.attention import Seeing, attend, attend_to
from diloco_jax.training.models.layers import Linear, checkpoint, keep, make_norm, soft_limit
from diloco_jax.training.models.options import DecoderConfig
from diloco_jax.training.models.protocol import config_from_args
from diloco_jax.training.models.rotary import apply_rope, frequencies, size_of
from diloco_jax.training.models.vocabulary import TABLE_AXES, chunked_cross_entropy, cross_entropy, logits_of, look_up
from diloco_jax.training.sharding import constrain, gather
from diloco_jax.training.state import Batch, Metrics

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
# Whether a layer has the window.
Local = bool | Bool[Array, ""]
# The keys and values of a layer's latest C tokens.
Cache = tuple[Float[Array, "b c k h"], Float[Array, "b c k h"]]


def draw_token(logits: Float[Array, " v"], key: Key[Array, ""], temperature: float, top_p: float) -> Int32[Array, ""]:
    """Draw a token from logits; temperature and top_p as in `Decoder.generate`."""
    if temperature == 0:
        return jnp.argmax(logits).astype(jnp.int32)
    logits = logits / temperature
    if top_p < 1:
        likeliest = jnp.sort(logits, descending=True)
        share = jax.nn.softmax(likeliest)
        # The likeliest tokens up to this one together reach the probability top_p.
        last = jnp.sum(jnp.cumsum(share) - share < top_p) - 1
        logits = jnp.where(logits >= likeliest[last], logits, -jnp.inf)
    return jax.random.categorical(key, logits).astype(jnp.int32)


class Places(NamedTuple):
    """The positions of tokens in their texts."""

    # None: 0, 1, 2, ...
    positions: Int32[Array, "b t"] | None = None
    # The number of each token's text; None: all tokens belong to one text.
    segments: Int32[Array, "b t"] | None = None


def places_of(segments: Int32[Array, "b t"]) -> Places:
    """Return the places of tokens whose positions start at 0 in every segment."""
    index = jnp.arange(segments.shape[1], dtype=jnp.int32)[None]
    first = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    return Places(index - jax.lax.cummax(jnp.where(first, index, 0), axis=1), segments)


def _norm(c: DecoderConfig, width: int, rngs: nnx.Rngs) -> Callable[[Array], Array]:
    return make_norm(width, c.norm_epsilon, c.dtype, offset=c.norm_offset, rngs=rngs)


class Block(nnx.Module):
    """One layer: attention and gated MLP, each between its norms and added to the residual stream."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        c = self.config = config
        queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        before, after = c.norms != "post", c.norms != "pre"
        self.norm_attention = _norm(c, c.dim, rngs) if before else None
        self.q = Linear(c.dim, queries, ("embed", "heads"), c.dtype, bias=c.qkv_bias, rngs=rngs)
        self.k = Linear(c.dim, keys, ("embed", "heads"), c.dtype, bias=c.qkv_bias, rngs=rngs)
        self.v = Linear(c.dim, keys, ("embed", "heads"), c.dtype, bias=c.qkv_bias, rngs=rngs)
        self.out = Linear(queries, c.dim, ("heads", "embed"), c.dtype, rngs=rngs)
        if c.qk_norm != "none":
            full = c.qk_norm == "full"
            self.norm_q = _norm(c, queries if full else c.head_dim, rngs)
            self.norm_k = _norm(c, keys if full else c.head_dim, rngs)
        self.norm_attention_out = _norm(c, c.dim, rngs) if after else None
        self.norm_mlp = _norm(c, c.dim, rngs) if before else None
        self.init_mlp(rngs)
        self.norm_mlp_out = _norm(c, c.dim, rngs) if after else None

    def init_mlp(self, rngs: nnx.Rngs) -> None:
        """Create the parameters of the MLP."""
        c = self.config
        self.gate = Linear(c.dim, c.mlp_dim, ("embed", "mlp"), c.dtype, rngs=rngs)
        self.up = Linear(c.dim, c.mlp_dim, ("embed", "mlp"), c.dtype, rngs=rngs)
        self.down = Linear(c.mlp_dim, c.dim, ("mlp", "embed"), c.dtype, rngs=rngs)

    def mlp(self, x: Float[Array, "b t d"]) -> tuple[Float[Array, "b t d"], Metrics]:
        """Apply the MLP to the normalised stream; return the result and the metrics of this layer."""
        gate, up = keep(self.gate(x), "gated"), keep(self.up(x), "gated")
        return keep(self.down(ACTIVATIONS[self.config.activation](gate) * up), "out"), {}

    def __call__(
        self, x: Float[Array, "b t d"], places: Places, local: Local = False, cache: Cache | None = None
    ) -> tuple[Float[Array, "b t d"], Metrics, Cache | None]:
        """Apply the layer to the residual stream; return the stream, the metrics of the MLP, and the cache.

        The cache has the earlier tokens, and the layer adds the new ones. Either the cache is empty, or there is only
        one new token.
        """
        y = x if self.norm_attention is None else self.norm_attention(x)
        mixed, cache = self._attention(y, places, local, cache)
        y = keep(self.out(mixed.reshape(*x.shape[:2], -1)), "out")
        y = y if self.norm_attention_out is None else self.norm_attention_out(y)
        x = constrain(x + y, "batch", None, None)
        y, metrics = self.mlp(x if self.norm_mlp is None else self.norm_mlp(x))
        y = y if self.norm_mlp_out is None else self.norm_mlp_out(y)
        return constrain(x + y, "batch", None, None), metrics, cache

    def _attention(
        self, y: Float[Array, "b t d"], places: Places, local: Local, cache: Cache | None
    ) -> tuple[Float[Array, "b t n h"], Cache | None]:
        c = self.config
        q, k, v = self._heads(y, places, local)
        rules = Seeing(c.attention_width or c.head_dim, c.attention_cap, c.window, c.splash_block)
        if cache is not None:
            length, at = cache[0].shape[1], places.positions
            assert at is not None, "tokens for a cache have positions"
            cache = (cache[0].at[:, at[0] % length].set(k), cache[1].at[:, at[0] % length].set(v))
            if y.shape[1] == 1:
                distance = (at - jnp.arange(length)[None]) % length
                seen = (distance <= at) & (distance < jnp.where(jnp.logical_and(local, c.window), c.window, length))
                return attend_to(q, *cache, seen[:, None], rules), cache

        def see(window: int) -> Array:
            return attend(q, k, v, c.attention, rules._replace(window=window), places.segments)

        if isinstance(local, bool):
            return see(c.window if local else 0), cache
        return jax.lax.cond(local, lambda: see(c.window), lambda: see(0)), cache

    def _heads(
        self, y: Float[Array, "b t d"], places: Places, local: Local
    ) -> tuple[Float[Array, "b t n h"], Float[Array, "b t k h"], Float[Array, "b t k h"]]:
        """Return queries, keys and values; queries and keys are rotated by their positions."""
        c = self.config
        q, k, v = (keep(linear(y), "qkv") for linear in (self.q, self.k, self.v))
        if c.qk_norm == "full":
            q, k = self.norm_q(q), self.norm_k(k)
        q, k, v = (x.reshape(*y.shape[:2], -1, c.head_dim) for x in (q, k, v))
        if c.qk_norm == "head":
            q, k = self.norm_q(q), self.norm_k(k)
        frequency, size = frequencies(c, local), size_of(c)
        q, k = (apply_rope(x, frequency, places.positions, size) for x in (q, k))
        return q, k, v


class Decoder(nnx.Module):
    """The built-in language model; implements `TrainableModel`."""

    config_class: type[DecoderConfig] = DecoderConfig
    block_class: type[Block] = Block

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        # Axis names must not require a mesh here, because the island places the parameters later.
        with nnx.use_eager_sharding(False):
            init = nnx.with_partitioning(nnx.initializers.normal(0.02), TABLE_AXES)
            self.embed = nnx.Embed(config.vocab_size, config.dim, dtype=config.dtype, embedding_init=init, rngs=rngs)
            self.blocks: Block | nnx.List[Block] = (
                self._stacked_blocks(rngs)
                if config.scan_layers
                else nnx.List(self.block_class(config, rngs=rngs) for _ in range(config.num_layers))
            )
            self.norm_final = _norm(config, config.dim, rngs)
            self.head = (
                None if config.tie_embeddings else nnx.Param(init(rngs.params(), (config.vocab_size, config.dim)))
            )

    def _stacked_blocks(self, rngs: nnx.Rngs) -> Block:
        """Return all blocks as one module, whose parameters have a leading `layers` axis."""

        # The scan creates one layer after the other. vmap gives the same numbers, but fifty times the compiler's work
        # on TPU.
        @nnx.split_rngs(splits=self.config.num_layers)
        @nnx.scan(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def create(layer_rngs: nnx.Rngs) -> Block:
            return self.block_class(self.config, rngs=layer_rngs)

        return create(rngs)

    @classmethod
    def from_config(cls, args: Mapping[str, Any], *, rngs: nnx.Rngs) -> Decoder:
        """Build the model from the fields of its configuration; ValueError for an unknown or ill-typed field."""
        return cls(config_from_args(cls.config_class, args), rngs=rngs)

    def __call__(
        self, tokens: Int32[Array, "b t"], segments: Int32[Array, "b t"] | None = None
    ) -> Float[Array, "b t v"]:
        """Return the float32 logits of the next token at every position."""
        table = self._table()
        x, _ = self.hidden(self.embedded(tokens, table), segments)
        return self._logits(x, table)

    def loss(self, batch: Batch) -> tuple[Float[Array, ""], Metrics]:
        """Return the mean cross-entropy in nats per token of tokens[:, 1:] given tokens[:, :-1], and layers' metrics.

        With `segments` in the batch, a token is predicted only from earlier tokens of its segment. The first token of a
        segment and all tokens of segment 0 are not predicted. The metric `weight` is the number of predicted tokens.
        """
        tokens, segments = batch["tokens"], batch.get("segments")
        table = self._table() if self.config.lookup == "gather" else None
        x = self.embedded(tokens[:, :-1], table)
        if segments is None:
            x, metrics = self.hidden(x)
            return self.mean_loss(x, tokens[:, 1:], table), metrics
        x, metrics = self.hidden(x, segments[:, :-1])
        weights = ((segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)).astype(jnp.float32)
        return self.mean_loss(x, tokens[:, 1:], table, weights), {**metrics, "weight": jnp.sum(weights)}

    def embedded(self, tokens: Int32[Array, "b t"], table: Float[Array, "v d"] | None = None) -> Float[Array, "b t d"]:
        """Return the embeddings of tokens, the input of the first layer; `table` is the gathered embedding if any."""
        c = self.config
        if c.lookup == "exchange" and table is None:
            x = look_up(self.embed.embedding[...], tokens, c.dtype)
        else:
            x = jnp.take(self._table() if table is None else table, tokens, axis=0)
        return constrain(x * c.dim**0.5 if c.embed_scale else x, "batch", None, None)

    def hidden(
        self, x: Float[Array, "b t d"], segments: Int32[Array, "b t"] | None = None
    ) -> tuple[Float[Array, "b t d"], Metrics]:
        """Apply all layers and the last norm; return the result and the mean of the metrics over the layers.

        A token sees only tokens of its segment, and positions start at 0 in each segment.

        Raises:
          ValueError: the sequence is longer than `seq_len_max`.
        """
        self._check_length(x.shape[1])
        x, metrics, _ = self._layers(x, Places() if segments is None else places_of(segments), None)
        return self.norm_final(x), metrics

    def mean_loss(
        self,
        x: Float[Array, "b t d"],
        labels: Int32[Array, "b t"],
        table: Float[Array, "v d"] | None = None,
        weights: Float[Array, "b t"] | None = None,
    ) -> Float[Array, ""]:
        """Return the mean cross-entropy of `labels` in nats, where x is the result of `hidden`; weights may be 0."""
        c = self.config
        if c.loss_chunk:
            stored = self.embed.embedding if self.head is None else self.head
            return chunked_cross_entropy(x, stored[...], labels, c.loss_chunk, c.logit_cap, weights)
        return cross_entropy(self._logits(x, table), labels, weights)

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
        """Continue a text token by token, with a cache of the keys and values of earlier tokens.

        Args:
          prompt: at least one token; only its last `context` tokens are read.
          count: tokens to add.
          key: random key of the draws.
          length: number of real tokens if the prompt is padded, so that one program serves many lengths; the padded
            prompt then has at most `context` tokens. None: the prompt is not padded.
          context: tokens that each layer sees, at most seq_len_max.
          temperature: divides the logits; at 0 the likeliest token is taken.
          top_p: tokens are drawn from the likeliest ones that together have this probability; 1 = from all.
          ids: only tokens with smaller ids are drawn.
        """
        c, table, prompt = self.config, self._table(), prompt[-context:]
        kept, beginning = min(context, len(prompt) + count), len(prompt) if length is None else length
        self._check_length(kept)
        empty = jnp.zeros((1, kept, c.num_kv_heads, c.head_dim), c.dtype)
        stacked = jnp.zeros((c.num_layers, *empty.shape), c.dtype)
        caches = (stacked, stacked) if c.scan_layers else [(empty, empty)] * c.num_layers

        def read(tokens: Array, positions: Array, caches: Any, last: int | Array = 0) -> tuple[Array, Any]:
            x, _, caches = self._layers(self.embedded(tokens[None], table), Places(positions[None]), caches)
            x = jax.lax.dynamic_slice_in_dim(x, last, 1, axis=1)
            return self._logits(self.norm_final(x), table)[0, 0, :ids], caches

        def add(state: tuple[Array, Any], number: Array) -> tuple[tuple[Array, Any], Array]:
            token = draw_token(state[0], jax.random.fold_in(key, beginning + number), temperature, top_p)
            return read(token[None], (beginning + number)[None], state[1]), token

        state = read(prompt, jnp.arange(len(prompt)), caches, beginning - 1)
        return jax.lax.scan(add, state, jnp.arange(count))[1]

    def _check_length(self, length: int) -> None:
        if length > self.config.seq_len_max:
            raise ValueError(f"a sequence of {length} tokens exceeds model.args.seq_len_max {self.config.seq_len_max}")

    def _table(self) -> Float[Array, "v d"]:
        # Every device gets whole rows, because looking up split rows would move activations.
        return gather(self.embed.embedding[...].astype(self.config.dtype), *TABLE_AXES)

    def _logits(self, x: Float[Array, "b t d"], table: Float[Array, "v d"] | None) -> Float[Array, "b t v"]:
        if self.head is not None:
            table = gather(self.head[...].astype(self.config.dtype), *TABLE_AXES)
        return soft_limit(logits_of(x, self._table() if table is None else table), self.config.logit_cap)

    def _layers(
        self, x: Float[Array, "b t d"], places: Places, caches: Any
    ) -> tuple[Float[Array, "b t d"], Metrics, Any]:
        """Apply all blocks; caches are None, or stacked or listed like the blocks."""
        c = self.config
        local = [c.local(layer) for layer in range(c.num_layers)]
        if isinstance(self.blocks, Block):
            graphdef, stacked = nnx.split(self.blocks)
            mixed = jnp.asarray(local) if len({*local}) > 1 else None

            def one(x: Array, layer: Any) -> tuple[Array, Any]:
                params, is_local, cache = layer
                x, metrics, cache = nnx.merge(graphdef, params)(
                    x, places, local[0] if is_local is None else is_local, cache
                )
                return x, (metrics, cache)

            x, (metrics, caches) = jax.lax.scan(checkpoint(one, c.remat, scanned=True), x, (stacked, mixed, caches))
            return x, jax.tree.map(jnp.mean, metrics), caches
        parts, after = [], []
        for block, is_local, cache in zip(self.blocks, local, caches or [None] * c.num_layers, strict=True):
            graphdef, layer = nnx.split(block)

            def alone(x: Array, layer: Any, cache: Any, of: Any = graphdef, is_local: bool = is_local) -> Any:
                return nnx.merge(of, layer)(x, places, is_local, cache)

            x, part, cache = checkpoint(alone, c.remat, scanned=False)(x, layer, cache)
            parts.append(part)
            after.append(cache)
        return x, jax.tree.map(lambda *values: jnp.mean(jnp.stack(values)), *parts), after
