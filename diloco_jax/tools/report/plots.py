"""Charts of a run: bars, and the timeline of rounds. Lines and axes are those of `drawing`."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, groupby

from diloco_jax.drawing.charts import BOTTOM, NUM_COLOURS, RIGHT, WIDE, Point, draw_x_axis, num, svg, time_axis

LABEL_WIDTH_MAX = 150
CELLS_MAX = 260  # rounds are grouped so that no row of the timeline has more cells
POINTS_MAX = 320  # per curve: about one for every three pixels
SMOOTHING = 60  # a curve's moving average spans one part in so many of its length
MARKS = {
    "joined": "joins",
    "left": "leaves",
    "silent": "falls silent",
    "back": "is heard again",
    "restarted": "starts again",  # the syncer
}


def smooth(points: Sequence[Point]) -> list[Point]:
    """Return a centred moving average, thinned to at most POINTS_MAX points that include the first and the last."""
    half = len(points) // (2 * SMOOTHING)
    sums = list(accumulate((value for _, value in points), initial=0.0))
    every = max(1, -(-len(points) // POINTS_MAX))
    out = []
    for index in [*range(0, len(points) - 1, every), *([len(points) - 1] if points else [])]:
        reach = min(half, index)  # narrow at the begin, where the curve is steep
        first, last = index - reach, min(index + reach + 1, len(points))
        out.append((points[index][0], (sums[last] - sums[first]) / (last - first)))
    return out


def thin(points: Sequence[Point]) -> list[Point]:
    """Return at most about POINTS_MAX points that include the first and the last."""
    every = max(1, -(-len(points) // POINTS_MAX))
    return [*points[::every], *(points[-1:] if (len(points) - 1) % every else [])]


def style(index: int, count: int) -> str:
    """Return the colour class of one of `count` islands; too many to tell apart share one colour."""
    return f"k{index}" if count <= NUM_COLOURS else "many"


def bars(title: str, values: Sequence[tuple[str, float, str]], *, high: float, width: int) -> str:
    """Draw horizontal bars, one per (name, value, style), with its value in per cent; `high` is the full length."""
    row, left = 24, _label_width([name for name, _, _ in values])
    right = width - 56
    out = []
    for index, (name, value, style) in enumerate(values):
        place, middle = f'x="{left}" y="{index * row + 4}" height="{row - 8}" rx="2"', index * row + row / 2
        length = max(0.0, min(1.0, value / high)) * (right - left)
        out += [
            _row_label(name, left, middle),
            f'<rect class="track" {place} width="{right - left}"/>',
            f'<rect class="fill {style}" {place} width="{num(length)}">',
            f"<title>{escape(name)}: {value:.2%}</title></rect>",
            f'<text class="value" x="{right + 8}" y="{num(middle)}" dy="0.32em">{value:.1%}</text>',
        ]
    return svg(width, len(values) * row + 4, title, out)


def _label_width(names: Sequence[str]) -> int:
    return min(LABEL_WIDTH_MAX, 16 + round(6.6 * max((len(name) for name in names), default=0)))


def _row_label(name: str, left: float, middle: float) -> str:
    fits = round((LABEL_WIDTH_MAX - 16) / 6.6)
    short = name if len(name) <= fits else name[: fits - 1] + "…"
    place = f'x="{left - 10}" y="{num(middle)}" dy="0.32em" text-anchor="end"'
    return f'<text class="row" {place}>{escape(short)}<title>{escape(name)}</title></text>'


@dataclass(frozen=True, slots=True)
class DrawnRound:
    """A merged round: when, which global step, whose values."""

    t: float
    global_step: int
    members: frozenset[str]


@dataclass(frozen=True, slots=True)
class LearnerMark:
    """Something that happened to a learner; `kind` is a key of MARKS."""

    t: float
    kind: str
    learner: str
    reason: str


def timeline(
    title: str,
    learners: Sequence[str],
    rounds: Sequence[DrawnRound],
    marks: Sequence[LearnerMark],
    times: tuple[float, float],
) -> str:
    """Draw a row per learner, time to the right; a cell is a few successive rounds, as full as the learner was in them.

    Args:
        learners: the rows, from the top.
        times: when the first inner step was reported, before which no round can have begun, and when the run ended.
    """
    row = 26 if len(learners) <= 16 else 18
    left, top = _label_width(learners), 6
    right, bottom = WIDE - RIGHT, top + row * len(learners) + 4
    axis = time_axis(times[1], "time since the run began", 12)

    def x(t: float) -> float:
        return left + axis.place(t) * (right - left)

    out = draw_x_axis(axis, x, top, bottom)
    at = {name: top + index * row for index, name in enumerate(learners)}
    for name, y in at.items():
        out.append(_row_label(name, left, y + row / 2))
        out.append(f'<rect class="track" x="{left}" y="{y + 3}" width="{right - left}" height="{row - 6}"/>')
        for begin_s, end_s, text, share in _cells(name, rounds, times[0]):
            place = f'x="{num(x(begin_s))}" y="{y + 3}" width="{num(x(end_s) - x(begin_s))}" height="{row - 6}"'
            out.append(f'<rect class="cell" {place} opacity="{0.12 + 0.88 * share:.2f}"><title>{text}</title></rect>')
    for mark in marks:
        if mark.learner in at:
            words = f"{mark.learner} {MARKS[mark.kind]} at {mark.t:.1f} s"
            text = escape(f"{words}: {mark.reason}" if mark.reason else words)
            middle = at[mark.learner] + row / 2
            out.append(f'<g class="mark" transform="translate({num(x(mark.t))} {num(middle)})">')
            out.append(f"{glyph(mark.kind)}<title>{text}</title></g>")
    return svg(WIDE, bottom + BOTTOM, title, out)


def _cells(name: str, rounds: Sequence[DrawnRound], begin_s: float) -> Iterator[tuple[float, float, str, float]]:
    """Yield a row's cells as (begin, end, words, share of rounds with the learner); join equal neighbours."""
    size = max(1, math.ceil(len(rounds) / CELLS_MAX))
    groups = [rounds[start : start + size] for start in range(0, len(rounds), size)]
    for _, alike in groupby(groups, lambda group: sum(name in this.members for this in group) / len(group)):
        cell = [this for group in alike for this in group]
        hits = sum(name in this.members for this in cell)
        if hits:
            span = f"rounds {cell[0].global_step} to {cell[-1].global_step}"
            words = f"{escape(name)}, {span}: merged in {hits} of {len(cell)}"
            yield begin_s, cell[-1].t, words, hits / len(cell)
        begin_s = cell[-1].t


def glyph(kind: str) -> str:
    """Draw the sign of a mark around the origin; the shape tells the kind without colour."""
    shapes = {
        "joined": '<path class="good" d="M-4.5 -6L5.5 0L-4.5 6Z"/>',
        "left": '<path class="halo" d="M-4 -4L4 4M-4 4L4 -4"/><path class="bad" d="M-4 -4L4 4M-4 4L4 -4"/>',
        "silent": '<path class="warn" d="M0 -6L6 0L0 6L-6 0Z"/>',
        "back": '<circle class="halo" r="4"/><circle class="ring" r="4"/>',
        "restarted": '<path class="bad" d="M-6 0H6M0 -6V6"/>',
    }
    return shapes[kind]
