"""Causal attention, in three implementations that give the same numbers.

Shapes: B batch, T length, N query heads, K key and value heads (N / K query heads read one), H head width.
"""

import logging
from functools import cache
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int32

from diloco_jax.training.models.layers import keep, soft_limit
from diloco_jax.training.sharding import current_layout

log = logging.getLogger(__name__)
Attention = Literal["einsum", "dot_product", "splash"]
# Tokens of one tile of the kernel. We compiled 512 for v5p. Public recipes (AI-Hypercomputer/tpu-recipes) use 1024 or
# 2048, with a larger xla_tpu_scoped_vmem_limit_kib.
SPLASH_BLOCKS = (2048, 1024, 512, 256, 128)
SPLASH_TUNED = 512
# The largest head width that has a backward pass in cuDNN's flash attention on every GPU since Ampere.
CUDNN_WIDTH_MAX = 128


class Seeing(NamedTuple):
    """The options of attention, in addition to that no query sees a later key."""

    # Scores are divided by the square root of this number.
    width: float
    # The soft limit of the scores; 0 for none.
    cap: float = 0.0
    # The number of tokens that a query sees, itself included; 0 for all.
    window: int = 0
    # The tokens of a tile of the splash kernel; 0 for the tuned size.
    block: int = 0


def attend(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k h"],
    method: str,
    rules: Seeing,
    segments: Int32[Array, "b t"] | None = None,
    sinks: Float[Array, " n"] | None = None,
    images: Int32[Array, "b t"] | None = None,
) -> Float[Array, "b t n h"]:
    """Compute causal grouped-query attention, softmax(q k^T / sqrt(width)) v; query head i reads key i // (N / K).

    Args:
      method: one of `Attention`. On devices other than TPUs, splash is computed as einsum, with a warning; dot_product
        with a cap, and all methods with sinks, are computed as einsum too. So is splash with images, because the
        kernel's mask is fixed when it is compiled.
      segments: a token sees only tokens of its segment; None: all tokens belong to one.
      sinks: as in `attend_to`.
      images: the number of the image of each token, 0 for text. A token also sees the later tokens of its image. None:
        no token sees a later one.
    """
    if method == "splash" and sinks is None:
        if _platform() == "tpu" and images is None:
            return splash(q, k, v, rules, segments)
        _warn_of_einsum(_platform())
    if method == "dot_product" and not rules.cap and sinks is None:
        # If `width` is the head's width, JAX computes the scale, because its number may differ in the last place.
        scale = None if rules.width == q.shape[3] else rules.width**-0.5
        mask = None if segments is None else (segments[:, None, :, None] == segments[:, None, None, :])
        local = (rules.window - 1, 0) if rules.window else None
        if images is not None:
            mask, local = _seen(q.shape[1], rules.window, segments, images)[:, None], None
        fits = q.shape[3] <= CUDNN_WIDTH_MAX and q.shape[3] % 8 == q.shape[1] % 2 == 0 and q.dtype == jnp.bfloat16
        way: Literal["cudnn"] | None = "cudnn" if fits and _platform() in ("gpu", "cuda") else None
        mixed = jax.nn.dot_product_attention(
            q, k, v, mask=mask, scale=scale, is_causal=images is None, local_window_size=local, implementation=way
        )
        return keep(mixed, "attention")
    return keep(attend_to(q, k, v, _seen(q.shape[1], rules.window, segments, images), rules, sinks), "attention")


def _seen(
    length: int, window: int, segments: Int32[Array, "b t"] | None, images: Int32[Array, "b t"] | None
) -> Bool[Array, "_ t t"]:
    """Return the tokens that each token sees; the first axis is the batch, or 1 if all texts are alike."""
    distance = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
    seen = (distance >= 0)[None]
    if images is not None:
        seen = seen | ((images[:, :, None] == images[:, None, :]) & (images[:, :, None] > 0))
    if window:
        # The later tokens of an image have a negative distance, so a window does not hide them.
        seen &= (distance < window)[None]
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None, :])
    return seen


@cache
def _warn_of_einsum(platform: str) -> None:
    log.warning(
        "attention is splash, a kernel without masks of images: layers with see_images are computed as einsum, which "
        "keeps all length x length scores of a layer in memory"
        if platform == "tpu"
        else f"attention is splash, a kernel for TPUs, but the devices are {platform}: it is computed as einsum, which "
        "keeps all length x length scores of a layer in memory; dot_product is faster on GPUs"
    )


def _platform() -> str:
    layout = current_layout()
    return jax.default_backend() if layout is None else layout.platform


