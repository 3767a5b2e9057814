"""Records, tables, verdicts and pages: exact small numbers, and pages that depend on records alone."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments import page
from experiments.plan import Choice, Job, make_plan
from experiments.plot import BYTES_MAX, draw
from experiments.records import append, elsewhere, read, thinned
from experiments.spec import Check, load, names, problems
from experiments.tables import Spread, collect, compared, limits, outcomes, score_differences, shown, spread, verdict
from experiments.tests.made import EXPERIMENT, record

ROOT = Path(__file__).resolve().parents[3]
UNTUNED = replace(EXPERIMENT, tuning=None)
# Losses of the seeds by tokens and arm.
LOSSES = {
    (1e6, "baseline"): (2.0, 1.0),
    (1e6, "m4"): (2.04, 1.01),
    (2e6, "baseline"): (1.0, 1.0),
    (2e6, "m4"): (1.005, 1.011),
}


def all_jobs() -> list[Job]:
    return [job for job in make_plan(UNTUNED, Choice(), []).jobs if job.arm != "m2"]


def losses_with(changes: Mapping[tuple[float, str], tuple[float, float]]) -> list[dict[str, Any]]:
    losses = {**LOSSES, **changes}
    return [record(job, losses[job.case.tokens, job.arm][job.seed]) for job in all_jobs()]


def test_a_curve_is_averaged_in_parts() -> None:
    assert thinned([(1, 4.0), (2, 2.0), (3, 1.0), (4, 3.0)], 2) == [[2, 3.0], [4, 2.0]]
    assert thinned([(1, 4.0)], 60) == [[1, 4.0]] and thinned([]) == []
    assert len(thinned((n, 1.0) for n in range(1000))) == 60


def test_an_incomplete_last_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    append(path, {"digest": "1"})
    path.write_text(path.read_text(encoding="utf-8") + '{"dig', encoding="utf-8")
    assert read(path) == [{"digest": "1"}]
    append(path, {"digest": "2"})
    assert [each["digest"] for each in read(path)] == ["1", "2"]
    path.write_text('{"dig\n{"digest": "2"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="line 1 is not a record"):
        read(path)


def test_records_of_other_experiments_are_found(tmp_path: Path) -> None:
    append(tmp_path / "a.jsonl", {"digest": "1"})
    append(tmp_path / "b.jsonl", {"digest": "2"})
    assert set(elsewhere(tmp_path / "b.jsonl")) == {"1"}


def test_seeds_are_compared_in_pairs() -> None:
    results = collect(UNTUNED, losses_with({}))
    case = results.cases[0]
    assert compared(results, case, "m4", "baseline", "loss", "percent") == pytest.approx({0: 2.0, 1: 1.0})
    assert compared(results, case, "m4", "baseline", "loss", "ratio") == pytest.approx({0: 1.02, 1: 1.01})
    assert compared(results, case, "m4", "baseline", "loss", "points") == pytest.approx({0: 4.0, 1: 1.0})
    assert compared(results, case, "m4", "", "bytes", "difference") == {0: 1.5e6, 1: 1.5e6}
    assert spread([2.0, 1.0]) == Spread(1.5, 1.0, 2.0, 2) and spread([]) is None
    assert shown(Spread(1.5, 1.0, 2.0, 2), "percent") == "+1.50 % (+1.00 to +2.00)"
    assert shown(Spread(1.5, 1.5, 1.5, 1), "ratio") == "1.500" and shown(None, "ratio") == "-"


def test_verdicts() -> None:
    def word(changes: dict[tuple[float, str], tuple[float, float]], keep: int = 8, **more: Any) -> str:
        results = collect(replace(UNTUNED, **more), losses_with(changes)[:keep])
        return verdict(results, outcomes(results))

    behind = {(2e6, "m4"): (1.02, 1.02)}
    assert word({}) == "reproduced", "0.8 % after 1.5 %"
    assert word(behind) == "not", "2 % after 1.5 %: above the limit, and it does not fall"
    assert word({**behind, (1e6, "m4"): (2.1, 1.1)}) == "partly", "2 % after 7.5 %"
    assert word({}, keep=7) == "unfinished", "a seed is missing"
    assert word({}, untestable="no TPU") == "not testable here"
    assert word({}, checks=()) == "not run yet"


def test_a_check_has_a_lower_limit_too() -> None:
    check = Check(says="slower", arm="m4", against="baseline", tokens=1e6, least=1.0)
    results = collect(replace(UNTUNED, checks=(check,)), losses_with({}))
    (outcome,) = outcomes(results)
    assert outcome.kept and limits(check) == "at least 1 %"
    results = collect(replace(UNTUNED, checks=(replace(check, least=1.6),)), losses_with({}))
    assert outcomes(results)[0].kept is False


def test_a_check_can_subtract_the_comparison_of_another_pair() -> None:
    check = Check(says="beyond m2", arm="m4", against="baseline", beyond=("m2", "baseline"), tokens=1e6, most=0.0)
    base = LOSSES[1e6, "baseline"]
    two = [job for job in make_plan(UNTUNED, Choice(), []).jobs if job.arm == "m2"]
    records = [*losses_with({}), *(record(job, base[job.seed] * (1.01, 1.03)[job.seed]) for job in two)]
    results = collect(replace(UNTUNED, checks=(check,)), records)
    (outcome,) = outcomes(results)
    assert outcome.measured == pytest.approx((-0.5, -2.0, 1.0, 2)), "2 and 1 %, less 1 and 3 %"
    assert outcome.kept
    assert [*problems(replace(EXPERIMENT, checks=(replace(check, beyond=("m2", "m3", "m4")),)))] == [
        "a check names 'm3', which is not an arm",
        "check 'beyond m2': beyond names 3 arms; name two",
    ]


def test_a_long_case_has_fewer_seeds() -> None:
    fewer = replace(UNTUNED, cases=(UNTUNED.cases[0], replace(UNTUNED.cases[1], seeds=(0,))))
    assert [job.seed for job in make_plan(fewer, Choice(), []).jobs if job.case.tokens == 2e6] == [0, 0]
    records = [each for each in losses_with({}) if (each["budget"], each["seed"]) != (2e6, 1)]
    done, waiting = collect(fewer, records), collect(UNTUNED, records)
    assert (verdict(done, outcomes(done)), verdict(waiting, outcomes(waiting))) == ("reproduced", "unfinished")
    assert done.left_s < waiting.left_s


def test_records_of_other_settings_do_not_count() -> None:
    changed = replace(UNTUNED, base={"outer": {"momentum": 0.5}})
    results = collect(changed, losses_with({}))
    assert not results.runs and verdict(results, outcomes(results)) == "not run yet"


def test_a_run_of_another_size_gets_a_separate_table() -> None:
    (job,) = make_plan(UNTUNED, Choice(seeds=(0,), size="35M", arms=("m4",), tokens=1e7), []).jobs
    results = collect(UNTUNED, [*losses_with({}), record(job, 1.0)])
    assert [case.name for case in results.cases] == ["1M, 1M tokens", "1M, 2M tokens", "35M, 10M tokens"]
    assert verdict(results, outcomes(results)) == "reproduced", "the bar is about the file's cases"


@pytest.mark.extra("dev")
def test_a_page_follows_from_records_alone(tmp_path: Path) -> None:
    for each in losses_with({}):
        append(tmp_path / page.RECORDS / "made.jsonl", each)
    text = page.write(UNTUNED, tmp_path).read_text(encoding="utf-8")
    assert "**Verdict: reproduced.**" in text and "waits for a setting" in text
    assert "| M = 4 | 2 | 1.0080 (1.0050 to 1.0110) | +0.80 % (+0.50 to +1.10) | 2.00M | 1.5 | 3.50 | 12 s |" in text
    assert "| m4 behind | 1M, 2M tokens | at most 1 % | +0.80 % (+0.50 to +1.10) | yes |" in text
    assert "`0123456789`" in text and "![Made up](made.svg)" in text
    again = tmp_path / "made.md"
    before = again.read_bytes()
    page.write(UNTUNED, tmp_path)
    assert again.read_bytes() == before


@pytest.mark.extra("dev")
def test_right_answers_have_intervals(tmp_path: Path) -> None:
    experiment = replace(UNTUNED, plot="scores", questions={"copy": 100}, cases=UNTUNED.cases[:1])
    right = {"baseline": (0.5, 0.6), "m4": (0.4, 0.6)}
    for job in make_plan(experiment, Choice(arms=("baseline", "m4")), []).jobs:
        append(tmp_path / page.RECORDS / "made.jsonl", record(job, 1.0, scores={"copy": right[job.arm][job.seed]}))
    results = collect(experiment, read(tmp_path / page.RECORDS / "made.jsonl"))
    found = score_differences(results, results.cases[0], "m4")
    # Student's quantile for one degree of freedom is 12.7062; half the distance is the standard error of two values.
    assert found["copy"] == pytest.approx((-5.0, -5.0 - 5.0 * 12.706205, -5.0 + 5.0 * 12.706205))
    text = page.write(experiment, tmp_path).read_text(encoding="utf-8")
    assert "| data parallel | 0 | 50.0 % (40.4 to 59.6) |" in text and "| arm | seed | copy, 100 questions |" in text
    assert "| M = 4 | -5.0 (-68.5 to +58.5) |" in text and " * |" not in text
    drawing = (tmp_path / "made.svg").read_text(encoding="utf-8")
    assert "copy" in drawing and "100%" in drawing and len(drawing) < BYTES_MAX


@pytest.mark.extra("dev")
@pytest.mark.parametrize("kind", ["curves", "gap", "arms"])
def test_plots_are_small(kind: str) -> None:
    published = {"name": "theirs", "points": [[35e6, 2.0], [1.3e9, 0.5]]}
    results = collect(replace(UNTUNED, plot=kind, published=published), losses_with({}))
    drawing = draw(results)
    assert drawing is not None and len(drawing) < BYTES_MAX
    assert ("theirs" in drawing) == (kind == "gap") and "<svg" in drawing
    assert draw(collect(UNTUNED, [])) is None


@pytest.mark.extra("dev")
@pytest.mark.parametrize("name", [*names(), "README"])
def test_the_pages_in_docs_follow_from_the_records(name: str, tmp_path: Path) -> None:
    docs = ROOT / "docs" / "results"
    (tmp_path / page.RECORDS).mkdir()
    for path in (docs / page.RECORDS).glob("*.jsonl"):
        (tmp_path / page.RECORDS / path.name).write_bytes(path.read_bytes())
    made = page.write_all(tmp_path) if name == "README" else page.write(load(name), tmp_path)
    assert made.read_text(encoding="utf-8") == (docs / made.name).read_text(encoding="utf-8"), (
        "run ./scripts/experiments/run --index"
    )
    svg = tmp_path / f"{name}.svg"
    assert not svg.exists() or svg.read_bytes() == (docs / svg.name).read_bytes()


def test_records_on_file_are_small_and_whole() -> None:
    for path in (ROOT / "docs" / "results" / page.RECORDS).glob("*.jsonl"):
        for each in read(path):
            assert len(each["curve"]) <= 60 and len(json.dumps(each)) < 4000, path
