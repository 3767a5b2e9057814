"""The cost of more learners in quality, as the factor of compute that reaches the loss of data parallel.

No source measures this factor directly. Each of the four sources here measured something else, and its penalty turns
the measurement into compute (docs/simulate.md). All sources are small or noisy, and none has more than 16 learners.
"""

import math
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Evaluation losses of DiLoCo by parameters (Scaling laws for DiLoCo, arXiv 2503.09799): data parallel, then M = 1, 2, 4
# and 8 if published. The runs are synchronous with H = 30, plain averages and a tuned outer rate for each M.
SCALING_LOSSES: dict[float, tuple[float, ...]] = {
    35e6: (3.485, 3.482, 3.508, 3.554, 3.621),
    90e6: (3.167, 3.162, 3.182, 3.213, 3.265),
    180e6: (2.950, 2.943, 2.957, 2.981, 3.019),
    335e6: (2.784, 2.777, 2.788, 2.808, 2.841),
    550e6: (2.653, 2.645, 2.657, 2.673, 2.698),
    1.3e9: (2.460, 2.451, 2.464, 2.472, 2.493),
    2.4e9: (2.326, 2.317, 2.323, 2.332, 2.351),
    4e9: (2.224, 2.219, 2.220, 2.230),
    10e9: (2.090, 2.086, 2.086, 2.096),
}
# The source's fit of data parallel is loss ~ parameters^-0.0953 with tokens in proportion.
SCALING_EXPONENT = 0.0953
# The distance of the source's losses from its fits.
SCALING_NOISE = 0.002

# Change of the validation loss in per cent when a run of 4 learners has M of them for half of its compute, and the same
# for data parallel, where only the batch grows (Decoupled DiLoCo, Table 15b: 2B parameters, 128B tokens).
SCAVENGED = ((5, 0.09, 0.02), (6, -0.01, -0.04), (8, 0.08, -0.02), (16, 0.23, 0.07))
# With this many learners the scores equal those of data parallel (Table 4).
SCAVENGED_BASE = 4
# The distance of the four values from the line.
SCAVENGED_NOISE = 0.0005
# Data parallel with more compute and equal steps (Table 15a): compute, change of the loss in per cent.
SCAVENGED_COMPUTE = ((1.125, -0.22), (1.25, -0.47), (1.5, -0.79), (2.5, -1.41))

# Mean scores in points, text and vision, of 2B parameters on 26B tokens; each M is the mean of three runs: without
# failures, at 1.2m chips, at 2.4m chips (Tables 11 and 12). Data parallel: one run, then one on ten times the tokens.
SCORES = {2: (54.63, 36.60), 4: (55.13, 35.90), 8: (54.80, 37.17), 16: (53.93, 34.33)}
SCORES_DATA_PARALLEL = ((55.1, 38.2), (61.8, 47.8))
# The points between two runs with equal settings, text and vision.
SCORES_NOISE = (1.0, 2.0)

# Our measurement in docs/log.md: 1.0M parameters, H = P = 24; data parallel's losses after 1.84M and 6.05M tokens.
QUICKSTART_LEARNERS, QUICKSTART_PERCENT, QUICKSTART_NOISE = 4, 2.87, 0.004
QUICKSTART_LOSSES = ((1.84e6, 1.353), (6.053888e6, 1.1766))

# Below the least slope the compute for a loss overflows.
SLOPE_MIN, SLOPE_MAX = 0.001, 10.0


class Cost(NamedTuple):
    """Cost of a number of learners against data parallel."""

    # None if the source measured scores instead of losses.
    loss_percent: float | None
    # A multiple of data parallel's compute. It is at least 1, so a measured gain is ignored.
    compute: float
    # The uncertainty of the natural logarithm of `compute`.
    noise: float
    # Whether the cost is outside of the source's measurements.
    extrapolated: bool


class Situation(NamedTuple):
    """Facts beside the number of learners that a cost depends on."""

    parameters: float
    # The relative fall of the loss per relative growth of the compute; None: the source's slope.
    slope: float | None


@dataclass(frozen=True, slots=True)
class Penalty:
    """A source of costs: its description, and its cost of M > 1 learners."""

    source: str
    cost: Callable[[int, Situation], Cost]


