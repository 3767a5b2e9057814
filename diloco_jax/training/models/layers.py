"""Parts that the built-in models share: a linear map whose weight may be spread over the mesh, and remat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
from flax import nnx
from jaxtyping import Array, Float

from diloco_jax.training.sharding import current_layout, gather

Remat = Literal["none", "full", "dots_saveable", "dots_with_no_batch_dims_saveable"]
LayerFunction = Callable[..., Any]


class Linear(nnx.Module):
    """x W without a bias. The weight is cast to the type of the computation, then gathered for this one use."""

    def __init__(self, n_in: int, n_out: int, names: tuple[str, str], dtype: str, *, rngs: nnx.Rngs) -> None:
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
        self.kernel = nnx.Param(init(rngs.params(), (n_in, n_out)))
        self.names = names
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
        """Apply the map to the last dimension."""
        return x @ gather(self.kernel[...].astype(self.dtype), *self.names)


def checkpoint(function: LayerFunction, remat: str, *, scanned: bool) -> LayerFunction:
    """Let the backward pass compute again what it does not keep.

    Args:
      function: of arrays and modules' parameters, one layer.
      remat: `none` keeps every activation; `full` only what goes into the layer; the others are policies of
        `jax.checkpoint_policies`.
      scanned: whether the function is the body of a scan.
    """
    layout = current_layout()
    if remat == "none" and not (layout and layout.gathers):
        return function
    policy = {
        "none": _all_but_weights,
        "full": jax.checkpoint_policies.nothing_saveable,
        "dots_saveable": jax.checkpoint_policies.dots_saveable,
        "dots_with_no_batch_dims_saveable": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    }[remat]
    # In a scan nothing can be merged with the forward pass, and the barriers against that would cost speed.
    return jax.checkpoint(function, policy=policy, prevent_cse=not scanned)


def _all_but_weights(primitive: Any, *_: Any, **__: Any) -> bool:
    """Keep everything but casts and changes of layout: else the gathered weights of all layers would be kept."""
    return primitive.name not in ("convert_element_type", "sharding_constraint")
