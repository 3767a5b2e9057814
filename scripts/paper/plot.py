"""Drawing of goodput against chips, with a curve for each method and number of learners."""

from collections.abc import Sequence

from plotting.figure import COLOURS, MAIN_COLOUR, Line, Point, line_figure

from diloco_jax.sim.goodput.methods import Row

# These methods have one learner; colours show the number of learners of the other methods.
ONE_LEARNER = ("rigid", "elastic")
TITLE = "Goodput against chips (simulated; see docs/simulate.md)"


def curves(rows: Sequence[Row]) -> list[Line]:
    """Return a line per method and number of learners; the best at the most chips is first."""
    points: dict[tuple[str, int], list[Point]] = {}
    for row in rows:
        points.setdefault((row.method, row.learners), []).append((row.chips, row.goodput))
    numbers = sorted({learners for method, learners in points if method not in ONE_LEARNER})
    colours = {learners: COLOURS[index % len(COLOURS)] for index, learners in enumerate(numbers)}
    lines = []
    for (method, learners), where in points.items():
        single = method in ONE_LEARNER
        line = Line(
            name=f"{method} data parallel" if single else f"{method} M = {learners}",
            points=sorted(where),
            colour=MAIN_COLOUR if single else colours[learners],
            dashed=method in ("rigid", "sync"),
            dots=True,
        )
        lines.append(line)
    return sorted(lines, key=lambda line: line.points[-1], reverse=True)


def drawing(rows: Sequence[Row]) -> str:
    """Return goodput against chips as the text of an SVG file."""
    return line_figure(TITLE, curves(rows), "chips of all learners together", "goodput", settings=True, share=True)
