"""Which learners' values may be merged: not what is damaged, holds NaN or infinity, or is wildly large.

Large is judged by norm per inner step, against the median of the last accepted values of the fragment, or against the
median of this round if that is larger and there are enough parts: a change that concerns everybody, such as the end of
a long warm-up, must not expel everybody. Nor is what cannot do harm wildly large: rows of an embedding may rest for
hundreds of steps until their token comes by. Medians are part of a fragment's state, so a replay leaves out whom the
run left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from diloco_jax.protocol.effects import Part

RATES_KEPT = 32  # accepted values whose norm per step is remembered, by fragment
RATES_MIN = 8  # with fewer, the fragment's past says nothing yet
HARMLESS = 1e-3  # a change of this share of a fragment's own norm, per inner step, is left out by no comparison
PARTS_MIN = 3  # with fewer in a round, one bad part could be the median


class Candidate(NamedTuple):
    """One learner's part, and the norm of its value; not finite if the value is not."""

    part: Part
    norm: float

    @property
    def rate(self) -> float:
        """Norm per inner step."""
        return self.norm / self.part.steps


def choose(
    candidates: Sequence[Candidate],
    rates: Sequence[float],
    outlier_factor: float,
    fragment_norm: float,
    left_out: dict[str, str],
) -> list[int]:
    """Indices of those who may be merged; who may not is added to `left_out` with the reason.

    Args:
        candidates: in the order of the learners' names.
        rates: norm per inner step of the fragment's last accepted values.
        outlier_factor: how many times what is usual a value may be; 0 for no limit.
        fragment_norm: of the fragment itself.
        left_out: learner -> why.
    """
    finite = [i for i, candidate in enumerate(candidates) if math.isfinite(candidate.norm)]
    for candidate in candidates:
        if not math.isfinite(candidate.norm):
            left_out[candidate.part.learner_id] = "NaN or infinity in its value"
    limit, usual = _limit(rates, [candidates[i].rate for i in finite], outlier_factor)
    chosen = []
    for i in finite:
        if candidates[i].rate > max(limit, HARMLESS * fragment_norm):
            left_out[candidates[i].part.learner_id] = (
                f"its value has norm {candidates[i].rate:.3g} per inner step, where {usual:.3g} is usual "
                f"(merge.outlier_factor {outlier_factor:g})"
            )
        else:
            chosen.append(i)
    return chosen


def _limit(rates: Sequence[float], now: Sequence[float], outlier_factor: float) -> tuple[float, float]:
    """The largest norm per inner step that is credible, and what is usual."""
    medians = [_median(rates)] if len(rates) >= RATES_MIN else []
    moving = [rate for rate in now if rate > 0]
    medians += [_median(moving)] if len(moving) >= PARTS_MIN else []
    if not medians or not outlier_factor:
        return math.inf, 0.0
    return outlier_factor * max(medians), max(medians)


def _median(values: Sequence[float]) -> float:
    """The lower median: one of the values, so no rounding."""
    return sorted(values)[(len(values) - 1) // 2]
