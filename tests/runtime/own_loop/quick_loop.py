"""A loop with steps of a few milliseconds: a list of tuples, momentum by hand, data made from positions; no optax."""

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import diloco_jax

BATCH, WIDTHS = 64, (16, 64, 64, 1)


def init(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return [
        (jnp.asarray(rng.normal(size=(a, b)) / np.sqrt(a), jnp.float32), jnp.zeros(b, jnp.float32))
        for a, b in pairwise(WIDTHS)
    ]


def forward(params: Any, x: Any) -> Any:
    for w, b in params[:-1]:
        x = jnp.tanh(x @ w + b)
    w, b = params[-1]
    return x @ w + b


TEACHER = init(1)


def load(indices: Any) -> Any:
    x = np.stack([np.random.default_rng(int(i)).normal(size=WIDTHS[0]) for i in indices]).astype(np.float32)
    return jnp.asarray(x)


def loss_fn(params: Any, x: Any) -> Any:
    return jnp.mean((forward(params, x) - forward(TEACHER, x)) ** 2)


@jax.jit
def step(params: Any, velocity: Any, x: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p - 0.02 * v, params, velocity)
    return params, velocity, loss


held_out = load(range(10**6, 10**6 + 256))
params = init(0)
velocity = jax.tree.map(jnp.zeros_like, params)
with diloco_jax.join(
    params=params,
    opt_state=velocity,
    samples_per_step=BATCH,
    tokens_per_step=BATCH,
    evaluate=lambda p: {"loss": loss_fn(p, held_out)},
) as island:
    params, velocity = island.state().values()
    while island.training:
        x = load(island.next_samples())
        params, velocity, loss = step(params, velocity, x)
        params = island.after_step(params, loss, opt_state=velocity)
