"""Draws of tokens: the ids that each option leaves, against NumPy and against transformers."""

from functools import cache
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.training.models.vocabulary import Drawing, draw, filtered

pytestmark = pytest.mark.usefixtures("quick_compiler")

LOGITS = np.random.default_rng(5).normal(0, 2.5, (3, 40)).astype(np.float32)
OPTIONS = [
    Drawing(temperature, top_k, top_p, min_p)
    for temperature, top_k, top_p, min_p in product((0.5, 1.7), (0, 1, 7, 60), (0.3, 0.9, 1.0), (0.0, 0.05))
][::5]


def left(logits: np.ndarray, how: Drawing) -> set[int]:
    """Return the ids that are left, one filter after the other, each by the probabilities of those left before it."""
    chance = np.exp(logits.astype(np.float64) / how.temperature)
    ids = sorted(range(len(logits)), key=lambda id: -chance[id])[: how.top_k or None]
    total = sum(chance[id] for id in ids)
    ids = [id for at, id in enumerate(ids) if sum(chance[ids[:at]]) < how.top_p * total]
    return {id for id in ids if chance[id] >= how.min_p * chance[ids[0]]}


@cache
def found(how: Drawing) -> list[set[int]]:
    program = jax.jit(lambda logits: filtered(logits, how))
    return [{*np.flatnonzero(np.isfinite(row)).tolist()} for row in np.asarray(program(LOGITS))]


def test_filters_leave_the_ids_of_the_reference() -> None:
    for how in OPTIONS:
        assert found(how) == [left(row, how) for row in LOGITS], how


@pytest.mark.extra("parity")
def test_filters_leave_the_ids_of_transformers() -> None:
    import torch
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    for how in OPTIONS:
        scores = torch.from_numpy(LOGITS)
        warpers = [TemperatureLogitsWarper(how.temperature), TopPLogitsWarper(how.top_p), MinPLogitsWarper(how.min_p)]
        for warper in [warpers[0], *([TopKLogitsWarper(how.top_k)] if how.top_k else []), *warpers[1:]]:
            scores = warper(None, scores)
        expected = [{*np.flatnonzero(row).tolist()} for row in torch.isfinite(scores).numpy()]
        assert found(how) == expected, how


def test_draws_follow_the_probabilities_of_the_ids_that_are_left() -> None:
    logits = jnp.log(jnp.asarray([[0.1, 0.4, 0.2, 0.3]]))
    keys = jax.random.split(jax.random.key(0), 4000)

    def counts(how: Drawing) -> np.ndarray:
        drawn = jax.jit(lambda keys: draw(jnp.repeat(logits, len(keys), axis=0), keys, how))(keys)
        return np.bincount(np.asarray(drawn), minlength=4) / len(keys)

    # Five standard errors are 0.04.
    np.testing.assert_allclose(counts(Drawing(1.0)), [0.1, 0.4, 0.2, 0.3], atol=0.04)
    np.testing.assert_allclose(counts(Drawing(1.0, top_p=0.75)), [0, 4 / 9, 2 / 9, 3 / 9], atol=0.04)
    assert counts(Drawing(0.0))[1] == counts(Drawing(1.0, top_k=1))[1] == counts(Drawing(1.0, top_p=0.4))[1] == 1
