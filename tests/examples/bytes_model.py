"""The model of docs/examples/optax_loop.py as a module for the built-in learner: same names, values and mathematics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from docs.examples import optax_loop


class Bytes(nnx.Module):
    """A tree of parameters, named as the example's dicts name them."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, Bytes(value) if isinstance(value, dict) else nnx.Param(value))

    @classmethod
    def from_config(cls, args: Any, *, rngs: nnx.Rngs) -> Bytes:
        return cls(optax_loop.initial(jax.random.key(0)))

    def loss(self, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        return optax_loop.loss_of(nnx.to_pure_dict(nnx.state(self, nnx.Param)), batch["tokens"]), {}
