"""The picture of a run for a terminal of any width: progress, curves, a row per island, alarms."""

import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from diloco_jax.protocol.watch.terms import shown
from diloco_jax.runtime.figures import table as figures
from diloco_jax.runtime.figures.facts import IslandFacts, RunFacts
from diloco_jax.runtime.figures.forms import NO_VALUE, format_bytes, format_count, format_duration
from diloco_jax.runtime.figures.table import Figure
from diloco_jax.runtime.records.liveness import SILENT, StartPhase
from diloco_jax.tools.terminal.words import (
    FINISHED,
    alarm_line,
    ended_lines,
    percent_done,
    share_done,
    shown_rows,
    steps_done,
    time_left,
)

# A curve of more points loses every second one.
POINTS_MAX = 512
# Time of the run between two points at first. It doubles each time that a curve loses half of its points.
FIRST_GAP_S = 0.5
BARS = "▁▂▃▄▅▆▇█"
TRAINING, EVALUATION, SPEED = "training loss", "evaluation loss", "tokens/s"


class History:
    """The curves of a run, from the statuses that were read so far."""

    def __init__(self) -> None:
        self._restart()

    def _restart(self) -> None:
        self._newest = (0.0, 0)  # wall_s, global_step
        self._curves: dict[str, list[float]] = {TRAINING: [], EVALUATION: [], SPEED: []}
        self._began_s: float | None = None
        self._gap_s, self._next_s = FIRST_GAP_S, 0.0

    def add(self, status: Mapping[str, Any]) -> None:
        """Take the newest status."""
        now = (status["wall_s"], status["global_step"])
        # A new run in the same folder starts at zero, and a run may return to a snapshot.
        if now < self._newest or now[1] < self._newest[1]:
            self._restart()
        self._newest = now
        if self._began_s is None:
            self._began_s = now[0]
        evaluations, loss = self._curves[EVALUATION], status["eval_loss"]
        if _known(loss) and evaluations[-1:] != [loss]:
            evaluations.append(loss)
        losses = [row["loss"] for row in status["learners"] if row["state"] == "active" and _known(row["loss"])]
        if losses and now[0] >= self._next_s:
            self._next_s = now[0] + self._gap_s
            self._curves[TRAINING].append(sum(losses) / len(losses))
            self._curves[SPEED].append(status["tokens_per_s"])
        for name, curve in self._curves.items():
            if len(curve) > POINTS_MAX:
                # The newest point stays.
                del curve[-2::-2]
                self._gap_s *= 2 if name == TRAINING else 1

    @property
    def span_s(self) -> float:
        """Return the time of the run that the curves show."""
        return self._newest[0] - (self._began_s or 0.0)

    def curves(self) -> dict[str, Sequence[float]]:
        """Return the curves with at least two points, the oldest first."""
        return {name: tuple(curve) for name, curve in self._curves.items() if len(curve) >= 2}


