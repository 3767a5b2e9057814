"""Figures of an experiment from its records: means with their spread, and the checks of the bar."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from experiments.intervals import Interval, over_seeds, wilson
from experiments.plan import Choice, Job, Plan, make_plan
from experiments.records import Record, by_digest
from experiments.spec import Case, Check, Experiment, sizes


class Spread(NamedTuple):
    """Mean, lowest and highest of some runs."""

    mean: float
    low: float
    high: float
    runs: int


def spread(values: Sequence[float]) -> Spread | None:
    """Return the spread of values; None if there are no values."""
    return Spread(statistics.fmean(values), min(values), max(values), len(values)) if values else None


@dataclass(frozen=True, kw_only=True)
class Results:
    """All records of an experiment that belong to its present settings."""

    experiment: Experiment
    # The cases of the file, then further cases with records.
    cases: tuple[Case, ...]
    # Plans by name of the case.
    plans: Mapping[str, Plan]
    # Records by name of the case and arm, then by seed.
    runs: Mapping[tuple[str, str], Mapping[int, Record]]
    # One job by name of the case and arm, for its settings.
    jobs: Mapping[tuple[str, str], Job]
    tuning: Sequence[tuple[Job, Record | None]]
    # The time of the jobs without a record, on two idle cores or one accelerator.
    left_s: float

    @property
    def records(self) -> list[Record]:
        """Return the records of all runs and of the tuning."""
        tried = [record for _, record in self.tuning if record is not None]
        return [record for seeds in self.runs.values() for record in seeds.values()] + tried

    def seeds(self, case: Case, arm: str) -> Mapping[int, Record]:
        """Return an arm's records in a case, by seed."""
        return self.runs.get((case.name, arm), {})


def collect(experiment: Experiment, records: Sequence[Record], *, quick: bool = False) -> Results:
    """Find the records of the present settings; records of other settings are omitted."""
    done = by_digest(records)
    seeds = tuple(sorted({*experiment.seeds, *(r["seed"] for r in records if r["point"] is None)}))
    choices = {(case.size, case.tokens): Choice(seeds=seeds) for case in experiment.cases}
    if quick:
        choices = {("quick", 0.0): Choice(seeds=(0,), quick=True)}
    else:
        extra = {(r["size"], r["budget"]) for r in records if r["point"] is None} - set(choices)
        choices |= {(size, budget): Choice(seeds=seeds, size=size, tokens=budget) for size, budget in sorted(extra)}
    runs: dict[tuple[str, str], dict[int, Record]] = {}
    jobs: dict[tuple[str, str], Job] = {}
    plans: dict[str, Plan] = {}
    cases: dict[str, Case] = {}
    tuning: dict[str, tuple[Job, Record | None]] = {}
    left: dict[str, float] = {}
    for choice in dict.fromkeys(choices.values()):
        plan = make_plan(experiment, choice, records)
        for job in (*plan.jobs, *plan.untuned):
            record = done.get(job.digest) if job not in plan.untuned else None
            if record is None and (job.point or job.seed in (job.case.seeds or experiment.seeds)):
                left[job.title] = job.expected_s
            if job.point is not None:
                tuning[job.digest] = (job, record)
                continue
            key = (job.case.name, job.arm)
            cases[job.case.name], plans[job.case.name] = job.case, plan
            jobs[key] = job
            if record is not None:
                runs.setdefault(key, {})[job.seed] = record
    if not quick:
        cases = {case.name: case for case in experiment.cases} | cases
    order = list(sizes())
    ordered = sorted(cases.values(), key=lambda case: (order.index(case.size), case.tokens))
    return Results(
        experiment=experiment,
        cases=tuple(ordered),
        plans=plans,
        runs=runs,
        jobs=jobs,
        tuning=tuple(tuning.values()),
        left_s=sum(left.values()),
    )


def value_of(record: Record, name: str) -> float | None:
    """Return a number of a record; None if it is missing or not finite."""
    if name == "bytes":
        return float(record["up_bytes"] + record["down_bytes"])
    value = record.get(name, record["scores"].get(name))
    return None if value is None or value != value else float(value)


def compared(results: Results, case: Case, arm: str, against: str, value: str, unit: str) -> dict[int, float]:
    """Return the comparison of two arms for each seed that both have."""
    ours, theirs = results.seeds(case, arm), results.seeds(case, against)
    found = {}
    for seed in sorted(ours):
        a = value_of(ours[seed], value)
        b = value_of(theirs[seed], value) if seed in theirs else None
        if a is None or (against and b is None):
            continue
        scale = 100.0 if unit == "points" else 1.0
        if not against or b is None:
            found[seed] = scale * a
        elif unit == "percent":
            found[seed] = 100.0 * (a / b - 1.0)
        else:
            found[seed] = a / b if unit == "ratio" else scale * (a - b)
    return found


def scored(record: Record, questions: Mapping[str, int]) -> dict[str, Interval]:
    """Return the shares of right answers of a run with their intervals."""
    return {name: wilson(round(record["scores"][name] * count), count) for name, count in questions.items()}


