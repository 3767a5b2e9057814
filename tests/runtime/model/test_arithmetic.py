"""The arithmetic of rounds with many values, some of them left out, against rounds of the others alone."""

import numpy as np
import pytest

from diloco_jax.core.codec import encode
from diloco_jax.core.layout import Piece, make_layout
from diloco_jax.core.merge import PAIRS_MAX, Rule
from diloco_jax.core.outer import Nesterov
from diloco_jax.runtime.model.arithmetic import Arithmetic, Setup

SIZE = 700


def merged(seeds: list[int], chosen: list[int]) -> int:
    """Inspect the values of these seeds, merge those chosen by index, and return the digest of the new version."""
    layout = make_layout([Piece("w", (SIZE,))])
    setup = Setup((layout,), ({"w": Rule("rda", SIZE)},), Nesterov(0.7, 0.9), "int4", "int4", 2)
    arithmetic = Arithmetic(setup)
    arithmetic.load(0, 1, setup.first(0, np.ones(SIZE, np.float32)))
    values = {seed: np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32) for seed in seeds}
    arithmetic.inspect(0, [encode({"w": value}, "int4") for value in values.values()], [1] * len(seeds))
    weights = np.array([1.0 + seeds[i] for i in chosen])
    finite, digest = arithmetic.update(0, 2, chosen, weights / weights.sum())
    assert finite
    return digest


@pytest.mark.parametrize("left", [PAIRS_MAX - 1, PAIRS_MAX, PAIRS_MAX + 1, PAIRS_MAX + 2])
def test_values_that_are_left_out_change_no_bit(left: int) -> None:
    """A replay inspects only the values that the run merged."""
    seeds = list(range(PAIRS_MAX + 3))
    chosen = seeds[1 : 1 + left]
    assert merged(seeds, chosen) == merged(chosen, list(range(left)))
