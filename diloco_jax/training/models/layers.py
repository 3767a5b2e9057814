"""Building blocks of the built-in models: linear maps with sharded weights, norms, and rematerialisation."""

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
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
# The most texts whose tokens are multiplied one by one on the CPU.
FEW_TEXTS = 8
# The factor of a clamped gate within its sigmoid; the sigmoid of 1.702 x is about the normal distribution's.
CLAMPED_SLOPE = 1.702
# For each policy, the results of a layer that it keeps in addition to the layer's input. `keep` gives them these names.
KEPT = {
    "attention": ("attention",),
    "mlp": ("attention", "qkv", "out"),
    "minimal": ("attention", "qkv", "out", "gated"),
}


class Linear(nnx.Module):
    """A linear map x W, or x W + b; the weight is cast to the computation's dtype, then gathered for each use.

    An `adapter` adds its result (lora.py).
    """

    def __init__(
        self,
        n_in: int,
        n_out: int,
        names: tuple[str | None, str | None],
        dtype: str,
        *,
        bias: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
        # A parameter, or frozen values (lora.py).
        self.kernel: Any = nnx.Param(init(rngs.params(), (n_in, n_out)))
        self.bias = vector(n_out, nnx.initializers.zeros_init(), rngs) if bias else None
        self.adapter: Callable[[Array], Array] | None = None
        self.names = names
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
        y = product(x, gather(self.kernel[...].astype(self.dtype), *self.names))
        y = y if self.adapter is None else y + self.adapter(x)
        if self.bias is None:
            return y
        bias = self.bias[...].astype(self.dtype)
        return y + bias.reshape((1,) * (y.ndim - 1) + bias.shape)


def by_text(x: Float[Array, "*b i"]) -> bool:
    """Return whether x is one token of each of a few texts, on the CPU; then a product is faster text by text.

    The compiler's product of a matrix of few rows copies the weight into another order first, which takes several times
    as long as reading it.
    """
    few = x.ndim == 3 and x.shape[1] == 1 < len(x) <= FEW_TEXTS
    return few and current_layout() is None and jax.default_backend() == "cpu"


def product(x: Float[Array, "*b i"], weight: Float[Array, "i o"]) -> Float[Array, "*b o"]:
    """Return x W."""
    return jnp.stack([row @ weight for row in x]) if by_text(x) else x @ weight


class OffsetNorm(nnx.Module):
    """A norm, x / sqrt(mean(x^2) + epsilon) (1 + scale), over the last dimension, computed in float32."""

    def __init__(self, width: int, epsilon: float, dtype: str, *, rngs: nnx.Rngs) -> None:
        self.scale = vector(width, nnx.initializers.zeros_init(), rngs)
        self.epsilon = epsilon
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        full = x.astype(jnp.float32)
        scale = (1 + self.scale[...]).reshape((1,) * (x.ndim - 1) + (-1,))
        full = full * jax.lax.rsqrt(jnp.mean(jnp.square(full), axis=-1, keepdims=True) + self.epsilon)
        return (full * scale).astype(self.dtype)


def unit_norm(x: Float[Array, "*b d"], epsilon: float) -> Float[Array, "*b d"]:
    """Return x / sqrt(mean(x^2) + epsilon) over the last dimension, computed in float32; a norm without weights."""
    full = x.astype(jnp.float32)
    return (full * jax.lax.rsqrt(jnp.mean(jnp.square(full), axis=-1, keepdims=True) + epsilon)).astype(x.dtype)


def make_norm(width: int, epsilon: float, dtype: str, *, offset: bool, rngs: nnx.Rngs) -> nnx.RMSNorm | OffsetNorm:
    """Return an RMS norm with an initial scale of 1; with `offset` the parameter is scale - 1, initially 0."""
    if offset:
        return OffsetNorm(width, epsilon, dtype, rngs=rngs)
    init = nnx.with_partitioning(nnx.initializers.ones_init(), (None,))
    return nnx.RMSNorm(width, epsilon=epsilon, dtype=dtype, scale_init=init, rngs=rngs)


def vector(width: int, init: nnx.Initializer, rngs: nnx.Rngs) -> nnx.Param:
    """Return a parameter of one axis, which is not sharded."""
    # The axis needs a name, even None, because a scan adds the name `layers` only to parameters with named axes.
    return nnx.Param(nnx.with_partitioning(init, (None,))(rngs.params(), (width,)))


def soft_limit(x: Float[Array, "..."], cap: float) -> Float[Array, "..."]:
    """Return cap tanh(x / cap), which is about x for small x; x itself if the cap is 0."""
    return cap * jnp.tanh(x / cap) if cap else x


def glu(gate: Float[Array, "*b f"], up: Float[Array, "*b f"], activation: str, limit: float) -> Float[Array, "*b f"]:
    """Return the hidden units of a gated MLP, activation(gate) up.

    With a limit they are g sigmoid(1.702 g) (u + 1). There g is the gate, clamped above at the limit, and u is `up`,
    clamped to plus and minus the limit.
    """
    if not limit:
        return ACTIVATIONS[activation](gate) * up
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(CLAMPED_SLOPE * gate) * (up + 1)


def keep(x: Float[Array, "..."], name: str) -> Float[Array, "..."]:
    """Name a result of a layer, so that policies of `checkpoint` can keep it."""
    return checkpoint_name(x, name)


def checkpoint(function: LayerFunction, remat: str, *, scanned: bool) -> LayerFunction:
    """Return the layer's function with a policy for the activations that its backward pass recomputes.

    Args:
      remat: `none` keeps every activation; `full` keeps only the layer's input; the policies of KEPT also keep the
        results that they list; `offload` keeps the same as `minimal`, with the MLP's results in CPU memory; other
        names are those of `jax.checkpoint_policies`.
      scanned: whether the function is the body of a scan.
    """
    layout = current_layout()
    if remat == "none" and not (layout and layout.gathers):
        return function
    known = jax.checkpoint_policies
    policy: Callable[..., Any]
    # On CPU there is nothing to offload, because the devices' memory is the host's.
    if remat == "offload" and not (layout and layout.platform == "cpu"):
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
    # Barriers keep the compiler from merging recomputation with the forward pass. In a scan it cannot merge them, and
    # barriers would only cost speed.
    return jax.checkpoint(function, policy=policy, prevent_cse=not scanned)


def _all_but_weights(primitive: Any, *_: Any, **__: Any) -> bool:
    """Keep everything but casts and changes of layout, because otherwise all layers' gathered weights would be kept."""
    return primitive.name not in ("convert_element_type", "sharding_constraint")