def _line(points: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate linearly between points in order of x; the last line continues beyond them."""
    right = min(max(1, bisect([at for at, _ in points], x)), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1 : right + 1]
    return y0 + (x - x0) / (x1 - x0) * (y1 - y0)


def _from_loss(percent: float, noise: float, slope: float, *, extrapolated: bool) -> Cost:
    """Return the cost of a loss this many per cent above data parallel's; `noise` is that of its logarithm."""
    percent = max(0.0, percent)
    return Cost(percent, math.exp(math.log1p(percent / 100) / slope), noise / slope, extrapolated)


def scaling_percent(learners: int, parameters: float) -> float:
    """Return the per cent above data parallel's loss, interpolated between sizes and numbers of learners."""
    columns = []
    for column, trained in enumerate((1, 2, 4, 8), 1):
        sizes = [
            (math.log(size), 100 * (losses[column] / losses[0] - 1))
            for size, losses in SCALING_LOSSES.items()
            if column < len(losses)
        ]
        within = min(max(math.log(parameters), sizes[0][0]), sizes[-1][0])
        columns.append((math.log2(trained), _line(sizes, within)))
    return _line(columns, math.log2(learners))


def _scaling_laws(learners: int, situation: Situation) -> Cost:
    largest = 2.4e9 if learners > 4 else 10e9
    outside = learners > 8 or not 35e6 <= situation.parameters <= largest
    # Compute grows with parameters times tokens, so with the square of the parameters.
    slope = situation.slope or SCALING_EXPONENT / 2
    return _from_loss(scaling_percent(learners, situation.parameters), SCALING_NOISE, slope, extrapolated=outside)


def _through_origin(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the least-squares line through the origin."""
    return sum(x * y for x, y in points) / sum(x * x for x, _ in points)


def _scavenging(learners: int, situation: Situation) -> Cost:
    base = math.log2(SCAVENGED_BASE)
    # The learners were present for half of the compute, so their change counts twice.
    changes = [(math.log2(many) - base, 2 * (ours - theirs)) for many, ours, theirs in SCAVENGED]
    percent = _through_origin(changes) * max(0.0, math.log2(learners) - base)
    gains = [(math.log(compute), -math.log1p(change / 100)) for compute, change in SCAVENGED_COMPUTE]
    slope = situation.slope or sum(gain / log for log, gain in gains) / len(gains)
    return _from_loss(percent, SCAVENGED_NOISE, slope, extrapolated=not SCAVENGED_BASE <= learners <= 16)


def _scores(learners: int, situation: Situation) -> Cost:
    if situation.slope is not None:
        raise ValueError(
            "--loss-slope turns losses into compute, but the penalty `scores` has no losses; leave one of the two out"
        )
    reference, later = SCORES_DATA_PARALLEL
    per_decade = [after - before for before, after in zip(reference, later, strict=True)]

    def decades(points: Sequence[float]) -> float:
        return sum(lost / gain for lost, gain in zip(points, per_decade, strict=True)) / len(per_decade)

    lost = [
        (math.log2(many), decades([was - now for was, now in zip(reference, scores, strict=True)]))
        for many, scores in SCORES.items()
    ]
    compute = 10 ** max(0.0, _line(lost, math.log2(learners)))
    spread = math.hypot(*(noise / gain for noise, gain in zip(SCORES_NOISE, per_decade, strict=True)))
    # The source has three runs for each M.
    noise = spread / len(per_decade) / math.sqrt(3)
    return Cost(None, compute, noise * math.log(10), learners > 16)


def _quickstart(learners: int, situation: Situation) -> Cost:
    doublings = math.log2(learners) / math.log2(QUICKSTART_LEARNERS)
    (tokens, loss), (tokens_later, loss_later) = QUICKSTART_LOSSES
    slope = situation.slope or math.log(loss / loss_later) / math.log(tokens_later / tokens)
    noise, other = QUICKSTART_NOISE * doublings, learners != QUICKSTART_LEARNERS
    return _from_loss(QUICKSTART_PERCENT * doublings, noise, slope, extrapolated=other)


PENALTIES = {
    "scavenging": Penalty(
        "Decoupled DiLoCo, Table 15: validation loss of 2B parameters with 4 to 16 learners for half of the compute, "
        "doubled; the compute is data parallel's in the same table",
        _scavenging,
    ),
    "scaling-laws": Penalty(
        "Scaling laws for DiLoCo (arXiv 2503.09799): losses of synchronous DiLoCo with plain averages, 1 to 8 "
        "learners, at the size of --parameters; the compute is that of its scaling law",
        _scaling_laws,
    ),
    "scores": Penalty(
        "Decoupled DiLoCo, Tables 11 and 12: scores of 2B parameters with 2 to 16 learners; the compute is the tokens "
        "that data parallel needs for as many points",
        _scores,
    ),
    "quickstart": Penalty(
        "our measurement, docs/log.md: loss of 1.0M parameters with 4 learners, assumed to grow with the logarithm of "
        "M; the compute is data parallel's on the same task",
        _quickstart,
    ),
}


def cost_of(penalty: str, learners: int, *, parameters: float, slope: float | None = None) -> Cost:
    """Return the cost of a number of learners.

    Args:
        learners: M; 1 is data parallel and costs nothing.
        parameters: parameters of the model; only `scaling-laws` uses them.
        slope: relative fall of the loss per relative growth of the compute; None: the source's slope.

    Raises:
        ValueError: the penalty is unknown, or a number is out of range.
    """
    if penalty not in PENALTIES:
        raise ValueError(f"the penalty {penalty!r} is unknown; choose from {', '.join(PENALTIES)}")
    if learners < 1:
        raise ValueError(f"{learners} learners; use 1 or more")
    if not 0 < parameters < math.inf:
        raise ValueError(f"--parameters is {parameters}; give a number above 0, such as 5e9")
    if slope is not None and not SLOPE_MIN <= slope <= SLOPE_MAX:
        raise ValueError(
            f"--loss-slope is {slope}, but must be {SLOPE_MIN:g} to {SLOPE_MAX:g}; published slopes are between "
            "0.02 and 0.05"
        )
    cost = PENALTIES[penalty].cost(max(learners, 2), Situation(parameters, slope))
    return cost if learners > 1 else Cost(0.0, 1.0, 0.0, False)
