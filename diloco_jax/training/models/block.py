"""One layer of the decoder: attention and MLP, each between norms and added to the residual stream.

    x += Attention(RMSNorm(x));   x += MLP(RMSNorm(x))

Shapes: B batch, T length, D model width, N query heads, K key and value heads, G = N / K queries per key head, H head
width, F width of the MLP, E experts, C slots of a cache. A block is built from the options of its kind of layers
(`DecoderConfig.of_kind`) alone. Gated DeltaNet may replace attention (delta.py), and a mixture the MLP (mixture.py).

Caches keep earlier tokens of texts that are being written, so that each new token is computed once. The texts of a
batch end in the same column, whatever their lengths, so a new token's keys are written to one column for all of them.
Column c is stored in slot c mod C. A cache of C slots is therefore a ring of the latest C columns, which is all that a
layer with a window of C tokens needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from diloco_jax.training.models.attention import Seeing, attend, attend_to
from diloco_jax.training.models.delta import DeltaCache, GatedDelta, empty_state
from diloco_jax.training.models.layers import ACTIVATIONS, Linear, glu, keep, make_norm, unit_norm, vector
from diloco_jax.training.models.mixture import BIAS_AXES, IN_AXES, OUT_AXES, ROUTER_AXES, Biases, Experts, mixture
from diloco_jax.training.models.options import DecoderConfig
from diloco_jax.training.models.rotary import apply_rope, frequencies, query_scale, size_of
from diloco_jax.training.sharding import constrain
from diloco_jax.training.state import Metrics

# Keys and values of tokens; kinds of layers differ in the number and width of heads.
KeysValues = tuple[Float[Array, "b _s _k _h"], Float[Array, "b _s _k _h"]]


class KeyCache(NamedTuple):
    """The keys and values of the latest tokens of each text in one layer."""

    keys: Float[Array, "*layers b k c h"]
    values: Float[Array, "*layers b k c h"]


# The state of a delta layer; empty if the layer uses the keys and values of another one.
Cache = KeyCache | tuple[()] | DeltaCache


class Caches(NamedTuple):
    """Caches of all layers, for a batch of texts."""

    # One for each block; those of stacked layers have a leading axis.
    layers: list[Any]
    # The number of columns so far, which is the length of the longest text.
    column: Int32[Array, ""]
    # The number of tokens of each text.
    lengths: Int32[Array, " b"]


def empty_cache(c: DecoderConfig, batch: int, length: int) -> Cache:
    """Return the cache of a layer with these options, before the first token."""
    if c.mixer == "delta":
        return empty_state(c, batch)
    if c.kv_from:
        return ()
    empty = jnp.zeros((batch, c.num_kv_heads, length, c.head_dim), c.dtype)
    return KeyCache(empty, empty)


def cache_slots(c: DecoderConfig, kind: str, size: int) -> int:
    """Return the slots that a layer of this kind needs for texts of up to `size` tokens.

    Later layers may use its keys and values with a wider window.
    """
    readers = [kind, *(name for name in c.kinds if c.of_kind(name).kv_from == kind)]
    windows = [c.of_kind(name).window for name in readers]
    return min(size, max(windows)) if all(windows) else size


def fill(cache: KeyCache, keys: Array, values: Array, lengths: Int32[Array, " b"]) -> KeyCache:
    """Return a cache with the latest tokens of prompts, whose keys and values are [B, T, K, H].

    Args:
      cache: an empty cache.
      lengths: the number of real tokens of each prompt; padding follows them.
    """
    slots, last = cache.keys.shape[2], jnp.max(lengths) - 1
    # The latest column of each slot, and the token that each text has there. A slot without a token is never read.
    columns = last - (last - jnp.arange(slots)) % slots
    tokens = jnp.clip(columns[None] - last + lengths[:, None] - 1, 0, keys.shape[1] - 1)
    found = (jnp.take_along_axis(x, tokens[:, :, None, None], axis=1) for x in (keys, values))
    return KeyCache(*(x.transpose(0, 2, 1, 3) for x in found))


def append(cache: KeyCache, keys: Array, values: Array, column: Int32[Array, ""]) -> KeyCache:
    """Return the cache with one more token of each text, whose keys and values are [B, 1, K, H]."""
    slot = column % cache.keys.shape[2]

    def write(stored: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(stored, new.transpose(0, 2, 1, 3), slot, axis=2)

    return KeyCache(write(cache.keys, keys), write(cache.values, values))


def seen_slots(
    slots: int, column: Int32[Array, ""], positions: Int32[Array, "b 1"], window: int
) -> Bool[Array, "b 1 c"]:
    """Return the slots of a cache that the newest token of each text sees; the cache already has this token."""
    distance = ((column - jnp.arange(slots)) % slots)[None]
    return ((distance <= positions) & (distance < (window or slots)))[:, None]


def cache_bytes(caches: Any) -> int:
    """Return the bytes of caches, or of descriptions of them."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(caches))


