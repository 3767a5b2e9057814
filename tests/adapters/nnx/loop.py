"""A loop with NNX Variables of each kind: island-0 trains a module in place, island-1 a split state that steps replace.

Every step adds 1 to the optimizer's count, to a batch statistic and to the count of a random stream.
"""

import json
import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from diloco_jax.nnx import attach

BATCH = 8
PACE_S = float(os.environ.get("DILOCO_TEST_STEP_S", "0"))


class Count(nnx.BatchStat[Any]):
    """A statistic that stays on the island."""


class Shared(nnx.BatchStat[Any]):
    """A statistic that is merged with the parameters."""


class Net(nnx.Module):
    """A regression with Dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.last = nnx.Linear(16, 1, rngs=rngs)
        self.count = Count(jnp.zeros(()))
        self.scale = Shared(jnp.zeros((4,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.count[...] += 1
        self.scale[...] = 0.9 * self.scale[...] + 0.1 * jnp.square(x).mean(0)
        return self.last(self.drop(nnx.relu(self.norm(self.first(x)))))


def update(model: Net, optimizer: nnx.Optimizer[Any], x: jax.Array) -> jax.Array:
    def loss_of(model: Net) -> jax.Array:
        return jnp.mean((model(x) - jnp.sin(x.sum(-1, keepdims=True))) ** 2)

    loss, gradient = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradient)
    return loss


def samples(positions: np.ndarray) -> jax.Array:
    return jnp.asarray([np.random.default_rng(int(p)).standard_normal(4) for p in positions], jnp.float32)


def counts(moments: dict[str, Any]) -> list[int]:
    model = moments["model"]
    return [int(value) for value in (moments["optimizer"]["step"], model["count"], model["drop/rngs/count"])]


def main() -> None:
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    sizes: Any = {"samples_per_step": BATCH, "tokens_per_step": BATCH, "average": Shared}
    if os.environ["DILOCO_ISLAND"] == "island-0":
        train = nnx.jit(update, donate_argnums=(0, 1))
        step = lambda x: train(model, optimizer, x)  # noqa: E731
        sources: tuple[Any, Any] = (model, optimizer)
        compiled = lambda: train.jitted_fn._cache_size()  # noqa: E731
    else:
        graph, state = nnx.split((model, optimizer))

        @jax.jit
        def pure(state: nnx.State, x: jax.Array) -> tuple[nnx.State, jax.Array]:
            both = nnx.merge(graph, state)
            loss = update(*both, x)
            return nnx.state(both), loss

        def step(x: jax.Array) -> jax.Array:
            nonlocal state
            state, loss = pure(state, x)
            return loss

        sources = (lambda: state[0], lambda: state[1])
        compiled = pure._cache_size
    with attach(*sources, **sizes) as island:
        began = island.training
        print("began", json.dumps([*counts(island._holder.moments()), island.global_step]), flush=True)
        while began and island.training:
            loss = step(samples(island.next_samples()))
            island.after_step(loss)
            time.sleep(PACE_S)
        whole = island.global_model()
        found = whole["scale"] if isinstance(whole, nnx.State) else whole.scale
        print("ended", compiled(), json.dumps(np.asarray(found[...]).tolist()), flush=True)


if __name__ == "__main__":
    main()
