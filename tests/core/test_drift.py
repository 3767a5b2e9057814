"""Drift against NumPy on whole vectors, and what it does not depend on."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_jax.core.drift import Drift, drift_of
from tests.drawn import examples

EQUAL = np.array([0.5, 0.5])


def drift(vectors: np.ndarray, weights: np.ndarray) -> list[Drift]:
    """The drift of vectors from their products, with nothing below the diagonal, as a merge computes them."""
    norms = [float(np.linalg.norm(each)) for each in vectors]
    return drift_of(norms, weights, np.triu(vectors @ vectors.T))


def reference(vectors: np.ndarray, weights: np.ndarray) -> list[float]:
    directions = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    found = []
    for m in range(len(vectors)):
        others = sum(weights[j] * directions[j] for j in range(len(vectors)) if j != m)
        found.append(float(directions[m] @ others / np.linalg.norm(others)))
    return found


def drawn(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((count, 5)) * rng.uniform(0.01, 100.0, (count, 1))
    weights = rng.uniform(0.1, 1.0, count)
    return vectors, weights / weights.sum()


def test_small_numbers() -> None:
    found = drift(np.array([[3.0, 4.0], [5.0, 0.0], [0.0, 10.0]]), np.array([0.25, 0.5, 0.25]))
    assert [each.norm_ratio for each in found] == [1.0, 1.0, 2.0]
    # The others' directions are (1, 0) and (0, 1) with weights 2 to 1; (0.6, 0.8) and (0, 1) equally; and so on.
    expected = [(0.6 * 2 + 0.8) / math.sqrt(5), 0.6 / math.hypot(0.6, 1.8), 0.8 / math.hypot(2.6, 0.8)]
    assert [each.cosine for each in found] == pytest.approx(expected, rel=1e-12)


@settings(max_examples=examples(50), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(2, 8))
def test_the_cosine_is_that_of_whole_vectors(seed: int, count: int) -> None:
    vectors, weights = drawn(seed, count)
    assert [each.cosine for each in drift(vectors, weights)] == pytest.approx(reference(vectors, weights), abs=1e-9)


@settings(max_examples=examples(50), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(2, 8), factor=st.floats(1.0, 1e6))
def test_a_longer_contribution_has_another_ratio_and_no_other_cosine(seed: int, count: int, factor: float) -> None:
    vectors, weights = drawn(seed, count)
    before = drift(vectors, weights)
    longest = max(range(count), key=lambda m: before[m].norm_ratio or 0.0)
    vectors[longest] *= factor
    after = drift(vectors, weights)
    expected = [(each.norm_ratio or 0.0) * (factor if m == longest else 1.0) for m, each in enumerate(before)]
    assert [each.norm_ratio for each in after] == pytest.approx(expected)
    assert [each.cosine for each in after] == pytest.approx([each.cosine for each in before], abs=1e-9)


def test_equal_and_opposite_contributions() -> None:
    one = np.array([1.0, 2.0, 3.0])
    assert drift(np.array([one, one, one]), np.full(3, 1 / 3)) == [Drift(1.0, pytest.approx(1.0))] * 3
    assert drift(np.array([one, -2.0 * one]), EQUAL) == [Drift(1.0, -1.0), Drift(2.0, -1.0)]


def test_one_contribution_has_no_drift_and_two_have_one_cosine() -> None:
    assert drift_of([3.0], np.ones(1), np.array([[9.0]])) == []
    first, second = drift(np.array([[1.0, 0.0], [3.0, 4.0]]), np.array([0.9, 0.1]))
    assert first.cosine == second.cosine == pytest.approx(0.6)


def test_zeros_have_no_number() -> None:
    zero, one, other = np.zeros(2), np.array([1.0, 0.0]), np.array([0.0, 2.0])
    assert drift(np.array([zero, zero]), EQUAL) == [Drift(None, None)] * 2
    assert drift(np.array([zero, one]), EQUAL) == [Drift(None, None)] * 2, "the lower median is 0"
    found = drift(np.array([zero, one, other]), np.full(3, 1 / 3))
    assert found == [Drift(0.0, None), Drift(1.0, 0.0), Drift(2.0, 0.0)]
    opposite = drift(np.array([other, one, -one]), np.full(3, 1 / 3))
    assert opposite[0] == Drift(2.0, None), "the mean direction of the others is 0"


def test_what_is_not_known_counts_for_nobody() -> None:
    vectors, weights = drawn(1, 4)
    products = vectors @ vectors.T
    products[2], products[:, 2] = math.nan, math.nan
    found = drift_of([1.0, 2.0, 3.0, 4.0], weights, products)
    others = [0, 1, 3]
    assert found[2] == Drift(1.5, None)
    assert [found[m].cosine for m in others] == pytest.approx(reference(vectors[others], weights[others]))
    assert drift_of([1.0, 2.0], EQUAL, None) == [Drift(1.0, None), Drift(2.0, None)]
