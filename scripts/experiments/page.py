"""Pages of docs/results: one for each experiment, and one table of all claims, from records alone."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from experiments.plan import differences
from experiments.plot import draw
from experiments.records import read
from experiments.runner import in_words
from experiments.spec import Case, Experiment, load, names
from experiments.tables import Outcome, Results, collect, columns, limits, ours_in_short, outcomes, shown, verdict

RECORDS = "records"
TITLES = {
    "virtual_s": "simulated seconds",
    "flight_steps": "steps in flight",
    "peak_to_mean": "largest round to mean, bytes",
}
WAYS = """Way `tapes`: on a simulated schedule, in one process (bytes are payloads);
`run`: islands and syncer as processes (bytes are payloads, those of joins too); `baseline`: plain data parallel."""


def write(experiment: Experiment, out: Path, *, quick: bool = False) -> Path:
    """Write the page of an experiment, and its plot, from the records below `out`."""
    results = collect(experiment, read(out / RECORDS / f"{experiment.name}.jsonl"), quick=quick)
    found = [] if quick else outcomes(results)
    drawing, plot = draw(results), out / f"{experiment.name}.svg"
    if drawing is not None:
        plot.write_text(drawing, encoding="utf-8")
    page = out / f"{experiment.name}.md"
    out.mkdir(parents=True, exist_ok=True)
    parts = [_head(results, found, quick), *_figures(results), _plotted(experiment, drawing), _held(found)]
    parts += [_tuned(results), _settings(results), _made_with(results)]
    page.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
    return page


def write_all(out: Path) -> Path:
    """Write README.md: one row for each claim."""
    rows = []
    for name in names():
        experiment = load(name)
        results = collect(experiment, read(out / RECORDS / f"{name}.jsonl"))
        found = outcomes(results)
        word = verdict(results, found)
        waits = f" (waits for {experiment.waits})" if experiment.waits else ""
        cells = [f"[{experiment.title}]({name}.md)", experiment.where, experiment.paper, ours_in_short(results, found)]
        rows.append([*cells, f"{word}{waits}", experiment.decides])
    head = (
        "# The paper's claims, repeated\n\n<!-- made by `./scripts/experiments/run --index`; do not edit -->\n\n"
        "Each row is an experiment that one command repeats, with a tuned baseline and equal tokens; its page has the\n"
        "settings, every figure with its spread, and the verdict. Figures come from the records in `records/` "
        "alone.\nWhat was measured of speed, links, failures and memory is in "
        "[Results](../results.md); how experiments work is in\n[scripts/experiments](../benchmarks.md#experiments)."
    )
    after = (
        "Goodput, uptime and bandwidth (Tables 1, 5 and 13) are simulated by `scripts/paper/tables`: "
        "[simulate](../simulate.md),\n[plan](../plan.md)."
    )
    table = _table(["claim", "in the paper", "the paper's figure", "ours", "verdict", "what would decide it"], rows)
    page = out / "README.md"
    page.write_text(f"{head}\n\n{table}\n\n{after}\n", encoding="utf-8")
    return page


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in rows)])


def _head(results: Results, found: Sequence[Outcome], quick: bool) -> str:
    own = results.experiment
    command = f"./scripts/experiments/run {own.name} --seeds {' '.join(map(str, own.seeds))}"
    word = "a trial of the machinery, no evidence" if quick else verdict(results, found)
    why = f" {own.untestable}" if own.untestable else f" Waits for {own.waits}." if own.waits else ""
    rows = [
        ("question", own.question),
        ("the paper's figure", f"{own.paper} ({own.where})"),
        ("bar", own.bar),
        ("what decides", own.decides),
        ("command", f"`{command}`; add `--max-minutes 10` for calls that stop and go on"),
        (
            "left to run",
            f"{in_words(results.left_s)} on two idle cores, or one accelerator for 35M and more"
            if results.left_s
            else "nothing",
        ),
    ]
    lines = [f"# {own.title}", "<!-- made by `./scripts/experiments/run NAME --page` from records; do not edit -->"]
    lines += [f"**Verdict: {word}.**{why}", _table(("", ""), rows)]
    return "\n\n".join([*lines, own.notes.strip()] if own.notes else lines)


def _figures(results: Results) -> list[str]:
    return [f"## {case.name}\n\n{_case(results, case)}" for case in results.cases]


def _case(results: Results, case: Case) -> str:
    rows, own = columns(results, case), results.experiment.columns
    scores = list(dict.fromkeys(name for row in rows for name in row["scores"]))
    head = ["arm", "seeds", "final loss", "behind the baseline", *scores, "tokens trained", "MB on the wire"]
    head += ["contributors", *(TITLES.get(name, name) for name in own), "wall time"]
    table = []
    for row in rows:
        if row["waits"]:
            table.append([row["label"], "-", f"not run yet: waits for {row['waits']}", *["-"] * (len(head) - 3)])
            continue
        seeds = len(results.seeds(case, row["arm"]))
        cells = [row["label"], str(seeds), shown(row["loss"], "difference"), shown(row["behind"], "percent")]
        cells += [shown(row["scores"].get(name), "difference") for name in scores]
        cells += [
            _mean(row["tokens"], "{:.2f}M", 1e-6),
            _mean(row["bytes"], "{:.1f}", 1e-6) if row["bytes"] and row["bytes"].high else "-",
        ]
        cells += [_mean(row["contributors"], "{:.2f}"), *(_mean(row[name], "{:.3f}") for name in own)]
        table.append([*cells, _mean(row["seconds"], "{:.0f} s")])
    return _table(head, table)


def _mean(value: Any, form: str, scale: float = 1.0) -> str:
    return form.format(value.mean * scale) if value is not None else "-"


def _plotted(experiment: Experiment, drawing: str | None) -> str:
    return f"![{experiment.title}]({experiment.name}.svg)" if drawing is not None else ""


def _held(found: Sequence[Outcome]) -> str:
    if not found:
        return ""
    words = {None: "unfinished", True: "yes", False: "no"}
    rows = [(o.check.says, o.where, limits(o.check), shown(o.measured, o.check.unit), words[o.kept]) for o in found]
    return "## The bar\n\n" + _table(("what", "where", "limit", "measured, mean (lowest to highest)", "kept"), rows)


def _tuned(results: Results) -> str:
    if not results.tuning:
        return ""
    tuning = results.experiment.tuning
    assert tuning is not None
    tuned = {key: point for plan in results.plans.values() for key, point in plan.tuned.items()}
    rows = []
    for job, record in results.tuning:
        assert job.point is not None
        best = tuned.get((job.case.size, job.arm)) == job.point
        loss = f"{record['loss']:.4f}" if record is not None and record["loss"] is not None else "-"
        point = ", ".join(f"`{path}` {value}" for path, value in job.point.items())
        rows.append((job.case.size, job.arm, point, loss, "taken" if best else ""))
    about = (
        f"Each side has {len(tuning.points(next(iter(tuning.grids))))} points, {tuning.tokens / 1e6:g}M tokens each, "
        f"seed {tuning.seed}, at every size. Other arms take the settings of the arm that they are like."
    )
    return f"## Tuning\n\n{about}\n\n" + _table(("size", "arm", "settings", "final loss", ""), rows)


def _settings(results: Results) -> str:
    case = next((case for case in results.cases if any(key[0] == case.name for key in results.jobs)), None)
    if case is None:
        return ""
    jobs = {arm: job for (name, arm), job in results.jobs.items() if name == case.name}
    lists = []
    for arm, own in differences(jobs).items():
        words = ", ".join(
            f"`{path}` {yaml.safe_dump(value, default_flow_style=True).strip().removesuffix('...').strip()}"
            for path, value in own.items()
        )
        lists.append((arm, jobs[arm].way, words or "nothing"))
    first = next(iter(jobs.values()))
    config = yaml.safe_dump(
        {k: v for k, v in first.settings.items() if k not in ("seed", "name")}, sort_keys=True, width=110
    )
    return (
        f"## Settings\n\nArms differ in these, shown for {case.name}. {WAYS}\n\n"
        + _table(("arm", "way", "settings"), lists)
        + f"\n\nThe whole config of `{first.arm}`:\n\n```yaml\n{config}```"
    )


def _made_with(results: Results) -> str:
    records = results.records
    if not records:
        return ""
    made = sorted({(r["date"], r["commit"], r["machine"]) for r in records})
    rows = [(date, f"`{commit}`", machine) for date, commit, machine in made]
    name = results.experiment.name
    return "## Made with\n\n" + _table(("date", "commit", "machine"), rows) + f"\n\nRecords: `records/{name}.jsonl`."
