"""The paper's tables of goodput with its numbers beside ours, and simulations that measure the simulator's own time."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from diloco_jax.sim.goodput.methods import Cell
from diloco_jax.sim.goodput.settings import compact
from diloco_jax.sim.goodput.simulate import Result

CHIPS = (150e3, 300e3, 600e3, 1.2e6, 2.4e6)
# Percent; columns are CHIPS (paper, Table 1a and 1b).
GOODPUT_1A = {
    ("rigid", 1): (72, 57, 38, 27, 18),
    ("elastic", 1): (88, 80, 69, 58, 40),
    ("decoupled", 2): (94, 88, 80, 70, 54),
    ("decoupled", 4): (96, 93, 89, 82, 73),
    ("decoupled", 8): (98, 96, 94, 88, 80),
    ("decoupled", 16): (99, 98, 96, 93, 86),
}
UPTIME_1B = {
    ("rigid", 1): (72, 57, 38, 27, 18),
    ("elastic", 1): (88, 81, 69, 59, 42),
    ("decoupled", 2): (100, 97, 96, 90, 80),
    ("decoupled", 4): (100, 100, 99, 99, 99),
    ("decoupled", 8): (100, 100, 100, 100, 99),
    ("decoupled", 16): (100, 100, 100, 100, 99),
}
TABLE_1 = {"goodput": GOODPUT_1A, "uptime": UPTIME_1B}
# Simulated hours by number of learners. Fewer learners fail less often, so they need more time.
HOURS = {1: 96.0, 2: 24.0, 4: 24.0, 8: 12.0, 16: 12.0}
# Table 5, percent, and the averages of its text and vision scores.
TABLE_5 = {"K=8, grace off": (84, 54.4, 37.6), "K=1, grace off": (100, 51.4, 25.7), "K=1, grace on": (100, 55.3, 37.0)}

# The settings that read_shared returns.
Settings = dict[str, Any]


class Table(NamedTuple):
    """A table of the paper: its cells, and functions that print their results."""

    cells: Callable[[Settings], list[Cell]]
    describe: Callable[[Sequence[Result]], str]
    # Further facts for --json.
    facts: Callable[[Sequence[Result]], dict[str, Any]]
    # Use 1 if the results are times, which other processes would disturb.
    workers: int = 0


def cell(settings: Settings, method: str, learners: int, chips: float, hours: float, **more: Any) -> Cell:
    """Make one cell with the settings of the command line."""
    return Cell(method=method, learners=learners, chips=chips, **({"hours": hours} | settings | more))


def _cells_1(settings: Settings) -> list[Cell]:
    return [cell(settings, *key, chips, HOURS[key[1]]) for key in GOODPUT_1A for chips in CHIPS]


def _errors(results: Sequence[Result]) -> dict[str, list[float]]:
    """Return our goodput and uptime minus the paper's, in points."""
    return {
        name: [
            100 * getattr(row, name) - paper[at.method, at.learners][CHIPS.index(at.chips)] for at, row, _ in results
        ]
        for name, paper in TABLE_1.items()
    }


def rmse(errors: Sequence[float]) -> float:
    """Return the root of the mean square."""
    return math.sqrt(sum(error * error for error in errors) / len(errors))


def _describe_1(results: Sequence[Result]) -> str:
    errors = _errors(results)
    by_cell = {(at.method, at.learners, at.chips): row for at, row, _ in results}
    lines = []
    for part, (name, paper) in zip("ab", TABLE_1.items(), strict=True):
        lines.append(f"Table 1{part}, {name} %: ours / paper" + "".join(f"{compact(chips):>12}" for chips in CHIPS))
        for (method, learners), theirs in paper.items():
            ours = [100 * getattr(by_cell[method, learners, chips], name) for chips in CHIPS]
            pairs = "".join(f"{our:>7.1f} /{their:>3}" for our, their in zip(ours, theirs, strict=True))
            lines.append(f"  {method:<10} {learners:>2} learners      {pairs}")
        off = errors[name]
        lines.append(f"  RMSE {rmse(off):.2f} points, largest difference {max(map(abs, off)):.1f}\n")
    return "\n".join(lines) + (
        "Rigid and elastic are data parallel without and with elasticity. Step time, slices, return times and stalls\n"
        "are our calibration against these tables, not the paper's values, which it does not publish."
    )


def _facts_1(results: Sequence[Result]) -> dict[str, Any]:
    paper = [
        {"method": method, "learners": learners, "chips": chips, "goodput": own / 100, "uptime": up / 100}
        for (method, learners), row in GOODPUT_1A.items()
        for chips, own, up in zip(CHIPS, row, UPTIME_1B[method, learners], strict=True)
    ]
    return {"paper": paper, "rmse_points": {name: rmse(errors) for name, errors in _errors(results).items()}}