class Places(NamedTuple):
    """The positions of tokens in their texts."""

    # None: 0, 1, 2, ...
    positions: Int32[Array, "b t"] | None = None
    # The number of each token's text; None: all tokens belong to one text.
    segments: Int32[Array, "b t"] | None = None
    # The number of each token's image, 0 for text; None: all tokens are text.
    images: Int32[Array, "b t"] | None = None
    # The number of tokens of a sequence that a cache receives in parts; 0: the tokens are the whole sequence.
    length: int = 0
    # The real tokens of each padded prompt that fills a cache.
    lengths: Int32[Array, " b"] | None = None
    # The column of the one new token of each text, whose earlier tokens a cache has.
    column: Int32[Array, ""] | None = None

    def all_positions(self, length: int) -> Int32[Array, "b t"]:
        """Return the positions of `length` tokens, also where they are 0, 1, 2, ..."""
        return jnp.arange(length, dtype=jnp.int32)[None] if self.positions is None else self.positions


def places_of(segments: Int32[Array, "b t"] | None) -> Places:
    """Return the places of tokens whose positions start at 0 in every segment; with None there is one segment."""
    if segments is None:
        return Places()
    index = jnp.arange(segments.shape[1], dtype=jnp.int32)[None]
    first = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    return Places(index - jax.lax.cummax(jnp.where(first, index, 0), axis=1), segments)


class Layer(NamedTuple):
    """Result of a block."""

    x: Float[Array, "b t d"]
    # The metrics of the mixture; empty without one.
    metrics: Metrics
    # The cache with the new tokens; None without a cache.
    cache: Cache | None
    # The keys and values that the layer's queries saw, for later layers that use them; None if there are none.
    kv: KeysValues | None


def block_norm(c: DecoderConfig, width: int, rngs: nnx.Rngs) -> Callable[[Array], Array]:
    """Return a norm with the decoder's options."""
    return make_norm(width, c.norm_epsilon, c.dtype, offset=c.norm_offset, rngs=rngs)


