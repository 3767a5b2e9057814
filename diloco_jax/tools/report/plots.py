"""Charts of a run: bars, and the timeline of rounds. Lines and axes are those of `drawing`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from diloco_jax.drawing.charts import BOTTOM, RIGHT, WIDE, draw_x_axis, num, svg, time_axis

LABEL_WIDTH_MAX = 150
CELLS_MAX = 260  # rounds are grouped so that no row of the timeline has more cells
MARKS = {
    "joined": "joins",
    "left": "leaves",
    "silent": "falls silent",
    "back": "is heard again",
    "restarted": "starts again",  # the syncer
}


def bars(title: str, values: Sequence[tuple[str, float, str]], *, high: float, width: int) -> str:
    """Horizontal bars, one per (name, value, style), with its value in per cent; `high` is the full length."""
    row, left = 24, _label_width([name for name, _, _ in values])
    right = width - 56
    out = []
    for index, (name, value, style) in enumerate(values):
        top, middle = index * row + 4, index * row + row / 2
        length = max(0.0, min(1.0, value / high)) * (right - left)
        out.append(_row_label(name, left, middle))
        out.append(f'<rect class="track" x="{left}" y="{top}" width="{right - left}" height="{row - 8}" rx="2"/>')
        out.append(
            f'<rect class="fill {style}" x="{left}" y="{top}" width="{num(length)}" height="{row - 8}" rx="2">'
            f"<title>{escape(name)}: {value:.2%}</title></rect>"
        )
        out.append(f'<text class="value" x="{right + 8}" y="{num(middle)}" dy="0.32em">{value:.1%}</text>')
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
    """One row per learner, time to the right; a cell is a few successive rounds, as full as the learner was in them.

    Args:
        learners: the rows, from the top.
        rounds: in order of time.
        marks: what happened to learners.
        times: when the first inner step was reported, before which no round can have begun, and when the run ended.
    """
    row, width = (26, WIDE) if len(learners) <= 16 else (18, WIDE)
    left, top = _label_width(learners), 6
    right, bottom = width - RIGHT, top + row * len(learners) + 4
    axis = time_axis(times[1], "time since the run began", 12)

    def x(t: float) -> float:
        return left + axis.place(t) * (right - left)

    out = draw_x_axis(axis, x, top, bottom)
    at = {name: top + index * row for index, name in enumerate(learners)}
    for name, y in at.items():
        out.append(_row_label(name, left, y + row / 2))
        out.append(f'<rect class="track" x="{left}" y="{y + 3}" width="{right - left}" height="{row - 6}"/>')
        for begin_s, end, text, share in _cells(name, rounds, times[0]):
            place = f'x="{num(x(begin_s))}" y="{y + 3}" width="{num(x(end) - x(begin_s))}" height="{row - 6}"'
            out.append(f'<rect class="cell" {place} opacity="{0.12 + 0.88 * share:.2f}"><title>{text}</title></rect>')
    for mark in marks:
        if mark.learner in at:
            words = f"{mark.learner} {MARKS[mark.kind]} at {mark.t:.1f} s"
            text = escape(f"{words}: {mark.reason}" if mark.reason else words)
            middle = at[mark.learner] + row / 2
            out.append(f'<g class="mark" transform="translate({num(x(mark.t))} {num(middle)})">')
            out.append(f"{glyph(mark.kind)}<title>{text}</title></g>")
    return svg(width, bottom + BOTTOM, title, out)


def _cells(name: str, rounds: Sequence[DrawnRound], begin_s: float) -> list[tuple[float, float, str, float]]:
    """Return a row's cells as (begin, end, words, share of rounds with the learner); join equal neighbours."""
    size = max(1, math.ceil(len(rounds) / CELLS_MAX))
    joined: list[list[float]] = []  # begin_s, end_s, first step, last step, rounds with the learner, rounds
    for start in range(0, len(rounds), size):
        group = rounds[start : start + size]
        hits = sum(name in this.members for this in group)
        last = joined[-1] if joined else None
        if last is not None and last[4] / last[5] == hits / len(group):
            last[1], last[3] = group[-1].t, group[-1].global_step
            last[4], last[5] = last[4] + hits, last[5] + len(group)
        else:
            joined.append([begin_s, group[-1].t, group[0].global_step, group[-1].global_step, hits, len(group)])
        begin_s = group[-1].t
    return [
        (
            begin,
            end,
            f"{escape(name)}, rounds {first:.0f} to {last:.0f}: merged in {hits:.0f} of {count:.0f}",
            hits / count,
        )
        for begin, end, first, last, hits, count in joined
        if hits
    ]


def glyph(kind: str) -> str:
    """The sign of a mark around the origin; the shape tells the kind without colour."""
    shapes = {
        "joined": '<path class="good" d="M-4.5 -6L5.5 0L-4.5 6Z"/>',
        "left": '<path class="halo" d="M-4 -4L4 4M-4 4L4 -4"/><path class="bad" d="M-4 -4L4 4M-4 4L4 -4"/>',
        "silent": '<path class="warn" d="M0 -6L6 0L0 6L-6 0Z"/>',
        "back": '<circle class="halo" r="4"/><circle class="ring" r="4"/>',
        "restarted": '<path class="bad" d="M-6 0H6M0 -6V6"/>',
    }
    return shapes[kind]
