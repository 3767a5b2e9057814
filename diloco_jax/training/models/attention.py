"""Rotary positions and causal attention, in three ways that give the same numbers.

Shapes: B batch, T length, N query heads, K key and value heads (N / K query heads read one), H head width.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jaxtyping import Array, Float

from diloco_jax.training.sharding import current_layout

Attention = Literal["einsum", "dot_product", "splash"]
SPLASH_BLOCK_MAX = 512  # tokens of one tile of the kernel, a power of two
SPLASH_BLOCK_MIN = 128


def apply_rope(x: Float[Array, "b t n h"], theta: float) -> Float[Array, "b t n h"]:
    """Rotate the pairs (x[i], x[i + H/2]) by the angle position * theta^(-2i/H)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequency[None, :]
    cos, sin = (f(angle)[None, :, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attend(
    q: Float[Array, "b t n h"], k: Float[Array, "b t k h"], v: Float[Array, "b t k h"], method: str
) -> Float[Array, "b t n h"]:
    """Compute causal grouped-query attention, softmax(q k^T / sqrt(H)) v; query head i reads key head i // (N / K).

    The method is one of `Attention`. Where the devices are no TPUs, splash is computed as einsum: a syncer evaluates on
    CPU what islands train on TPU.
    """
    if method == "dot_product":
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)
    if method == "splash" and _platform() == "tpu":
        return splash(q, k, v)
    return _einsum(q, k, v)


def _platform() -> str:
    layout = current_layout()
    return jax.default_backend() if layout is None else layout.platform


def _einsum(
    q: Float[Array, "b t n h"], k: Float[Array, "b t k h"], v: Float[Array, "b t k h"]
) -> Float[Array, "b t n h"]:
    b, t, n, h = q.shape
    groups = n // k.shape[2]
    # One matrix product per (example, key head): the G query heads of a group are stacked along time. The softmax is
    # normalised after the product with v, on T x H instead of T x T numbers. Together 10 % of a training step on CPU.
    q = (q * h**-0.5).reshape(b, t, -1, groups, h).transpose(0, 2, 3, 1, 4).reshape(b, -1, groups * t, h)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    scores = jnp.einsum("bkqh,bksh->bkqs", q, k, preferred_element_type=jnp.float32)
    causal = jnp.tile(jnp.arange(t), groups)[:, None] >= jnp.arange(t)[None, :]
    scores = jnp.where(causal[None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    mixed = jnp.einsum("bkqs,bksh->bkqh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    mixed = (mixed / jnp.sum(weights, axis=-1, keepdims=True)).astype(v.dtype)
    return mixed.reshape(b, -1, groups, t, h).transpose(0, 3, 1, 2, 4).reshape(b, t, n, h)


def splash(
    q: Float[Array, "b t n h"], k: Float[Array, "b t k h"], v: Float[Array, "b t k h"], *, interpret: bool = False
) -> Float[Array, "b t n h"]:
    """Compute attention by JAX's Pallas kernel for TPUs, without a T x T matrix; devices do their own part.

    Args:
      q, k, v: queries, keys and values.
      interpret: emulate the kernel, for tests.

    Raises:
      ValueError: a length that the kernel's tiles do not divide, or heads that the mesh cannot share.
    """
    t, h = q.shape[1], q.shape[3]
    if t % SPLASH_BLOCK_MIN:
        raise ValueError(
            f"attention splash: {t} tokens are no multiple of {SPLASH_BLOCK_MIN}; change train.seq_len, or use "
            "dot_product"
        )
    block = next(size for size in (SPLASH_BLOCK_MAX, 256, SPLASH_BLOCK_MIN) if t % size == 0)

    def local(q: Array, k: Array, v: Array) -> Array:
        heads = [splash_attention_mask.CausalMask((t, t)) for _ in range(q.shape[2])]
        kernel = splash_attention_kernel.make_splash_mha(
            splash_attention_mask.MultiHeadMask(heads),
            block_sizes=_blocks(block),
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )
        heads_first = [x.swapaxes(1, 2) for x in (q * h**-0.5, k, v)]
        mixed: Array = jax.vmap(kernel)(*heads_first).swapaxes(1, 2)
        return mixed

    layout = current_layout()
    if layout is None:
        return local(q, k, v)
    queries, keys = (layout.sharding(x.shape, ("batch", None, "heads", None)).spec for x in (q, k))
    if queries != keys and k.shape[2] > 1:
        raise ValueError(
            f"attention splash: the mesh {dict(layout.mesh.shape)} splits {q.shape[2]} query heads and {k.shape[2]} "
            "key heads differently; make islands.mesh.tensor a divisor of num_kv_heads, or num_kv_heads 1"
        )
    # The kernel's types do not say over which axes its results vary, hence check_vma.
    spread = jax.shard_map(local, mesh=layout.mesh, in_specs=(queries, keys, keys), out_specs=queries, check_vma=False)
    result: Array = spread(q, k, v)
    return result


def _blocks(size: int) -> splash_attention_kernel.BlockSizes:
    return splash_attention_kernel.BlockSizes(
        block_q=size, block_kv=size, block_q_dkv=size, block_kv_dkv=size, block_q_dq=size, block_kv_dq=size
    )
