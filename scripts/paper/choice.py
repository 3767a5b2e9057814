"""The number of learners with the most progress on given chips: goodput against the cost in quality."""

from collections.abc import Sequence
from math import exp
from textwrap import fill
from typing import Any, NamedTuple

from diloco_jax.sim.goodput.methods import Row
from paper.penalty import PENALTIES, Cost, cost_of

# The width of the printed text.
WIDTH = 110
DATA_PARALLEL = ("rigid", "elastic")


class Option(NamedTuple):
    """One way to use the chips; its progress is a share of data parallel's progress without failures."""

    row: Row
    cost: Cost
    progress: float
    low: float
    high: float

    @property
    def name(self) -> str:
        """Return the name for tables."""
        method, learners = self.row.method, self.row.learners
        if method in DATA_PARALLEL:
            return f"{method} data parallel"
        return f"M = {learners}" if method == "decoupled" else f"{method} with M = {learners}"


class LearnerChoice(NamedTuple):
    """All ways to use a number of chips, and the best of them."""

    chips: float
    penalty: str
    options: list[Option]
    best: Option
    why: str


def choose(rows: Sequence[Row], penalty: str, *, parameters: float, slope: float | None = None) -> list[LearnerChoice]:
    """Choose among the rows for each number of chips.

    Raises:
        ValueError: there are no rows, or `cost_of` refuses the penalty or its numbers.
    """
    if not rows:
        raise ValueError("the simulation has no rows; simulate at least one number of learners")
    choices = []
    for chips in dict.fromkeys(row.chips for row in rows):
        options = [_option(row, penalty, parameters, slope) for row in rows if row.chips == chips]
        best = max(options, key=lambda option: option.progress)
        choices.append(LearnerChoice(chips, penalty, options, best, _why(options, best)))
    return choices


def _option(row: Row, penalty: str, parameters: float, slope: float | None) -> Option:
    cost = cost_of(penalty, row.learners, parameters=parameters, slope=slope)
    progress = row.goodput / cost.compute
    return Option(row, cost, progress, progress * exp(-cost.noise), progress * exp(cost.noise))


def _why(options: Sequence[Option], best: Option) -> str:
    """Write a sentence about the best option, and a sentence about its certainty."""
    more = "it has no loss to compensate"
    if best.cost.compute > 1:
        more = f"{best.cost.compute - 1:.1%} more compute would compensate its loss"
    text = (
        f"{best.name} makes the most progress, {best.progress:.1%} of an ideal cluster's: {best.row.goodput:.1%} of "
        f"the chips' time is useful, and {more}."
    )
    near = [option.name for option in options if option is not best and option.high >= best.low]
    text += (
        f" This penalty cannot separate it from {', '.join(near)}." if near else " No other option is within the noise."
    )
    return text + (" The penalty of the best option is extrapolated." if best.cost.extrapolated else "")


def as_dict(choice: LearnerChoice) -> dict[str, Any]:
    """Return a choice as plain values for JSON."""
    rows = [
        {
            "method": option.row.method,
            "learners": option.row.learners,
            "goodput": option.row.goodput,
            "loss_percent": option.cost.loss_percent,
            "compute": option.cost.compute,
            "progress": option.progress,
            "progress_low": option.low,
            "progress_high": option.high,
            "extrapolated": option.cost.extrapolated,
        }
        for option in choice.options
    ]
    best = {"method": choice.best.row.method, "learners": choice.best.row.learners, "progress": choice.best.progress}
    source = PENALTIES[choice.penalty].source
    return {
        "chips": choice.chips,
        "penalty": choice.penalty,
        "source": source,
        "rows": rows,
        "best": best,
        "why": choice.why,
    }


def describe(choice: LearnerChoice) -> str:
    """Return a choice as a table with its reason."""
    lines = [
        f"Choice of learners for {choice.chips:,.0f} chips",
        fill(f"Penalty {choice.penalty}: {PENALTIES[choice.penalty].source}.", WIDTH),
        "",
        f"{'method':<10} {'learners':>8} {'goodput':>8} {'loss':>8} {'compute':>8} {'progress':>9}   low to high",
    ]
    for option in choice.options:
        row, cost = option.row, option.cost
        loss = "" if cost.loss_percent is None else f"+{cost.loss_percent:.2f}%"
        marks = ("  <- best" if option is choice.best else "") + ("  extrapolated" if cost.extrapolated else "")
        lines.append(
            f"{row.method:<10} {row.learners:>8} {row.goodput:>8.1%} {loss:>8} {cost.compute:>7.2f}x "
            f"{option.progress:>9.1%}   {option.low:.1%} to {option.high:.1%}{marks}"
        )
    return "\n".join([*lines, "", fill(choice.why, WIDTH)])
