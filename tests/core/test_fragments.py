"""Fragments partition all elements, and depend on nothing but the shapes."""

import math
import random

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from diloco_jax.core.fragments import FragmentConfig, Slice, plan_fragments, put, take
from diloco_jax.core.kinds import Kind, kind_of

SHAPES = {"embed": (16, 4), "mlp/kernel": (4, 6), "norm": (4,), "temperature": ()}

shape = st.lists(st.integers(1, 7), max_size=3).map(tuple)
models = st.dictionaries(st.sampled_from([f"p{i}" for i in range(12)]), shape, min_size=1)


@st.composite
def plans(draw: st.DrawFn) -> tuple[dict, int, dict]:
    shapes = draw(models)
    axes = {path: draw(st.integers(-len(s), len(s) - 1)) for path, s in shapes.items() if s and draw(st.booleans())}
    possible = sum(s[axes.get(path, 0)] if s else 1 for path, s in shapes.items())
    return shapes, draw(st.integers(1, min(possible, 12))), axes


def arrays(shapes: dict) -> dict[str, np.ndarray]:
    return {path: np.arange(math.prod(s), dtype=np.float32).reshape(s) for path, s in shapes.items()}


@given(plans())
def test_a_plan_is_a_balanced_partition(case: tuple[dict, int, dict]) -> None:
    shapes, num_fragments, axes = case
    plan = plan_fragments(shapes, num_fragments, split_axis=axes)
    assert [fragment.fragment_id for fragment in plan.fragments] == list(range(num_fragments))
    assert list(plan.shapes.items()) == sorted(shapes.items())
    counts = {path: np.zeros(s, np.int32) for path, s in shapes.items()}
    for fragment in plan.fragments:
        for piece in fragment.slices:
            index = (slice(None),) * max(piece.axis, 0) + (slice(piece.start, piece.stop),)
            counts[piece.path][index if shapes[piece.path] else ()] += 1
        values = take(arrays(shapes), fragment)
        assert fragment.num_elements == sum(value.size for value in values.values()) > 0
        assert fragment.keys_shapes == tuple((key, value.shape) for key, value in values.items())
    assert all((count == 1).all() for count in counts.values()), "an element is not in exactly one fragment"
    largest_piece = max(math.prod(s) for fragment in plan.fragments for s in fragment.shapes)
    # Any list schedule keeps this bound; one that ignores the current sizes does not.
    bound = sum(map(math.prod, shapes.values())) / num_fragments + (1 - 1 / num_fragments) * largest_piece
    assert max(fragment.num_elements for fragment in plan.fragments) <= bound + 1e-9


@given(plans(), st.randoms(use_true_random=False))
def test_plan_does_not_depend_on_the_order_of_parameters(case: tuple[dict, int, dict], order: random.Random) -> None:
    shapes, num_fragments, axes = case
    items = list(shapes.items())
    order.shuffle(items)
    assert plan_fragments(dict(items), num_fragments, split_axis=axes) == plan_fragments(
        shapes, num_fragments, split_axis=axes
    )


@given(plans())
def test_put_is_the_inverse_of_take(case: tuple[dict, int, dict]) -> None:
    shapes, num_fragments, axes = case
    plan = plan_fragments(shapes, num_fragments, split_axis=axes)
    params = arrays(shapes)
    rebuilt = {path: np.full_like(array, -1) for path, array in params.items()}
    for fragment in plan.fragments:
        before = {path: array.copy() for path, array in rebuilt.items()}
        changed = put(rebuilt, fragment, take(params, fragment))
        assert all((rebuilt[path] == before[path]).all() for path in shapes), "put wrote into its argument"
        rebuilt = changed
    assert all((rebuilt[path] == params[path]).all() for path in shapes)


@given(plans(), st.data())
def test_fingerprint_changes_with_any_shape_and_setting(case: tuple[dict, int, dict], data: st.DataObject) -> None:
    shapes, num_fragments, axes = case
    fingerprint = plan_fragments(shapes, num_fragments, split_axis=axes).fingerprint
    path = data.draw(st.sampled_from(sorted(shapes)))
    renamed = {("q" if name == path else name): s for name, s in shapes.items()}
    reshaped = shapes | {path: (*shapes[path], 2)}
    variants = [
        plan_fragments(renamed, 1).fingerprint,
        plan_fragments(reshaped, 1).fingerprint,
        plan_fragments(shapes | {"q": (2,)}, 1).fingerprint,
        plan_fragments(shapes, 1).fingerprint,
    ]
    assert len(fingerprint) == 16 and int(fingerprint, 16) >= 0
    assert len(set(variants)) == len(variants)
    assert fingerprint not in variants[:3]
    assert (fingerprint == variants[3]) == (num_fragments == 1 and all(axes[p] % len(shapes[p]) == 0 for p in axes))


