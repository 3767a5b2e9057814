"""Parts that the built-in models share: a linear map whose weight may be spread over the mesh, and remat."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from diloco_jax.training.sharding import current_layout, gather

Remat = Literal[
    "none", "full", "attention", "mlp", "minimal", "offload", "dots_saveable", "dots_with_no_batch_dims_saveable"
]
LayerFunction = Callable[..., Any]
# Results of a layer by the names that `keep` gives them: those that the policies keep, beside what goes into the layer.
KEPT = {
    "attention": ("attention",),
    "mlp": ("attention", "qkv", "out"),
    "minimal": ("attention", "qkv", "out", "gated"),
}


class Linear(nnx.Module):
    """x W, or x W + b. The weight is cast to the type of the computation, then gathered for this one use."""

    def __init__(
        self, n_in: int, n_out: int, names: tuple[str, str], dtype: str, *, bias: bool = False, rngs: nnx.Rngs
    ) -> None:
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
        self.kernel = nnx.Param(init(rngs.params(), (n_in, n_out)))
        self.bias = _vector(n_out, nnx.initializers.zeros_init(), rngs) if bias else None
        self.names = names
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
        y = x @ gather(self.kernel[...].astype(self.dtype), *self.names)
        if self.bias is None:
            return y
        bias = self.bias[...].astype(self.dtype)
        return y + bias.reshape((1,) * (y.ndim - 1) + bias.shape)


class OffsetNorm(nnx.Module):
    """x / sqrt(mean(x^2) + epsilon) (1 + scale), over the last dimension, in float32."""

    def __init__(self, width: int, epsilon: float, dtype: str, *, rngs: nnx.Rngs) -> None:
        self.scale = _vector(width, nnx.initializers.zeros_init(), rngs)
        self.epsilon = epsilon
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        full = x.astype(jnp.float32)
        scale = (1 + self.scale[...]).reshape((1,) * (x.ndim - 1) + (-1,))
        full = full * jax.lax.rsqrt(jnp.mean(jnp.square(full), axis=-1, keepdims=True) + self.epsilon)
        return (full * scale).astype(self.dtype)


def make_norm(width: int, epsilon: float, dtype: str, *, offset: bool, rngs: nnx.Rngs) -> nnx.RMSNorm | OffsetNorm:
    """Return a norm whose scale begins at 1, or at 0 if it is an offset to 1."""
    if offset:
        return OffsetNorm(width, epsilon, dtype, rngs=rngs)
    init = nnx.with_partitioning(nnx.initializers.ones_init(), (None,))
    return nnx.RMSNorm(width, epsilon=epsilon, dtype=dtype, scale_init=init, rngs=rngs)


def _vector(width: int, init: nnx.Initializer, rngs: nnx.Rngs) -> nnx.Param:
    # Named, though by no mesh axis: only to axes that have names does a scan add that of the layers.
    return nnx.Param(nnx.with_partitioning(init, (None,))(rngs.params(), (width,)))


def soft_limit(x: Float[Array, "..."], cap: float) -> Float[Array, "..."]:
    """Return cap tanh(x / cap), which is about x where x is small; x itself if the cap is 0."""
    return cap * jnp.tanh(x / cap) if cap else x


def keep(x: Float[Array, "..."], name: str) -> Float[Array, "..."]:
    """Name a result of a layer, so that policies of `checkpoint` can keep it."""
    return checkpoint_name(x, name)


def checkpoint(function: LayerFunction, remat: str, *, scanned: bool) -> LayerFunction:
    """Let the backward pass of a layer compute again what it does not keep.

    `none` keeps every activation; `full` only what goes into the layer; those of KEPT also what they name; `offload`
    keeps what `minimal` does, with the MLP's part in the memory of the host; others are `jax.checkpoint_policies`.
    """
    layout = current_layout()
    if remat == "none" and not (layout and layout.gathers):
        return function
    known = jax.checkpoint_policies
    policy: Callable[..., Any]
    if remat == "offload" and not (layout and layout.platform == "cpu"):  # whose memory is the host's
        policy = known.save_and_offload_only_these_names(
            names_which_can_be_saved=KEPT["mlp"],
            names_which_can_be_offloaded=["gated"],
            offload_src="device",
            offload_dst="pinned_host",
        )
    elif remat in (*KEPT, "offload"):
        policy = known.save_only_these_names(*KEPT.get(remat, KEPT["minimal"]))
    else:
        policy = {"none": _all_but_weights, "full": known.nothing_saveable}.get(remat) or getattr(known, remat)
    # In a scan nothing can be merged with the forward pass, and the barriers against that would cost speed.
    return jax.checkpoint(function, policy=policy, prevent_cse=not scanned)


def _all_but_weights(primitive: Any, *_: Any, **__: Any) -> bool:
    """Keep everything but casts and changes of layout: else the gathered weights of all layers would be kept."""
    return primitive.name not in ("convert_element_type", "sharding_constraint")
