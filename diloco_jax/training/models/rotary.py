"""Rotary positions: they rotate pairs of numbers by their position; scaling stretches wavelengths for longer texts."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from diloco_jax.training.models.options import DecoderConfig


def apply_rope(
    x: Float[Array, "b t n h"],
    frequency: Float[Array, " half"],
    positions: Int32[Array, "b t"] | None,
    size: float = 1.0,
) -> Float[Array, "b t n h"]:
    """Rotate the pairs (x[i], x[i + R/2]) by the angle position * frequency[i], and multiply them by `size`.

    R is twice the number of frequencies; the numbers of a head from R on are returned unchanged. Without `positions`
    they are 0, 1, 2, ...
    """
    half = len(frequency)
    place = jnp.arange(x.shape[1])[None] if positions is None else positions
    angle = place.astype(jnp.float32)[:, :, None] * frequency[None, None, :]
    cos, sin = ((size * f(angle))[:, :, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second = x[..., :half], x[..., half : 2 * half]
    rest = [x[..., 2 * half :]] if 2 * half < x.shape[-1] else []
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, *rest], axis=-1)


def frequencies(c: DecoderConfig, length: int) -> Float[Array, " half"]:
    """Return the frequencies, in radians per token, of a layer with these options in a sequence of `length` tokens."""
    half = int(c.head_dim * c.rope_fraction) // 2
    if c.rope_scaling == "proportional":
        # The rest of the head is paired as well, but with a frequency of 0, so it keeps its numbers.
        return jnp.pad(_plain(c.rope_theta, c.head_dim // 2)[:half], (0, c.head_dim // 2 - half))
    if c.rope_scaling == "longrope":
        return _plain(c.rope_theta, half) / jnp.array(c.rope_long if length > c.rope_length else c.rope_short)
    return _scaled(c, _plain(c.rope_theta, half))


def size_of(c: DecoderConfig) -> float:
    """Return the factor of queries and keys, which sharpens attention for longer texts."""
    if c.rope_scaling == "yarn":
        return c.rope_attention or 1 + 0.1 * math.log(c.rope_factor)
    if c.rope_scaling == "longrope":
        return c.rope_attention or math.sqrt(1 + math.log(c.rope_factor) / math.log(c.rope_length))
    return 1.0


def query_scale(c: DecoderConfig, positions: Int32[Array, "b t"]) -> Float[Array, "b t 1 1"]:
    """Return the factor of queries by their position, 1 + query_beta ln(1 + floor(position / rope_length))."""
    return 1 + c.query_beta * jnp.log1p((positions // c.rope_length).astype(jnp.float32))[:, :, None, None]


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
        if c.rope_truncate:
            fast, slow = math.floor(fast), math.ceil(slow)
        first, last = max(fast, 0), min(slow, 2 * half - 1)
        kept = 1 - (jnp.arange(half) - first) / max(last - first, 0.001)
    kept = jnp.clip(kept, 0, 1)
    return frequency * (kept + (1 - kept) / c.rope_factor)
