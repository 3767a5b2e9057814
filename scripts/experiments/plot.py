"""Plots of an experiment as small SVG files, drawn from records alone."""

import statistics
from collections.abc import Mapping

from plotting.figure import COLOURS, MAIN_COLOUR, Line, line_figure

from diloco_jax.tools.plan.law import PARAMETERS_MIN, distance
from experiments.records import Record
from experiments.spec import Case
from experiments.tables import Results, compared, scored, value_of

BYTES_MAX = 60_000
# The number of learners of the published distances.
LAW_LEARNERS = 4


def draw(results: Results) -> str | None:
    """Draw the plot of an experiment; None if there are no records for it."""
    if results.experiment.plot == "gap":
        return _gap(results)
    if results.experiment.plot == "scores":
        return _scores(results)
    return _curves(results) if results.experiment.plot == "curves" else _arms(results)


def _mean_curve(runs: Mapping[int, Record]) -> list[tuple[float, float]]:
    """Average the curves of the seeds, point by point."""
    curves = [record["curve"] for record in runs.values() if record["curve"]]
    points = zip(*curves, strict=False)
    return [(statistics.fmean(p[0] for p in each), statistics.fmean(p[1] for p in each)) for each in points]


def _curves(results: Results) -> str | None:
    """Draw the training loss over tokens of the first case with records."""
    for case in results.cases:
        lines = []
        for number, (arm, own) in enumerate(results.experiment.arms.items()):
            points = _mean_curve(results.seeds(case, arm))
            if points:
                # All arms share the first fall, which would hide their differences.
                tail = points[len(points) // 6 :]
                lines.append(Line(name=own.label or arm, points=tail, colour=COLOURS[number % len(COLOURS)]))
        if lines:
            title = f"{results.experiment.title}: loss of the training, {case.name}"
            return line_figure(title, lines, "tokens", "loss")
    return None


def _gap(results: Results) -> str | None:
    """Draw each arm's distance from the baseline over parameters, the published distances, and their law."""
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
            colour = COLOURS[number % len(COLOURS)]
            lines.append(Line(name=own.label or arm, points=points, colour=colour, dots=True))
    if not lines:
        return None
    if experiment.published:
        published = [(float(x), float(y)) for x, y in experiment.published["points"]]
        name = experiment.published["name"]
        lines.append(Line(name=name, points=published, colour=MAIN_COLOUR, dots=True, joined=False))
        smallest = min(size for line in lines for size, _ in line.points)
        law = [(size, 100 * distance(LAW_LEARNERS, size)) for size in (smallest, PARAMETERS_MIN, published[-1][0])]
        lines.append(Line(name="its law, extended down", points=law, colour=MAIN_COLOUR, dashed=True))
    title = f"{experiment.title}: per cent behind the baseline"
    return line_figure(title, lines, "parameters", "per cent", settings=True)


def _arms(results: Results) -> str | None:
    """Draw the loss of each arm of the first case with records, as a dot for each seed."""
    for case in results.cases:
        arms = [arm for arm in results.experiment.arms if results.seeds(case, arm)]
        if not arms:
            continue
        lines = []
        for place, arm in enumerate(arms):
            losses = [value_of(record, "loss") for record in results.seeds(case, arm).values()]
            points = [(float(place), loss) for loss in losses if loss is not None]
            name, colour = f"{place}: {results.experiment.arms[arm].label or arm}", COLOURS[place % len(COLOURS)]
            if points:
                lines.append(Line(name=name, points=points, colour=colour, dots=True, joined=False))
        if lines:
            return line_figure(f"{results.experiment.title}: final loss, {case.name}", lines, "arm", "loss")
    return None


def _scores(results: Results) -> str | None:
    """Draw the shares of right answers by task of the first case with records: a dot and its interval for each seed."""
    tasks, experiment = results.experiment.questions, results.experiment
    for case in results.cases:
        lines = []
        runs = [(arm, record) for arm in experiment.arms for record in results.seeds(case, arm).values()]
        for number, arm in enumerate(experiment.arms):
            points, intervals = [], []
            for place, (other, record) in enumerate(runs):
                for task, score in enumerate(scored(record, tasks).values()) if arm == other else ():
                    points.append((task + (place - (len(runs) - 1) / 2) * 0.8 / len(runs), score.value))
                    intervals.append((score.low, score.high))
            if points:
                name, colour = experiment.arms[arm].label or arm, COLOURS[number % len(COLOURS)]
                lines.append(
                    Line(name=name, points=points, colour=colour, dots=True, joined=False, intervals=intervals)
                )
        if lines:
            title = f"{experiment.title}, {case.name}"
            return line_figure(title, lines, "task", "right", share=True, names=list(tasks))
    return None
