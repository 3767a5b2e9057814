"""Merge: from the outer gradients of several learners to one (paper, 3.2 and App. D.2).

An outer gradient is `global - local`, so the outer optimizer descends along it. Two ways to merge, per tensor:

  average  sum_m w_m v_m                                        (weights sum to 1)
  rda      (sum_m w_m |v_m|) * phi(sum_m w_m phi(v_m)),         phi(v) = v / |v|

Outer gradients of learners are almost orthogonal, so the norm of their average shrinks like 1 / sqrt(M); radial-
directional averaging keeps the mean norm for any M. (The paper prints the radial factor without norm bars.)

Everything here is NumPy on the host: float32 data, float64 scalars, separate multiplications and additions, learners
and elements in a fixed order. Equal inputs give equal bits. Values that are not finite propagate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float32, Float64

Method = Literal["rda", "average"]
WeightScheme = Literal["tokens2_per_step", "tokens", "uniform"]
Weights = Sequence[float | int] | Float64[np.ndarray, "m"]

CANCELLED_NORM = 1e-6  # a mean direction shorter than this is rounding noise: float32 resolves about 1e-7
ZERO_NORM = 1e-30  # phi(v) = 0 below: 1 / |v| must stay far inside the range of float32
_CHUNK = 1 << 16  # elements worked on at once: 256 KiB of float32 stay in the cache between two operations


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeConfig:
    """Which tensors are merged how."""

    method: Method = "rda"
    """'rda' keeps the mean norm of the learners' outer gradients; 'average' lets it shrink with their number (then
    raise the outer learning rate). Tensors with fewer than two axes are always averaged."""

    average_paths: tuple[str, ...] = ("*embed*",)
    """Parameters averaged whatever `method` says: patterns on the whole path, case-sensitive, where '*' stands
    for any characters, '/' too. ('*',) averages all; () makes no exception for embeddings."""

    outlier_factor: float = 100.0
    """A learner's outer gradient is left out, and its sender warned, when its norm per inner step is this many times
    what is usual for the fragment; above 1, or 0 for no limit. An inner optimizer with a bounded step never comes
    near 100, even in a warm-up; a model that diverges, or damaged memory, is far above. Near 1 leaves out good work."""

    def __post_init__(self) -> None:
        if not (self.outlier_factor == 0 or 1 < self.outlier_factor < math.inf):
            raise ValueError(f"merge.outlier_factor is {self.outlier_factor}; use a number above 1, or 0 for no limit")
        if self.method not in get_args(Method):
            raise ValueError(f"merge method is {self.method!r}; choose one of {', '.join(get_args(Method))}")


def token_weights(
    tokens: Sequence[int], steps: Sequence[int], scheme: WeightScheme = "tokens2_per_step"
) -> Float64[np.ndarray, "m"]:
    """Return the learners' normalised weights: `w_m = tokens_m^2 / steps_m` (paper, 3.2: quantity times quality).

    Args:
      tokens: of each learner since it adopted the fragment.
      steps: inner steps of each learner since it adopted the fragment, at least 1.
      scheme: 'tokens2_per_step', 'tokens' (quantity only) or 'uniform'.

    Returns:
      Weights that sum to 1.

    Raises:
      ValueError: lengths differ or are 0, a learner has no step or negative tokens, or every weight is 0.
    """
    if len(tokens) != len(steps) or not steps:
        raise ValueError(f"got tokens of {len(tokens)} learners and steps of {len(steps)}; need both of one or more")
    if min(steps) < 1:
        raise ValueError(f"steps {list(steps)} hold a learner without a step; leave it out of the merge")
    if min(tokens) < 0:
        raise ValueError(f"tokens {list(tokens)} hold a negative count")
    # Python integers and one correctly rounded division: the same weights on every machine.
    if scheme == "tokens2_per_step":
        weights = [count * count / step for count, step in zip(tokens, steps, strict=True)]
    elif scheme == "tokens":
        weights = [float(count) for count in tokens]
    else:
        weights = [1.0] * len(steps)
    return _normalised(weights, len(steps))


def average(gradients: Iterable[Float32[np.ndarray, "..."]], weights: Weights) -> Float32[np.ndarray, "..."]:
    """Return the weighted mean, `sum_m w_m v_m / sum_m w_m`.

    Args:
      gradients: of equal shapes, one per learner; read one at a time, so a generator holds only one in memory.
      weights: one per learner, at least 0, with a sum above 0; need not be normalised.

    Raises:
      ValueError: no gradients, or numbers or shapes that do not match, or unusable weights.
    """
    return _weighted_sum(gradients, _normalised(weights))


def radial_directional_average(
    gradients: Sequence[Float32[np.ndarray, "..."]], weights: Weights
) -> Float32[np.ndarray, "..."]:
    """Return the mean norm along the mean direction, `(sum_m w_m |v_m|) phi(sum_m w_m phi(v_m))` (paper, D.2).

    Norms are over the whole array. `phi(0) = 0`: a learner that did not move shortens the result and has no say in
    the direction. Where directions cancel (`|sum_m w_m phi(v_m)| < 1e-6`) there is none, and the result is the
    weighted average. One contributor is returned as it is.

    Args:
      gradients: of equal shapes, one per learner.
      weights: one per learner, at least 0, with a sum above 0; need not be normalised.

    Raises:
      ValueError: no gradients, or numbers or shapes that do not match, or unusable weights.
    """
    shares = _normalised(weights, len(gradients))
    if np.count_nonzero(shares) == 1:
        return _weighted_sum(gradients, shares)
    norms = [_norm(gradient) for gradient in gradients]
    scales = [share / norm if norm > ZERO_NORM else 0.0 for share, norm in zip(shares, norms, strict=True)]
    direction = _weighted_sum(gradients, np.asarray(scales, np.float64))
    length = _norm(direction)
    if length < CANCELLED_NORM:
        return _weighted_sum(gradients, shares)
    radius = math.fsum(share * norm for share, norm in zip(shares, norms, strict=True))
    direction *= np.float32(radius / length)
    return direction


def merge_method(path: str, shape: tuple[int, ...], config: MergeConfig) -> Method:
    """Return how the tensor at `path` is merged: tensors with fewer than two axes and `average_paths` are averaged.

    Args:
      path: of the whole tensor.
      shape: of the tensor or of a slice of it (equal number of axes).
      config: the settings.
    """
    if len(shape) < 2 or any(_matches(path, pattern) for pattern in config.average_paths):
        return "average"
    return config.method


def merge_fragment(
    gradients: Sequence[Mapping[str, Float32[np.ndarray, "..."]]],
    weights: Weights,
    methods: Mapping[str, Method],
) -> dict[str, Float32[np.ndarray, "..."]]:
    """Merge the learners' outer gradients of one fragment, each tensor slice by itself.

    Args:
      gradients: one mapping per learner, all with the keys of `methods`. Their order is part of the result's last
        bits: sort by learner name.
      weights: one per learner, at least 0, with a sum above 0; need not be normalised.
      methods: 'rda' or 'average', by key.

    Returns:
      New arrays, by key, in the order of `methods`.

    Raises:
      ValueError: no gradients, or keys, numbers or shapes that do not match, or unusable weights.
    """
    shares = _normalised(weights, len(gradients))
    for index, gradient in enumerate(gradients):
        if different := sorted(gradient.keys() ^ methods.keys()):
            raise ValueError(f"gradient {index} and the merge methods differ in key {different[0]!r}")
    merged = {}
    for key, method in methods.items():
        merge = radial_directional_average if method == "rda" else average
        try:
            merged[key] = merge([gradient[key] for gradient in gradients], shares)
        except ValueError as error:
            raise ValueError(f"{key!r}: {error}") from error
    return merged


def _matches(path: str, pattern: str) -> bool:
    return re.fullmatch(".*".join(re.escape(part) for part in pattern.split("*")), path) is not None


def _normalised(weights: Weights, count: int | None = None) -> Float64[np.ndarray, "m"]:
    values = np.asarray(weights, np.float64)
    if count is not None and values.shape != (count,):
        raise ValueError(f"got {count} gradients and weights of shape {values.shape}; need one weight per gradient")
    total = math.fsum(values)
    if not (math.isfinite(total) and total > 0 and values.min() >= 0):
        raise ValueError(f"weights {values.tolist()} must be finite, at least 0, and not all 0")
    return values / total


def _weighted_sum(
    gradients: Iterable[Float32[np.ndarray, "..."]], scales: Float64[np.ndarray, "m"]
) -> Float32[np.ndarray, "..."]:
    """sum_m scale_m v_m in one float32 accumulator."""
    total: np.ndarray | None = None
    product = np.empty(_CHUNK, np.float32)
    for gradient, scale in zip(gradients, scales.astype(np.float32), strict=True):
        if total is None:
            total = np.zeros(gradient.shape, np.float32)
        elif gradient.shape != total.shape:
            raise ValueError(f"gradients have different shapes, {total.shape} and {gradient.shape}")
        if scale == 0:
            continue
        flat, sums = gradient.reshape(-1), total.reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            part = flat[start : start + _CHUNK]
            np.multiply(part, scale, out=product[: part.size])
            sums[start : start + _CHUNK] += product[: part.size]
    if total is None:
        raise ValueError("no gradients to merge; a merge needs at least one")
    return total


def _norm(array: Float32[np.ndarray, "..."]) -> float:
    """Euclidean norm. Not np.linalg.norm: BLAS chooses its order of summation by machine and thread count."""
    flat = array.reshape(-1)
    squares = np.empty(min(_CHUNK, flat.size), np.float64)
    sums = []
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK]
        np.multiply(part, part, out=squares[: part.size], dtype=np.float64)
        sums.append(float(np.add.reduce(squares[: part.size])))
    return math.sqrt(math.fsum(sums))
