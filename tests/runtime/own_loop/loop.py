"""A training loop of a user's own, as small as can be: arrays, optax, and the lines that make it an island."""

import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

if "DILOCO_HOSTS" in os.environ and int(os.environ["DILOCO_HOSTS"]) > 1:
    place = {key: os.environ[f"DILOCO_{key}"] for key in ("COORDINATOR", "HOSTS", "HOST")}
    jax.distributed.initialize(place["COORDINATOR"], int(place["HOSTS"]), int(place["HOST"]))

import diloco_jax

BATCH, WIDTH, HIDDEN = 8, 16, 64
PACE_S = float(os.environ.get("DILOCO_TEST_STEP_S", "0"))
MESH = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
ROWS = jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec("fsdp"))
WHOLE = jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec())
LIES = {"in": {"w": ROWS, "b": WHOLE}, "out": ROWS}
TX = optax.adamw(1e-2)


def initial():
    first, second = jax.random.split(jax.random.key(0))
    w = {"w": jax.random.normal(first, (WIDTH, HIDDEN)) / 4, "b": jnp.zeros(HIDDEN)}
    return {"in": w, "out": jax.random.normal(second, (HIDDEN, 4)) / 8}


def step(params, opt_state, x):
    def loss(p):
        return jnp.mean((jnp.tanh(x @ p["in"]["w"] + p["in"]["b"]) @ p["out"] - jnp.sin(3 * x[:, :4])) ** 2)

    value, gradient = jax.value_and_grad(loss)(params)
    updates, opt_state = TX.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


def samples(positions):
    rows = [np.random.default_rng(int(position)).standard_normal(WIDTH) for position in positions]
    return jax.make_array_from_callback((BATCH, WIDTH), WHOLE, lambda index: np.float32(rows)[index])


def main() -> None:
    params = jax.jit(initial, out_shardings=LIES)()
    opt_state = jax.jit(TX.init)(params)
    sizes = {"samples_per_step": BATCH, "tokens_per_step": BATCH}
    with diloco_jax.join(params=params, opt_state=opt_state, **sizes) as island:
        params, opt_state = island.state().values()
        layouts = (LIES, jax.tree.map(lambda leaf: leaf.sharding, opt_state), WHOLE)
        train = jax.jit(step, donate_argnums=(0, 1), out_shardings=layouts)
        while island.training:
            params, opt_state, loss = train(params, opt_state, samples(island.next_samples()))
            params = island.after_step(params, loss, opt_state=opt_state)
            if island.global_step == 10 and os.environ["DILOCO_HOST"] == "1" and not os.path.exists("failed"):
                open("failed", "w").close()
                raise RuntimeError("your own loop may fail on one host alone")
            time.sleep(PACE_S)
    print(f"{island.name}: {train._cache_size()} compiled step, loss {float(loss):.4f}")


if __name__ == "__main__":
    main()
