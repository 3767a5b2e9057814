"""Plain JAX and optax, parameters in a dict of arrays: your own loop as an island of a run.

    DILOCO_SYNCER=127.0.0.1:50051 DILOCO_ISLAND=a python docs/examples/optax_loop.py

Lines that end with `# island` make it one; the loop is the same without them. The model predicts bytes of the source of
Python's standard library, read as the built-in learner reads it, so that both can be compared bit for bit.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import diloco_jax  # island
from diloco_jax.training.data.config import DataConfig
from diloco_jax.training.data.corpus import load_source
from diloco_jax.training.data.order import SampleOrder

BATCH, LENGTH, CONTEXT, WIDTH, HIDDEN = 16, 64, 8, 32, 128
# The peak of the learning rate, and the warm-up in steps of the whole run.
PEAK, WARMUP = 1e-2, 10
Params = dict[str, Any]


def initial(key: jax.Array) -> Params:
    """Draw the parameters, 74,112 of them."""
    normal, (first, second, third) = jax.random.normal, jax.random.split(key, 3)
    return {
        "embed": normal(first, (256, WIDTH)),
        "hidden": {"kernel": normal(second, (CONTEXT * WIDTH, HIDDEN)) / 16, "bias": jnp.zeros(HIDDEN)},
        "out": {"kernel": normal(third, (HIDDEN, 256)) / 11, "bias": jnp.zeros(256)},
    }


def loss_of(params: Params, tokens: jax.Array) -> jax.Array:
    """Return the mean loss in nats of every byte but the first, each from up to `CONTEXT` bytes before it."""
    x = params["embed"][tokens[:, :-1]]
    x = jnp.concatenate([jnp.pad(x, ((0, 0), (k, 0), (0, 0)))[:, : x.shape[1]] for k in range(CONTEXT)], axis=-1)
    x = jax.nn.gelu(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    logits = x @ params["out"]["kernel"] + params["out"]["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


DECAYED = {"embed": False, "hidden": {"kernel": True, "bias": False}, "out": {"kernel": True, "bias": False}}
# The optimizer uses rate 1, and the step multiplies its update by the scheduled rate. The schedule follows the run's
# clock, which continues while an island is disconnected.
OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(1.0, b1=0.9, b2=0.95, weight_decay=0.1, mask=DECAYED)
)

# Data parallel over the devices of this process: each holds all parameters and has a share of every batch.
MESH = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
WHOLE, SPLIT = NamedSharding(MESH, PartitionSpec()), NamedSharding(MESH, PartitionSpec("data"))


@partial(jax.jit, donate_argnums=(0, 1), out_shardings=WHOLE)
def train_step(params: Params, opt_state: Any, tokens: jax.Array, rate: np.float32) -> tuple[Params, Any, Any]:
    """Make one step, in place."""
    loss, gradient = jax.value_and_grad(loss_of)(params, tokens)
    gradient = jax.lax.with_sharding_constraint(gradient, WHOLE)
    updates, opt_state = OPTIMIZER.update(gradient, opt_state, params)
    params = jax.tree.map(lambda p, u: p + rate * u, params, updates)
    return params, opt_state, {"loss": loss, "grad_norm": optax.tree.norm(gradient)}


def rate_of(step: int) -> np.float32:
    """Return the learning rate of a step of the run."""
    return np.float32(PEAK * (step + 1) / WARMUP if step < WARMUP else PEAK)


def train() -> None:
    """Train until the run is over."""
    params = jax.jit(initial, out_shardings=WHOLE)(jax.random.key(0))
    opt_state = jax.jit(OPTIMIZER.init, out_shardings=WHOLE)(params)
    source = load_source(DataConfig(), LENGTH)
    order = SampleOrder(source, seed=0)
    step = {"samples_per_step": BATCH, "tokens_per_step": BATCH * LENGTH, "corpus": source.corpus}  # island
    with diloco_jax.join(params=params, opt_state=opt_state, **step) as island:  # island
        params, opt_state = island.state().values()  # island
        while island.training:  # island
            positions = island.next_samples()  # island
            tokens = jax.device_put(order.batch([(p, p + 1) for p in positions.tolist()])["tokens"], SPLIT)
            params, opt_state, metrics = train_step(params, opt_state, tokens, rate_of(island.global_step))
            params = island.after_step(params, metrics, opt_state=opt_state)  # island


if __name__ == "__main__":
    train()
