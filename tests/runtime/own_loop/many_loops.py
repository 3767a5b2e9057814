"""Training loops of many kinds, each as an island: python many_loops.py KIND.

A kind is a function that returns parameters, the state that the island saves, and the step. The step draws its batch by
its number.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

import diloco_jax

BATCH, WIDTH, HIDDEN = 32, 8, 32
PAUSE_S = 60.0


def dense(key: jax.Array, *shapes: tuple[int, int]) -> dict[str, jax.Array]:
    keys = jax.random.split(key, len(shapes))
    return {f"w{i}": jax.random.normal(keys[i], shape) / shape[0] ** 0.5 for i, shape in enumerate(shapes)}


def mlp(params: Any, x: jax.Array) -> jax.Array:
    for name in sorted(params)[:-1]:
        x = jnp.tanh(x @ params[name])
    return x @ params[sorted(params)[-1]]


def inputs(number: jax.Array) -> jax.Array:
    return jax.random.normal(jax.random.fold_in(jax.random.key(7), number), (BATCH, WIDTH))


def regression(params: Any, number: jax.Array) -> jax.Array:
    x = inputs(number)
    return jnp.mean((mlp(params, x) - jnp.sin(2 * x[:, :4])) ** 2)


def optimized(tx: Any, params: Any = None, loss: Any = regression) -> tuple[Any, Any, Any]:
    params = dense(jax.random.key(0), (WIDTH, HIDDEN), (HIDDEN, 4)) if params is None else params

    def step(params: Any, state: Any, number: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, number)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    return params, tx.init(params), step


def multi_steps() -> tuple[Any, Any, Any]:
    """Gradients of four steps in one update."""
    return optimized(optax.MultiSteps(optax.adam(1e-2), 4))


def soap() -> tuple[Any, Any, Any]:
    """Adam in the eigenbasis of Shampoo's factors, which are state of two more shapes (SOAP)."""
    adam = optax.scale_by_adam()

    def init(params: Any) -> Any:
        eye = jax.tree.map(lambda p: tuple(jnp.eye(n) for n in p.shape), params)
        return {
            "factors": jax.tree.map(jnp.zeros_like, eye),
            "bases": eye,
            "adam": adam.init(params),
            "count": jnp.int32(0),
        }

    def update(gradient: Any, state: Any, _: Any) -> tuple[Any, Any]:
        def factor(g: jax.Array, old: Any) -> Any:
            return 0.9 * old[0] + 0.1 * g @ g.T, 0.9 * old[1] + 0.1 * g.T @ g

        def turn(g: jax.Array, basis: Any) -> jax.Array:
            return basis[0].T @ g @ basis[1]

        factors = jax.tree.map(factor, gradient, state["factors"])
        again = lambda: jax.tree.map(lambda f, q: jnp.linalg.qr(f @ q)[0], factors, state["bases"])  # noqa: E731
        bases = jax.lax.cond(state["count"] % 10 == 1, again, lambda: state["bases"])
        turned, inner = adam.update(jax.tree.map(turn, gradient, bases), state["adam"])
        back = jax.tree.map(lambda u, q: -1e-2 * q[0] @ u @ q[1].T, turned, bases)
        return back, {"factors": factors, "bases": bases, "adam": inner, "count": state["count"] + 1}

    return optimized(optax.GradientTransformation(init, update))


def ema() -> tuple[Any, Any, Any]:
    """An average of the parameters beside the optimizer's state."""
    params, inner, plain = optimized(optax.adam(1e-2))

    def step(params: Any, state: Any, number: jax.Array) -> tuple[Any, Any, jax.Array]:
        params, inner, loss = plain(params, state["tx"], number)
        average = jax.tree.map(lambda a, p: 0.99 * a + 0.01 * p, state["average"], params)
        return params, {"tx": inner, "average": average}, loss

    return params, {"tx": inner, "average": jax.tree.map(jnp.copy, params)}, step


def gan() -> tuple[Any, Any, Any]:
    """Two networks with two optimizers and a typed random key; the loss is the generator's distance of means."""
    first, second = jax.random.split(jax.random.key(0))
    params = {"d": dense(first, (2, HIDDEN), (HIDDEN, 1)), "g": dense(second, (4, HIDDEN), (HIDDEN, 2))}
    tx = {"d": optax.adam(1e-2), "g": optax.adam(1e-2)}
    state = {"key": jax.random.key(1), **{name: tx[name].init(params[name]) for name in tx}}

    def step(params: Any, state: Any, number: jax.Array) -> tuple[Any, Any, jax.Array]:
        key, noise = jax.random.split(state["key"])
        real, z = inputs(number)[:, :2] * 0.5 + 2.0, jax.random.normal(noise, (BATCH, 4)).at[:, 0].set(1.0)

        def doubts(d: Any) -> jax.Array:
            wrong = jax.nn.softplus(-mlp(d, real)) + jax.nn.softplus(mlp(d, mlp(params["g"], z)))
            return jnp.mean(wrong)

        new, state = {}, state | {"key": key}
        losses = {"d": doubts, "g": lambda g: jnp.mean(jax.nn.softplus(-mlp(params["d"], mlp(g, z))))}
        for name, loss in losses.items():
            updates, state[name] = tx[name].update(jax.grad(loss)(params[name]), state[name])
            new[name] = optax.apply_updates(params[name], updates)
        return new, state, jnp.mean((mlp(new["g"], z).mean(0) - 2.0) ** 2)

    return params, state, step