class Block(nnx.Module):
    """One layer, built from the options of its kind; the parameters of an option exist only with the option."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        c = self.config = config
        before, after = c.norms != "post", c.norms != "pre"
        self.norm_attention = block_norm(c, c.dim, rngs) if before else None
        if c.mixer == "delta":
            self.delta = GatedDelta(c, rngs=rngs)
        else:
            self._init_attention(rngs)
        self.norm_attention_out = block_norm(c, c.dim, rngs) if after else None
        self.norm_mlp = block_norm(c, c.dim, rngs) if before else None
        if c.num_experts:
            self._init_mixture(rngs)
        if not c.num_experts or c.dense_beside:
            self.gate = Linear(c.dim, c.mlp_dim, ("embed", "mlp"), c.dtype, bias=c.mlp_bias, rngs=rngs)
            self.up = Linear(c.dim, c.mlp_dim, ("embed", "mlp"), c.dtype, bias=c.mlp_bias, rngs=rngs)
            self.down = Linear(c.mlp_dim, c.dim, ("mlp", "embed"), c.dtype, bias=c.mlp_bias, rngs=rngs)
        self.norm_mlp_out = block_norm(c, c.dim, rngs) if after else None
        if c.per_layer_dim:
            self.per_layer_gate = Linear(c.dim, c.per_layer_dim, ("embed", None), c.dtype, rngs=rngs)
            self.per_layer_out = Linear(c.per_layer_dim, c.dim, (None, "embed"), c.dtype, rngs=rngs)
            self.norm_per_layer = block_norm(c, c.dim, rngs)
        self.layer_scale = vector(1, nnx.initializers.ones_init(), rngs) if c.layer_scale else None

    def _init_attention(self, rngs: nnx.Rngs) -> None:
        c, has_keys = self.config, not self.config.kv_from
        queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        gated = 2 if c.attention_gate else 1
        self.q = Linear(c.dim, gated * queries, ("embed", "heads"), c.dtype, bias=c.qkv_bias, rngs=rngs)
        if has_keys:
            self.k = Linear(c.dim, keys, ("embed", "heads"), c.dtype, bias=c.qkv_bias, rngs=rngs)
        if has_keys and not c.keys_as_values:
            self.v = Linear(c.dim, keys, ("embed", "heads"), c.dtype, bias=c.qkv_bias, rngs=rngs)
        self.out = Linear(queries, c.dim, ("heads", "embed"), c.dtype, bias=c.out_bias, rngs=rngs)
        if c.qk_norm != "none":
            full = c.qk_norm == "full"
            self.norm_q = block_norm(c, queries if full else c.head_dim, rngs)
            if has_keys:
                self.norm_k = block_norm(c, keys if full else c.head_dim, rngs)
        self.sinks = vector(c.num_heads, nnx.initializers.zeros_init(), rngs) if c.attention_sinks else None

    def _init_mixture(self, rngs: nnx.Rngs) -> None:
        c, width = self.config, self.config.expert_dim or self.config.mlp_dim
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ROUTER_AXES)
        each = nnx.initializers.lecun_normal(batch_axis=0)
        into, out = nnx.with_partitioning(each, IN_AXES), nnx.with_partitioning(each, OUT_AXES)
        self.router = nnx.Param(init(rngs.params(), (c.dim, c.num_experts)))
        self.experts_gate = nnx.Param(into(rngs.params(), (c.num_experts, c.dim, width)))
        self.experts_up = nnx.Param(into(rngs.params(), (c.num_experts, c.dim, width)))
        self.experts_down = nnx.Param(out(rngs.params(), (c.num_experts, width, c.dim)))
        if c.mixture_bias:
            biases = nnx.with_partitioning(nnx.initializers.zeros_init(), BIAS_AXES)
            self.router_bias = vector(c.num_experts, nnx.initializers.zeros_init(), rngs)
            self.experts_gate_bias = nnx.Param(biases(rngs.params(), (c.num_experts, width)))
            self.experts_up_bias = nnx.Param(biases(rngs.params(), (c.num_experts, width)))
            self.experts_down_bias = nnx.Param(biases(rngs.params(), (c.num_experts, c.dim)))
        if c.dense_beside:
            self.norm_dense_out = block_norm(c, c.dim, rngs)
            self.norm_experts = block_norm(c, c.dim, rngs)
            self.norm_experts_out = block_norm(c, c.dim, rngs)
            self.router_scale = vector(c.dim, nnx.initializers.ones_init(), rngs)
            self.expert_scale = vector(c.num_experts, nnx.initializers.ones_init(), rngs)
        if c.shared_dim:
            self.shared_gate = Linear(c.dim, c.shared_dim, ("embed", "mlp"), c.dtype, rngs=rngs)
            self.shared_up = Linear(c.dim, c.shared_dim, ("embed", "mlp"), c.dtype, rngs=rngs)
            self.shared_down = Linear(c.shared_dim, c.dim, ("mlp", "embed"), c.dtype, rngs=rngs)
            self.shared_weight = Linear(c.dim, 1, ("embed", None), c.dtype, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "b t d"],
        places: Places,
        *,
        kv: KeysValues | None = None,
        vectors: Float[Array, "b t p"] | None = None,
        cache: Cache | None = None,
    ) -> Layer:
        """Apply the layer to the residual stream.

        Args:
          kv: keys and values of an earlier layer, for a layer that computes none.
          vectors: the tokens' vectors for this layer, for a model with per-layer embeddings.
          cache: the keys and values of earlier tokens, or the state after them; the layer adds the new tokens. Either
            the cache is empty and `places` has the lengths of prompts, or it has the column of one new token.
        """
        c = self.config
        y = x if self.norm_attention is None else self.norm_attention(x)
        if c.mixer == "delta":
            assert cache is None or isinstance(cache, DeltaCache), "a delta layer keeps its state"
            y, cache = self.delta(y, places.segments, cache)
        else:
            assert not isinstance(cache, DeltaCache), "attention keeps keys and values"
            y, kv, cache = self._attention(y, places, kv, cache)
        y = y if self.norm_attention_out is None else self.norm_attention_out(y)
        x = constrain(x + _scaled(y, c.residual_scale), "batch", None, None)
        y, metrics = self.feed_forward(x)
        y = y if self.norm_mlp_out is None else self.norm_mlp_out(y)
        x = x + _scaled(y, c.residual_scale)
        if vectors is not None:
            y = ACTIVATIONS[c.activation](self.per_layer_gate(x)) * vectors
            x = x + self.norm_per_layer(self.per_layer_out(y))
        if self.layer_scale is not None:
            # The scale is a constant: without a gradient it is exchanged and saved, but never changes.
            x = x * jax.lax.stop_gradient(self.layer_scale[...]).astype(x.dtype)[None, None]
        return Layer(constrain(x, "batch", None, None), metrics, cache, kv)

    def feed_forward(self, x: Float[Array, "b t d"]) -> tuple[Float[Array, "b t d"], Metrics]:
        """Apply the MLP, the mixture, or both to the stream; return the result, and the metrics of the mixture."""
        c = self.config
        y = x if self.norm_mlp is None else self.norm_mlp(x)
        if not c.num_experts:
            return keep(self._mlp(y, self.gate, self.up, self.down), "out"), {}
        if c.dense_beside:
            dense = self.norm_dense_out(self._mlp(y, self.gate, self.up, self.down))
            scale = (self.router_scale[...] * c.dim**-0.5)[None, None]
            routed = unit_norm(x.astype(jnp.float32), c.norm_epsilon) * scale
            y, metrics = self._mixture(self.norm_experts(x), routed, self.expert_scale[...])
            return dense + self.norm_experts_out(y), metrics
        mixed, metrics = self._mixture(y, y)
        if c.shared_dim:
            shared = self._mlp(y, self.shared_gate, self.shared_up, self.shared_down)
            mixed = mixed + jax.nn.sigmoid(self.shared_weight(y)) * shared
        return mixed, metrics

    def _mlp(self, y: Float[Array, "b t d"], gate: Linear, up: Linear, down: Linear) -> Float[Array, "b t d"]:
        c = self.config
        return down(glu(keep(gate(y), "gated"), keep(up(y), "gated"), c.activation, c.glu_limit))

    def _mixture(
        self, y: Float[Array, "b t d"], routed: Float[Array, "b t d"], scale: Float[Array, " e"] | None = None
    ) -> tuple[Float[Array, "b t d"], Metrics]:
        logits = routed.astype(jnp.float32) @ self.router[...]
        biases = None
        if self.config.mixture_bias:
            logits = logits + self.router_bias[...][None, None]
            biases = Biases(self.experts_gate_bias[...], self.experts_up_bias[...], self.experts_down_bias[...])
        experts = Experts(self.experts_gate[...], self.experts_up[...], self.experts_down[...], scale, biases)
        return mixture(y, logits, experts, self.config)

    def _attention(
        self, y: Float[Array, "b t d"], places: Places, kv: KeysValues | None, cache: KeyCache | tuple[()] | None
    ) -> tuple[Float[Array, "b t d"], KeysValues, KeyCache | tuple[()] | None]:
        """Return the result of attention, the keys and values that the queries saw, and the cache."""
        c = self.config
        q, gate = self._queries(y, places)
        if not c.kv_from:
            kv = self._keys_values(y, places)
        assert kv is not None, "a layer without keys gets those of an earlier layer"
        if cache and places.column is not None:
            cache = append(cache, *kv, places.column)
            kv = (cache.keys.transpose(0, 2, 1, 3), cache.values.transpose(0, 2, 1, 3))
        elif cache:
            assert places.lengths is not None, "prompts that fill a cache have lengths"
            cache = fill(cache, *kv, places.lengths)
        sinks = None if self.sinks is None else self.sinks[...]
        rules = Seeing(c.attention_width or c.head_dim, c.attention_cap, c.window, c.splash_block)
        if places.column is None:
            mixed = self.mix(q, *kv, rules, places, sinks)
        else:
            assert places.positions is not None, "a new token has a position"
            seen = seen_slots(kv[0].shape[1], places.column, places.positions, c.window)
            mixed = attend_to(q, *kv, seen, rules, sinks)
        if gate is not None:
            mixed = mixed * jax.nn.sigmoid(gate)
        return keep(self.out(mixed.reshape(*y.shape[:2], -1)), "out"), kv, cache

    def mix(
        self,
        q: Float[Array, "b t n h"],
        k: Float[Array, "b t k h"],
        v: Float[Array, "b t k h"],
        rules: Seeing,
        places: Places,
        sinks: Float[Array, " n"] | None,
    ) -> Float[Array, "b t n h"]:
        """Mix the values of the tokens that each token sees: itself and the earlier tokens of its text."""
        return attend(q, k, v, self.config.attention, rules, places.segments, sinks)

    def _queries(
        self, y: Float[Array, "b t d"], places: Places
    ) -> tuple[Float[Array, "b t n h"], Float[Array, "b t n h"] | None]:
        """Return the queries, normalised and rotated by their positions, and the gate of the result if there is one."""
        c, gate = self.config, None
        q = keep(self.q(y), "qkv")
        if c.attention_gate:
            q, gate = jnp.split(q.reshape(*y.shape[:2], c.num_heads, -1), 2, axis=-1)
            q = q.reshape(*y.shape[:2], -1)
        q = self._as_heads(q, self.norm_q if c.qk_norm != "none" else None)
        q = self._rotated(q, places)
        if c.query_beta:
            q = q * query_scale(c, places.all_positions(y.shape[1])).astype(q.dtype)
        return q, gate

    def _keys_values(self, y: Float[Array, "b t d"], places: Places) -> KeysValues:
        """Return keys, normalised and rotated by their positions, and values."""
        c = self.config
        keys = keep(self.k(y), "qkv")
        values = self._as_heads(keys if c.keys_as_values else keep(self.v(y), "qkv"), None)
        if c.value_norm:
            values = unit_norm(values, c.norm_epsilon)
        keys = self._as_heads(keys, self.norm_k if c.qk_norm != "none" else None)
        return self._rotated(keys, places), values

    def _as_heads(self, x: Float[Array, "b t nh"], norm: Callable[[Array], Array] | None) -> Float[Array, "b t n h"]:
        """Cut queries, keys or values into heads, and normalise each head or all heads together."""
        full = norm is not None and self.config.qk_norm == "full"
        x = norm(x) if norm is not None and full else x
        x = x.reshape(*x.shape[:2], -1, self.config.head_dim)
        return norm(x) if norm is not None and not full else x

    def _rotated(self, x: Float[Array, "b t n h"], places: Places) -> Float[Array, "b t n h"]:
        c = self.config
        if not c.rope_theta:
            return x
        return apply_rope(x, frequencies(c, places.length or x.shape[1]), places.positions, size_of(c))


def _scaled(y: Float[Array, "*b d"], factor: float) -> Float[Array, "*b d"]:
    return y if factor == 1 else y * factor