def _known(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return at most `width` bars, each for the mean of an equal share of the values, from least to greatest mean."""
    count = min(width, len(values))
    cuts = [len(values) * bar // count for bar in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, span = min(means), max(means) - min(means)
    return "".join(BARS[min(7, int(8 * (mean - low) / span)) if span > 0 else 0] for mean in means)


# Columns of a terminal that shows more of each island.
WIDE = 120
NARROW_BARS, WIDE_BARS = 32, 24
# Columns of the bar of progress.
BAR = 16
# Conditions of islands and states of runs, by the style that shows them.
STYLES = {
    "cyan": ("joining", "recovering", "starting"),
    "green": ("training", "evaluating", "running", "complete", FINISHED),
    "yellow": ("slow", "unmerged", "unanswered", "striking", SILENT, "stopped"),
    "dim": ("left", "banned"),
    "red": ("gone", "expelled"),
}
STYLE_OF = {name: style for style, names in STYLES.items() for name in names}
BOUND = "\N{NO-BREAK SPACE}"


class Column(NamedTuple):
    """A column of the table of islands.

    Attributes:
        header: its header, with line breaks.
        cell: function that returns the text for an island; None if the value is not known.
    """

    header: str
    cell: Callable[[IslandFacts], str | Text | None]


def _column(figure: Figure[IslandFacts]) -> Column:
    def cell(island: IslandFacts) -> str | Text | None:
        value = figure.value(island)
        if value is None:
            return None
        text = figure.form.write(value)
        return Text(text, style="yellow" if value else "dim") if figure.name == RESTARTS else text

    return Column(figure.column, cell)


def _measured(name: str) -> Column:
    """Return a column for a value that an island measures and that has no row in the table of figures."""

    def cell(island: IslandFacts) -> str | None:
        value = island.measured(name)
        # Programs may measure anything; sizes are called so.
        return None if value is None else format_bytes(value) if "bytes" in name.split("_") else f"{value:.4g}"

    return Column(name.replace("_", "\n", 1), cell)


def _condition(island: IslandFacts) -> Text:
    state = Text(shown(island.condition), style=STYLE_OF.get(island.condition, ""))
    if island.condition not in ("training", FINISHED):
        # One letter of the unit is enough, because 80 columns are few.
        number, unit, *_ = format_duration(island.since_s or 0.0).split()
        state.append(f" {number}{unit[0]}", style="dim")
    return state


NAME = (Column("island", lambda island: Text(island.learner)), Column("condition", _condition))
RESTARTS = "restarts"
# The speed of an island's devices; the first that is known of any island is shown.
SPEEDS = ("mfu", "model_flops_per_s")


def _filled(column: Column, islands: Sequence[IslandFacts]) -> list[str | Text]:
    return [NO_VALUE if (cell := column.cell(island)) is None else cell for island in islands]


def _width(header: str, cells: Iterable[str | Text]) -> int:
    """Return the width of a column in cells, with the space after it."""
    return 1 + max(cell_len(str(text)) for text in (*header.split("\n"), *cells))


def _island_table(islands: Sequence[IslandFacts], width: int) -> Table:
    shown = {figure.name: _column(figure) for figure in figures.ISLAND_FIGURES if figure.column}
    speed = next((name for name in SPEEDS if any(shown[name].cell(island) is not None for island in islands)), "")
    wide = {figure.name for figure in figures.ISLAND_FIGURES if figure.wide}
    always = [name for name in shown if name not in wide and (name == speed or name not in SPEEDS)]
    columns = [*NAME, *(shown[name] for name in always)]
    left = width - sum(_width(column.header, _filled(column, islands)) for column in columns)
    # After a million steps beside long names one column more does not fit.
    while left < 0 and len(columns) > len(NAME) + 1:
        column = columns.pop()
        left += _width(column.header, _filled(column, islands))
    if width >= WIDE:
        listed = {figure.name for figure in figures.ISLAND_FIGURES if figure.column}
        others = sorted({name for island in islands for name in island.metrics} - listed)
        for column in (*(shown[name] for name in shown if name in wide), *map(_measured, others)):
            takes = _width(column.header, _filled(column, islands))
            if takes <= left and any(column.cell(island) is not None for island in islands):
                columns.append(column)
                left -= takes
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for number, column in enumerate(columns):
        table.add_column(Text(column.header), no_wrap=True, justify="left" if number < len(NAME) else "right")
    for cells in zip(*(_filled(column, islands) for column in columns), strict=True):
        table.add_row(*cells)
    return table


def _packed(facts: Iterable[str], width: int) -> str:
    """Join facts into lines that break between facts, or within a fact only if it is longer than a line."""
    return _wrapped(f"{BOUND}· ".join(fact.replace(" ", BOUND) for fact in facts), width)


def _wrapped(text: str, width: int) -> str:
    """Break text into lines, but never between a number and its unit."""
    bound = re.sub(r"(?<=\d) (?=[A-Za-z%])", BOUND, text)
    return "\n".join(textwrap.wrap(bound, max(1, width), break_on_hyphens=False)).replace(BOUND, " ")


def _curves(curves: Mapping[str, Sequence[float]], span_s: float, width: int) -> list[str]:
    """Draw curves with their first and last value, after the time that they show; the speed needs a wide terminal."""
    most = WIDE_BARS if width >= WIDE else NARROW_BARS
    lines = list[str]()
    for name, values in curves.items():
        form: Callable[[float], str] = format_count if name == SPEED else "{:.3f}".format
        if name != SPEED or width >= WIDE:
            span = f"last {format_duration(span_s)}: " if span_s and not lines else ""
            before, after = f"{span}{name} {form(values[0])} ", f" {form(values[-1])}"
            # A curve stays on one line, with room for the mark between two facts.
            bars = max(1, min(most, width - len(before) - len(after) - 2))
            lines.append(f"{before}{sparkline(values, bars)}{after}")
    return lines


def _beyond(status: Mapping[str, Any]) -> str:
    """Return an explanation if an island has made more inner steps than the run has global steps; else ""."""
    most = max(status["learners"], key=lambda row: row["local_step"], default=None)
    if most is None or most["local_step"] <= status["total_steps"]:
        return ""
    name, made, planned = most["learner"], most["local_step"], status["total_steps"]
    return (
        f"{name} has made {made} inner steps in a run of {planned} global steps: "
        "the syncer counts a global step when it closes a round, and islands train on meanwhile, so a fast or a "
        "restarted one makes more inner steps than there are rounds"
    )


def draw_phases(phases: Sequence[StartPhase]) -> RenderableType:
    """Draw what processes do that do not train yet, and for how long they have done it."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for phase in phases:
        style = STYLE_OF["joining"]
        grid.add_row(Text(phase.name), Text(phase.words, style=style), Text(format_duration(phase.ago_s), style="dim"))
    return grid


def render(
    status: Mapping[str, Any],
    width: int,
    *,
    curves: Mapping[str, Sequence[float]] | None = None,
    span_s: float = 0.0,
    phases: Sequence[StartPhase] = (),
) -> RenderableType:
    """Draw a run that is `width` columns wide; curves have the oldest value first, and show the last `span_s`."""
    state = Text(status["state"], style=f"bold {STYLE_OF.get(status['state'], '')}")
    steps = f"{percent_done(status)}, {steps_done(status)}"
    times = ", ".join(filter(None, (format_duration(status["wall_s"]), time_left(status))))
    progress = Table.grid(padding=(0, 2, 0, 0))
    fits = BAR + 4 + len(steps) + len(times) <= width
    bar = ProgressBar(total=1.0, completed=share_done(status), width=BAR)
    progress.add_row(bar, Text(steps), Text(times if fits else "", "dim"))
    facts = [] if fits else [times]
    facts += figures.texts(figures.RUN_FIGURES, RunFacts.of(status), lambda figure: figure.live)
    told: list[RenderableType] = [Text.assemble((status["run"], "bold"), "  ", state), progress]
    told += [Text(_packed(lines, width)) for lines in (facts, _curves(curves or {}, span_s, width)) if lines]
    told.append(Text())
    if status["learners"]:
        told.append(_island_table([IslandFacts.of(row) for row in shown_rows(status)], width))
    elif not phases:
        told.append(Text("no island has connected yet", style="dim"))
    told += [draw_phases(phases)] if phases else []
    told += [Text(_wrapped(text, width), style="dim") for text in [_beyond(status)] if text]
    waiting = Text(_wrapped(f"waiting for: {status['waiting_for']}", width))
    waiting.stylize("dim", 0, len("waiting for:"))
    # Statuses of older versions do not have the key.
    due = status.get("upcoming", {}) if status["state"] == "running" else {}
    ahead = ", ".join(f"{kind} at step {step:,}" for kind, step in due.items())
    following = [Text(_wrapped(f"next: {ahead}", width), style="dim")] if ahead else []
    alarms = [Text(_wrapped(alarm_line(alarm), width), style="red") for alarm in status["alarms"]]
    ended = [Text(_wrapped(line, width), style="dim") for line in ended_lines(status.get("episodes", ()))]
    return Group(*told, Text(), waiting, *following, *alarms, *ended)
