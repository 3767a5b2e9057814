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

    # Empty: the legend leaves the curve out.
    name: str
    points: Sequence[Point] = field(repr=False)
    colour: str
    dots: bool = False
    # The sign of a dot, as matplotlib names it.
    marker: str = "o"
    dashed: bool = False
    joined: bool = True
    # The ends of an interval for each point.
    intervals: Sequence[tuple[float, float]] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes with its curves.

    Attributes:
        settings: the values of x are settings, such as numbers of chips; they are the ticks of a logarithmic axis.
        share: y is a share from 0 to 1, and is written in per cent.
        log: axes that are logarithmic, `x`, `y` or both.
        names: words for x = 0, 1, 2 and so on.
    """

    title: str
    lines: Sequence[Line] = field(repr=False)
    x_label: str
    y_label: str
    settings: bool = False
    share: bool = False
    log: str = ""
    names: Sequence[str] = ()


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
    """Draw one panel with a legend at its right, and return the text of an SVG file; arguments as for `Panel`."""
    panel = Panel(
        title=title, lines=lines, x_label=x_label, y_label=y_label, settings=settings, share=share, names=names
    )
    return _svg([panel], SIZE_INCHES)


def panel_figure(panels: Sequence[Panel]) -> str:
    """Draw panels below each other, each with its legend at its right, and return the text of an SVG file."""
    width, height = SIZE_INCHES
    return _svg(panels, (width, height * len(panels)))


def _svg(panels: Sequence[Panel], inches: tuple[float, float]) -> str:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=inches, layout="constrained")
        # Each panel has a separate figure, so that a legend beside it takes no room from the other panels.
        parts = figure.subfigures(len(panels), 1, squeeze=False)[:, 0] if len(panels) > 1 else [figure]
        for part, panel in zip(parts, panels, strict=True):
            _draw(part.add_subplot(), panel)
            part.legend(loc="outside right upper")
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _draw(axes: Axes, panel: Panel) -> None:
    from matplotlib.ticker import FuncFormatter, PercentFormatter

    for line in panel.lines:
        xs, ys = zip(*line.points, strict=True)
        style = ("--" if line.dashed else "-") if line.joined else "none"
        dot = line.marker if line.dots else ""
        # matplotlib leaves names that start with an underscore out of legends.
        axes.plot(xs, ys, linestyle=style, marker=dot, ms=4, color=line.colour, label=line.name or "_")
        if line.intervals:
            axes.vlines(xs, *zip(*line.intervals, strict=True), color=line.colour, linewidth=1)
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    if panel.settings:
        _set_ticks(axes, sorted({x for line in panel.lines for x, _ in line.points}))
    if "x" in panel.log:
        axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(_count))
    if "y" in panel.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if panel.names:
        axes.set_xticks(range(len(panel.names)), panel.names)
    if panel.share:
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))


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
