"""Flax NNX, a module and an optimizer that change in place: your own loop as an island of a run.

    DILOCO_SYNCER=127.0.0.1:50051 DILOCO_ISLAND=a python docs/examples/nnx_loop.py

Lines that end with `# island` make the loop an island. The model predicts bytes of the source of
Python's standard library.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from diloco_jax.nnx import attach  # island

BATCH, LENGTH, CONTEXT = 16, 64, 8
TEXT = np.frombuffer(b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("*.py"))), np.uint8)


def load(positions: np.ndarray) -> np.ndarray:
    """Return the windows of the text at these positions of the run's order: int32 [batch, length + 1]."""
    starts = positions * 1_000_003 % (len(TEXT) - LENGTH)
    return TEXT[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int32)


class Bytes(nnx.Module):
    """A model of the next byte, from up to `CONTEXT` bytes before it."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        """Draw the parameters."""
        self.embed = nnx.Embed(256, 32, rngs=rngs)
        self.hidden = nnx.Linear(CONTEXT * 32, 128, rngs=rngs)
        self.out = nnx.Linear(128, 256, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return logits [batch, length, 256]."""
        x = self.embed(tokens)
        x = jnp.concatenate([jnp.pad(x, ((0, 0), (k, 0), (0, 0)))[:, : x.shape[1]] for k in range(CONTEXT)], axis=-1)
        return self.out(nnx.gelu(self.hidden(x)))


def loss_of(model: Bytes, tokens: jax.Array) -> jax.Array:
    """Return the mean loss in nats per byte."""
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()


@nnx.jit
def train_step(model: Bytes, optimizer: nnx.Optimizer[Any], tokens: jax.Array) -> jax.Array:
    """Make one step."""
    loss, gradient = nnx.value_and_grad(loss_of)(model, tokens)
    optimizer.update(model, gradient)
    return loss


def train() -> None:
    """Train until the run is over."""
    model = Bytes(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    with attach(model, optimizer, samples_per_step=BATCH, tokens_per_step=BATCH * LENGTH) as island:  # island
        while island.training:  # island
            tokens = load(island.next_samples())  # island
            loss = train_step(model, optimizer, tokens)
            island.after_step(loss)  # island


if __name__ == "__main__":
    train()
