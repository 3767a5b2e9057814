"""Merge: the outer gradients of several learners become one (paper, 3.2 and App. D.2).

An outer gradient is `global - local`, so the outer optimizer descends along it. There are two methods for a tensor:

  average  sum_m w_m v_m                                        (weights sum to 1)
  rda      (sum_m w_m |v_m|) * phi(sum_m w_m phi(v_m)),         phi(v) = v / |v|

In a stack each layer and each expert is merged separately; in a tensor that is cut, each piece is.

The learners' outer gradients are almost orthogonal, so the norm of their average shrinks like 1 / sqrt(M). Radial-
directional averaging (rda) keeps the mean norm for any M. (The paper prints the radial factor without norm bars.)

This module computes weights and coefficients from a few float64 numbers; equal inputs give equal bits. The loops over
the values themselves are in passes.py.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement
from typing import Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Float32, Float64

from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.core.kinds import Kind, matches

Method = Literal["rda", "average"]
WeightScheme = Literal["tokens2_per_step", "tokens", "uniform"]

# A mean direction shorter than this is rounding noise, because float32 resolves about 1e-7.
CANCELLED_NORM = 1e-6
# For shorter v, phi(v) is 0, because 1 / |v| must stay far inside the range of float32.
ZERO_NORM = 1e-30
# With more learners than this, a second pass over the values is faster than the products of all pairs.
PAIRS_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeConfig:
    """Settings of the merge: the method for each tensor, and the limit for outliers."""

    method: Method = "rda"
    """rda averages the directions and the norms of the islands' outer gradients separately, so that the merged gradient
    is as long as the gradient of a single island (radial-directional averaging, the paper). average is the weighted
    mean of the outer gradients. Their directions differ, so the mean becomes shorter with more islands and needs a
    higher optimizer.learning_rate: about 1.4 times that of rda with four islands and 0.12M parameters. Vectors and
    embeddings (first axis `vocab`) are always averaged. Set it to average for H of 3 to 6 with up to four islands,
    together with a new learning rate (docs/settings.md). A comparison at one rate favours rda."""
    average_paths: tuple[str, ...] = ("*embed*",)
    """Parameters that are averaged with every `method`: case-sensitive patterns of the whole path, where '*' stands for
    any characters, '/' included. ('*',) averages all parameters. Set it if your model has tables that few tokens use,
    such as embeddings, under names that do not match and without a first axis vocab."""
    outlier_factor: float = 100.0
    """A learner's outer gradient is excluded, and the learner warned, when its norm per inner step is this many times
    the usual one of the fragment; above 1, or 0 for no limit. An inner optimizer with a bounded step never comes near
    100, even in a warm-up; a model that diverges, or damaged memory, is far above. An outer gradient is never excluded
    if it moves the fragment by less than a thousandth of its initial norm per inner step. With fewer than three
    learners in a round, a lasting change above the limit is excluded twice, then merged. Raise it if good work is
    excluded, and lower it if damaged values are merged."""
    pairs_max: int = PAIRS_MAX
    """rda computes the products of all pairs of values if a merge has at most this many learners. With more learners it
    reads all values a second time instead, so that its time grows with the number of learners and not with the square.
    The two ways differ in the last bits of their results, so a run keeps this number. Leave it at the default, where
    both ways take about the same time."""

    shares: dict[str, float] = field(default_factory=dict)
    """Weights of corpora that stay at their sites, by the name of the corpus (data.corpus); a corpus that is not named
    has 1, and so has the run's. A merge gives each corpus its share of the weights of those present, divided among its
    islands by `weights`. Empty: the weights of all islands by `weights`. Set it if corpora must not count by the speed
    of their machines."""
    share_max: float = 2.0
    """Most weight of a corpus that stays at its site in a merge, in equal shares of the corpora present: with 2 and
    four corpora, half of all weights; with two corpora no limit. 0: no limit. The excess goes to the others in
    proportion. Lower it, not below 1, if no site may lead the model."""

    def __post_init__(self) -> None:
        if wrong := next((name for name, share in self.shares.items() if not 0 < share < math.inf), None):
            raise ValueError(f"merge.shares.{wrong} is {self.shares[wrong]}; use a number above 0")
        if not (self.share_max == 0 or 1 <= self.share_max < math.inf):
            raise ValueError(f"merge.share_max is {self.share_max}; use a number of at least 1, or 0 for no limit")
        if not (self.outlier_factor == 0 or 1 < self.outlier_factor < math.inf):
            raise ValueError(f"merge.outlier_factor is {self.outlier_factor}; use a number above 1, or 0 for no limit")
        if self.pairs_max < 1:
            raise ValueError(f"merge.pairs_max is {self.pairs_max}; use a number of learners of at least 1")
        if self.method not in get_args(Method):
            raise ValueError(f"merge method is {self.method!r}; choose one of {', '.join(get_args(Method))}")


def token_weights(
    tokens: Sequence[int], steps: Sequence[int], scheme: WeightScheme = "tokens2_per_step"
) -> Float64[np.ndarray, "m"]:
    """Return the learners' weights in a merge, w_m = tokens_m^2 / steps_m, normalised to the sum 1.

    The product is quantity, tokens_m, times quality, tokens_m / steps_m (paper, 3.2).

    Args:
      tokens: tokens of each learner since it adopted the fragment, at least 0.
      steps: inner steps of each learner since it adopted the fragment, at least 1.
      scheme: 'tokens2_per_step', 'tokens' (quantity only) or 'uniform'.

    Raises:
      ValueError: lengths differ or are 0, a learner has less than one step or negative tokens, or all weights are 0.
    """
    if len(tokens) != len(steps) or not steps:
        raise ValueError(f"got tokens of {len(tokens)} learners and steps of {len(steps)}; need both of one or more")
    if min(steps) < 1:
        raise ValueError(f"steps {list(steps)} hold a learner without a step; leave it out of the merge")
    if min(tokens) < 0:
        raise ValueError(f"tokens {list(tokens)} hold a negative count")
    # Python integers and one correctly rounded division give the same weights on every machine.
    if scheme == "tokens2_per_step":
        weights = [count * count / step for count, step in zip(tokens, steps, strict=True)]
    elif scheme == "tokens":
        weights = [float(count) for count in tokens]
    else:
        weights = [1.0] * len(steps)
    total = math.fsum(weights)
    if not 0 < total < math.inf:
        raise ValueError(f"weights {weights} must be finite, at least 0, and not all 0")
    return np.asarray(weights, np.float64) / total


def corpus_weights(
    weights: Float64[np.ndarray, "m"], corpora: Sequence[str], shares: Mapping[str, float], share_max: float
) -> Float64[np.ndarray, "m"]:
    """Return the learners' weights in a merge after the shares of their corpora, and the limit of one, are applied.

    The weight of a corpus is W_c = sum of w_m over its learners. With shares, W_c becomes s_c / sum s over the corpora
    present. Then every W_c of a corpus with a name is at most share_max / C, C being the number of corpora present; the
    excess goes to the other corpora in proportion. Within a corpus the weights keep their proportion.

    Args:
      weights: w_m, at least 0, with the sum 1.
      corpora: the name of each learner's corpus; "" is the run's, which has no limit.
      shares: s_c by name, above 0; 1 where it is missing. Empty: W_c as it is.
      share_max: limit in equal shares, at least 1; 0 for none.
    """
    names = sorted(set(corpora))
    if len(names) == 1:
        return weights
    before = {n: math.fsum(w for w, c in zip(weights.tolist(), corpora, strict=True) if c == n) for n in names}
    wanted = {n: shares.get(n, 1.0) if before[n] else 0.0 for n in names} if shares else before
    total = math.fsum(wanted.values())
    after = _limited({n: share / total for n, share in wanted.items()}, share_max / len(names))
    found = [w / before[c] * after[c] if before[c] else 0.0 for w, c in zip(weights.tolist(), corpora, strict=True)]
    return np.asarray(found, np.float64) / math.fsum(found)


def _limited(shares: dict[str, float], most: float) -> dict[str, float]:
    """Limit the shares of corpora with a name to `most`, if the others can take the excess; 0 for no limit."""
    limited: set[str] = set()
    while most and (above := {n for n, share in shares.items() if n and share > most} - limited):
        limited |= above
        left, rest = 1.0 - most * len(limited), math.fsum(s for n, s in shares.items() if n not in limited)
        # Where nobody else has weight, a limit would leave weights without a place.
        if rest <= 0:
            return shares
        shares = {n: most if n in limited else share / rest * left for n, share in shares.items()}
    return shares


def coefficients(
    products: Float64[np.ndarray, "m m"],
    weights: Float64[np.ndarray, "m"],
    method: Method,
    square: float | None = None,
) -> Float32[np.ndarray, "m"]:
    """Return the factors c of one unit's merge: merged = sum_m c_m v_m (paper, D.2).

    The products <v_i, v_j> of the learners' outer gradients are enough to compute them. A unit is a tensor, a layer or
    expert of a stack, or the piece of one of these in the fragment.

      average   c_m = w_m
      rda       c_m = (w_m / |v_m|) (sum_j w_j |v_j|) / |sum_j w_j phi(v_j)|

    Because `phi(0) = 0`, a learner that did not move shortens the result and does not affect its direction. Where
    directions cancel (`|sum_m w_m phi(v_m)| < 1e-6`), the result is the weighted average. The outer gradient of a
    single contributor is returned unchanged.

    Args:
      products: <v_i, v_j>; only the diagonal and the elements above it are read.
      weights: w_m, at least 0, with the sum 1.
      square: |sum_j w_j phi(v_j)|^2; then only the diagonal is read. None to compute it from the products.
    """
    if method == "average" or np.count_nonzero(weights) == 1:
        return weights.astype(np.float32)
    norms = [math.sqrt(each) for each in np.diagonal(products).tolist()]
    scales = _factors(norms, weights)
    if square is None:
        pairs = combinations_with_replacement(range(len(scales)), 2)
        rows = products.tolist()
        terms = [scales[i] * scales[j] * rows[i][j] * (1 if i == j else 2) for i, j in pairs]
        square = math.fsum(terms)
    length = math.sqrt(max(0.0, square))
    if length < CANCELLED_NORM:
        return weights.astype(np.float32)
    radius = math.fsum(float(w) * norm for w, norm in zip(weights, norms, strict=True))
    return np.array([scale * (radius / length) for scale in scales], np.float64).astype(np.float32)


def direction_factors(products: Float64[np.ndarray, "m m"], weights: Float64[np.ndarray, "m"]) -> list[float]:
    """Return w_m / |v_m|, the factors of the mean direction sum_m w_m phi(v_m), from the squares on the diagonal."""
    return _factors([math.sqrt(each) for each in np.diagonal(products).tolist()], weights)


def _factors(norms: Sequence[float], weights: Float64[np.ndarray, "m"]) -> list[float]:
    return [w / norm if norm > ZERO_NORM else 0.0 for w, norm in zip(weights.tolist(), norms, strict=True)]


class Rule(NamedTuple):
    """The method for one slice, and the size of the units that have separate coefficients."""

    method: Method
    # The number of consecutive elements that share their coefficients.
    unit: int


def merge_rules(plan: FragmentPlan, config: MergeConfig) -> tuple[dict[str, Rule], ...]:
    """Return for each fragment the rule for merging each of its slices, by key."""
    found = []
    for fragment in plan.fragments:
        paths = {each.key: each.path for each in fragment.slices}
        found.append(
            {key: merge_rule(paths[key], shape, plan.kinds[paths[key]], config) for key, shape in fragment.keys_shapes}
        )
    return tuple(found)


def merge_rule(path: str, shape: tuple[int, ...], kind: Kind, config: MergeConfig) -> Rule:
    """Return the rule for merging a slice of the tensor at `path`.

    Vectors and tables are averaged with every method, as in the paper. A direction means little for a vector, and for
    the rows of a table that few learners touched.
    """
    averaged = any(matches(path, pattern) for pattern in config.average_paths)
    if config.method != "average" and kind.form == "matrix" and not averaged:
        return Rule(config.method, kind.unit(shape))
    return Rule("average", math.prod(shape))
