"""Merge: weights, average and radial-directional average against a few lines of float64."""

import math

import numpy as np
import optax
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diloco_jax.core.codec import Format, decode
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.core.kinds import Kind, kind_of
from diloco_jax.core.layout import LEAF
from diloco_jax.core.merge import (
    PAIRS_MAX,
    MergeConfig,
    Rule,
    coefficients,
    corpus_weights,
    merge_rule,
    merge_rules,
    token_weights,
)
from diloco_jax.core.outer import Nesterov, Optax, Outer
from diloco_jax.core.passes import Merger, Values, norms, squares_of
from tests.core.merging import FORMATS, layout_of, make_merger, payload_of, round_of, rules_of
from tests.drawn import examples

elements = st.floats(-100, 100, width=32).map(lambda x: 0.0 if abs(x) < 1e-3 else x)


def merged(gradients: list[np.ndarray], weights: list[float], method: str) -> np.ndarray:
    """The merged gradient, read off a step of size one from zero."""
    layout = layout_of({"x": gradients[0].shape})
    merger = make_merger(layout, "float32", "float32", Nesterov(1.0, 0.0), method)
    payloads = [gradient.reshape(-1).view(np.uint8) for gradient in gradients]
    shares, state = np.asarray(weights, np.float64) / np.sum(weights), merger.first(np.zeros(layout.size, np.float32))
    return -round_of(merger, payloads, shares, state).state.value.reshape(gradients[0].shape)


def average(gradients: list[np.ndarray], weights: list[float]) -> np.ndarray:
    return merged(gradients, weights, "average")


def radial_directional_average(gradients: list[np.ndarray], weights: list[float]) -> np.ndarray:
    return merged(gradients, weights, "rda")


@st.composite
def merges(draw: st.DrawFn) -> tuple[list[np.ndarray], list[float]]:
    shape = draw(hnp.array_shapes(max_dims=3, max_side=5))
    count = draw(st.integers(1, 5))
    gradients = [draw(hnp.arrays(np.float32, shape, elements=elements)) for _ in range(count)]
    return gradients, [draw(st.floats(0.1, 10)) for _ in range(count)]


def reference_average(gradients: list[np.ndarray], weights: list[float]) -> np.ndarray:
    return np.average(np.asarray(gradients, np.float64), axis=0, weights=weights)


def reference_rda(gradients: list[np.ndarray], weights: list[float]) -> np.ndarray:
    vectors = np.asarray(gradients, np.float64)
    norms = np.sqrt((vectors.reshape(len(vectors), -1) ** 2).sum(1))
    units = np.stack([v / n if n > 0 else 0 * v for v, n in zip(vectors, norms, strict=True)])
    direction = np.average(units, axis=0, weights=weights)
    length = np.linalg.norm(direction)
    return np.average(norms, weights=weights) * direction / length if length > 1e-6 else direction


def mean_direction_norm(gradients: list[np.ndarray], weights: list[float]) -> float:
    units = [g.astype(np.float64) / max(float(np.linalg.norm(g.astype(np.float64))), 1e-9) for g in gradients]
    return float(np.linalg.norm(np.average(units, axis=0, weights=weights)))


