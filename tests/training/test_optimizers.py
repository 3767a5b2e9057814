"""Inner optimizers against NumPy, and schedules as functions of the global step."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diloco_jax.core.kinds import Kind, canonical_of
from diloco_jax.training.optimizers import OptimizerConfig, OptimizerName, learning_rate, make_inner

pytestmark = pytest.mark.usefixtures("quick_compiler")


def first_updates(tx: optax.GradientTransformation, gradient: Any, params: Any) -> Any:
    """Return the first updates, from one compiled program."""
    return jax.jit(lambda gradient, params: tx.update(gradient, tx.init(params), params)[0])(gradient, params)


def test_wsd_warms_up_stays_and_decays() -> None:
    config = OptimizerConfig(learning_rate=2.0, warmup_steps=4, decay_fraction=0.5, final_fraction=0.25)
    rate = learning_rate(config, 20)
    assert [rate(t) for t in (0, 1, 3, 4, 10)] == [0.5, 1.0, 2.0, 2.0, 2.0]
    assert [rate(t) for t in (15, 20, 99)] == [1.25, 0.5, 0.5]


def test_cosine_and_constant() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=10, schedule="cosine", final_fraction=0.2)
    rate = learning_rate(config, 30)
    assert [round(rate(t), 6) for t in (4, 10, 20, 30, 31)] == [0.5, 1.0, 0.6, 0.2, 0.2]
    for flat in ({"schedule": "constant"}, {"decay_fraction": 0.0}):
        rate = learning_rate(OptimizerConfig(learning_rate=1.0, warmup_steps=0, **flat), 5)
        assert [rate(t) for t in (0, 4, 5, 9)] == [1.0] * 4


def test_a_run_shorter_than_its_warm_up_is_refused() -> None:
    with pytest.raises(ValueError, match=r"warmup_steps 50 and 2 steps of decay do not fit into 10"):
        learning_rate(OptimizerConfig(warmup_steps=50), 10)


def test_adamw_is_its_formula_and_decays_matrices_only() -> None:
    config = OptimizerConfig(b1=0.8, b2=0.9, weight_decay=0.5, clip_norm=0.0)
    params = {"a/kernel": jnp.full((2, 3), 2.0), "a/scale": jnp.full((3,), 2.0), "embed/embedding": jnp.ones((4, 3))}
    rng = np.random.default_rng(0)
    gradients = [{k: rng.normal(size=v.shape).astype(np.float32) for k, v in params.items()} for _ in range(3)]
    tx = make_inner(config, params)
    state = jax.jit(tx.init)(params)
    step = jax.jit(tx.update)
    want = {k: np.asarray(v, np.float64) for k, v in params.items()}
    m = {k: 0.0 for k in params}
    v = {k: 0.0 for k in params}
    for t, gradient in enumerate(gradients, start=1):
        updates, state = step(gradient, state, params)
        params = {k: p + np.float32(0.1) * np.asarray(updates[k]) for k, p in params.items()}
        for k, g in gradient.items():
            m[k], v[k] = 0.8 * m[k] + 0.2 * g, 0.9 * v[k] + 0.1 * g * g
            decay = 0.5 if k == "a/kernel" else 0.0
            want[k] -= 0.1 * (m[k] / (1 - 0.8**t) / (np.sqrt(v[k] / (1 - 0.9**t)) + 1e-8) + decay * want[k])
    for k in params:
        np.testing.assert_allclose(params[k], want[k], rtol=1e-5)


def test_muon_orthogonalises_matrices_and_leaves_the_rest_to_adam() -> None:
    config = OptimizerConfig(name="muon", learning_rate=0.5, adam_learning_rate=0.25, weight_decay=0.0, clip_norm=0.0)
    rng = np.random.default_rng(1)
    params = {"x/kernel": jnp.zeros((6, 3)), "embed/embedding": jnp.zeros((6, 3)), "x/scale": jnp.zeros(3)}
    gradient = {k: jnp.asarray(rng.normal(size=v.shape), jnp.float32) for k, v in params.items()}
    tx = make_inner(config, params)
    updates = first_updates(tx, gradient, params)
    # Five quintic Newton-Schulz steps bring singular values near one, not to it; the direction is that of -U V^T.
    u, _, vt = np.linalg.svd(gradient["x/kernel"], full_matrices=False)
    np.testing.assert_allclose(np.linalg.svd(updates["x/kernel"], compute_uv=False), 1.0, atol=0.35)
    assert np.trace(vt @ np.asarray(updates["x/kernel"]).T @ u) < -2
    # The first step of Nesterov's adam is -(b1 (1 - b1) / (1 - b1^2) + 1) sign(g); the ratio of the rates is 1/2.
    for k in ("embed/embedding", "x/scale"):
        np.testing.assert_allclose(updates[k], -0.5 * (0.09 / 0.19 + 1) * np.sign(gradient[k]), rtol=1e-4)


def test_muon_treats_each_layer_of_a_stack_alone() -> None:
    config = OptimizerConfig(name="muon", clip_norm=0.0)
    rng = np.random.default_rng(2)
    layers = [jnp.asarray(rng.normal(size=(4, 6)), jnp.float32) for _ in range(3)]
    stack = {"b/kernel": jnp.stack(layers), "b/scale": jnp.ones((3, 4))}
    tx = make_inner(config, stack, kinds={"b/kernel": Kind("matrix", 1), "b/scale": Kind("vector", 1)})
    stacked = first_updates(tx, stack, stack)
    first = {"b/kernel": layers[0], "b/scale": jnp.ones(4)}
    tx = make_inner(config, first)
    update = jax.jit(lambda one: tx.update(one, tx.init(one), one)[0])
    for i, layer in enumerate(layers):
        alone = update({**first, "b/kernel": layer})
        np.testing.assert_allclose(stacked["b/kernel"][i], alone["b/kernel"], atol=1e-5)
        np.testing.assert_allclose(stacked["b/scale"][i], alone["b/scale"], atol=1e-6)


def test_large_gradients_are_clipped_to_the_norm() -> None:
    params = {"w": jnp.zeros(4)}
    config = OptimizerConfig(clip_norm=1.0)
    tx = make_inner(config, params)
    big, small = ({"w": jnp.asarray([s, 0.0, 0.0, 0.0])} for s in (100.0, 1.0))
    step = jax.jit(lambda g: tx.update(g, tx.init(params), params)[1])
    states = [step(g) for g in (big, small)]
    np.testing.assert_allclose(optax.tree.norm(states[0]), optax.tree.norm(states[1]), rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("learning_rate", 0.0, "must be positive and finite"),
        ("adam_learning_rate", math.inf, "must be positive and finite"),
        ("accumulate_steps", 0, "must be at least 1"),
        ("b1", 1.0, r"must be in \[0, 1\)"),
        ("weight_decay", math.nan, "must not be negative"),
        ("warmup_steps", -1, "must not be negative"),
        ("decay_fraction", 1.5, "must be between 0 and 1"),
        ("name", "sgdx", "choose from adamw, muon"),
        ("schedule", "linear", "choose from wsd, cosine, constant"),
    ],
)
def test_impossible_settings_are_named(name: str, value: float | str, rule: str) -> None:
    config = OptimizerConfig()
    # Under test the constructor checks types, and would refuse some of these values with another error.
    object.__setattr__(config, name, value)
    with pytest.raises(ValueError, match=f"optimizer.{name} is '?{value}'?; (it )?{rule}"):
        config.__post_init__()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_layers_at_axis_1_are_updated_as_layers_at_axis_0(name: OptimizerName) -> None:
    rng = np.random.default_rng(3)
    names = {
        "b/kernel": ("embed", "layers", "mlp"),
        "b/scale": ("embed", "layers"),
        "b/out": ("mlp", "embed", "layers"),
    }
    shapes = {"b/kernel": (4, 3, 6), "b/scale": (4, 3), "b/out": (6, 4, 3)}
    forms = {path: canonical_of(shapes[path], names[path]) for path in names}
    kinds = {path: form.kind for path, form in forms.items()}
    stored = {path: jnp.asarray(rng.normal(size=shape), jnp.float32) for path, shape in shapes.items()}
    front = {path: forms[path].view(value) for path, value in stored.items()}
    found = []
    for params, orders in ((stored, {path: form.order for path, form in forms.items()}), (front, None)):
        tx = make_inner(OptimizerConfig(name=name, weight_decay=0.5), params, kinds=kinds, orders=orders)
        update = jax.jit(lambda gradient, params, tx=tx: tx.update(gradient, tx.init(params), params)[0])
        decayed = update({path: np.zeros_like(value) for path, value in params.items()}, params)
        # Decay alone: of the matrices of each layer, not of the scales.
        np.testing.assert_allclose(decayed["b/kernel"], -0.5 * np.asarray(params["b/kernel"]), rtol=1e-6)
        assert not np.asarray(decayed["b/scale"]).any()
        found.append(update(params, params))
    for path, form in forms.items():
        np.testing.assert_allclose(form.view(np.asarray(found[0][path])), found[1][path], rtol=1e-5, atol=1e-6)
