"""The outer optimizer against numpy, with any optax transformation, and without side effects."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

from diloco_jax.core.outer import OuterConfig, OuterOptimizer, make_outer


def fragment(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        key: rng.standard_normal(shape).astype(np.float32) for key, shape in {"w": (3, 2), "b[0:0:4]": (4,)}.items()
    }


def test_nesterov_matches_numpy() -> None:
    outer = OuterOptimizer(make_outer(OuterConfig(learning_rate=0.7, momentum=0.9)))
    params = fragment(0)
    state = outer.init(params)
    theta = {key: value.astype(np.float64) for key, value in params.items()}
    velocity = {key: np.zeros_like(value) for key, value in theta.items()}
    for seed in range(1, 5):
        gradient = fragment(seed)
        params, state = outer.step(params, gradient, state)
        for key, g in gradient.items():
            velocity[key] = g + 0.9 * velocity[key]
            theta[key] = theta[key] - 0.7 * (g + 0.9 * velocity[key])
            np.testing.assert_allclose(params[key], theta[key], rtol=1e-5, atol=1e-5)


def test_sgd_with_rate_one_moves_to_the_merged_value() -> None:
    outer = OuterOptimizer(make_outer(OuterConfig(optimizer="sgd", learning_rate=1.0)))
    params, local = fragment(0), fragment(1)
    gradient = {key: params[key] - local[key] for key in params}
    new, _ = outer.step(params, gradient, outer.init(params))
    for key in local:
        np.testing.assert_allclose(new[key], local[key], rtol=0, atol=2 * np.finfo(np.float32).eps * 4)


def test_adam_uses_momentum_as_its_first_decay() -> None:
    outer = OuterOptimizer(make_outer(OuterConfig(optimizer="adam", learning_rate=0.1, momentum=0.5)))
    params = {"w": np.zeros(2, np.float32)}
    _, state = outer.step(params, {"w": np.full(2, 3.0, np.float32)}, outer.init(params))
    np.testing.assert_allclose(state[0].mu["w"], [1.5, 1.5])  # (1 - 0.5) * 3


@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(0.1),
        optax.adamw(1e-2),
        optax.chain(optax.clip_by_global_norm(1.0), optax.trace(0.9)),
        optax.MultiSteps(optax.sgd(0.5), every_k_schedule=2).gradient_transformation(),  # keeps gradients in its state
        optax.masked(optax.scale(-1.0), lambda params: {key: key == "w" for key in params}),  # looks at keys
    ],
    ids=["sgd", "adamw", "chain", "multi_steps", "masked"],
)
def test_any_transformation_works_and_changes_no_argument(tx: optax.GradientTransformation) -> None:
    outer = OuterOptimizer(tx)
    params = fragment(0)
    state = outer.init(params)
    expected_params, expected_state = dict(params), tx.init(params)
    for seed in range(1, 4):
        gradient = fragment(seed)
        before = jax.tree.map(np.array, (params, gradient, state))
        new_params, new_state = outer.step(params, gradient, state)
        jax.tree.map(np.testing.assert_array_equal, before, (params, gradient, state))
        again, _ = outer.step(params, gradient, state)
        assert all(again[key].tobytes() == new_params[key].tobytes() for key in params), "a retry gives other bits"

        updates, expected_state = tx.update(gradient, expected_state, expected_params)
        expected_params = optax.apply_updates(expected_params, updates)
        for value in gradient.values():
            value[...] = np.nan  # the caller may reuse its buffers
        params, state = new_params, new_state
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), params, expected_params)


def test_aligned_memory_is_not_overwritten() -> None:
    """JAX borrows NumPy memory that is aligned to 64 bytes instead of copying it; donation would then write there."""
    size = 4096

    def aligned(value: float) -> np.ndarray:
        buffer = np.empty(size + 16, np.float32)
        start = -(buffer.ctypes.data // 4) % 16
        buffer[:] = value
        return buffer[start : start + size]

    outer = OuterOptimizer(optax.sgd(0.5, momentum=0.9))
    params, gradient = {"w": aligned(1.0)}, {"w": aligned(2.0)}
    state = jax.tree.map(lambda leaf: aligned(0.0), outer.init(params))
    new, new_state = outer.step(params, gradient, state)
    assert (params["w"] == 1).all() and (gradient["w"] == 2).all() and not jax.tree.leaves(state)[0].any()
    assert (new["w"] == 0).all() and (jax.tree.leaves(new_state)[0] == 2).all()


def test_numpy_in_numpy_out_in_the_order_given() -> None:
    outer = OuterOptimizer(make_outer(OuterConfig()))
    params = fragment(0)
    state = outer.init(params)
    new, new_state = outer.step(params, fragment(1), state)
    assert list(new) == list(params)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves((state, new, new_state)))
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves((new, new_state)))


def test_each_fragment_compiles_once() -> None:
    traces = []
    base = optax.sgd(0.1, momentum=0.9)

    def update(updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None) -> tuple:
        traces.append(1)
        return base.update(updates, state, params)

    outer = OuterOptimizer(optax.GradientTransformation(base.init, update))
    params, state = fragment(0), outer.init(fragment(0))
    for seed in range(1, 4):
        params, state = outer.step(params, fragment(seed), state)
    assert len(traces) == 1


def test_mismatches_are_refused() -> None:
    outer = OuterOptimizer(make_outer(OuterConfig()))
    params = {"w": np.zeros((2, 3), np.float32)}
    state = outer.init(params)
    with pytest.raises(ValueError, match="differ in key 'v'"):
        outer.step(params, {"v": params["w"]}, state)
    with pytest.raises(ValueError, match=r"'w' has shape \(2, 3\), its outer gradient \(3, 2\)"):
        outer.step(params, {"w": params["w"].T.copy()}, state)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"momentum": 1.0}, "momentum is 1.0.*below 1"),
        ({"momentum": -0.1}, "momentum is -0.1"),
    ],
)
def test_impossible_settings_are_refused(settings: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OuterConfig(**settings)


def test_an_unknown_optimizer_is_refused() -> None:
    config = OuterConfig()
    object.__setattr__(config, "optimizer", "lamb")  # past the type checker that runs under test
    with pytest.raises(ValueError, match="'lamb'; choose one of nesterov, sgd, adam"):
        config.__post_init__()
