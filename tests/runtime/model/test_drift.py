"""A merge measures the drift of its contributions from the products that it computes anyway."""

import math

import numpy as np
import pytest

from diloco_jax.core.drift import Drift
from diloco_jax.core.merge import PAIRS_MAX
from diloco_jax.protocol.effects import Contribution, Merge
from diloco_jax.runtime.model.global_model import GlobalModel
from tests.runtime.models import gradient, make_model, merge

NORMS = {"a": 1.0, "b": 2.0, "c": 4.0}


def matrices(model: GlobalModel, payload: bytes) -> np.ndarray:
    """The elements of a payload of fragment 0 that are not averaged."""
    views = model.layout(0).views(np.frombuffer(payload, np.float32))
    rules = model.setup.rules[0]
    return np.concatenate([view.ravel() for key, view in views.items() if rules[key].method == "rda"]).astype(float)


def payloads_of(model: GlobalModel) -> dict[str, bytes]:
    return {name: gradient(model, 0, seed, norm) for seed, (name, norm) in enumerate(NORMS.items())}


def test_norms_are_those_of_the_fragment_and_cosines_those_of_its_matrices() -> None:
    model = make_model()
    payloads = payloads_of(model)
    found = merge(model, 1, payloads).drift
    directions = {name: (v := matrices(model, each)) / np.linalg.norm(v) for name, each in payloads.items()}
    assert 0 < directions["a"].size < model.layout(0).size, "some tensors of the fragment are averaged"
    for name, drift in found.items():
        others = sum(each for other, each in directions.items() if other != name)
        assert drift.norm_ratio == pytest.approx(NORMS[name] / 2.0, rel=1e-6)
        assert drift.cosine == pytest.approx(directions[name] @ others / np.linalg.norm(others), rel=1e-5)
    assert found.keys() == NORMS.keys()


def test_averaged_and_many_contributions_have_no_cosine() -> None:
    model = make_model(method="average")  # type: ignore[arg-type]
    found = merge(model, 1, payloads_of(model)).drift
    assert {name: each.cosine for name, each in found.items()} == dict.fromkeys(NORMS)
    assert found["c"].norm_ratio == pytest.approx(2.0)
    model = make_model()
    many = {chr(ord("a") + m): gradient(model, 0, m) for m in range(PAIRS_MAX + 1)}
    found = merge(model, 1, many).drift
    assert len(found) == PAIRS_MAX + 1 and {each.cosine for each in found.values()} == {None}
    assert [each.norm_ratio for each in found.values()] == pytest.approx([1.0] * len(many))


def test_an_excluded_contribution_counts_for_nobody() -> None:
    model, clean = make_model(), make_model()
    payloads = payloads_of(model)
    bad = np.frombuffer(payloads["a"], np.float32).copy()
    bad[3] = math.nan
    found = merge(model, 1, payloads | {"A": bad.tobytes()}).drift
    assert found == merge(clean, 1, payloads).drift
    assert merge(model, 2, {"a": payloads["a"]}).drift == {}, "one contribution has no drift"


def test_a_contribution_from_an_older_version_has_a_norm_ratio_alone() -> None:
    model = make_model()
    payloads = payloads_of(model)
    merge(model, 1, payloads)
    bases = {"a": 1, "b": 1, "c": 0}
    parts = tuple(Contribution(name, 2, 1, 64, base, 4) for name, base in bases.items())
    found = model.merge(Merge(2, 0, parts), payloads).drift
    assert found["c"] == Drift(pytest.approx(2.0), None)
    first, second = (matrices(model, payloads[name]) for name in "ab")
    cosine = first @ second / (np.linalg.norm(first) * np.linalg.norm(second))
    assert [found[name].cosine for name in "ab"] == pytest.approx([cosine, cosine], rel=1e-5)


def test_nothing_that_a_merge_records_depends_on_it() -> None:
    model, other = make_model(), make_model()
    payloads = payloads_of(model)
    other._drift = lambda *_: {}  # type: ignore[method-assign, assignment]
    merged, without = merge(model, 1, payloads), merge(other, 1, payloads)
    assert without.drift == {} and merged.drift
    assert merged._replace(drift={}) == without._replace(drift={}) and model.digests == other.digests
