"""A model of leaves that are easily forgotten: without axes, with one element, with none, and in a narrow type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx


class Odd(nnx.Module):
    """Learns the mean of the tokens, with whatever it has."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(jnp.ones((16, 40)))
        self.narrow = nnx.Param(jnp.ones((9, 5), jnp.bfloat16))
        self.nothing = nnx.Param(jnp.zeros((0, 3)))
        self.one = nnx.Param(jnp.ones((1,)))
        self.temperature = nnx.Param(jnp.ones(()))

    @classmethod
    def from_config(cls, args: Mapping[str, Any], *, rngs: nnx.Rngs) -> Odd:
        return cls(rngs)

    def loss(self, batch: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        wanted = batch["tokens"].astype(jnp.float32).mean() / 256
        leaves = (self.kernel, self.narrow, self.nothing, self.one, self.temperature)
        return sum(jnp.sum((leaf[...].astype(jnp.float32) - wanted) ** 2) for leaf in leaves) / 100, {}
