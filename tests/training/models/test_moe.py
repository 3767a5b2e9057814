"""The mixture of experts against a few lines of NumPy, and what must hold for any routing."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from diloco_jax.training.data.sample import Sample
from diloco_jax.training.island import Island
from diloco_jax.training.models.block import Block
from diloco_jax.training.models.mixture import route
from diloco_jax.training.models.moe import MoeConfig, MoeDecoder
from diloco_jax.training.models.protocol import join_model
from diloco_jax.training.sharding import MeshConfig, MeshLayout, make_mesh, use_layout
from tests.training.outlines import drawn, outline

pytestmark = pytest.mark.usefixtures("quick_compiler")

MODULE = "diloco_jax.training.models.moe:MoeDecoder"
TINY = {"vocab_size": 11, "dim": 8, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "mlp_dim": 12}
rng = np.random.default_rng(7)


def config_of(**changes: object) -> MoeConfig:
    return MoeConfig(**{**TINY, "num_experts": 4, "norms": "post", **changes})


def reference(p: dict[str, np.ndarray], x: np.ndarray, c: MoeConfig) -> tuple[np.ndarray, float]:
    """One token after the other, [t, d]; and the share of dropped choices."""

    def gelu(a):
        return 0.5 * a * (1 + np.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a**3)))

    def units(gate, up):
        if not c.glu_limit:
            return gelu(gate) * up
        g = np.where(gate > c.glu_limit, c.glu_limit, gate)
        u = np.where(abs(up) > c.glu_limit, np.sign(up) * c.glu_limit, up)
        return g / (1 + np.exp(-1.702 * g)) * (u + 1)

    def plus(path, i):
        return p[f"experts_{path}_bias"][i] if c.mixture_bias else 0.0

    used, dropped, y = np.zeros(c.num_experts, int), 0, np.zeros_like(x)
    for t, token in enumerate(x):
        e = np.exp(token @ p["router"] + p.get("router_bias", 0.0))
        best = np.argsort(-e)[: c.experts_per_token]
        total = e[best].sum() if c.normalize_weights else e.sum()
        for i in best:
            if c.routing == "dropless" or used[i] < c.capacity(len(x)):
                gate, up = (token @ p[f"experts_{path}"][i] + plus(path, i) for path in ("gate", "up"))
                y[t] += e[i] / total * (units(gate, up) @ p["experts_down"][i] + plus("down", i))
            else:
                dropped += 1
            used[i] += 1
    return y, dropped / (len(x) * c.experts_per_token)


@pytest.mark.parametrize(
    ("chosen", "factor", "options"),
    [
        (1, 0.5, {}),
        (2, 1.0, {}),
        (2, 2.0, {"normalize_weights": False}),
        (4, 1.0, {}),
        (2, 0.5, {"routing": "dropless"}),
        (3, 0.5, {"routing": "dropless", "normalize_weights": False}),
        (2, 0.5, {"mixture_bias": True}),
        (3, 2.0, {"mixture_bias": True, "glu_limit": 0.4, "activation": "silu"}),
        (2, 0.5, {"mixture_bias": True, "glu_limit": 0.4, "activation": "silu", "routing": "dropless"}),
    ],
)
def test_the_layer_is_the_numpy_reference(chosen: int, factor: float, options: dict[str, object]) -> None:
    config = config_of(experts_per_token=chosen, capacity_factor=factor, **options)
    graphdef, shapes, _ = outline(lambda: Block(config, rngs=nnx.Rngs(0)))
    params = drawn(shapes)
    x = rng.normal(size=(3, 10, 8)).astype(np.float32)
    program = jax.jit(lambda params, x: join_model(graphdef, params).feed_forward(x))  # type: ignore[operator]
    y, metrics = program(params, x)
    p = {path: value.astype(np.float64) for path, value in params.items()}
    wanted = [reference(p, one.astype(np.float64), config) for one in x]
    np.testing.assert_allclose(y, np.stack([w[0] for w in wanted]), atol=2e-5)
    assert float(metrics["dropped"]) == pytest.approx(np.mean([w[1] for w in wanted]), abs=1e-6)
    assert (float(metrics["dropped"]) > 0) == (factor < 4 / chosen and config.routing == "capacity")


def test_slots_hold_the_tokens_that_chose_them() -> None:
    found = jax.device_get(jax.jit(lambda logits: route(logits, 2, 3))(rng.normal(size=(12, 4)).astype(np.float32)))
    for t in range(12):
        for expert, slot, weight in zip(found.experts[t], found.slots[t], found.weights[t], strict=True):
            assert (weight > 0) == (slot < 3)
            assert slot >= 3 or found.tokens[expert, slot] == t
    assert int((found.tokens < 12).sum()) == int((found.weights > 0).sum())


def test_balance_is_one_if_even_and_the_number_of_experts_if_one_takes_all() -> None:
    balance = jax.jit(lambda logits: route(logits, 1, 8).balance)
    even = np.float32(30 * np.tile(np.eye(4), (2, 1)))
    assert float(balance(even)) == pytest.approx(1)
    one = np.float32(30 * np.eye(4)[[0] * 8])
    assert float(balance(one)) == pytest.approx(4)


def test_the_loss_is_the_cross_entropy_and_the_gradient_balances_too() -> None:
    tokens = {"tokens": jnp.asarray(rng.integers(0, 11, (2, 9)), jnp.int32)}
    found = []
    for coefficient in (0.0, 1.0):
        config = config_of(num_layers=1, balance_coefficient=coefficient)
        graphdef, shapes, _ = outline(lambda c=config: MoeDecoder(c, rngs=nnx.Rngs(0)))
        program = jax.jit(jax.value_and_grad(lambda p, g=graphdef: join_model(g, p).loss(tokens)[0]))
        found.append(program(drawn(shapes)))
    assert float(found[0][0]) == pytest.approx(float(found[1][0]), rel=1e-6)
    path = "blocks/0/router"
    assert np.abs(found[0][1][path] - found[1][1][path]).max() > 1e-4


@pytest.mark.parametrize(("routing", "axis"), [("capacity", "expert"), ("dropless", "tensor")])
def test_experts_on_a_mesh_compute_what_one_device_does(routing: str, axis: str) -> None:
    config = config_of(routing=routing, mixture_bias=True, capacity_factor=0.75)
    graphdef, shapes, axes = outline(lambda: Block(config, rngs=nnx.Rngs(0)))
    params, x = drawn(shapes), rng.normal(size=(4, 10, 8)).astype(np.float32)

    def total(params: Any, x: Any) -> Any:
        y, metrics = join_model(graphdef, params).feed_forward(x)  # type: ignore[operator]
        return jnp.sum(jnp.sin(y)), (y, metrics)

    step = jax.value_and_grad(total, has_aux=True)
    (_, want), wanted = jax.jit(step)(params, x)
    layout = MeshLayout(make_mesh(MeshConfig(**{"fsdp": 2, axis: 2}), jax.devices()[:4]))
    placed = {path: jax.device_put(v, layout.sharding(v.shape, axes[path])) for path, v in params.items()}
    with use_layout(layout):
        (_, got), found = jax.jit(step)(placed, jax.device_put(x, layout.sharding(x.shape, ("batch", None, None))))
    np.testing.assert_allclose(got[0], want[0], atol=2e-5)
    assert (float(want[1]["dropped"]) > 0) == (routing == "capacity") and jax.device_get(got[1]) == want[1]
    for path, gradient in wanted.items():
        np.testing.assert_allclose(found[path], gradient, atol=2e-5 * max(1.0, np.abs(gradient).max()), err_msg=path)
    shards = {path: placed[path].sharding.shard_shape(value.shape) for path, value in params.items()}
    if routing == "capacity":
        assert shards["experts_gate"] == (2, 4, 12) and shards["experts_down_bias"] == (2, 8)
    else:
        assert shards["experts_gate"] == (4, 4, 6) and shards["experts_down_bias"] == (4, 8)


def test_a_mixture_trains_on_a_mesh(make_island: Callable[..., Island], batches: list[Sample]) -> None:
    args = {"num_layers": 1, "num_experts": 4, "scan_layers": True, "mixture_bias": True}
    island = make_island(module=MODULE, args=args, fsdp=2, expert=2)
    steps = [island.wait(island.step(island.put_batch(batch), 1e-2)) for batch in batches]
    assert set(steps[0]) == {"loss", "grad_norm", "balance", "dropped"}
    assert steps[-1]["loss"] < 0.95 * steps[0]["loss"]
    gate, bias = (island.state.params[f"blocks/experts_{path}"] for path in ("gate", "down_bias"))
    assert np.abs(bias).max() > 0 and bias.sharding.shard_shape(bias.shape) == (1, 2, 16)
    assert gate.shape == (1, 4, 16, 32) and gate.sharding.shard_shape(gate.shape) == (1, 2, 8, 32)
