"""Haiku, whose parameters are a dict of dicts: your own loop as an island of a run.

    DILOCO_SYNCER=127.0.0.1:50051 DILOCO_ISLAND=a python docs/examples/haiku_loop.py

Lines that end with `# island` make the loop an island. The model predicts bytes of the source of
Python's standard library.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import haiku as hk
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


@hk.without_apply_rng
@hk.transform
def model(tokens: jax.Array) -> jax.Array:
    """Return logits [batch, length, 256] of the next byte, from up to `CONTEXT` bytes before it."""
    x = hk.Embed(256, 32)(tokens)
    x = jnp.concatenate([jnp.pad(x, ((0, 0), (k, 0), (0, 0)))[:, : x.shape[1]] for k in range(CONTEXT)], axis=-1)
    return hk.nets.MLP([128, 256], activation=jax.nn.gelu)(x)


OPTIMIZER = optax.adam(1e-2)


@jax.jit
def train_step(params: hk.Params, opt_state: Any, tokens: jax.Array) -> tuple[hk.Params, Any, dict[str, jax.Array]]:
    """Make one step."""

    def loss_of(params: hk.Params) -> jax.Array:
        logits = model.apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, gradient = jax.value_and_grad(loss_of)(params)
    updates, opt_state = OPTIMIZER.update(gradient, opt_state)
    return optax.apply_updates(params, updates), opt_state, {"loss": loss}


def train() -> None:
    """Train until the run is over."""
    params = model.init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))
    opt_state = OPTIMIZER.init(params)
    sizes = {"samples_per_step": BATCH, "tokens_per_step": BATCH * LENGTH}  # island
    with diloco_jax.join(params=params, opt_state=opt_state, **sizes) as island:  # island
        params, opt_state = island.state().values()  # island
        while island.training:  # island
            tokens = load(island.next_samples())  # island
            params, opt_state, metrics = train_step(params, opt_state, tokens)
            params = island.after_step(params, metrics, opt_state=opt_state)  # island


if __name__ == "__main__":
    train()
