"""Outer optimizers against numpy and optax; all pieces together against DiLoCo in plain numpy, round by round."""

from collections.abc import Mapping

import jax
import numpy as np
import optax
import pytest

from diloco_jax.core.codec import Format, encode
from diloco_jax.core.fragments import plan_fragments, put, take
from diloco_jax.core.layout import whole
from diloco_jax.core.merge import MergeConfig, merge_rule, token_weights
from diloco_jax.core.outer import Nesterov, Optax, Outer, OuterConfig, make_outer
from diloco_jax.core.passes import Merger, Values, WeightedSum, values_of
from tests.core.merging import layout_of, round_of, rules_of

SHAPES = {"w": (3, 2), "b[0:0:4]": (4,)}


def fragment(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {key: rng.standard_normal(shape).astype(np.float32) for key, shape in SHAPES.items()}


def merged(values: Mapping[str, np.ndarray]) -> WeightedSum:
    layout = layout_of({key: value.shape for key, value in values.items()})
    return WeightedSum(layout, values_of([layout.flat(values).view(np.uint8)]), [np.ones((1, 1), np.float32)] * 2)


def run(outer: Outer, rounds: int) -> list[dict[str, np.ndarray]]:
    """Values after each round of one learner that sends fragment(1), fragment(2), ..."""
    layout = layout_of(SHAPES)
    merger = Merger(layout, rules_of(layout, "average", "average"), outer, "float32", "float32")
    state, history = merger.first(layout.flat(fragment(0))), []
    for seed in range(1, rounds + 1):
        state = round_of(merger, [layout.flat(fragment(seed)).view(np.uint8)], np.ones(1), state).state
        history.append(layout.views(state.value))
    return history


def by_optax(tx: optax.GradientTransformation, rounds: int) -> list[Mapping[str, np.ndarray]]:
    params, history = fragment(0), []
    state = tx.init(params)
    for seed in range(1, rounds + 1):
        updates, state = tx.update(fragment(seed), state, params)
        params = optax.apply_updates(params, updates)
        history.append(params)
    return history


def assert_close(real: list[dict[str, np.ndarray]], expected: list[Mapping[str, np.ndarray]]) -> None:
    for got, want in zip(real, expected, strict=True):
        for key in SHAPES:
            np.testing.assert_allclose(got[key], want[key], rtol=1e-5, atol=1e-5, err_msg=key)


def test_nesterov_matches_optax() -> None:
    real = run(make_outer(OuterConfig(learning_rate=0.7, momentum=0.9)), 4)
    assert_close(real, by_optax(optax.sgd(0.7, momentum=0.9, nesterov=True), 4))


def test_sgd_with_rate_one_moves_to_the_merged_value() -> None:
    outer = make_outer(OuterConfig(optimizer="sgd", learning_rate=1.0, momentum=0.9))
    assert outer == Nesterov(1.0, 0.0)
    expected = {key: value - fragment(1)[key] for key, value in fragment(0).items()}
    for key, value in run(outer, 1)[0].items():
        np.testing.assert_array_equal(value, expected[key])


def test_adam_uses_momentum_as_its_first_decay() -> None:
    outer = make_outer(OuterConfig(optimizer="adam", learning_rate=0.1, momentum=0.5))
    params = {"w": np.zeros(2, np.float32)}
    _, state = outer.update(merged({"w": np.full(2, 3.0, np.float32)}), outer.init(params), params)
    (mu,) = [leaf for name, leaf in state.items() if "mu" in name]
    np.testing.assert_allclose(mu, [1.5, 1.5])
    assert_close(run(outer, 3), by_optax(optax.adam(0.1, b1=0.5), 3))


@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(0.1),
        optax.adamw(1e-2),
        optax.chain(optax.clip_by_global_norm(1.0), optax.trace(0.9)),
        # MultiSteps keeps gradients in its state.
        optax.MultiSteps(optax.sgd(0.5), every_k_schedule=2).gradient_transformation(),
        optax.masked(optax.scale(-1.0), lambda params: {key: key == "w" for key in params}),  # looks at keys
    ],
    ids=["sgd", "adamw", "chain", "multi_steps", "masked"],
)
def test_any_transformation_works_and_changes_no_argument(tx: optax.GradientTransformation) -> None:
    assert_close(run(Optax(tx), 3), by_optax(tx, 3))
    outer, params, gradient = Optax(tx), dict(sorted(fragment(0).items())), merged(fragment(1))
    state = outer.init(params)
    before = jax.tree.map(np.array, (params, gradient.views(), state))
    moves, after = outer.update(gradient, state, params)
    jax.tree.map(np.testing.assert_array_equal, before, (params, gradient.views(), state))
    change, again = moves.gradient.views(), outer.update(gradient, state, params)[0].gradient.views()
    assert [again[key].tobytes() for key in params] == [change[key].tobytes() for key in params], "a retry differs"
    kept = jax.tree.map(np.array, (change, after))
    for value in params.values():
        # The caller may reuse its buffers.
        value[...] = np.nan
    jax.tree.map(np.testing.assert_array_equal, kept, (moves.gradient.views(), after))
    assert moves.rate == -1 and not moves.momentum and list(after) == list(state)


