"""Caches of a text being written: keys and values of earlier tokens, so that each new token is computed once.

Shapes: B batch, K key heads, C columns of a cache, H head width.

The texts of a batch end in the same column, whatever their lengths, so a new token's keys are written to one column for
all of them. Column c is stored in slot c mod C. A cache of C slots is therefore a ring of the latest C columns, which
is all that a layer with a window of C tokens needs.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from diloco_jax.training.models.delta import DeltaCache, empty_state
from diloco_jax.training.models.options import DecoderConfig


class KeyCache(NamedTuple):
    """The keys and values of the latest tokens of each text in one layer."""

    keys: Float[Array, "*layers b k c h"]
    values: Float[Array, "*layers b k c h"]


# The state of a delta layer; empty if the layer uses the keys and values of another one.
Cache = KeyCache | tuple[()] | DeltaCache


class Caches(NamedTuple):
    """What a decoder keeps of the texts that it has read."""

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
