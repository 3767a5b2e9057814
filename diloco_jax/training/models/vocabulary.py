"""Embeddings and cross-entropy for large vocabularies, computed in parts that fit into memory.

**Cross-entropy of the next token, without all logits at once.** With V = 262,144 tokens, the logits of 8 sequences of
2048 tokens take 17 GB in float32. So they are computed for a chunk of the vocabulary at a time, and again in the
backward pass. The table is gathered by chunks too, and each chunk is sharded over all devices that hold a part of the
table:

    loss = mean_i log sum_v exp(E_v x_i) - E_label(i) x_i            the sum grows from chunk to chunk
    d loss / d logit_iv = (exp(logit_iv - lse_i) - [v = label(i)]) / n

**Embeddings looked up where they are stored.** No device ever has the whole table or its whole gradient. The table's
rows are sharded over devices that also split the batch. With V = 262,144 tokens and width 3840, gathering the table
would take 2 GB on each device, and its gradient another 2 GB. Instead, the token ids, which are small, are gathered.
Each device looks up the rows that it has, with zeros for the others, and a reduce-scatter gives each device the rows of
its tokens. The gradient takes the same way back. Sequences are cut so that little data travels at a time.

**Draws of the next token.** Temperature, top-k, top-p and min-p apply in this order, as in transformers.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32, Key

from diloco_jax.training.models.layers import by_text, soft_limit
from diloco_jax.training.sharding import constrain, current_layout, gather

TABLE_AXES = ("vocab", "embed")
# Bytes of rows that travel at a time, on each device.
SLAB_BYTES = 1 << 27


def look_up(table: Float[Array, "v d"], tokens: Int32[Array, "b t"], dtype: str) -> Float[Array, "b t d"]:
    """Return the embedding rows of tokens in `dtype`; the stored table has the logical axes TABLE_AXES."""
    layout = current_layout()
    spec = PartitionSpec(None, None) if layout is None else layout.sharding(table.shape, TABLE_AXES).spec
    # If each device has the whole table, or if rows are split, the table is gathered.
    if layout is None or not spec[0] or spec[1]:
        return jnp.take(gather(table.astype(dtype), *TABLE_AXES), tokens, axis=0)
    batch = layout.sharding(tokens.shape, ("batch", None))
    sizes, holders = layout.mesh.shape, (spec[0],) if isinstance(spec[0], str) else tuple(spec[0])
    # Along the axes `sharing`, devices have different tokens; along `alike`, the same.
    sharing = tuple(axis for axis in holders if axis in layout.rules["batch"])
    alike = tuple(axis for axis in holders if axis not in sharing)
    own, length = batch.shard_shape(tokens.shape)
    slab = own * math.prod(sizes[axis] for axis in sharing) * table.shape[1] * jnp.dtype(dtype).itemsize
    cuts = next(n for n in range(1, length + 1) if length % n == 0 and (slab * length / n <= SLAB_BYTES or n == length))

    def local(table: Array, tokens: Array) -> Array:
        def piece(ids: Array) -> Array:
            ids = jax.lax.all_gather(ids, sharing, axis=0, tiled=True) if sharing else ids
            rows = ids - jax.lax.axis_index(holders) * len(table)
            # A row that another device has gets an index beyond the table, which reads as zeros.
            rows = jnp.where((rows >= 0) & (rows < len(table)), rows, len(table))
            found: Array = table.at[rows].get(mode="fill", fill_value=0).astype(dtype)
            if sharing:
                found = jax.lax.psum_scatter(found, sharing, scatter_dimension=0, tiled=True)
            return jax.lax.psum(found, alike) if alike else found

        pieces: Array = jax.lax.map(piece, tokens.reshape(len(tokens), cuts, -1).swapaxes(0, 1))
        return pieces.swapaxes(0, 1).reshape(*tokens.shape, -1)

    specs, out = (spec, batch.spec), PartitionSpec(*batch.spec, None)
    return jax.shard_map(local, mesh=layout.mesh, in_specs=specs, out_specs=out, check_vma=False)(table, tokens)


def logits_of(x: Float[Array, "b t d"], table: Float[Array, "v d"]) -> Float[Array, "b t v"]:
    """Return float32 logits, sharded over batch and vocabulary, from a gathered table."""
    if by_text(x):
        return jnp.stack([jnp.einsum("td,vd->tv", row, table, preferred_element_type=jnp.float32) for row in x])
    logits = jnp.einsum("btd,vd->btv", x, table, preferred_element_type=jnp.float32)
    return constrain(logits, "batch", None, "vocab")


def cross_entropy(
    logits: Float[Array, "b t v"], labels: Int32[Array, "b t"], weights: Float[Array, "b t"] | None = None
) -> Float[Array, ""]:
    """Return the mean cross-entropy in nats per token, weighted by `weights` if given."""
    # A comparison with an iota replaces a gather, because it fuses, shards over `vocab`, and has a cheap gradient.
    hit = jnp.arange(logits.shape[-1])[None, None, :] == labels[:, :, None]
    label_logits = jnp.sum(jnp.where(hit, logits, 0.0), axis=-1)
    return _mean(jax.nn.logsumexp(logits, axis=-1) - label_logits, weights)


def _mean(losses: Float[Array, "b t"], weights: Float[Array, "b t"] | None) -> Float[Array, ""]:
    if weights is None:
        return jnp.mean(losses)
    total = jnp.sum(weights)
    return jnp.sum(losses * weights) / jnp.where(total > 0, total, 1.0)


def chunked_cross_entropy(
    x: Float[Array, "b t d"],
    table: Float[Array, "v d"],
    labels: Int32[Array, "b t"],
    chunk: int,
    cap: float = 0.0,
    weights: Float[Array, "b t"] | None = None,
) -> Float[Array, ""]:
    """Return the mean cross-entropy in nats per token of the logits x table^T, computed in chunks of the table.

    Args:
      x: in the dtype of the computation.
      table: the stored table, with the logical axes TABLE_AXES.
      chunk: rows of a chunk.
      cap: soft limit of the logits; 0 for none.

    Raises:
      ValueError: `chunk` does not divide the vocabulary, or the devices do not divide a chunk.
    """
    layout = current_layout()
    vocab = table.shape[0]
    parts = 1 if layout is None else vocab // layout.sharding(table.shape, TABLE_AXES).shard_shape(table.shape)[0]
    if vocab % chunk or chunk % parts:
        raise ValueError(
            f"model.args.loss_chunk is {chunk}; it must divide vocab_size ({vocab}) and be a multiple of {parts}, the "
            "number of parts of the embedding on the devices"
        )
    return _mean(_chunked(x, table, labels, _Chunks(vocab // chunk, parts, chunk // parts, cap)), weights)


class _Chunks(NamedTuple):
    """The cut of a table into chunks.

    A part is the rows of one device. Each chunk has rows of every part, so that a chunk is sharded like the table.
    """

    # The number of chunks.
    number: int
    parts: int
    # Rows of one part in one chunk.
    rows: int
    # The soft limit of the logits.
    cap: float

    def cut(self, table: Float[Array, "v d"]) -> Float[Array, "c p r d"]:
        """Reshape [vocabulary, width] to [chunk, part, row, width]."""
        parts = table.reshape(self.parts, self.number, self.rows, -1).swapaxes(0, 1)
        return constrain(parts, None, TABLE_AXES[0], None, TABLE_AXES[1])

    def join(self, cut: Float[Array, "c p r d"]) -> Float[Array, "v d"]:
        return cut.swapaxes(0, 1).reshape(-1, cut.shape[-1])

    def logits(self, x: Float[Array, "b t d"], rows: Float[Array, "p r d"]) -> Float[Array, "b t p r"]:
        logits = jnp.einsum("btd,prd->btpr", x, rows, preferred_element_type=jnp.float32)
        return soft_limit(constrain(logits, "batch", None, "vocab", None), self.cap)

    def hits(self, index: Int32[Array, ""], labels: Int32[Array, "b t"]) -> Array:
        """Return whether each logit [b, t, part, row] of a chunk is that of its label."""
        part, row = jnp.arange(self.parts)[:, None], jnp.arange(self.rows)[None, :]
        ids = (part * self.number + index) * self.rows + row
        return labels[:, :, None, None] == ids[None, None]


def _gathered(rows: Float[Array, "p r d"]) -> Float[Array, "p r d"]:
    return gather(rows, TABLE_AXES[0], None, TABLE_AXES[1])


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _chunked(
    x: Float[Array, "b t d"], table: Float[Array, "v d"], labels: Int32[Array, "b t"], chunks: _Chunks
) -> Float[Array, "b t"]:
    return _forward(x, table, labels, chunks)[0]


def _forward(
    x: Float[Array, "b t d"], table: Float[Array, "v d"], labels: Int32[Array, "b t"], chunks: _Chunks
) -> tuple[Float[Array, "b t"], tuple[Array, Array, Array, Array]]:
    def add(carry: tuple[Array, Array, Array], part: tuple[Array, Array]) -> tuple[tuple[Array, Array, Array], None]:
        top, total, label_logits = carry
        logits = chunks.logits(x, _gathered(part[1]))
        new_top = jnp.maximum(top, jnp.max(logits, axis=(2, 3)))
        total = total * jnp.exp(top - new_top) + jnp.sum(jnp.exp(logits - new_top[:, :, None, None]), axis=(2, 3))
        label_logits += jnp.sum(jnp.where(chunks.hits(part[0], labels), logits, 0.0), axis=(2, 3))
        return (new_top, total, label_logits), None

    zeros = jnp.zeros(labels.shape, jnp.float32)
    xs = (jnp.arange(chunks.number), chunks.cut(table.astype(x.dtype)))
    (top, total, label_logits), _ = jax.lax.scan(add, (jnp.full_like(zeros, -jnp.inf), zeros, zeros), xs)
    lse = top + jnp.log(total)
    return lse - label_logits, (x, table, labels, lse)


def _backward(
    chunks: _Chunks, kept: tuple[Array, Array, Array, Array], gradient: Float[Array, "b t"]
) -> tuple[Array, Array, None]:
    x, table, labels, lse = kept

    def back(x_gradient: Array, part: tuple[Array, Array]) -> tuple[Array, Array]:
        rows = _gathered(part[1])
        logits = chunks.logits(x, rows)
        error = jnp.exp(logits - lse[:, :, None, None]) - chunks.hits(part[0], labels)
        if chunks.cap:
            error *= 1 - jnp.square(logits / chunks.cap)
        error = (gradient[:, :, None, None] * error).astype(x.dtype)
        x_gradient += jnp.einsum("btpr,prd->btd", error, rows, preferred_element_type=jnp.float32)
        rows_gradient = constrain(jnp.einsum("btpr,btd->prd", error, x), TABLE_AXES[0], None, TABLE_AXES[1])
        return constrain(x_gradient, "batch", None, None), rows_gradient

    xs = (jnp.arange(chunks.number), chunks.cut(table.astype(x.dtype)))
    x_gradient, rows_gradient = jax.lax.scan(back, jnp.zeros(x.shape, jnp.float32), xs)
    return x_gradient.astype(x.dtype), chunks.join(rows_gradient).astype(table.dtype), None


_chunked.defvjp(_forward, _backward)


class Drawing(NamedTuple):
    """The options for drawing tokens."""

    # Divides the logits; 0 takes the likeliest token; 1 draws with the model's probabilities.
    temperature: float = 0.0
    # Tokens are drawn from this number of likeliest ones; 0 for all.
    top_k: int = 0
    # Tokens are drawn from the fewest likeliest ones that together have this probability; 1 for all.
    top_p: float = 1.0
    # Tokens are drawn from those that have at least this share of the likeliest one's probability; 0 for all.
    min_p: float = 0.0


def filtered(logits: Float[Array, "b v"], how: Drawing) -> Float[Array, "b v"]:
    """Return logits over the temperature, with -inf for tokens that are not drawn.

    Tokens as likely as the least likely one that is kept by top_k or top_p are kept too. Each filter sees the
    probabilities after the filters before it.
    """
    logits = logits / how.temperature
    limited = 0 < how.top_k < logits.shape[-1]
    if limited or how.top_p < 1:
        likeliest = jax.lax.top_k(logits, how.top_k)[0] if limited else jnp.sort(logits, descending=True)
        least = likeliest[:, -1:]
        if how.top_p < 1:
            share = jax.nn.softmax(likeliest, axis=-1)
            # The likeliest tokens up to this one together reach the probability top_p.
            last = jnp.sum(jnp.cumsum(share, axis=-1) - share < how.top_p, axis=-1, keepdims=True) - 1
            least = jnp.take_along_axis(likeliest, last, axis=-1)
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if how.min_p > 0:
        top = jnp.max(logits, axis=-1, keepdims=True)
        logits = jnp.where(logits >= top + jnp.log(jnp.float32(how.min_p)), logits, -jnp.inf)
    return logits


def draw(logits: Float[Array, "b v"], keys: Key[Array, " b"], how: Drawing) -> Int32[Array, " b"]:
    """Draw a token for each text, with its own key."""
    if how.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.vmap(jax.random.categorical)(keys, filtered(logits, how)).astype(jnp.int32)