def test_aligned_memory_is_not_overwritten() -> None:
    """JAX borrows NumPy memory that is aligned to 64 bytes instead of copying it; donation would then write there."""
    size = 4096

    def aligned(value: float) -> np.ndarray:
        buffer = np.empty(size + 16, np.float32)
        start = -(buffer.ctypes.data // 4) % 16
        buffer[:] = value
        return buffer[start : start + size]

    outer = Optax(optax.sgd(0.5, momentum=0.9))
    params, gradient = {"w": aligned(1.0)}, {"w": aligned(2.0)}
    state = {name: aligned(0.0) for name in outer.init(params)}
    moves, new_state = outer.update(merged(gradient), state, params)
    assert (params["w"] == 1).all() and (gradient["w"] == 2).all() and not any(leaf.any() for leaf in state.values())
    assert (moves.gradient.views()["w"] == -1).all() and all((leaf == 2).all() for leaf in new_state.values())


def test_each_fragment_compiles_once() -> None:
    traces = []
    base = optax.sgd(0.1, momentum=0.9)

    def update(updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None) -> tuple:
        traces.append(1)
        return base.update(updates, state, params)

    run(Optax(optax.GradientTransformation(base.init, update)), 3)
    assert len(traces) == 1


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
    # This passes the type checker that runs under test.
    object.__setattr__(config, "optimizer", "lamb")
    with pytest.raises(ValueError, match="'lamb'; choose one of nesterov, sgd, adam"):
        config.__post_init__()


MODEL_SHAPES = {"embed": (6, 2), "kernel": (3, 4), "scale": (4,)}
H, ROUNDS, INNER_RATE = 5, 8, 0.1
Params = dict[str, np.ndarray]


def targets(learner: int) -> Params:
    """The loss of a learner is 1/2 |curvature (x - target)|^2, different for each of them."""
    rng = np.random.default_rng(100 + learner)
    return {path: rng.standard_normal(shape) for path, shape in MODEL_SHAPES.items()}


def inner_steps(params: Params, learner: int, steps: int) -> Params:
    goal = targets(learner)
    for _ in range(steps):
        params = {path: x - INNER_RATE * (1 + 0.2 * learner) * (x - goal[path]) for path, x in params.items()}
    return params


def initial() -> Params:
    rng = np.random.default_rng(0)
    return {path: rng.standard_normal(shape).astype(np.float32) for path, shape in MODEL_SHAPES.items()}


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
    plan = plan_fragments(MODEL_SHAPES, num_fragments)
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


def assert_follows(real: list[Params], expected: list[Params], tolerance: float = 2e-5) -> None:
    for got, want in zip(real, expected, strict=True):
        for path in MODEL_SHAPES:
            np.testing.assert_allclose(got[path], want[path], rtol=tolerance, atol=tolerance, err_msg=path)


def test_follows_the_reference() -> None:
    tokens, steps = [640, 640, 320, 512], [H, H, H, H - 1]
    config = OuterConfig(learning_rate=0.7, momentum=0.9)
    assert_follows(real_diloco(tokens, steps, config), reference_diloco(tokens, steps, 0.7, 0.9))


def test_fragments_change_nothing_when_all_tensors_stay_whole() -> None:
    tokens, steps = [100, 300], [H, H]
    config = OuterConfig(learning_rate=0.5, momentum=0.8)
    whole, parts = real_diloco(tokens, steps, config), real_diloco(tokens, steps, config, num_fragments=2)
    assert len(plan_fragments(MODEL_SHAPES, 2).fragments[0].slices) < len(MODEL_SHAPES)
    assert_follows(parts, whole)


def test_one_learner_and_plain_sgd_is_the_learner() -> None:
    real = real_diloco([100], [H], OuterConfig(optimizer="sgd", learning_rate=1.0))
    params: Params = initial()
    for theta in real:
        params = inner_steps(params, 0, H)
        for path in MODEL_SHAPES:
            np.testing.assert_allclose(theta[path], params[path], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("way", ["format", "down"])
@pytest.mark.parametrize(
    ("format", "tolerance"), [("bfloat16", 0.02), ("int8", 0.05), ("int4", 0.5), ("int2", 1.5), ("ternary", 1.5)]
)
def test_rounded_gradients_and_steps_stay_near(way: str, format: Format, tolerance: float) -> None:
    tokens, steps = [640, 640, 320], [H, H, H]
    config = OuterConfig(learning_rate=0.7, momentum=0.5)
    exact, rounded = real_diloco(tokens, steps, config), real_diloco(tokens, steps, config, **{way: format})
    assert_follows(rounded, exact, tolerance)
    assert any((rounded[-1][path] != exact[-1][path]).any() for path in MODEL_SHAPES), "nothing was rounded"


def test_a_run_can_be_repeated_bit_for_bit() -> None:
    first, second = (real_diloco([3, 4], [H, H], OuterConfig(), 3, "int4", "int4")[-1] for _ in range(2))
    assert all(first[path].tobytes() == second[path].tobytes() for path in MODEL_SHAPES)
