"""Goodput against chips as a drawing (.svg) or a page (.html): one curve for each method and number of learners."""

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from diloco_jax.drawing.charts import (
    NUM_COLOURS,
    WIDE,
    Line,
    Point,
    format_count,
    line_chart,
    settings_axis,
    share_axis,
)
from diloco_jax.drawing.page import SVG_STYLE, figure, legend, page
from diloco_jax.sim.goodput.methods import Row

SUFFIXES = (".svg", ".html")
HEIGHT = 440  # of a chart, in its own pixels
SVG_WIDTH, LEGEND_WIDTH, HEAD = 720, 190, 56  # of the drawing that stands alone: chart, legend, title
ONE_LEARNER = {"rigid": "main dashed", "elastic": "main"}
TITLE = "Goodput against chips"
NOTE = (
    "Goodput is the share of all chips' time that went into steps; a step without some of its slices counts for the "
    "rest. Simulated, with a calibration of our own: see docs/simulate.md."
)


def check_plot(path: Path) -> None:
    """Refuse a file that could not be written after the simulation.

    Raises:
        ValueError: an ending that says no format, a folder that is not there, or one that cannot be written.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--plot {path} ends in {path.suffix!r}; choose a name that ends in {' or '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise ValueError(f"--plot {path}: the folder {path.parent} does not exist; make it, or choose another")
    if path.is_dir():
        raise ValueError(f"--plot {path} is a folder; choose the name of a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"--plot {path} cannot be written; choose another folder, or change its permissions")


def write_plot(rows: Sequence[Row], path: Path) -> None:
    """Write the drawing or the page that `path` ends in.

    Raises:
        ValueError: see `check_plot`.
        OSError: the file cannot be written.
    """
    check_plot(path)
    text = _page(rows) if path.suffix == ".html" else drawing(rows)
    path.write_text(text, encoding="utf-8")


def _curves(rows: Sequence[Row], value: str) -> list[Line]:
    """Return a line per method and number of learners, the best at the most chips first: so is the legend's order."""
    points: dict[tuple[str, int], list[Point]] = {}
    for row in rows:
        points.setdefault((row.method, row.learners), []).append((row.chips, getattr(row, value)))
    numbers = sorted({learners for method, learners in points if method not in ONE_LEARNER})
    colours = {learners: f"k{index % NUM_COLOURS}" for index, learners in enumerate(numbers)}
    lines = []
    for (method, learners), where in points.items():
        style = ONE_LEARNER.get(method) or colours[learners] + (" dashed" if method == "sync" else "")
        name = f"{method} data parallel" if method in ONE_LEARNER else f"{method} M = {learners}"
        lines.append(Line(name=name, points=sorted(where), style=style, dots=True))
    return sorted(lines, key=lambda line: line.points[-1], reverse=True)


def _chart(rows: Sequence[Row], lines: Sequence[Line], title: str, label: str, width: int) -> str:
    x_axis = settings_axis([row.chips for row in rows], "chips of all learners together")
    return line_chart(title, lines, x_axis, share_axis(label), width=width, height=HEIGHT)


def drawing(rows: Sequence[Row]) -> str:
    """Goodput against chips as the text of an SVG file; it follows the viewer into the dark."""
    lines = _curves(rows, "goodput")
    width, height = SVG_WIDTH + LEGEND_WIDTH, HEIGHT + HEAD
    keys = []
    for index, line in enumerate(lines):
        y, left = HEAD + 24 + 22 * index, SVG_WIDTH + 8
        keys.append(f'<path class="line {line.style}" d="M{left} {y}h24"/>')
        keys.append(f'<text class="key" x="{left + 32}" y="{y}" dy="0.32em">{escape(line.name)}</text>')
    chart = _chart(rows, lines, TITLE, "goodput", SVG_WIDTH)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"<style>{SVG_STYLE}</style><desc>{escape(NOTE)}</desc>"
        f'<rect class="page" width="{width}" height="{height}"/><text class="title" x="18" y="28">{TITLE}</text>'
        f'<text x="18" y="{HEAD - 4}">goodput</text>'
        f'<svg y="{HEAD}" width="{SVG_WIDTH}" height="{HEIGHT}">{chart}</svg>{"".join(keys)}</svg>\n'
    )


def _page(rows: Sequence[Row]) -> str:
    parts = [f"<header><h1>{TITLE}</h1><p>{escape(NOTE)}</p></header>"]
    for title, note, value in (
        ("Goodput", "Useful time of all chips together.", "goodput"),
        ("Uptime", "Time in which any learner was in a step.", "uptime"),
    ):
        lines = _curves(rows, value)
        chart = _chart(rows, lines, title, value, WIDE)
        parts.append(figure(title, note, chart, legend([(line.name, line.style) for line in lines])))
    return page(TITLE, [*parts, _table(rows)])


def _table(rows: Sequence[Row]) -> str:
    heads = ("method", "learners", "chips", "goodput", "uptime", "learners per round")
    head = "".join(f'<th scope="col">{text}</th>' for text in heads)
    body = ""
    for row in rows:
        contributors = "" if row.contributors_per_round is None else f"{row.contributors_per_round:.2f}"
        cells = (row.learners, format_count(row.chips), f"{row.goodput:.1%}", f"{row.uptime:.1%}", contributors)
        body += f'<tr><th scope="row">{row.method}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
    return (
        f'<figure class="wide"><h2>Numbers</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></figure>"
    )
