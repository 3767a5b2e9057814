"""The number of learners that makes the most progress on given chips: goodput against the cost in quality."""

from collections.abc import Sequence
from math import exp
from textwrap import fill
from typing import Any, NamedTuple

from diloco_jax.sim.goodput.methods import Row
from paper.penalty import PENALTIES, Cost, cost_of

WIDTH = 110  # of the text for people
DATA_PARALLEL = ("rigid", "elastic")


class Option(NamedTuple):
    """One way to use the chips. Progress is a share of what data parallel would make if nothing ever failed."""

    row: Row
    cost: Cost
    progress: float
    low: float
    high: float

    @property
    def name(self) -> str:
        """The name that a table prints."""
        method, learners = self.row.method, self.row.learners
        if method in DATA_PARALLEL:
            return f"{method} data parallel"
        return f"M = {learners}" if method == "decoupled" else f"{method} with M = {learners}"


class LearnerChoice(NamedTuple):
    """All ways to use the chips in the order given, and the best of them."""

    chips: float
    penalty: str
    options: list[Option]
    best: Option
    why: str


def choose(rows: Sequence[Row], penalty: str, *, parameters: float, slope: float | None = None) -> list[LearnerChoice]:
    """Choose among the rows for each number of chips.

    Raises:
        ValueError: no rows, or see `cost_of`.
    """
    if not rows:
        raise ValueError("there is nothing to choose from; simulate at least one number of learners")
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
    """Write one sentence on the winner, and one on how sure that is."""
    more = "there is no loss to make up for"
    if best.cost.compute > 1:
        more = f"{best.cost.compute - 1:.1%} more compute would make up for its loss"
    said = (
        f"{best.name} makes the most progress, {best.progress:.1%} of an ideal cluster's: {best.row.goodput:.1%} of "
        f"the chips' time is useful, and {more}."
    )
    near = [option.name for option in options if option is not best and option.high >= best.low]
    said += f" Not told apart by this penalty: {', '.join(near)}." if near else " No other comes within the noise."
    return said + (" The winner's penalty is extrapolated." if best.cost.extrapolated else "")


def as_dict(choice: LearnerChoice) -> dict[str, Any]:
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
