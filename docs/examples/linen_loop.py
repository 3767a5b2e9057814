"""Flax Linen with its `TrainState`: your own loop as an island of a run.

    DILOCO_SYNCER=127.0.0.1:50051 DILOCO_ISLAND=a python docs/examples/linen_loop.py

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
from flax import linen as nn
from flax.training.train_state import TrainState

import diloco_jax  # island

BATCH, LENGTH, CONTEXT = 16, 64, 8
TEXT = np.frombuffer(b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("*.py"))), np.uint8)


def load(positions: np.ndarray) -> np.ndarray:
    """Return the windows of the text at these positions of the run's order: int32 [batch, length + 1]."""
    starts = positions * 1_000_003 % (len(TEXT) - LENGTH)
    return TEXT[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int32)


class Bytes(nn.Module):
    """A model of the next byte, from up to `CONTEXT` bytes before it."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return logits [batch, length, 256]."""
        x = nn.Embed(256, 32)(tokens)
        x = jnp.concatenate([jnp.pad(x, ((0, 0), (k, 0), (0, 0)))[:, : x.shape[1]] for k in range(CONTEXT)], axis=-1)
        return nn.Dense(256)(nn.gelu(nn.Dense(128)(x)))


@jax.jit
def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, dict[str, Any]]:
    """Make one step."""

    def loss_of(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, gradient = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradient), {"loss": loss}


def train() -> None:
    """Train until the run is over."""
    model = Bytes()
    params = model.init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))
    sizes = {"samples_per_step": BATCH, "tokens_per_step": BATCH * LENGTH}  # island
    with diloco_jax.join(params=state.params, opt_state=state.opt_state, **sizes) as island:  # island
        state = state.replace(**island.state())  # island
        while island.training:  # island
            tokens = load(island.next_samples())  # island
            state, metrics = train_step(state, tokens)
            state = state.replace(params=island.after_step(state.params, metrics, opt_state=state.opt_state))  # island


if __name__ == "__main__":
    train()