def attend_to(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b s k h"],
    v: Float[Array, "b s k h"],
    seen: Bool[Array, "_ t s"],
    rules: Seeing,
    sinks: Float[Array, " n"] | None = None,
) -> Float[Array, "b t n h"]:
    """Compute attention to the keys that each query sees.

    Args:
      seen: the first axis is the batch, or 1 for all alike.
      sinks: for each query head a score that takes a share of the softmax, and adds nothing to the result.
    """
    b, t, n, h = q.shape
    groups = n // k.shape[2]
    # The G query heads of a group are stacked along time, so that there is one matrix product per example and key head.
    # The softmax is normalised after the product with v, on T x H instead of T x T numbers. Together these save 10 % of
    # a training step on CPU.
    q = (q * rules.width**-0.5).reshape(b, t, -1, groups, h).transpose(0, 2, 3, 1, 4).reshape(b, -1, groups * t, h)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    scores = jnp.einsum("bkqh,bksh->bkqs", q, k, preferred_element_type=jnp.float32)
    scores = soft_limit(scores, rules.cap)
    scores = jnp.where(jnp.tile(seen, (1, groups, 1))[:, None], scores, jnp.finfo(jnp.float32).min)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    sink = None if sinks is None else jnp.repeat(sinks.reshape(-1, groups), t, axis=1)[None, :, :, None]
    top = top if sink is None else jnp.maximum(top, jax.lax.stop_gradient(sink))
    weights = jnp.exp(scores - top)
    mixed = jnp.einsum("bkqs,bksh->bkqh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    total = total if sink is None else total + jnp.exp(sink - top)
    mixed = (mixed / total).astype(v.dtype)
    return mixed.reshape(b, -1, groups, t, h).transpose(0, 3, 1, 2, 4).reshape(b, t, n, h)


def splash(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k h"],
    rules: Seeing,
    segments: Int32[Array, "b t"] | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "b t n h"]:
    """Compute attention with JAX's Pallas kernel for TPUs, without a T x T matrix; each device computes its part.

    With `interpret` the kernel is emulated, for tests.

    Raises:
      ValueError: the kernel's tiles do not divide the length, or the mesh cannot split the heads.
    """
    t = q.shape[1]
    if t % SPLASH_BLOCKS[-1]:
        raise ValueError(
            f"attention splash: {t} tokens are not a multiple of {SPLASH_BLOCKS[-1]}; change train.seq_len, or use "
            "dot_product"
        )
    block = next(size for size in SPLASH_BLOCKS if size <= (rules.block or SPLASH_TUNED) and t % size == 0)
    # The kernel needs all of Pallas, which takes long to import, and only this method uses it.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    # The tiles are the same in both passes; one fused kernel computes all gradients of the backward pass.
    tiles = splash_attention_kernel.BlockSizes(
        block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, use_fused_bwd_kernel=True
    )

    def local(q: Array, k: Array, v: Array, segments: Array | None) -> Array:
        mask: splash_attention_mask.Mask = splash_attention_mask.CausalMask((t, t))
        if rules.window:
            mask = splash_attention_mask.LocalMask((t, t), (rules.window - 1, 0), 0)
        kernel = splash_attention_kernel.make_splash_mha(
            splash_attention_mask.MultiHeadMask([mask] * q.shape[2]),
            block_sizes=tiles,
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=rules.cap or None,
            residual_checkpoint_name="attention",
            interpret=interpret,
        )
        heads_first = [x.swapaxes(1, 2) for x in (q * rules.width**-0.5, k, v)]
        ids = None if segments is None else splash_attention_kernel.SegmentIds(segments, segments)
        return jax.vmap(kernel)(*heads_first, ids).swapaxes(1, 2)

    layout = current_layout()
    if layout is None:
        return local(q, k, v, segments)
    queries, keys = (layout.sharding(x.shape, ("batch", None, "heads", None)).spec for x in (q, k))
    if queries != keys and k.shape[2] > 1:
        raise ValueError(
            f"attention splash: the mesh {dict(layout.mesh.shape)} splits {q.shape[2]} query heads and {k.shape[2]} "
            "key heads differently; make islands.mesh.tensor a divisor of num_kv_heads, or num_kv_heads 1"
        )
    # The kernel's types do not show along which axes its results vary, so check_vma must be off.
    specs = (queries, keys, keys, PartitionSpec(queries[0]))
    spread = jax.shard_map(local, mesh=layout.mesh, in_specs=specs, out_specs=queries, check_vma=False)
    return spread(q, k, v, segments)