def _cells_5(settings: Settings) -> list[Cell]:
    """Return cells of eight learners on two kinds of hardware (18 % apart) with step noise of 10 % and no failures."""
    if settings["fast"]:
        raise ValueError("table5 needs rounds, but --fast simulates none; leave --fast out")
    own: dict[str, Any] = {"speed_gap": 0.18, "generations": 2, "step_noise": 0.10, "mtbi_chip_s": math.inf}
    hardware, protocol = replace(settings["hardware"], **own), settings["protocol"]

    def of(label: str, **changed: Any) -> Cell:
        config = replace(protocol, **changed)
        wan = replace(settings["wan"], delay_s=0.001, merge_s=0.0) if config.lockstep else settings["wan"]
        return cell(settings, "decoupled", 8, 1e3, 12.0, hardware=hardware, wan=wan, protocol=config, label=label)

    return [
        of("K=8, grace off", quorum=8, grace_steps_max=0.0, overlap_steps=0),
        of("K=1, grace off", quorum=1, grace_steps_max=0.0),
        of("K=1, grace on", quorum=1),
        of("K=8, nobody waits", quorum=8, grace_steps_max=0.0),
    ]


def _describe_5(results: Sequence[Result]) -> str:
    lines = [
        f"{'Table 5, 8 learners':<22}{'goodput %':>14}{'contributors':>14}{'own steps':>11}{'merges of a':>13}"
        f"{'paper: text, vision':>22}",
        f"{'':<22}{'ours / paper':>14}{'per round':>14}{'per round':>11}{'value in 24':>13}",
    ]
    for which, row, _ in results:
        theirs, text, vision = TABLE_5.get(which.label, (None, None, None))
        goodput = f"{100 * row.goodput:.1f} / {theirs if theirs is not None else '-'}"
        steps, merges = _shape(row.learner_steps, row.rounds, which.learners)
        scores = f"{text}, {vision}" if text is not None else "-"
        contributors = row.contributors_per_round or 0.0
        lines.append(f"{which.label:<22}{goodput:>14}{contributors:>14.2f}{steps:>11.2f}{merges:>13.2f}{scores:>22}")
    return "\n".join(lines) + _NOTES_5


_NOTES_5 = """

Own steps: inner steps of the mean learner per merged round. Merges of a value in 24: the merges of a fragment while the
mean learner makes 24 steps; it is 1 if rounds keep pace with the learners. Without a grace window, K = 1 merges the
learners that have just finished a step, a third of all, and merges each fragment three times as often. Outer steps then
follow the noise of few learners, and learners train on a merged value only for a short time. This explains the collapse
of the paper's scores. (In the paper a round may pull any fragment after any step, so it may merge one learner at a
time. Our learners keep copies of the fragments that are due next, so an early round waits for a step and for others.)
The paper's 84 % for K = 8 means that learners wait. That row runs in lockstep (tau = 0) on a network without delay, and
a step of all learners takes as long as the slowest of eight. With tau = 2 our learners do not wait (last row): rounds
are as slow, and goodput is full."""


def _shape(learner_steps: int, rounds: int, learners: int) -> tuple[float, float]:
    """Return the inner steps of the mean learner per merged round, and its inverse."""
    steps = learner_steps / learners
    return (steps / rounds, rounds / steps) if rounds else (math.inf, 0.0)


def _facts_5(results: Sequence[Result]) -> dict[str, Any]:
    paper = [
        {"label": label, "goodput": goodput / 100, "text": text, "vision": vision}
        for label, (goodput, text, vision) in TABLE_5.items()
    ]
    return {"labels": [result.cell.label for result in results], "paper": paper}


def _cells_cost(settings: Settings, learners: Sequence[int], hours: float) -> list[Cell]:
    return [cell(settings, "decoupled", each, 2.4e6, hours) for each in learners]


def _describe_cost(results: Sequence[Result]) -> str:
    lines = [f"{'learners':>8} {'hours':>6} {'goodput':>8} {'events':>10} {'CPU s':>8} {'us/event':>9}"]
    for which, row, cpu_s in results:
        each_us = 1e6 * cpu_s / row.events
        lines.append(
            f"{row.learners:>8} {which.hours:>6g} {row.goodput:>8.3f} {row.events:>10} {cpu_s:>8.2f} {each_us:>9.2f}"
        )
    return "\n".join(lines)


def _facts_cost(results: Sequence[Result]) -> dict[str, Any]:
    return {"cpu_s": [result.cpu_s for result in results]}


TABLES = {
    "table1": Table(_cells_1, _describe_1, _facts_1),
    "table5": Table(_cells_5, _describe_5, _facts_5),
    "day": Table(partial(_cells_cost, learners=(16,), hours=24.0), _describe_cost, _facts_cost, workers=1),
    "scale": Table(partial(_cells_cost, learners=(1, 4, 16, 64), hours=6.0), _describe_cost, _facts_cost, workers=1),
}
