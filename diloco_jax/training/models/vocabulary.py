"""The two ends of a language model, whose tables have a row for each token: embeddings and cross-entropy, in parts.

**Cross-entropy of the next token, without all logits at once.** With V = 262,144 words the logits of 8 sequences of
2048 tokens are 17 GB in float32. So they are made for a chunk of the vocabulary at a time, and again on the way back;
the table too is gathered by chunks, each of them spread over all devices that hold a part of the table:

    loss = mean_i log sum_v exp(E_v x_i) - E_label(i) x_i            the sum grows from chunk to chunk
    d loss / d logit_iv = (exp(logit_iv - lse_i) - [v = label(i)]) / n

**Embeddings looked up where they lie:** no device ever has the whole table, or the whole of its gradient. The table's
rows are shared out over devices that also share the batch. With V = 262,144 words of width 3840 gathering it takes 2 GB
on each device, and its gradient as much again, summed over all. Instead the token ids, which are small, are gathered;
each device looks up the rows that it has, zeros for the others; and a reduce-scatter gives each device the rows of its
own tokens. The gradient goes the same way back. Sequences are cut, so that what travels at a time is small.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from diloco_jax.training.models.layers import soft_limit
from diloco_jax.training.sharding import constrain, current_layout, gather

TABLE_AXES = ("vocab", "embed")
SLAB_BYTES = 1 << 27  # of rows that travel at a time, on each device


def look_up(table: Float[Array, "v d"], tokens: Int32[Array, "b t"], dtype: str) -> Float[Array, "b t d"]:
    """Return the rows of the tokens in this type; the table is as it is stored, with the logical axes TABLE_AXES."""
    layout = current_layout()
    spec = PartitionSpec(None, None) if layout is None else layout.sharding(table.shape, TABLE_AXES).spec
    if layout is None or not spec[0] or spec[1]:  # whole on each device, or rows in parts
        return jnp.take(gather(table.astype(dtype), *TABLE_AXES), tokens, axis=0)
    batch = layout.sharding(tokens.shape, ("batch", None))
    sizes, holders = layout.mesh.shape, (spec[0],) if isinstance(spec[0], str) else tuple(spec[0])
    sharing = tuple(axis for axis in holders if axis in layout.rules["batch"])  # they have other tokens, too
    alike = tuple(axis for axis in holders if axis not in sharing)
    own, length = batch.shard_shape(tokens.shape)
    slab = own * math.prod(sizes[axis] for axis in sharing) * table.shape[1] * jnp.dtype(dtype).itemsize
    cuts = next(n for n in range(1, length + 1) if length % n == 0 and (slab * length / n <= SLAB_BYTES or n == length))

    def local(table: Array, tokens: Array) -> Array:
        def piece(ids: Array) -> Array:
            ids = jax.lax.all_gather(ids, sharing, axis=0, tiled=True) if sharing else ids
            rows = ids - jax.lax.axis_index(holders) * len(table)
            rows = jnp.where((rows >= 0) & (rows < len(table)), rows, len(table))  # behind the last: others have it
            found: Array = table.at[rows].get(mode="fill", fill_value=0).astype(dtype)
            if sharing:
                found = jax.lax.psum_scatter(found, sharing, scatter_dimension=0, tiled=True)
            return jax.lax.psum(found, alike) if alike else found

        pieces: Array = jax.lax.map(piece, tokens.reshape(len(tokens), cuts, -1).swapaxes(0, 1))
        return pieces.swapaxes(0, 1).reshape(*tokens.shape, -1)

    specs, out = (spec, batch.spec), PartitionSpec(*batch.spec, None)
    return jax.shard_map(local, mesh=layout.mesh, in_specs=specs, out_specs=out, check_vma=False)(table, tokens)


def logits_of(x: Float[Array, "b t d"], table: Float[Array, "v d"]) -> Float[Array, "b t v"]:
    """Return logits in float32, split over the batch and the vocabulary; the table is gathered."""
    logits = jnp.einsum("btd,vd->btv", x, table, preferred_element_type=jnp.float32)
    return constrain(logits, "batch", None, "vocab")


def cross_entropy(
    logits: Float[Array, "b t v"], labels: Int32[Array, "b t"], weights: Float[Array, "b t"] | None = None
) -> Float[Array, ""]:
    """Compute the mean cross-entropy in nats per token, where a token counts as its weight says."""
    # A comparison with an iota instead of a gather: it fuses, shards over `vocab`, and has a cheap gradient.
    hit = jnp.arange(logits.shape[-1])[None, None, :] == labels[:, :, None]
    label_logits = jnp.sum(jnp.where(hit, logits, 0.0), axis=-1)
    return _mean(jax.nn.logsumexp(logits, axis=-1) - label_logits, weights)


def _mean(losses: Float[Array, "b t"], weights: Float[Array, "b t"] | None) -> Float[Array, ""]:
    if weights is None:
        return jnp.mean(losses)
    return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1)


def chunked_cross_entropy(
    x: Float[Array, "b t d"],
    table: Float[Array, "v d"],
    labels: Int32[Array, "b t"],
    chunk: int,
    cap: float = 0.0,
    weights: Float[Array, "b t"] | None = None,
) -> Float[Array, ""]:
    """Compute the mean cross-entropy in nats per token of logits x table^T, `chunk` rows of the table at a time.

    The table is as it is stored (logical axes TABLE_AXES), x in the type of the computation; cap 0 is none.

    Raises:
      ValueError: the chunks do not divide the vocabulary, or the devices a chunk.
    """
    layout = current_layout()
    vocab = table.shape[0]
    parts = 1 if layout is None else vocab // layout.sharding(table.shape, TABLE_AXES).shard_shape(table.shape)[0]
    if vocab % chunk or chunk % parts:
        raise ValueError(
            f"model.args.loss_chunk is {chunk}; it must divide vocab_size ({vocab}) and be a multiple of the {parts} "
            "parts in which the devices hold the embedding"
        )
    return _mean(_chunked(x, table, labels, _Chunks(vocab // chunk, parts, chunk // parts, cap)), weights)


class _Chunks(NamedTuple):
    """The cut of a table: each part, the rows of one device, into all chunks; so a chunk is spread like the table."""

    number: int  # of chunks
    parts: int
    rows: int  # of one part in one chunk
    cap: float  # of the logits

    def cut(self, table: Float[Array, "v d"]) -> Float[Array, "c p r d"]:
        """Reshape [vocabulary, width] as [chunk, part, row, width]."""
        parts = table.reshape(self.parts, self.number, self.rows, -1).swapaxes(0, 1)
        return constrain(parts, None, TABLE_AXES[0], None, TABLE_AXES[1])

    def join(self, cut: Float[Array, "c p r d"]) -> Float[Array, "v d"]:
        return cut.swapaxes(0, 1).reshape(-1, cut.shape[-1])

    def logits(self, x: Float[Array, "b t d"], rows: Float[Array, "p r d"]) -> Float[Array, "b t p r"]:
        logits = jnp.einsum("btd,prd->btpr", x, rows, preferred_element_type=jnp.float32)
        return soft_limit(constrain(logits, "batch", None, "vocab", None), self.cap)

    def hits(self, index: Int32[Array, ""], labels: Int32[Array, "b t"]) -> Array:
        """Return which logit [b, t, part, row] of a chunk is that of the label."""
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
