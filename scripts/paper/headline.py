"""The announcement's Figure 2 from our simulator, our planner and our experiments: ./scripts/paper/headline [FILE].

Dots of the two upper panels are the paper's values, and dots of the lowest one are the published losses.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from experiments.records import read
from experiments.spec import load
from experiments.tables import collect, compared
from plotting.figure import COLOURS, MAIN_COLOUR, Line, Panel, Point, panel_figure

from diloco_jax.sim.goodput.bandwidth import UTILISATIONS, data_parallel_gbit_per_s
from diloco_jax.sim.goodput.simulate import read_shared, run_cells
from diloco_jax.tools.plan.law import PARAMETERS_MAX, PARAMETERS_MIN, distance
from paper.goodput import CHIPS, GOODPUT_1A, TABLES
from paper.penalty import QUICKSTART_PERCENT, SCALING_LOSSES
from paper.table13 import PARAMETERS, TABLE, needed_gbit_per_s

DOCS = Path(__file__).resolve().parents[2] / "docs"
STEP_S = 1.0
SITES = (2, 8)
WIRES = {"data_parallel": "data parallel", "bfloat16": "islands, bfloat16", "int4": "islands, int4"}
# The colours of data parallel without and with elasticity, and of M learners.
METHOD_COLOURS = {"rigid": MAIN_COLOUR, "elastic": "grey"}
LEARNER_COLOURS = {2: COLOURS[0], 4: COLOURS[1], 8: COLOURS[2], 16: COLOURS[3]}
# The case of each size that is nearest to 20 tokens per parameter, as the published law has them.
DISTANCE_TOKENS = {"0.12M": 2e6, "0.5M": 12e6, "1M": 24e6}
DISTANCE_ARMS = {
    "m2": (2, "M = 2, H = 6, int4", "D"),
    "m4": (4, "M = 4, H = 6, int4", "D"),
    "m8": (8, "M = 8, H = 6, int4", "D"),
    "m4-waits": (4, "M = 4, H = 3, waits", "x"),
    "m8-waits": (8, "M = 8, H = 3, waits", "x"),
}
# The law is drawn from this number of parameters on.
SMALLEST = 1e5
# One million parameters after 6.1M tokens, three seeds (docs/results.md).
DEFAULT_POINT, DEFAULT_INTERVAL = (1.0e6, QUICKSTART_PERCENT), (2.54, 3.34)


def bandwidth() -> Panel:
    """Draw the rate of a site's link against utilisation, for data parallel and for islands."""
    lines = []
    for number, (wire, name) in enumerate(WIRES.items()):
        for sites in SITES:
            needs = [
                data_parallel_gbit_per_s(2 * PARAMETERS, STEP_S, sites, share)
                if wire == "data_parallel"
                else needed_gbit_per_s(wire, STEP_S, sites, share)
                for share in UTILISATIONS
            ]
            colour = COLOURS[number] if number else MAIN_COLOUR
            of_lines = list(zip(_percent(UTILISATIONS), needs, strict=True))
            of_paper = list(zip(_percent(UTILISATIONS), TABLE[STEP_S, sites, wire], strict=True))
            lines.append(Line(name=f"{name}, {sites} sites", points=of_lines, colour=colour, dashed=sites == SITES[0]))
            marker = "^" if sites == SITES[0] else "o"
            lines.append(Line(name="", points=of_paper, colour=colour, dots=True, marker=marker, joined=False))
    title = "Link of a site, 5B parameters, steps of 1 s (marks: the paper)"
    x_label = "time in steps (data parallel), rounds made (islands), per cent"
    return Panel(title=title, lines=lines, x_label=x_label, y_label="Gbit/s, each way", log="y")


def _percent(shares: Sequence[float]) -> list[float]:
    return [100 * share for share in shares]


