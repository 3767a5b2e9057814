"""Line figures as SVG text, drawn with matplotlib, for the experiments and for the tables of the paper.

Programs that draw only when asked import this module, so matplotlib is imported when a figure is drawn.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = tuple[float, float]

# These settings give equal bytes for equal input, and text that viewers can search.
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "diloco",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.4,
    "legend.frameon": False,
    "path.simplify": False,
}
COLOURS = tuple(f"C{index}" for index in range(10))
MAIN_COLOUR = "black"
SIZE_INCHES = (8.4, 4.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve; dots mark single measurements."""

    name: str
    points: Sequence[Point] = field(repr=False)
    colour: str
    dots: bool = False
    dashed: bool = False
    joined: bool = True
    # The ends of an interval for each point.
    intervals: Sequence[tuple[float, float]] = field(default=(), repr=False)


def line_figure(
    title: str,
    lines: Sequence[Line],
    x_label: str,
    y_label: str,
    *,
    settings: bool = False,
    share: bool = False,
    names: Sequence[str] = (),
) -> str:
    """Draw curves with a legend at their right, and return the text of an SVG file.

    Args:
        settings: the values of x are settings, such as numbers of chips; they are the ticks of a logarithmic axis.
        share: y is a share from 0 to 1, and is written in per cent.
        names: words for x = 0, 1, 2 and so on.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, PercentFormatter

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        axes = figure.add_subplot()
        for line in lines:
            xs, ys = zip(*line.points, strict=True)
            style = ("--" if line.dashed else "-") if line.joined else "none"
            dot = "o" if line.dots else ""
            axes.plot(xs, ys, linestyle=style, marker=dot, ms=4, color=line.colour, label=line.name)
            if line.intervals:
                axes.vlines(xs, *zip(*line.intervals, strict=True), color=line.colour, linewidth=1)
        axes.set(title=title, xlabel=x_label, ylabel=y_label)
        if settings:
            _set_ticks(axes, sorted({x for line in lines for x, _ in line.points}))
        axes.xaxis.set_major_formatter(FuncFormatter(_count))
        if names:
            axes.set_xticks(range(len(names)), names)
        if share:
            axes.set_ylim(0, 1.02)
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        figure.legend(loc="outside right upper")
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _count(value: float, position: int | None = None) -> str:
    """Write a count with two significant digits and its unit prefix, such as 1.1M."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter(sep="")(float(f"{value:.2g}"))


def _set_ticks(axes: Axes, values: Sequence[float]) -> None:
    """Make x logarithmic, with ticks at those values that are far enough from the tick before."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axes.set_xscale("log")
    ratio_min = (values[-1] / values[0]) ** 0.08
    ticks = [values[0]]
    ticks += [value for before, value in itertools.pairwise(values) if value / before >= ratio_min]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
