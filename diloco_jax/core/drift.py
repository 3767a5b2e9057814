"""Drift: how far one learner's contribution to a merge differs from those of the others.

    norm ratio   |v_m| / median_j |v_j|
    cosine       <v_m, u> / (|v_m| |u|),      u = sum_{j != m} w_j v_j / |v_j|

u is the mean direction of the others, with their weights in the merge. So the cosine compares a learner with what
radial-directional averaging would do without it. Because each v_j has length 1 in u, a single very long contribution
changes only its own numbers; in a mean of the v_j themselves it would hide all others.

Both follow from the products <v_i, v_j> that a merge computes anyway, so no value is read again. People read them; no
merge does.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from diloco_jax.core.merge import CANCELLED_NORM, ZERO_NORM


class Drift(NamedTuple):
    """The drift of one learner in one round; a number is None where it is not defined or not known."""

    norm_ratio: float | None
    cosine: float | None


def drift_of(
    norms: Sequence[float], weights: Float64[np.ndarray, "m"], products: Float64[np.ndarray, "m m"] | None
) -> list[Drift]:
    """Return the drift of each learner of a round; an empty list if the round has a single one.

    Args:
      norms: |v_m|, finite.
      weights: w_m, at least 0, with the sum 1.
      products: <v_i, v_j>; only the diagonal and the elements above it are read. A learner whose square is not finite
        has no cosine and does not count in u. None if no products are known; then nobody has a cosine.
    """
    if len(norms) < 2:
        return []
    # The lower median is one of the norms, also for an even number of learners.
    median = sorted(norms)[(len(norms) - 1) // 2]
    ratios = [norm / median if median > ZERO_NORM else None for norm in norms]
    cosines = [None] * len(norms) if products is None else _cosines(products, weights)
    return [Drift(*each) for each in zip(ratios, cosines, strict=True)]


def _cosines(products: Float64[np.ndarray, "m m"], weights: Float64[np.ndarray, "m"]) -> list[float | None]:
    squares = np.diagonal(products)
    known = np.flatnonzero(np.isfinite(squares) & (squares > ZERO_NORM**2))
    lengths = np.sqrt(squares[known])
    upper = np.triu(products[np.ix_(known, known)] / np.outer(lengths, lengths), 1)
    # The cosine of each pair of learners.
    pairs = upper + upper.T + np.eye(len(known))
    found: list[float | None] = [None] * len(weights)
    for at, learner in enumerate(known.tolist()):
        others = np.where(np.arange(len(known)) == at, 0.0, weights[known])
        length = math.sqrt(max(0.0, float(others @ pairs @ others)))
        # Where the others' directions cancel, their mean has no direction.
        if length > CANCELLED_NORM:
            # Rounding may lead out of the range of a cosine.
            found[learner] = min(1.0, max(-1.0, float(pairs[at] @ others) / length))
    return found
