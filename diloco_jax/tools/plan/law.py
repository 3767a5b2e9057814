"""The published law of loss against the number of learners (Scaling Laws for DiLoCo, arXiv 2503.09799).

It fits the evaluation loss of N parameters as A N^a, for data parallel and for M learners:

    distance(M, N) = A(M) N^a(M) / (A(data parallel) N^a(data parallel)) - 1

The fits are for 35M to 2.4B parameters, 20 tokens per parameter, H = 30, plain averages without delay, float payloads,
and tuned rates for each M. Outside of that range the value is an extrapolation.
"""

import math

# A and a: of data parallel, and by M.
DATA_PARALLEL = (18.129, -0.0953)
FITS = {1: (18.363, -0.0961), 2: (18.768, -0.0969), 4: (19.762, -0.0992), 8: (21.051, -0.1018)}
# The fits are for models of these sizes.
PARAMETERS_MIN, PARAMETERS_MAX = 35e6, 2.4e9
LEARNERS_MAX = max(FITS)


def distance(learners: int, parameters: float) -> float:
    """Return how far M learners end above data parallel's loss, as a share of it; negative if below.

    It is linear in log2 M between fits, and continues the line from 4 to 8 beyond 8.
    """
    known = sorted(FITS)
    right = min(max(1, sum(each < learners for each in known)), len(known) - 1)
    (low, at_low), (high, at_high) = ((math.log2(m), _fit(m, parameters)) for m in known[right - 1 : right + 1])
    return at_low + (math.log2(learners) - low) / (high - low) * (at_high - at_low)


def is_extrapolated(learners: int, parameters: float) -> bool:
    """Tell whether a value of `distance` is outside of the fitted range."""
    return learners > LEARNERS_MAX or not PARAMETERS_MIN <= parameters <= PARAMETERS_MAX


def _fit(learners: int, parameters: float) -> float:
    (factor, power), (reference, slope) = FITS[learners], DATA_PARALLEL
    return factor / reference * parameters ** (power - slope) - 1
