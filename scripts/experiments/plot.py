"""Plots of an experiment as small SVG files, made from records alone."""

import statistics
from collections.abc import Mapping, Sequence
from html import escape

from plotting.charts import SVG_STYLE, Axis, Line, count_axis, line_chart, number_axis, settings_axis

from experiments.records import Record
from experiments.spec import Case
from experiments.tables import Results, compared, value_of

WIDTH, LEGEND, HEIGHT, HEAD = 620, 220, 360, 48
BYTES_MAX = 40_000
COLOURS = 8


def draw(results: Results) -> str | None:
    """Draw what the experiment asks for; None while there is nothing to show."""
    if results.experiment.plot == "gap":
        return _gap(results)
    return _curves(results) if results.experiment.plot == "curves" else _arms(results)


def _mean_curve(runs: Mapping[int, Record]) -> list[tuple[float, float]]:
    """Average the curves of the seeds, point by point."""
    curves = [record["curve"] for record in runs.values() if record["curve"]]
    points = zip(*curves, strict=False)
    return [(statistics.fmean(p[0] for p in each), statistics.fmean(p[1] for p in each)) for each in points]


def _curves(results: Results) -> str | None:
    """Loss of the training over tokens, in the first case that has records."""
    for case in results.cases:
        lines = []
        for number, (arm, own) in enumerate(results.experiment.arms.items()):
            points = _mean_curve(results.seeds(case, arm))
            if points:
                tail = points[len(points) // 6 :]  # what follows the first fall, which is the same for all
                lines.append(Line(name=own.label or arm, points=tail, style=f"k{number % COLOURS}"))
        if lines:
            values = [loss for line in lines for _, loss in line.points]
            x_axis = count_axis(max(x for line in lines for x, _ in line.points), "tokens")
            title = f"{results.experiment.title}: loss of the training, {case.name}"
            return _drawing(title, lines, x_axis, number_axis(values, "loss"))
    return None


def _gap(results: Results) -> str | None:
    """Distance from the baseline over parameters, a line for each arm, beside the published one."""
    experiment, lines = results.experiment, []
    budgets: dict[str, list[Case]] = {}
    for case in results.cases:
        budgets.setdefault(case.size, []).append(case)
    for number, (arm, own) in enumerate(experiment.arms.items()):
        points = []
        for cases in budgets.values():
            behind = compared(results, cases[-1], arm, experiment.baseline, "loss", "percent")
            if arm != experiment.baseline and behind:
                record = next(iter(results.seeds(cases[-1], arm).values()))
                points.append((record["parameters"], statistics.fmean(behind.values())))
        if points:
            lines.append(Line(name=own.label or arm, points=points, style=f"k{number % COLOURS}", dots=True))
    if not lines:
        return None
    if experiment.published:
        published = [(float(x), float(y)) for x, y in experiment.published["points"]]
        lines.append(Line(name=experiment.published["name"], points=published, style="main dashed", dots=True))
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    x_axis = settings_axis(xs, "parameters")
    title = f"{experiment.title}: per cent behind the baseline"
    return _drawing(title, lines, x_axis, number_axis([0.0, *ys], "per cent"))


def _arms(results: Results) -> str | None:
    """Loss of each arm, a dot for each seed, in the first case that has records."""
    for case in results.cases:
        arms = [arm for arm in results.experiment.arms if results.seeds(case, arm)]
        if not arms:
            continue
        lines = []
        for place, arm in enumerate(arms):
            losses = [value_of(record, "loss") for record in results.seeds(case, arm).values()]
            points = [(float(place), loss) for loss in losses if loss is not None]
            label = results.experiment.arms[arm].label or arm
            lines.append(Line(name=f"{place}: {label}", points=points, style=f"k{place % COLOURS}", dots=True))
        values = [loss for line in lines for _, loss in line.points]
        if not values:
            continue
        ticks = tuple((float(place), str(place)) for place in range(len(arms)))
        x_axis = Axis(low=-0.5, high=len(arms) - 0.5, ticks=ticks, label="arm", kind="count")
        return _drawing(
            f"{results.experiment.title}: final loss, {case.name}", lines, x_axis, number_axis(values, "loss")
        )
    return None


def _drawing(title: str, lines: Sequence[Line], x_axis: Axis, y_axis: Axis) -> str:
    """Return a file of its own: chart, legend and title; it follows the viewer into the dark."""
    width, height = WIDTH + LEGEND, HEIGHT + HEAD
    keys = []
    for index, line in enumerate(lines):
        y, left = HEAD + 24 + 22 * index, WIDTH + 8
        keys.append(f'<path class="line {line.style}" d="M{left} {y}h24"/>')
        keys.append(f'<text class="key" x="{left + 32}" y="{y}" dy="0.32em">{escape(line.name[:34])}</text>')
    chart = line_chart(title, lines, x_axis, y_axis, width=WIDTH, height=HEIGHT)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f'<style>{SVG_STYLE}</style><rect class="page" width="{width}" height="{height}"/>'
        f'<text class="title" x="18" y="28">{escape(title)}</text>'
        f'<svg y="{HEAD}" width="{WIDTH}" height="{HEIGHT}">{chart}</svg>{"".join(keys)}</svg>\n'
    )
