"""The pieces together are DiLoCo: they follow an independent implementation in plain numpy, round by round."""

from __future__ import annotations

import numpy as np
import pytest

from diloco_jax.core.codec import Format, encode
from diloco_jax.core.fragments import plan_fragments, put, take
from diloco_jax.core.layout import whole
from diloco_jax.core.merge import MergeConfig, merge_rule, token_weights
from diloco_jax.core.outer import OuterConfig, make_outer
from diloco_jax.core.passes import Merger, Values

SHAPES = {"embed": (6, 2), "kernel": (3, 4), "scale": (4,)}
H, ROUNDS, INNER_RATE = 5, 8, 0.1
Params = dict[str, np.ndarray]


def targets(learner: int) -> Params:
    """The loss of a learner is 1/2 |curvature (x - target)|^2, different for each of them."""
    rng = np.random.default_rng(100 + learner)
    return {path: rng.standard_normal(shape) for path, shape in SHAPES.items()}


def inner_steps(params: Params, learner: int, steps: int) -> Params:
    goal = targets(learner)
    for _ in range(steps):
        params = {path: x - INNER_RATE * (1 + 0.2 * learner) * (x - goal[path]) for path, x in params.items()}
    return params


def initial() -> Params:
    rng = np.random.default_rng(0)
    return {path: rng.standard_normal(shape).astype(np.float32) for path, shape in SHAPES.items()}


def reference_diloco(tokens: list[int], steps: list[int], rate: float, momentum: float) -> list[Params]:
    """DiLoCo in float64: synchronous rounds, RDA for matrices but the embedding, Nesterov outside."""
    theta = {path: x.astype(np.float64) for path, x in initial().items()}
    velocity = {path: np.zeros_like(x) for path, x in theta.items()}
    weights = np.array([c * c / s for c, s in zip(tokens, steps, strict=True)])
    weights /= weights.sum()
    history = []
    for _ in range(ROUNDS):
        local = [inner_steps(theta, m, s) for m, s in enumerate(steps)]
        for path in theta:
            deltas = [theta[path] - x[path] for x in local]
            if path == "kernel":
                norms = [np.sqrt((d**2).sum()) for d in deltas]
                direction = sum(w * d / n for w, d, n in zip(weights, deltas, norms, strict=True))
                g = (weights @ norms) * direction / np.sqrt((direction**2).sum())
            else:
                g = sum(w * d for w, d in zip(weights, deltas, strict=True))
            velocity[path] = g + momentum * velocity[path]
            theta[path] = theta[path] - rate * (g + momentum * velocity[path])
        history.append(dict(theta))
    return history


def real_diloco(
    tokens: list[int],
    steps: list[int],
    config: OuterConfig,
    num_fragments: int = 1,
    format: Format = "float32",
    down: Format = "float32",
) -> list[Params]:
    """The same rounds with the package's functions, every fragment at the same step."""
    plan = plan_fragments(SHAPES, num_fragments)
    theta = initial()
    mergers, states = [], []
    for fragment in plan.fragments:
        layout = whole(fragment)
        paths = {piece.key: piece.path for piece in fragment.slices}
        where = [(paths[piece.key], piece.shape) for piece in layout.pieces]
        rules = [merge_rule(path, shape, plan.kinds[path], MergeConfig()) for path, shape in where]
        mergers.append(Merger(layout, rules, make_outer(config), format, down))
        states.append(mergers[-1].first(layout.flat(take(theta, fragment))))
    weights = token_weights(tokens, steps)
    history = []
    for _ in range(ROUNDS):
        local = [inner_steps(theta, m, s) for m, s in enumerate(steps)]
        for number, fragment in enumerate(plan.fragments):
            anchor, merger = take(theta, fragment), mergers[number]
            deltas = [{k: (anchor[k] - v).astype(np.float32) for k, v in take(x, fragment).items()} for x in local]
            payloads = [np.frombuffer(encode(delta, format), np.uint8) for delta in deltas]
            values = Values(payloads, [None] * len(payloads))
            states[number] = merger.update(values, merger.inspect(values), weights, states[number]).state
            theta = put(theta, fragment, merger.layout.views(states[number].value))
        history.append(theta)
    return history


def assert_close(real: list[Params], expected: list[Params], tolerance: float = 2e-5) -> None:
    for got, want in zip(real, expected, strict=True):
        for path in SHAPES:
            np.testing.assert_allclose(got[path], want[path], rtol=tolerance, atol=tolerance, err_msg=path)


def test_follows_the_reference() -> None:
    tokens, steps = [640, 640, 320, 512], [H, H, H, H - 1]
    config = OuterConfig(learning_rate=0.7, momentum=0.9)
    assert_close(real_diloco(tokens, steps, config), reference_diloco(tokens, steps, 0.7, 0.9))


def test_fragments_change_nothing_when_all_tensors_stay_whole() -> None:
    tokens, steps = [100, 300], [H, H]
    config = OuterConfig(learning_rate=0.5, momentum=0.8)
    whole, parts = real_diloco(tokens, steps, config), real_diloco(tokens, steps, config, num_fragments=2)
    assert len(plan_fragments(SHAPES, 2).fragments[0].slices) < len(SHAPES)
    assert_close(parts, whole)


def test_one_learner_and_plain_sgd_is_the_learner() -> None:
    real = real_diloco([100], [H], OuterConfig(optimizer="sgd", learning_rate=1.0))
    params: Params = initial()
    for theta in real:
        params = inner_steps(params, 0, H)
        for path in SHAPES:
            np.testing.assert_allclose(theta[path], params[path], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("way", ["format", "down"])
@pytest.mark.parametrize(("format", "tolerance"), [("bfloat16", 0.02), ("int8", 0.05), ("int4", 0.5)])
def test_rounded_gradients_and_steps_stay_near(way: str, format: Format, tolerance: float) -> None:
    tokens, steps = [640, 640, 320], [H, H, H]
    config = OuterConfig(learning_rate=0.7, momentum=0.5)
    exact, rounded = real_diloco(tokens, steps, config), real_diloco(tokens, steps, config, **{way: format})
    assert_close(rounded, exact, tolerance)
    assert any((rounded[-1][path] != exact[-1][path]).any() for path in SHAPES), "nothing was rounded"


def test_a_run_can_be_repeated_bit_for_bit() -> None:
    first, second = (real_diloco([3, 4], [H, H], OuterConfig(), 3, "int4", "int4")[-1] for _ in range(2))
    assert all(first[path].tobytes() == second[path].tobytes() for path in SHAPES)