@given(plans(), st.data())
def test_fingerprint_changes_with_the_number_of_fragments(case: tuple[dict, int, dict], data: st.DataObject) -> None:
    shapes, num_fragments, axes = case
    assume(num_fragments > 1)
    other = data.draw(st.integers(1, num_fragments - 1))
    first, second = (plan_fragments(shapes, n, split_axis=axes).fingerprint for n in (num_fragments, other))
    assert first != second


def test_a_known_plan() -> None:
    # 64 + 24 + 4 + 1 = 93 elements; a fair share of 3 is 31. Pieces of a share, and of half of it, leave a fragment of
    # more than 35; with those of a third, 7 of the embedding, there are 32, 32 and 29 elements.
    plan = plan_fragments(SHAPES, 3)
    assert [[piece.key for piece in fragment.slices] for fragment in plan.fragments] == [
        ["embed[0:11:13]", "mlp/kernel"],
        ["embed[0:0:2]", "embed[0:4:6]", "embed[0:6:9]", "norm"],
        ["embed[0:2:4]", "embed[0:9:11]", "embed[0:13:16]", "temperature"],
    ]
    assert [fragment.num_elements for fragment in plan.fragments] == [32, 32, 29]
    assert plan.fragments[0].keys_shapes == (("embed[0:11:13]", (2, 4)), ("mlp/kernel", (4, 6)))


def test_a_declared_axis_is_cut() -> None:
    plan = plan_fragments({"w": (3, 8)}, 4, split_axis={"w": -1})
    assert [fragment.slices for fragment in plan.fragments] == [(Slice("w", 1, i, i + 2),) for i in (0, 2, 4, 6)]


def test_small_tensors_stay_whole_until_there_are_too_few() -> None:
    assert [f.slices[0].key for f in plan_fragments({"a": (4,), "b": (4,)}, 2).fragments] == ["a", "b"]
    # One huge row and two tiny tensors: a fair share alone would leave 3 pieces for 4 fragments.
    plan = plan_fragments({"huge": (1, 100), "x": (2,), "y": (2,)}, 4)
    assert sorted(f.slices[0].key for f in plan.fragments) == ["huge", "x[0:0:1]", "x[0:1:2]", "y"]


def test_config_axes_are_clamped_to_each_tensor() -> None:
    shapes = {"matrix": (2, 3), "scalar": (), "stack": (1, 2, 3), "vector": (4,)}
    kinds = {path: kind_of(shape) for path, shape in shapes.items()} | {"stack": Kind("matrix", 1)}
    for split_axis, matrix, stack in ((0, 0, 1), (1, 1, 2), (-1, 1, 2), (-2, 0, 1), (-3, 0, 1)):
        plan = FragmentConfig(split_axis=split_axis).plan(shapes, kinds, 7)
        cut = {piece.path: piece.axis for fragment in plan.fragments for piece in fragment.slices}
        assert cut == {"matrix": matrix, "scalar": -1, "stack": stack, "vector": 0}


@pytest.mark.parametrize(
    ("shapes", "num_fragments", "words"),
    [
        ({"w": (3,)}, 4, "num_fragments is 4.*1 to 3.*lower"),
        ({"w": (3,)}, 0, "num_fragments is 0"),
        ({}, 1, "0 tensors"),
        ({"w": (3, 0)}, 1, "0 tensors|1 to 0"),
        ({"w": (2,), "w[0:0:1]": (1,)}, 3, "same key"),
    ],
)
def test_impossible_plans_are_refused(shapes: dict, num_fragments: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan_fragments(shapes, num_fragments)


def test_put_casts_to_the_parameter_and_checks_shapes() -> None:
    plan = plan_fragments({"v": (2,), "w": (4, 2)}, 2)
    params = {"v": np.ones((2,), ml_dtypes.bfloat16), "w": np.ones((4, 2), ml_dtypes.bfloat16)}
    for fragment in plan.fragments:
        values = {key: np.full(s, 3, np.float32) for key, s in fragment.keys_shapes}
        assert all(array.dtype == ml_dtypes.bfloat16 for array in put(params, fragment, values).values())
        with pytest.raises(ValueError, match=r"\(9, 9\), the plan needs"):
            put(params, fragment, {key: np.zeros((9, 9)) for key in values})


def test_numpy_take_gives_views() -> None:
    params = arrays({"w": (4, 2)})
    for fragment in plan_fragments({"w": (4, 2)}, 2).fragments:
        assert all(np.shares_memory(value, params["w"]) for value in take(params, fragment).values())
