"""A model of a few large tensors without computation, for the bench `memory`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class LargeModel(nnx.Module):
    """A model of `tensors` matrices of equal shape, drawn like layers."""

    def __init__(self, *, tensors: int, rows: int, columns: int, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.lecun_normal()
        for number in range(tensors):
            setattr(self, f"kernel_{number:02}", nnx.Param(init(rngs.params(), (rows, columns), jnp.float32)))

    @classmethod
    def from_config(cls, args: Mapping[str, Any], *, rngs: nnx.Rngs) -> LargeModel:
        return cls(**args, rngs=rngs)

    def loss(self, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        return jnp.zeros(()) * self.kernel_00[0, 0], {}