def goodput() -> Panel:
    """Draw simulated goodput against chips, for each method and number of learners."""
    settings = read_shared([], seed=0, fast=True, hours=None)
    points: dict[tuple[str, int], list[Point]] = {}
    for cell, row, _ in run_cells(TABLES["table1"].cells(settings), 1, lambda line: None):
        points.setdefault((cell.method, cell.learners), []).append((cell.chips, row.goodput))
    lines = []
    for (method, learners), found in reversed(points.items()):
        alone = method in METHOD_COLOURS
        name = f"{method} data parallel" if alone else f"M = {learners}"
        colour = METHOD_COLOURS[method] if alone else LEARNER_COLOURS[learners]
        theirs = [(chips, value / 100) for chips, value in zip(CHIPS, GOODPUT_1A[method, learners], strict=True)]
        lines.append(Line(name=name, points=sorted(found), colour=colour, dashed=alone))
        lines.append(Line(name="", points=theirs, colour=colour, dots=True, joined=False))
    title = "Goodput on failing chips, simulated (dots: the paper)"
    return Panel(title=title, lines=lines, x_label="chips", y_label="goodput", settings=True, share=True)


def distances() -> Panel:
    """Draw the distance of islands from data parallel against parameters, with the published law."""
    lines = []
    below, within = _sizes(SMALLEST, PARAMETERS_MIN), _sizes(PARAMETERS_MIN, PARAMETERS_MAX)
    for column, learners in ((2, 2), (3, 4), (4, 8)):
        colour = LEARNER_COLOURS[learners]
        law = [[(size, 100 * distance(learners, size)) for size in sizes] for sizes in (within, below)]
        theirs = [
            (size, 100 * (losses[column] / losses[0] - 1))
            for size, losses in SCALING_LOSSES.items()
            if column < len(losses)
        ]
        lines.append(Line(name=f"law, M = {learners}", points=law[0], colour=colour))
        lines.append(Line(name="", points=law[1], colour=colour, dashed=True))
        lines.append(Line(name="", points=theirs, colour=colour, dots=True, joined=False))
    default = Line(
        name="M = 4, H = 24",
        points=[DEFAULT_POINT],
        colour=LEARNER_COLOURS[4],
        dots=True,
        marker="s",
        joined=False,
        intervals=[DEFAULT_INTERVAL],
    )
    title = "Loss above data parallel (lines and dots: published)"
    return Panel(title=title, lines=[*lines, *_ours(), default], x_label="parameters", y_label="per cent", log="x")


def _sizes(low: float, high: float) -> list[float]:
    return [low * (high / low) ** (step / 8) for step in range(9)]


def _ours() -> list[Line]:
    """Return our distances with their lowest and highest seed, from the records of the experiment `parity`."""
    experiment, lines = load("parity"), []
    results = collect(experiment, read(DOCS / "results" / "records" / "parity.jsonl"))
    cases = [case for case in results.cases if DISTANCE_TOKENS.get(case.size) == case.tokens]
    for arm, (learners, name, marker) in DISTANCE_ARMS.items():
        points, intervals = [], []
        for case in cases:
            behind = list(compared(results, case, arm, experiment.baseline, "loss", "percent").values())
            if behind:
                (parameters,) = {record["parameters"] for record in results.seeds(case, arm).values()}
                points.append((parameters, fmean(behind)))
                intervals.append((min(behind), max(behind)))
        colour = LEARNER_COLOURS[learners]
        lines.append(
            Line(name=name, points=points, colour=colour, dots=True, marker=marker, joined=False, intervals=intervals)
        )
    return lines


def draw() -> str:
    """Return the three panels as the text of an SVG file."""
    return panel_figure([bandwidth(), goodput(), distances()])


def main(arguments: Sequence[str]) -> int:
    """Write the figure, and return the exit status."""
    file = Path(arguments[0]) if arguments else DOCS / "pictures" / "headline.svg"
    file.write_text(draw(), encoding="utf-8")
    print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