def score_differences(results: Results, case: Case, arm: str) -> dict[str, Interval]:
    """Return by task how many points more an arm scores than the baseline; the interval is over seeds in pairs."""
    own = results.experiment
    found = {task: compared(results, case, arm, own.baseline, task, "points") for task in own.questions}
    return {task: each for task, values in found.items() if (each := over_seeds([*values.values()])) is not None}


def measured(results: Results, check: Check, case: Case) -> list[float]:
    """Return the value of a check in a case for each seed that all of its arms have."""
    found = compared(results, case, check.arm, check.against, check.value, check.unit)
    if not check.beyond:
        return list(found.values())
    other = compared(results, case, *check.beyond, check.value, check.unit)
    return [found[seed] - other[seed] for seed in found if seed in other]


class Outcome(NamedTuple):
    """Result of a check in one case, or over several cases."""

    check: Check
    where: str
    measured: Spread | None
    # None: records of some seeds are missing.
    kept: bool | None


def outcomes(results: Results) -> list[Outcome]:
    """Compare the records with every check."""
    found = []
    for check in results.experiment.checks:
        cases = [case for case in results.cases if _asked(results, check, case)]
        if check.falls:
            found.append(_falling(results, check, cases))
            continue
        for case in cases:
            seen = spread(measured(results, check, case))
            kept = None
            if seen is not None and seen.runs >= len(case.seeds or results.experiment.seeds):
                kept = (check.most is None or seen.mean <= check.most) and (
                    check.least is None or seen.mean >= check.least
                )
            found.append(Outcome(check, case.name, seen, kept))
    return found


def _asked(results: Results, check: Check, case: Case) -> bool:
    named = [own for own in results.experiment.cases if own.name == case.name]
    wanted = ((check.case, case.name), (check.size, case.size), (check.tokens, case.tokens))
    if not named or any(asked and asked != own for asked, own in wanted):
        return False
    return all(not arm or not named[0].arms or arm in named[0].arms for arm in (check.arm, check.against))


def _falling(results: Results, check: Check, cases: Sequence[Case]) -> Outcome:
    """Check that each mean along tokens or sizes is below the previous one."""
    means = []
    for case in cases:
        values = measured(results, check, case)
        if len(values) < len(case.seeds or results.experiment.seeds):
            return Outcome(check, f"{len(cases)} cases", None, None)
        means.append(statistics.fmean(values))
    kept = all(after < before for before, after in pairwise(means))
    return Outcome(check, " to ".join(case.name for case in (cases[0], cases[-1])), spread(means), kept)


def verdict(results: Results, found: Sequence[Outcome]) -> str:
    """Return the result of an experiment in one or a few words."""
    if results.experiment.untestable:
        return "not testable here"
    if not found or any(outcome.kept is None for outcome in found):
        return "unfinished" if found and results.runs else "not run yet"
    kept = sum(bool(outcome.kept) for outcome in found)
    return "reproduced" if kept == len(found) else "partly" if kept else "not"


def ours_in_short(results: Results, found: Sequence[Outcome]) -> str:
    """Return our figure beside the paper's, for the table of all claims."""
    shorts = [
        f"{outcome.check.says}: {shown(outcome.measured, outcome.check.unit)}" for outcome in found if outcome.measured
    ]
    return "; ".join(shorts[:3]) or "-"


def shown(value: Spread | None, unit: str) -> str:
    """Write a spread: mean (low to high)."""
    if value is None:
        return "-"
    form = {"percent": "{:+.2f} %", "points": "{:+.1f} points", "ratio": "{:.3f}", "difference": "{:.4f}"}[unit]
    mean = form.format(value.mean)
    digits = form.split(" ")[0]
    return mean if value.runs == 1 else f"{mean} ({digits.format(value.low)} to {digits.format(value.high)})"


def limits(check: Check) -> str:
    """Write the limit of a check."""
    if check.falls:
        return f"falls along {check.falls}"
    unit = {"percent": " %", "points": " points"}.get(check.unit, "")
    parts = [f"at most {check.most:g}{unit}"] if check.most is not None else []
    parts += [f"at least {check.least:g}{unit}"] if check.least is not None else []
    return ", ".join(parts)


def columns(results: Results, case: Case) -> list[dict[str, Any]]:
    """Return a row for each arm of a case."""
    rows = []
    base = results.experiment.baseline
    for arm, own in results.experiment.arms.items():
        if (case.name, arm) not in results.jobs and not own.waits:
            continue
        seeds = list(results.seeds(case, arm).values())
        shown_too = (*_NUMBERS, *results.experiment.columns)
        each = {name: spread([v for r in seeds if (v := value_of(r, name)) is not None]) for name in shown_too}
        behind = compared(results, case, arm, base, "loss", "percent") if base and arm != base else {}
        scores = {name: spread([r["scores"][name] for r in seeds]) for name in (seeds[0]["scores"] if seeds else ())}
        row = {"arm": arm, "label": own.label or arm, "waits": own.waits, "behind": spread([*behind.values()])}
        rows.append({**row, "scores": scores, **each})
    return rows


_NUMBERS = ("loss", "bytes", "contributors", "seconds", "tokens")