def rnn() -> tuple[Any, Any, Any]:
    """A recurrent network that carries its hidden state from step to step."""
    tx, params = optax.adam(1e-2), dense(jax.random.key(0), (WIDTH + HIDDEN, HIDDEN), (HIDDEN, 1))

    def step(params: Any, state: Any, number: jax.Array) -> tuple[Any, Any, jax.Array]:
        x = jax.random.normal(jax.random.fold_in(jax.random.key(7), number), (12, BATCH, WIDTH))

        def loss(params: Any) -> tuple[jax.Array, jax.Array]:
            def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
                h = jnp.tanh(jnp.concatenate([h, x], -1) @ params["w0"])
                return h, (h @ params["w1"])[:, 0]

            h, found = jax.lax.scan(cell, state["h"], x)
            return jnp.mean((found[1:] - x[:-1, :, 0]) ** 2), h

        (value, h), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        updates, inner = tx.update(gradient, state["tx"])
        return optax.apply_updates(params, updates), {"tx": inner, "h": h}, value

    return params, {"tx": tx.init(params), "h": jnp.zeros((BATCH, HIDDEN))}, step


def diffusion() -> tuple[Any, Any, Any]:
    """A denoiser, with a typed random key for times and noise."""
    tx, params = optax.adam(1e-2), dense(jax.random.key(0), (3, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 2))

    def step(params: Any, state: Any, number: jax.Array) -> tuple[Any, Any, jax.Array]:
        key, first, second = jax.random.split(state["key"], 3)
        angle = jnp.arctan2(inputs(number)[:, 0], inputs(number)[:, 1])
        x, t = jnp.stack([jnp.cos(angle), jnp.sin(angle)], -1), jax.random.uniform(first, (BATCH, 1))
        noise = jax.random.normal(second, x.shape)

        def loss(params: Any) -> jax.Array:
            mixed = jnp.sqrt(1 - t) * x + jnp.sqrt(t) * noise
            return jnp.mean((mlp(params, jnp.concatenate([mixed, t], -1)) - noise) ** 2)

        value, gradient = jax.value_and_grad(loss)(params)
        updates, inner = tx.update(gradient, state["tx"])
        return optax.apply_updates(params, updates), {"tx": inner, "key": key}, value

    return params, {"tx": tx.init(params), "key": jax.random.key(3)}, step


def haiku_state() -> tuple[Any, Any, Any]:
    """Haiku with the state of BatchNorm."""
    import haiku as hk

    def network(x: jax.Array) -> jax.Array:
        x = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(hk.Linear(HIDDEN)(x), is_training=True)
        return hk.Linear(4)(jax.nn.relu(x))

    model, tx = hk.without_apply_rng(hk.transform_with_state(network)), optax.adam(1e-2)
    params, running = model.init(jax.random.key(0), inputs(jnp.int32(0)))

    def step(params: Any, state: Any, number: jax.Array) -> tuple[Any, Any, jax.Array]:
        x = inputs(number)

        def loss(params: Any) -> tuple[jax.Array, Any]:
            found, running = model.apply(params, state["running"], x)
            return jnp.mean((found - jnp.sin(2 * x[:, :4])) ** 2), running

        (value, running), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        updates, inner = tx.update(gradient, state["tx"])
        return optax.apply_updates(params, updates), {"tx": inner, "running": running}, value

    return params, {"tx": tx.init(params), "running": running}, step


def four_devices() -> tuple[Any, Any, Any]:
    """Parameters and moments that are sharded over four devices."""
    assert jax.device_count() == 4
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    params, _, step = optimized(tx := optax.adam(1e-2))
    whole, columns = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    state = tx.init(params)
    layouts = jax.tree.map(lambda leaf: columns if leaf.ndim else whole, (params, state))
    params, state = jax.device_put((params, state), layouts)
    return params, state, jax.jit(step, out_shardings=(*layouts, whole))


def many_leaves() -> tuple[Any, Any, Any]:
    """Ten thousand parameters of four numbers each, in a loop that calls no compiled step."""
    params = {f"layer{i // 100}": {f"w{j}": jnp.full(4, 2.0) for j in range(100)} for i in range(0, 10_000, 100)}

    def step(params: Any, state: Any, number: int) -> tuple[Any, Any, jax.Array]:
        loss = jnp.vdot(params["layer3"]["w5"], params["layer3"]["w5"])
        return jax.tree.map(lambda leaf: leaf * 0.99, params), state + 1, loss

    return params, jnp.int32(0), step


def pauses() -> tuple[Any, Any, Any]:
    """A loop that rests for a minute, as for your own evaluation."""
    return optimized(optax.adam(1e-2))


KINDS = (multi_steps, soap, ema, gan, rnn, diffusion, haiku_state, four_devices, many_leaves, pauses)


def main(kind: str) -> None:
    params, state, step = next(each for each in KINDS if each.__name__ == kind)()
    train = step if kind in ("many_leaves", "four_devices") else jax.jit(step)
    losses, rested = [], Path("rested")
    with diloco_jax.join(
        params=params, opt_state=state, samples_per_step=BATCH, tokens_per_step=BATCH, data="own"
    ) as island:
        params, state = island.state().values()
        while island.training:
            params, state, loss = train(params, state, island.local_step)
            params = island.after_step(params, loss, opt_state=state)
            losses.append(float(loss))
            if kind == "pauses" and island.name == "island-0" and island.global_step > 10 and not rested.exists():
                rested.touch()
                time.sleep(PAUSE_S)
            time.sleep(float(os.environ["DILOCO_TEST_STEP_S"]))
    tenth = max(1, len(losses) // 10)
    first, last = (sum(part) / tenth for part in (losses[:tenth], losses[-tenth:]))
    compiled = train._cache_size() if hasattr(train, "_cache_size") else 1
    print(f"{compiled} compiled step, {len(losses)} steps, loss {first:.4f} to {last:.4f}")


if __name__ == "__main__":
    main(sys.argv[1])
