"""A loop with a scan over layers; island-0 stores the layers at axis 0, the others at axis 1, as MaxText does."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import diloco_jax

BATCH, LAYERS, WIDTH = 32, 3, 16
AT = int(os.environ["DILOCO_ISLAND"] != "island-0")
AXES = {"blocks/w": ("layers", None, None), "blocks/scale": ("layers", None)}
if AT == 1:
    AXES = {"blocks/w": (None, "layers", None), "blocks/scale": (None, "layers")}


def forward(params: Any, x: Any) -> Any:
    layers = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, AT, 0), params["blocks"])
    return jax.lax.scan(lambda x, each: (x + jnp.tanh(x @ each["w"]) * each["scale"], None), x, layers)[0]


def loss_fn(params: Any, x: Any) -> Any:
    return jnp.mean((forward(params, x) - jnp.sin(2 * x)) ** 2)


@jax.jit
def step(params: Any, x: Any) -> Any:
    loss, gradient = jax.value_and_grad(loss_fn)(params, x)
    return jax.tree.map(lambda p, g: p - 0.3 * g, params, gradient), loss


def load(indices: Any) -> Any:
    return jnp.asarray(np.float32([np.random.default_rng(int(i)).normal(size=WIDTH) for i in indices]))


rng = np.random.default_rng(0)
first = {"w": 0.3 * rng.normal(size=(LAYERS, WIDTH, WIDTH)), "scale": np.ones((LAYERS, WIDTH))}
params = {"blocks": {name: jnp.asarray(np.moveaxis(value, 0, AT), jnp.float32) for name, value in first.items()}}
with diloco_jax.join(params=params, axes=AXES, samples_per_step=BATCH, tokens_per_step=BATCH) as island:
    params = island.state()["params"]
    begun = loss_fn(params, load(range(10**6, 10**6 + 256)))
    while island.training:
        params, loss = step(params, load(island.next_samples()))
        params = island.after_step(params, loss)
    found = island.global_params()
    canonical = [np.moveaxis(np.asarray(found["blocks"][name]), AT, 0) for name in ("scale", "w")]
    total = float(np.sum(np.float64(canonical[1]) * np.arange(canonical[1].size).reshape(canonical[1].shape)))
    held_out = load(range(10**6, 10**6 + 256))
    print(f"global {AT} {total!r} {float(begun):.4f} {float(loss_fn(found, held_out)):.4f}")