def test_token_weights_are_exact() -> None:
    # 100^2 / 10 = 1000, 200^2 / 10 = 4000, 200^2 / 20 = 2000
    np.testing.assert_array_equal(token_weights([100, 200, 200], [10, 10, 20]), [1 / 7, 4 / 7, 2 / 7])
    np.testing.assert_array_equal(token_weights([100, 300], [10, 1], "tokens"), [0.25, 0.75])
    np.testing.assert_array_equal(token_weights([100, 300], [10, 1], "uniform"), [0.5, 0.5])
    assert token_weights([0, 5], [3, 3]).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("weights", "corpora", "shares", "share_max", "expected"),
    [
        # One corpus: nothing changes, whatever the settings are.
        ([0.9, 0.1], ["", ""], {}, 1.0, [0.9, 0.1]),
        ([0.9, 0.1], ["fr", "fr"], {"fr": 5.0}, 1.0, [0.9, 0.1]),
        # Two corpora: twice an equal share is everything.
        ([0.9, 0.1], ["fr", "de"], {}, 2.0, [0.9, 0.1]),
        # Four: at most a half, and the excess of 0.2 goes to the others in proportion.
        ([0.7, 0.15, 0.1, 0.05], ["fr", "de", "it", ""], {}, 2.0, [0.5, 0.25, 1 / 6, 1 / 12]),
        # The limit is of the corpus, not of its islands, and the run's corpus has none.
        ([0.35, 0.35, 0.2, 0.1], ["fr", "fr", "de", "it"], {}, 1.0, [1 / 6, 1 / 6, 1 / 3, 1 / 3]),
        ([0.7, 0.2, 0.1], ["", "de", "it"], {}, 1.0, [0.7, 0.2, 0.1]),
        ([0.7, 0.2, 0.1], ["fr", "de", "it"], {}, 0.0, [0.7, 0.2, 0.1]),
        # After the first limit the second corpus is above it.
        ([0.6, 0.38, 0.02], ["fr", "de", ""], {}, 1.0, [1 / 3, 1 / 3, 1 / 3]),
        # A corpus has its share, divided by the weights of its islands.
        ([0.6, 0.2, 0.2], ["fr", "fr", "de"], {"de": 3.0}, 2.0, [0.1875, 0.0625, 0.75]),
        ([0.0, 1.0], ["fr", "de"], {"fr": 3.0}, 2.0, [0.0, 1.0]),
    ],
)
def test_corpora_get_their_shares(
    weights: list[float], corpora: list[str], shares: dict[str, float], share_max: float, expected: list[float]
) -> None:
    got = corpus_weights(np.asarray(weights), corpora, shares, share_max)
    np.testing.assert_allclose(got, expected, rtol=1e-12)


@given(st.lists(st.tuples(st.integers(1, 10**13), st.integers(1, 10**6)), min_size=1, max_size=9))
def test_token_weights_sum_to_one(counters: list[tuple[int, int]]) -> None:
    tokens, steps = zip(*counters, strict=True)
    for scheme in ("tokens2_per_step", "tokens", "uniform"):
        weights = token_weights(tokens, steps, scheme)
        assert weights.sum() == pytest.approx(1, abs=1e-14) and (weights > 0).all()


