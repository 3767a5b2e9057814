"""Equinox, with models that are trees of arrays and functions: your own loop as an island of a run.

    DILOCO_SYNCER=127.0.0.1:50051 DILOCO_ISLAND=a python docs/examples/equinox_loop.py

Lines that end with `# island` make the loop an island. The model predicts bytes of the source of
Python's standard library.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import diloco_jax  # island

BATCH, LENGTH, CONTEXT = 16, 64, 8
TEXT = np.frombuffer(b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("*.py"))), np.uint8)


def load(positions: np.ndarray) -> np.ndarray:
    """Return the windows of the text at these positions of the run's order: int32 [batch, length + 1]."""
    starts = positions * 1_000_003 % (len(TEXT) - LENGTH)
    return TEXT[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int32)


class Bytes(eqx.Module):
    """A model of the next byte, from up to `CONTEXT` bytes before it."""

    embed: eqx.nn.Embedding
    mlp: eqx.nn.MLP

    def __init__(self, key: jax.Array) -> None:
        """Draw the parameters."""
        first, second = jax.random.split(key)
        self.embed = eqx.nn.Embedding(256, 32, key=first)
        self.mlp = eqx.nn.MLP(CONTEXT * 32, 256, width_size=128, depth=1, activation=jax.nn.gelu, key=second)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return logits [length, 256] of one sequence."""
        x = jax.vmap(self.embed)(tokens)
        x = jnp.concatenate([jnp.pad(x, ((k, 0), (0, 0)))[: len(x)] for k in range(CONTEXT)], axis=-1)
        return jax.vmap(self.mlp)(x)


@eqx.filter_value_and_grad
def loss_of(model: Bytes, tokens: jax.Array) -> jax.Array:
    """Return the mean loss in nats per byte."""
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(tokens[:, :-1]), tokens[:, 1:]).mean()


OPTIMIZER = optax.adam(1e-2)


@eqx.filter_jit(donate="all")
def train_step(model: Bytes, opt_state: Any, tokens: np.ndarray) -> tuple[Bytes, Any, dict[str, jax.Array]]:
    """Make one step, in place."""
    loss, gradient = loss_of(model, tokens)
    updates, opt_state = OPTIMIZER.update(gradient, opt_state)
    return eqx.apply_updates(model, updates), opt_state, {"loss": loss}


def train() -> None:
    """Train until the run is over."""
    model = Bytes(jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    opt_state = OPTIMIZER.init(params)
    sizes = {"samples_per_step": BATCH, "tokens_per_step": BATCH * LENGTH}  # island
    with diloco_jax.join(params=params, opt_state=opt_state, **sizes) as island:  # island
        params, opt_state = island.state().values()  # island
        model = eqx.combine(params, static)  # island
        while island.training:  # island
            tokens = load(island.next_samples())  # island
            model, opt_state, metrics = train_step(model, opt_state, tokens)
            params = eqx.filter(model, eqx.is_inexact_array)  # island
            model = eqx.combine(island.after_step(params, metrics, opt_state=opt_state), static)  # island


if __name__ == "__main__":
    train()
