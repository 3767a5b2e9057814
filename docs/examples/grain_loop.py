"""A Grain IterDataset as the data of an island: each island reads its shard, and continues there after a restart.

    DILOCO_SYNCER=127.0.0.1:50051 DILOCO_ISLAND=a python docs/examples/grain_loop.py

Lines that end with `# island` make the loop an island. The model predicts bytes of the source of
Python's standard library.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

import diloco_jax  # island

BATCH, LENGTH, CONTEXT, WIDTH, HIDDEN = 16, 64, 8, 32, 128
TEXT = np.frombuffer(b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("*.py"))), np.uint8)
OPTIMIZER = optax.adam(1e-2)
Params = dict[str, Any]


def window(number: int) -> np.ndarray:
    """Return a window of the text: int32 [length + 1]."""
    return TEXT[number * LENGTH : (number + 1) * LENGTH + 1].astype(np.int32)


def batches(index: int, count: int, incarnation: int) -> grain.IterDataset[np.ndarray]:  # island
    """Return the batches of shard `index` of `count`: int32 [batch, length + 1]."""
    windows = grain.MapDataset.range((len(TEXT) - 1) // LENGTH)
    windows = windows[index::count]  # island
    shuffled = windows.shuffle(seed=0).repeat(None).map(window)
    return shuffled.to_iter_dataset(grain.ReadOptions(num_threads=2)).batch(BATCH)


def initial(key: jax.Array) -> Params:
    """Draw the 74,112 parameters."""
    normal, (first, second, third) = jax.random.normal, jax.random.split(key, 3)
    return {
        "embed": normal(first, (256, WIDTH)),
        "hidden": {"kernel": normal(second, (CONTEXT * WIDTH, HIDDEN)) / 16, "bias": jnp.zeros(HIDDEN)},
        "out": {"kernel": normal(third, (HIDDEN, 256)) / 11, "bias": jnp.zeros(256)},
    }


def loss_of(params: Params, tokens: jax.Array) -> jax.Array:
    """Return the mean loss in nats per byte."""
    x = params["embed"][tokens[:, :-1]]
    x = jnp.concatenate([jnp.pad(x, ((0, 0), (k, 0), (0, 0)))[:, : x.shape[1]] for k in range(CONTEXT)], axis=-1)
    x = jax.nn.gelu(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    logits = x @ params["out"]["kernel"] + params["out"]["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@jax.jit
def train_step(params: Params, moments: Any, tokens: jax.Array) -> tuple[Params, Any, jax.Array]:
    """Make one step."""
    loss, gradient = jax.value_and_grad(loss_of)(params, tokens)
    updates, moments = OPTIMIZER.update(gradient, moments, params)
    return optax.apply_updates(params, updates), moments, loss


def train() -> None:
    """Train until the run is over."""
    params = initial(jax.random.key(0))
    moments = OPTIMIZER.init(params)
    sizes = {"samples_per_step": BATCH, "tokens_per_step": BATCH * LENGTH}  # island
    own = {"data": "own", "loader": batches}  # island
    with diloco_jax.join(params=params, opt_state=moments, **sizes, **own) as island:  # island
        params, moments = island.state().values()  # island
        while island.training:  # island
            tokens = next(island.loader)  # island
            params, moments, loss = train_step(params, moments, tokens)
            params = island.after_step(params, loss, opt_state=moments)  # island


if __name__ == "__main__":
    train()
