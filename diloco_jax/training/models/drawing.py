"""Draws of the next token from logits: temperature, top-k, top-p and min-p, in this order, as in transformers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Key


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