@pytest.mark.parametrize(
    ("tokens", "steps", "words"),
    [
        ([5, 5], [1, 0], "without a step"),
        ([5], [1, 1], "tokens of 1 learners and steps of 2"),
        ([], [], "one or more"),
        ([-5], [1], "negative"),
        ([0, 0], [1, 1], "not all 0"),
    ],
)
def test_unusable_counters_are_refused(tokens: list[int], steps: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        token_weights(tokens, steps)


@settings(max_examples=examples(40))
@given(merges())
def test_average_matches_reference(case: tuple[list[np.ndarray], list[float]]) -> None:
    gradients, weights = case
    np.testing.assert_allclose(average(gradients, weights), reference_average(gradients, weights), atol=1e-4)


@settings(max_examples=examples(40))
@given(merges())
def test_rda_matches_reference(case: tuple[list[np.ndarray], list[float]]) -> None:
    gradients, weights = case
    # The direction of a smaller mean is rounding noise.
    assume(mean_direction_norm(gradients, weights) > 1e-2)
    result = radial_directional_average(gradients, weights)
    expected = reference_rda(gradients, weights)
    np.testing.assert_allclose(result, expected, atol=1e-4 * max(1.0, float(np.abs(expected).max())))


@settings(max_examples=examples(40))
@given(merges())
def test_rda_norm_is_the_mean_norm(case: tuple[list[np.ndarray], list[float]]) -> None:
    gradients, weights = case
    direction = mean_direction_norm(gradients, weights)
    assume(direction > 1e-5)
    norms = [np.linalg.norm(g.astype(np.float64)) for g in gradients]
    result = radial_directional_average(gradients, weights).astype(np.float64)
    # Directions that nearly cancel leave few digits of a float32: a rounding of 2^-24 counts for 1 / direction as much.
    rel = 1e-5 + 8 * 2.0**-24 / direction
    assert np.linalg.norm(result) == pytest.approx(np.average(norms, weights=weights), rel=rel)


@settings(max_examples=examples(40))
@given(merges(), st.integers(1, 6))
def test_identical_gradients_merge_to_themselves(case: tuple[list[np.ndarray], list[float]], count: int) -> None:
    gradient, weights = case[0][0], (case[1] * count)[:count]
    copies = [gradient] * len(weights)
    for merge in (average, radial_directional_average):
        np.testing.assert_allclose(merge(copies, weights), gradient, rtol=2e-6)


@settings(max_examples=examples(40))
@given(merges())
def test_equal_inputs_give_equal_bits_and_stay_as_they_are(case: tuple[list[np.ndarray], list[float]]) -> None:
    gradients, weights = case
    copies = [gradient.copy() for gradient in gradients]
    for merge in (average, radial_directional_average):
        first, second = merge(gradients, weights), merge(copies, list(weights))
        assert first.dtype == np.float32
        assert first.tobytes() == second.tobytes()
        assert all(a.tobytes() == b.tobytes() for a, b in zip(gradients, copies, strict=True))


def test_orthogonal_gradients_keep_their_norm_only_with_rda() -> None:
    gradients = [3 * row for row in np.eye(4, dtype=np.float32)]
    assert np.linalg.norm(average(gradients, [1] * 4)) == pytest.approx(1.5)  # 3 / sqrt(4)
    assert np.linalg.norm(radial_directional_average(gradients, [1] * 4)) == pytest.approx(3)


def test_zero_vectors_shorten_but_do_not_turn() -> None:
    moved, still = np.array([6.0, 8.0], np.float32), np.zeros(2, np.float32)
    np.testing.assert_allclose(radial_directional_average([moved, still], [1, 1]), [3, 4], rtol=1e-6)
    assert not radial_directional_average([still, still], [1, 1]).any()


def test_cancelling_directions_fall_back_to_the_average() -> None:
    right = np.array([3.0, 0.0], np.float32)
    np.testing.assert_allclose(radial_directional_average([right, -3 * right], [1, 1]), [-3, 0], rtol=1e-6)


def test_a_single_contributor_is_returned_bit_for_bit() -> None:
    gradient = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    for merge in (average, radial_directional_average):
        assert merge([gradient], [0.3]).tobytes() == gradient.tobytes()
        assert merge([gradient, 2 * gradient], [0.3, 0]).tobytes() == gradient.tobytes()


def test_extreme_magnitudes_stay_finite() -> None:
    huge = np.full(3, 1e38, np.float32)
    # The inverse of this value is beyond float32.
    tiny = np.full(3, 1e-40, np.float32)
    np.testing.assert_allclose(radial_directional_average([huge, huge], [1, 1]), huge, rtol=1e-6)
    np.testing.assert_allclose(radial_directional_average([tiny, tiny], [1, 1]), tiny, rtol=1e-4, atol=0)


def test_large_tensors_cross_chunks() -> None:
    gradients = [np.random.default_rng(i).standard_normal(70_001).astype(np.float32) for i in range(3)]
    np.testing.assert_allclose(
        radial_directional_average(gradients, [1, 2, 3]), reference_rda(gradients, [1, 2, 3]), atol=1e-5
    )


@pytest.mark.parametrize(
    ("path", "shape", "method"),
    [
        ("blocks/0/down/kernel", (4, 4), "rda"),
        ("blocks/0/norm/scale", (4,), "average"),
        ("temperature", (), "average"),
        ("embed/embedding", (8, 4), "average"),
        ("decoder/embedding", (8, 4), "average"),
        ("Unrelated/kernel[0:0:1]", (8, 4), "rda"),
    ],
)
def test_merge_rule_by_default(path: str, shape: tuple[int, ...], method: str) -> None:
    assert merge_rule(path, shape, kind_of(shape), MergeConfig()) == (method, math.prod(shape))


def test_merge_rule_follows_the_settings() -> None:
    def method_of(path: str, config: MergeConfig) -> str:
        return merge_rule(path, (2, 2), Kind("matrix"), config).method

    assert method_of("kernel", MergeConfig(method="average")) == "average"
    assert method_of("embed", MergeConfig(average_paths=())) == "rda"
    assert method_of("a/kernel", MergeConfig(average_paths=("a/*", "b"))) == "average"
    assert method_of("ab", MergeConfig(average_paths=("b", "a", "a.", "?b"))) == "rda"
    config = MergeConfig()
    # This passes the type checker that runs under test.
    object.__setattr__(config, "method", "median")
    with pytest.raises(ValueError, match="'median'; choose one of rda, average"):
        config.__post_init__()


def test_coefficients_by_hand() -> None:
    # Values below the diagonal are not read.
    products = np.array([[25.0, 30.0], [np.nan, 100.0]])
    weights = np.array([0.75, 0.25])
    np.testing.assert_array_equal(coefficients(products, weights, "average"), np.float32([0.75, 0.25]))
    # The mean direction is 0.75 (0.6, 0.8) + 0.25 (1, 0).
    length = np.hypot(0.7, 0.6)
    expected = [0.75 / 5 * 6.25 / length, 0.25 / 10 * 6.25 / length]
    np.testing.assert_allclose(coefficients(products, weights, "rda"), expected, rtol=1e-6)


def test_each_piece_is_merged_by_its_own_method() -> None:
    layout = layout_of({"a": (2,), "b": (2,)})
    merger = Merger(layout, rules_of(layout, "rda", "average"), Nesterov(1.0, 0.0), "float32", "float32")
    payloads = [np.tile(2 * row, 2).view(np.uint8) for row in np.eye(2, dtype=np.float32)]
    value = round_of(merger, payloads, np.array([0.5, 0.5]), merger.first(np.zeros(4, np.float32))).state.value
    np.testing.assert_allclose(-value, [np.sqrt(2), np.sqrt(2), 1, 1], rtol=1e-6)


PLAIN = Nesterov(1.0, 0.0)
WEIGHTS = np.array([0.5, 0.3, 0.2])
# Units share a block, cross blocks, have the length of blocks, cross leaves, or are each longer than one.
STACKS = {
    "blocks": (20, 7, 9),
    "odd": (5, 30, 70),
    "even": (3, 4, 256),
    "leaves": (5, LEAF // 3, 1),
    "long": (2, LEAF + 100, 1),
}
# A stack of several leaves has half a million elements, and a leaf begins with a separate block in every format.
LARGE: dict[str, tuple[Format, ...]] = {"leaves": ("float32", "int4"), "long": ("bfloat16", "ternary")}
STACKS_AND_FORMATS = pytest.mark.parametrize(
    ("name", "up"), [(name, up) for name in STACKS for up in LARGE.get(name, FORMATS)]
)


def stacks(seed: int, name: str) -> np.ndarray:
    """Draw tensors; each is many times as large as the one before, in another order for each learner."""
    rng = np.random.default_rng(seed)
    shape = STACKS[name]
    return (10.0 ** rng.permutation(shape[0])[:, None, None] ** 0.3 * rng.standard_normal(shape)).astype(np.float32)


@STACKS_AND_FORMATS
def test_units_are_merged_as_separate_tensors(name: str, up: Format) -> None:
    shape, layout = STACKS[name], layout_of({"w": STACKS[name]})
    payloads = [payload_of({"w": stacks(m, name)}, up) for m in range(3)]
    moved = stacks(7, name).reshape(-1)
    merger = Merger(layout, [Rule("rda", shape[1] * shape[2])], PLAIN, up, "float32")
    values = Values(payloads, [None, moved, None])
    products = merger.inspect(values)
    made = merger.update(values, products, WEIGHTS, merger.first(np.zeros(layout.size, np.float32))).state.value
    gradients = [decode(payload.tobytes(), [("w", shape)], up)["w"] for payload in payloads]
    gradients[1] = gradients[1] + moved.reshape(shape)
    for number, unit in enumerate(made.reshape(shape)):
        alone = make_merger(layout_of({"w": shape[1:]}), "float32", "float32", PLAIN, "rda")
        sent = [payload_of({"w": gradient[number]}, "float32") for gradient in gradients]
        expected = round_of(alone, sent, WEIGHTS, alone.first(np.zeros(unit.size, np.float32))).state.value
        largest = np.abs(expected).max()
        np.testing.assert_allclose(unit.reshape(-1), expected, rtol=1e-5, atol=1e-6 * largest)
    np.testing.assert_allclose(
        norms(squares_of(products)), [np.linalg.norm(g.astype(np.float64)) for g in gradients], rtol=1e-6
    )


def merged_stacks(up: Format, name: str, count: int, pairs_max: int = PAIRS_MAX) -> np.ndarray:
    """Merge `count` stacks, the second measured from an older version; return the step of size one."""
    shape, layout = STACKS[name], layout_of({"w": STACKS[name]})
    rules = [Rule("rda", shape[1] * shape[2])]
    merger = Merger(layout, rules, PLAIN, up, "float32", pairs_max=pairs_max)
    moved = [stacks(99, name).reshape(-1) if m == 1 else None for m in range(count)]
    values = Values([payload_of({"w": stacks(m, name)}, up) for m in range(count)], moved)
    weights = np.arange(1, count + 1) / (count * (count + 1) / 2)
    state = merger.first(np.zeros(layout.size, np.float32))
    return -merger.update(values, merger.inspect(values), weights, state).state.value.reshape(shape)


@STACKS_AND_FORMATS
def test_many_learners_are_merged_without_pairs(name: str, up: Format) -> None:
    count, shape = PAIRS_MAX + 1, STACKS[name]
    gradients = [
        decode(payload_of({"w": stacks(m, name)}, up).tobytes(), [("w", shape)], up)["w"] for m in range(count)
    ]
    gradients[1] = gradients[1] + stacks(99, name)
    weights = [float(m) for m in range(1, count + 1)]
    for number, unit in enumerate(merged_stacks(up, name, count)):
        expected = reference_rda([each[number] for each in gradients], weights)
        np.testing.assert_allclose(unit, expected, rtol=1e-4, atol=1e-6 * np.abs(expected).max())


def test_pairs_are_computed_up_to_their_limit() -> None:
    few = [merged_stacks("int4", "odd", PAIRS_MAX, most).tobytes() for most in (PAIRS_MAX, 4096, 1)]
    assert few[0] == few[1] != few[2]
    many = [merged_stacks("int4", "odd", PAIRS_MAX + 1, most).tobytes() for most in (PAIRS_MAX, 4096, 1)]
    assert many[0] == many[2] != many[1]


@pytest.mark.parametrize("pairs_max", [1, PAIRS_MAX])
def test_directions_that_cancel_are_averaged_without_pairs(pairs_max: int) -> None:
    layout = layout_of({"x": (300,)})
    merger = Merger(layout, rules_of(layout, "rda"), PLAIN, "float32", "float32", pairs_max=pairs_max)
    row = np.random.default_rng(0).standard_normal(300).astype(np.float32)
    payloads = [each.view(np.uint8) for each in (3 * row, -row, 0 * row)]
    state = merger.first(np.zeros(300, np.float32))
    made = round_of(merger, payloads, np.array([0.4, 0.4, 0.2]), state).state.value
    np.testing.assert_allclose(-made, np.float32(0.8) * row, rtol=1e-5)


def test_an_optax_transformation_sees_the_mean_of_units() -> None:
    shape, layout = STACKS["odd"], layout_of({"w": STACKS["odd"]})
    payloads = [payload_of({"w": stacks(m, "odd")}, "int8") for m in range(3)]

    def made(outer: Outer) -> np.ndarray:
        merger = Merger(layout, [Rule("rda", shape[1] * shape[2])], outer, "int8", "float32")
        return round_of(merger, payloads, WEIGHTS, merger.first(np.zeros(layout.size, np.float32))).state.value

    np.testing.assert_array_equal(made(Optax(optax.sgd(1.0))), made(PLAIN))


def test_a_piece_has_a_unit_for_each_tensor_of_which_it_has_elements() -> None:
    shapes = {"experts": (4, 3, 5, 7), "kernel": (5, 7), "scales": (4, 7), "table": (9, 7)}
    kinds = {"experts": Kind("matrix", 2), "scales": Kind("vector", 1), "table": Kind("table")}
    (rules,) = merge_rules(plan_fragments(shapes, 1, kinds=kinds), MergeConfig(average_paths=()))
    assert rules["experts"] == Rule("rda", 35)
    assert rules["kernel"] == Rule("rda", 35)
    assert rules["scales"] == Rule("average", 28) and rules["table"] == Rule("average", 63)
    cut = merge_rules(plan_fragments(shapes, 5, kinds=kinds), MergeConfig())
    units = {key.split("[")[0]: rule.unit for rules in cut for key, rule in rules.items() if rule.method == "rda"}
    assert units == {"experts": 35, "kernel": 35}


def test_names_say_what_a_tensor_is() -> None:
    assert kind_of(()) == kind_of((3,)) == Kind("vector")
    assert kind_of((3, 4)) == kind_of((3, 4, 5)) == Kind("matrix")
    assert kind_of((2, 3), ("layers", None)) == kind_of((2, 3), ("expert", "mlp")) == Kind("vector", 1)
    assert kind_of((2,), ("layers",)) == Kind("vector", 1)
    assert kind_of((2, 3, 4, 5), ("layers", "expert", "embed", "mlp")) == Kind("matrix", 2)
    assert kind_of((9, 4), ("vocab", "embed")) == Kind("table")
    assert kind_of((4, 9), ("embed", "vocab")) == kind_of((4, 2), ("embed", "expert")) == Kind("matrix")
