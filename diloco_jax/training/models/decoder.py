"""A decoder-only transformer, small enough to read in one sitting; its options select a public family (options.py).

Shapes: B batch, T length, D model width, V vocabulary, L layers, P width of per-layer embeddings.

    x = E[tokens] sqrt(D);   x = Block(x) for each layer (block.py);   logits = RMSNorm(x) E^T
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32, Key, Shaped

from diloco_jax.training.models.block import (
    Block,
    Cache,
    Caches,
    KeysValues,
    Layer,
    Places,
    block_norm,
    cache_slots,
    empty_cache,
    places_of,
)
from diloco_jax.training.models.delta import DeltaCache
from diloco_jax.training.models.layers import Linear, checkpoint, soft_limit
from diloco_jax.training.models.options import DecoderConfig, Period
from diloco_jax.training.models.protocol import config_from_args
from diloco_jax.training.models.vocabulary import (
    TABLE_AXES,
    Drawing,
    chunked_cross_entropy,
    cross_entropy,
    draw,
    logits_of,
    look_up,
)
from diloco_jax.training.sharding import constrain, gather
from diloco_jax.training.state import Batch, Metrics


def _repeated(count: int, one: Array) -> Array:
    return jnp.broadcast_to(one, (count, *one.shape))


class Inputs(NamedTuple):
    """The input of the layers."""

    # The residual stream of the first layer.
    x: Float[Array, "b t d"]
    places: Places
    # The result of `layer_vectors`.
    vectors: Float[Array, "l b t p"] | None


class Decoder(nnx.Module):
    """The built-in language model; implements `TrainableModel`."""

    config_class: type[DecoderConfig] = DecoderConfig
    block_class: type[Block] = Block

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        c = self.config = config
        if c.kv_from and not c.pattern:
            raise ValueError(
                f"model.args.kv_from is '{c.kv_from}', which names a kind of layers, but there are no kinds; set "
                "model.args.pattern and kinds, or remove it"
            )
        # Axis names must not require a mesh here, because the island places the parameters later.
        with nnx.use_eager_sharding(False):
            init = nnx.with_partitioning(nnx.initializers.normal(0.02), TABLE_AXES)
            self.embed = nnx.Embed(c.vocab_size, c.dim, dtype=c.dtype, embedding_init=init, rngs=rngs)
            blocks = [self._make_block(stack.layers, stack.stacked, rngs) for stack in c.stacks()]
            self.blocks: Block | nnx.List[Block] = blocks[0] if c.stacks()[0].path == "blocks" else nnx.List(blocks)
            self.norm_final = block_norm(c, c.dim, rngs)
            self.head = None if c.tie_embeddings else nnx.Param(init(rngs.params(), (c.vocab_size, c.dim)))
            if c.per_layer_dim:
                width = c.num_layers * c.per_layer_dim
                self.per_layer_table = nnx.Param(init(rngs.params(), (c.per_layer_vocab or c.vocab_size, width)))
                self.per_layer_project = Linear(c.dim, width, ("embed", None), c.dtype, rngs=rngs)
                self.per_layer_norm = block_norm(c, c.per_layer_dim, rngs)

    def _make_block(self, layers: range, stacked: bool, rngs: nnx.Rngs) -> Block:
        """Return a block, or the blocks of several layers as one module whose parameters have an axis `layers`."""
        options = self.config.of_kind(self.config.kind(layers[0]))
        if not stacked:
            return self.block_class(options, rngs=rngs)

        # The scan creates one layer after the other. vmap gives the same numbers, but fifty times the compiler's work
        # on TPU.
        @nnx.split_rngs(splits=len(layers))
        @nnx.scan(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def create(layer_rngs: nnx.Rngs) -> Block:
            return self.block_class(options, rngs=layer_rngs)

        return create(rngs)

    @classmethod
    def from_config(cls, args: Mapping[str, Any], *, rngs: nnx.Rngs) -> Decoder:
        """Build the model from the fields of its configuration; ValueError for an unknown or ill-typed field."""
        return cls(config_from_args(cls.config_class, args), rngs=rngs)

    def __call__(
        self, tokens: Int32[Array, "b t"], segments: Int32[Array, "b t"] | None = None, **arrays: Shaped[Array, "..."]
    ) -> Float[Array, "b t v"]:
        """Return the float32 logits of the next token at every position; `arrays` are further arrays of a batch."""
        table = self._table()
        batch = {"tokens": tokens, **arrays, **({} if segments is None else {"segments": segments})}
        return self._logits(self.hidden(*self.inputs(batch, table))[0], table)

    def loss(self, batch: Batch) -> tuple[Float[Array, ""], Metrics]:
        """Return the mean cross-entropy in nats per token of tokens[:, 1:] given tokens[:, :-1], and layers' metrics.

        With `segments` in the batch, a token is predicted only from earlier tokens of its segment. The first token of a
        segment and all tokens of segment 0 are not predicted. With `weights` in the batch, the mean is weighted by the
        weight of each predicted token. The metric `weight` is the sum of the weights.
        The balance of a mixture enters only the gradient, so that losses of different models can be compared.
        """
        table = self._table() if self.config.lookup == "gather" else None
        read = {name: batch[name][:, :-1] for name in ("tokens", "segments") if name in batch}
        x, metrics = self.hidden(*self.inputs({**batch, **read}, table))
        weights = self.weights(batch)
        if weights is not None:
            metrics = {**metrics, "weight": jnp.sum(weights)}
        loss = self.mean_loss(x, batch["tokens"][:, 1:], table, weights)
        if "balance" in metrics:
            balance = metrics["balance"]
            loss = loss + self.config.balance_coefficient * (balance - jax.lax.stop_gradient(balance))
        return loss, metrics

    def weights(self, batch: Batch) -> Float[Array, "b t"] | None:
        """Return the weights of the predictions of tokens[:, 1:] in the loss; None if all are 1.

        They are the array `weights` of the batch, where there is one, and 0 where `segments` has no prediction.
        """
        segments, given = batch.get("segments"), batch.get("weights")
        weights = None if given is None else given[:, 1:].astype(jnp.float32)
        if segments is None:
            return weights
        within = ((segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)).astype(jnp.float32)
        return within if weights is None else within * weights

    def inputs(self, batch: Batch, table: Float[Array, "v d"] | None = None) -> Inputs:
        """Return the input of the layers for the `tokens` of a batch, and for its `segments` if it has any.

        Args:
          batch: arrays by name; unlike in `loss`, tokens and segments end with the last token that is read.
          table: the gathered embedding, if there is one.
        """
        tokens = batch["tokens"]
        x = self.embedded(tokens, table)
        return Inputs(x, places_of(batch.get("segments")), self.layer_vectors(tokens, x))

    def embedded(self, tokens: Int32[Array, "b t"], table: Float[Array, "v d"] | None = None) -> Float[Array, "b t d"]:
        """Return the embeddings of tokens, the input of the first layer; `table` is the gathered embedding if any."""
        c = self.config
        if c.lookup == "exchange" and table is None:
            x = look_up(self.embed.embedding[...], tokens, c.dtype)
        else:
            x = jnp.take(self._table() if table is None else table, tokens, axis=0)
        x = x * c.dim**0.5 if c.embed_scale else x
        return constrain(x if c.embed_multiplier == 1 else x * c.embed_multiplier, "batch", None, None)

    def layer_vectors(self, tokens: Int32[Array, "b t"], x: Float[Array, "b t d"]) -> Float[Array, "l b t p"] | None:
        """Return the tokens' vectors for each layer; None for a model without per-layer embeddings.

            vectors = (E2[tokens] sqrt(P) + RMSNorm(x W / sqrt(D))) / sqrt(2)

        Args:
          tokens: ids.
          x: their embeddings, the input of the first layer.
        """
        c = self.config
        if not c.per_layer_dim:
            return None
        shape = (*tokens.shape, c.num_layers, c.per_layer_dim)
        stored = look_up(self.per_layer_table[...], tokens, c.dtype).reshape(shape) * c.per_layer_dim**0.5
        projected = self.per_layer_norm((self.per_layer_project(x) * c.dim**-0.5).reshape(shape))
        return jnp.moveaxis((stored + projected) * 2**-0.5, 2, 0)

    def hidden(
        self,
        x: Float[Array, "b t d"],
        places: Places = Places(),  # noqa: B008  a constant
        vectors: Float[Array, "l b t p"] | None = None,
    ) -> tuple[Float[Array, "b t d"], Metrics]:
        """Apply all layers and the last norm; return the result and the mean of the metrics over the layers.

        Args:
          x: the input of the first layer.
          places: a token sees only tokens of its segment.
          vectors: the result of `layer_vectors`.

        Raises:
          ValueError: the sequence is longer than `seq_len_max`.
        """
        self._check_length(x.shape[1])
        x, metrics, _ = self._layers(x, places, vectors)
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
            x = x if c.logit_scale == 1 else x * c.logit_scale
            return chunked_cross_entropy(x, stored[...], labels, c.loss_chunk, c.logit_cap, weights)
        return cross_entropy(self._logits(x, table), labels, weights)

    def prefill(
        self,
        tokens: Int32[Array, "b n"],
        lengths: Int32[Array, " b"],
        *,
        size: int,
        arrays: Batch = MappingProxyType({}),
    ) -> tuple[Float[Array, "b v"], Caches]:
        """Read prompts; return the logits of the token after each of them, and caches for `step`.

        Args:
          tokens: prompts with padding behind them.
          lengths: the real tokens of each prompt, at least one.
          size: the most tokens of a text that the caches keep; a layer with a window keeps no more than its window.
          arrays: further arrays of a batch of the prompts, such as their images.

        Raises:
          ValueError: `size` is larger than `seq_len_max`.
        """
        self._check_length(size)
        table = self._table()
        x, places, vectors = self.inputs({"tokens": tokens, **arrays}, table)
        empty = self._empty_caches(len(tokens), size)
        real = None
        # Attention is causal, but the state of a delta layer would see the padding behind a prompt.
        if any(isinstance(cache, DeltaCache) for cache in empty):
            real = (jnp.arange(tokens.shape[1])[None] < lengths[:, None]).astype(jnp.int32)
        # Padding is behind the prompts, so the positions of all of them are 0, 1, 2, ...
        places = places._replace(segments=real, length=size, lengths=lengths)
        x, _, caches = self._layers(x, places, vectors, empty)
        x = jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1)
        return self._drawable_after(x, table), Caches(list(caches or []), jnp.max(lengths), lengths)

    def step(self, tokens: Int32[Array, " b"], caches: Caches, *, size: int) -> tuple[Float[Array, "b v"], Caches]:
        """Read one more token of each text; return the logits of the token after it, and the caches with it.

        Args:
          tokens: ids.
          caches: the result of `prefill` or of `step`; beyond `size` tokens, they lose the oldest ones.
          size: that of `prefill`.
        """
        table = self._table()
        x, places, vectors = self.inputs({"tokens": tokens[:, None]}, table)
        places = places._replace(positions=caches.lengths[:, None], length=size, column=caches.column)
        x, _, layers = self._layers(x, places, vectors, caches.layers)
        return self._drawable_after(x, table), Caches(list(layers or []), caches.column + 1, caches.lengths + 1)

    def _drawable_after(self, x: Float[Array, "b 1 d"], table: Float[Array, "v d"]) -> Float[Array, "b v"]:
        return self.drawable(self._logits(self.norm_final(x), table)[:, 0])

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
        top_k: int = 0,
        min_p: float = 0.0,
        ids: int,
        arrays: Batch = MappingProxyType({}),
    ) -> Int32[Array, " count"]:
        """Continue a text token by token; `prefill` and `step` do the same for several texts and with caches that stay.

        Args:
          prompt: at least one token; only its last `context` tokens are read.
          count: tokens to add.
          key: random key of the draws.
          length: number of real tokens if the prompt is padded, so that one program serves many lengths; the padded
            prompt then has at most `context` tokens. None: the prompt is not padded.
          context: number of latest tokens that a layer may see, at most seq_len_max.
          temperature, top_k, top_p, min_p: as in `Drawing`.
          ids: only tokens with smaller ids are drawn.
          arrays: further arrays of a batch of the prompt alone, such as its images.
        """
        prompt, how = prompt[-context:], Drawing(temperature, top_k, top_p, min_p)
        size, begin = min(context, len(prompt) + count), len(prompt) if length is None else length

        def add(state: tuple[Array, Caches], number: Array) -> tuple[tuple[Array, Caches], Array]:
            token = draw(state[0][:, :ids], jax.random.fold_in(key, begin + number)[None], how)
            return self.step(token, state[1], size=size), token[0]

        state = self.prefill(prompt[None], jnp.asarray([begin], jnp.int32), size=size, arrays=arrays)
        return jax.lax.scan(add, state, jnp.arange(count))[1]

    def drawable(self, logits: Float[Array, "b v"]) -> Float[Array, "b v"]:
        """Return logits where tokens that the model may not write are -inf."""
        return logits

    def unstack(self) -> None:
        """Give each layer its own parameters, so that a step copies none of them.

        Call this outside a program. A stack of layers is a loop, whose body gets a copy of a layer's parameters; the
        copies would take longer than the computation of one token. The model computes the same numbers as before.
        """
        c, layers = self.config, dict[int, Block]()
        blocks: list[Any] = [self.blocks] if isinstance(self.blocks, Block) else list(self.blocks)
        self.blocks = nnx.List([])
        for stack in reversed(c.stacks()):
            block = blocks.pop()
            if not stack.stacked:
                layers[stack.layers[0]] = block
                continue
            graphdef, state = nnx.split(block)
            leaves, tree = jax.tree.flatten(state)
            del block, state
            cut = list[list[Array]]()
            # Each stacked array is freed when its layers are cut, so that memory holds the model about once.
            while leaves:
                leaf = leaves.pop()
                cut.append([leaf[at] for at in range(len(stack.layers))])
            for layer, values in zip(stack.layers, zip(*reversed(cut), strict=True), strict=True):
                layers[layer] = nnx.merge(graphdef, jax.tree.unflatten(tree, values))
        self.blocks = nnx.List([layers[layer] for layer in range(c.num_layers)])
        self.config = replace(c, scan_layers=False)

    def _check_length(self, length: int) -> None:
        if length > self.config.seq_len_max:
            raise ValueError(f"a sequence of {length} tokens exceeds model.args.seq_len_max {self.config.seq_len_max}")

    def _table(self) -> Float[Array, "v d"]:
        # Every device gets whole rows, because looking up split rows would move activations.
        return gather(self.embed.embedding[...].astype(self.config.dtype), *TABLE_AXES)

    def _logits(self, x: Float[Array, "b t d"], table: Float[Array, "v d"] | None) -> Float[Array, "b t v"]:
        if self.head is not None:
            table = gather(self.head[...].astype(self.config.dtype), *TABLE_AXES)
        x = x if self.config.logit_scale == 1 else x * self.config.logit_scale
        return soft_limit(logits_of(x, self._table() if table is None else table), self.config.logit_cap)

    def _empty_caches(self, batch: int, size: int) -> list[Cache]:
        """Return a cache for each block; that of stacked layers has a leading axis of layers."""
        c, caches = self.config, list[Cache]()
        for stack in c.stacks():
            kind = c.kind(stack.layers[0])
            cache = empty_cache(c.of_kind(kind), batch, cache_slots(c, kind, size))
            caches.append(jax.tree.map(partial(_repeated, len(stack.layers)), cache) if stack.stacked else cache)
        return caches

    def _layers(
        self,
        x: Float[Array, "b t d"],
        places: Places,
        vectors: Float[Array, "l b t p"] | None,
        caches: Sequence[Any] | None = None,
    ) -> tuple[Float[Array, "b t d"], Metrics, Sequence[Any] | None]:
        """Apply all blocks; return the stream, the means of the layers' metrics, and the caches, one for each block."""
        c = self.config
        blocks = [self.blocks] if isinstance(self.blocks, Block) else list(self.blocks)
        state = (x, self._no_keys(x, places))
        metrics, after, stacks, at = list[Any](), list[Cache](), c.stacks(), 0
        for period in c.periods():
            here = slice(at, at + len(period.kinds))
            rows = None if vectors is None else vectors[stacks[at].layers[0] : stacks[here.stop - 1].layers[-1] + 1]
            given = [None] * len(period.kinds) if caches is None else caches[here]
            state, (parts, kept) = self._period(
                period, blocks[here], state, places, rows, given, stacked=stacks[at].stacked
            )
            metrics += parts
            after += kept
            at = here.stop
        names = dict.fromkeys(name for part in metrics for name in part)
        means = {
            name: jnp.mean(jnp.concatenate([jnp.atleast_1d(part[name]) for part in metrics if name in part]))
            for name in names
        }
        return state[0], means, None if caches is None else after

    def _no_keys(self, x: Float[Array, "b t d"], places: Places) -> dict[str, KeysValues]:
        """Return zeros as the first keys and values of each kind of layers whose keys and values later layers use."""
        found, c = dict[str, KeysValues](), self.config
        for kind in {c.of_kind(kind).kv_from for kind in c.kinds} - {""}:
            options = c.of_kind(kind)
            # The queries of one new token see a whole cache.
            length = x.shape[1] if places.column is None else cache_slots(c, kind, places.length)
            zeros = jnp.zeros((len(x), length, options.num_kv_heads, options.head_dim), x.dtype)
            found[kind] = (zeros, zeros)
        return found

    def _period(
        self,
        period: Period,
        blocks: Sequence[Block],
        state: tuple[Float[Array, "b t d"], dict[str, KeysValues]],
        places: Places,
        vectors: Float[Array, "n b t p"] | None,
        caches: Sequence[Any],
        *,
        stacked: bool,
    ) -> tuple[Any, tuple[list[Any], list[Any]]]:
        """Apply the layers of a repeated period to the stream and to the latest keys and values of each kind."""
        split = [nnx.split(block) for block in blocks]

        def once(state: Any, given: Any) -> Any:
            (x, latest), metrics, after = state, [], []
            for at, (kind, params, cache) in enumerate(zip(period.kinds, *given[:2], strict=True)):
                rows = None if given[2] is None else given[2][at]
                source = latest.get(self.config.of_kind(kind).kv_from)

                def alone(x: Array, params: Any, kv: Any, cache: Any, rows: Any, at: int = at) -> Layer:
                    layer: Layer = nnx.merge(split[at][0], params)(x, places, kv=kv, vectors=rows, cache=cache)
                    # The backward pass keeps keys and values only if a later layer uses them.
                    return layer if period.kinds[at] in state[1] else layer._replace(kv=None)

                layer = checkpoint(alone, self.config.remat, scanned=stacked)(x, params, source, cache, rows)
                x, latest = layer.x, {**latest, kind: layer.kv} if kind in latest else latest
                metrics.append(layer.metrics)
                after.append(layer.cache)
            return (x, latest), (metrics, after)

        params = [each for _, each in split]
        if not stacked:
            return once(state, (params, caches, vectors))
        if vectors is not None:
            vectors = vectors.reshape(period.repeats, len(blocks), *vectors.shape[1:])
        return jax.lax.scan(once, state, (params, list(caches), vectors))
