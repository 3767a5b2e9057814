"""A small model with slow steps for `scripts/upgrade`; it uses only names that every release has."""

from __future__ import annotations

import os
import time
from typing import Any

import jax
import optax
from flax import nnx

STEP_S_ENV = "UPGRADE_STEP_S"


class Paced(nnx.Module):
    """A model that predicts the next byte from the byte before it."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(256, 32, rngs=rngs)
        self.hidden = nnx.Linear(32, 64, rngs=rngs)
        self.out = nnx.Linear(64, 256, rngs=rngs)

    @classmethod
    def from_config(cls, args: Any, *, rngs: nnx.Rngs) -> Paced:
        return cls(rngs)

    def loss(self, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        jax.debug.callback(lambda: time.sleep(float(os.environ[STEP_S_ENV])))
        tokens = batch["tokens"]
        logits = self.out(nnx.relu(self.hidden(self.embed(tokens[:, :-1]))))
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean(), {}
