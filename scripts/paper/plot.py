"""Goodput against chips as a drawing: one curve for each method and number of learners."""

from collections.abc import Sequence
from html import escape

from plotting.charts import NUM_COLOURS, SVG_STYLE, Line, Point, line_chart, settings_axis, share_axis

from diloco_jax.sim.goodput.methods import Row

HEIGHT = 440  # of a chart, in its own pixels
SVG_WIDTH, LEGEND_WIDTH, HEAD = 720, 190, 56  # of the drawing that stands alone: chart, legend, title
ONE_LEARNER = {"rigid": "main dashed", "elastic": "main"}
TITLE = "Goodput against chips"
NOTE = (
    "Goodput is the share of all chips' time that went into steps; a step without some of its slices counts for the "
    "rest. Simulated, with a calibration of our own: see docs/simulate.md."
)


def _curves(rows: Sequence[Row]) -> list[Line]:
    """Return a line per method and number of learners, the best at the most chips first: so is the legend's order."""
    points: dict[tuple[str, int], list[Point]] = {}
    for row in rows:
        points.setdefault((row.method, row.learners), []).append((row.chips, row.goodput))
    numbers = sorted({learners for method, learners in points if method not in ONE_LEARNER})
    colours = {learners: f"k{index % NUM_COLOURS}" for index, learners in enumerate(numbers)}
    lines = []
    for (method, learners), where in points.items():
        style = ONE_LEARNER.get(method) or colours[learners] + (" dashed" if method == "sync" else "")
        name = f"{method} data parallel" if method in ONE_LEARNER else f"{method} M = {learners}"
        lines.append(Line(name=name, points=sorted(where), style=style, dots=True))
    return sorted(lines, key=lambda line: line.points[-1], reverse=True)


def drawing(rows: Sequence[Row]) -> str:
    """Goodput against chips as the text of an SVG file; it follows the viewer into the dark."""
    lines = _curves(rows)
    width, height = SVG_WIDTH + LEGEND_WIDTH, HEIGHT + HEAD
    keys = []
    for index, line in enumerate(lines):
        y, left = HEAD + 24 + 22 * index, SVG_WIDTH + 8
        keys.append(f'<path class="line {line.style}" d="M{left} {y}h24"/>')
        keys.append(f'<text class="key" x="{left + 32}" y="{y}" dy="0.32em">{escape(line.name)}</text>')
    x_axis = settings_axis([row.chips for row in rows], "chips of all learners together")
    chart = line_chart(TITLE, lines, x_axis, share_axis("goodput"), width=SVG_WIDTH, height=HEIGHT)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"<style>{SVG_STYLE}</style><desc>{escape(NOTE)}</desc>"
        f'<rect class="page" width="{width}" height="{height}"/><text class="title" x="18" y="28">{TITLE}</text>'
        f'<text x="18" y="{HEAD - 4}">goodput</text>'
        f'<svg y="{HEAD}" width="{SVG_WIDTH}" height="{HEIGHT}">{chart}</svg>{"".join(keys)}</svg>\n'
    )
