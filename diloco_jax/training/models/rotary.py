"""Rotary positions: they rotate pairs of numbers by their position; scaling stretches wavelengths for longer texts."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from diloco_jax.training.models.options import DecoderConfig


def apply_rope(
    x: Float[Array, "b t n h"],
    frequency: Float[Array, " half"],
    positions: Int32[Array, "b t"] | None,
    size: float = 1.0,
) -> Float[Array, "b t n h"]:
    """Rotate the pairs (x[i], x[i + H/2]) by the angle position * frequency[i], and multiply them by `size`.

    Without `positions` they are 0, 1, 2, ...
    """
    half = x.shape[-1] // 2
    place = jnp.arange(x.shape[1])[None] if positions is None else positions
    angle = place.astype(jnp.float32)[:, :, None] * frequency[None, None, :]
    cos, sin = ((size * f(angle))[:, :, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def frequencies(c: DecoderConfig, local: bool | Bool[Array, ""]) -> Float[Array, " half"]:
    """Return a layer's frequencies in radians per token; `local` is whether the layer has the window."""
    whole = _scaled(c, _plain(c.rope_theta, c.head_dim // 2))
    if not c.rope_theta_local or local is False:
        return whole
    return jnp.where(local, _plain(c.rope_theta_local, c.head_dim // 2), whole)


def size_of(c: DecoderConfig) -> float:
    """Return the factor of queries and keys; yarn uses it to sharpen attention for longer texts, others have 1."""
    return 1 + 0.1 * math.log(c.rope_factor) if c.rope_scaling == "yarn" else 1.0


def _plain(theta: float, half: int) -> Float[Array, " half"]:
    return theta ** (-jnp.arange(half, dtype=jnp.float32) / half)


def _scaled(c: DecoderConfig, frequency: Float[Array, " half"]) -> Float[Array, " half"]:
    if c.rope_scaling == "none":
        return frequency
    if c.rope_scaling == "linear":
        return frequency / c.rope_factor
    if c.rope_scaling == "llama3":
        turns = c.rope_length * frequency / (2 * math.pi)
        kept = (turns - c.rope_slow) / (c.rope_fast - c.rope_slow)
    else:
        # yarn interpolates between indices of pairs, llama3 between numbers of turns.
        half = len(frequency)
        fast, slow = (
            half * math.log(c.rope_length / (2 * math.pi * turns)) / math.log(c.rope_theta)
            for turns in (c.rope_fast, c.rope_slow)
        )
        first, last = max(math.floor(fast), 0), min(math.ceil(slow), 2 * half - 1)
        kept = 1 - (jnp.arange(half) - first) / max(last - first, 0.001)
    kept = jnp.clip(kept, 0, 1)
    return frequency * (kept + (1 - kept) / c.rope_factor)
