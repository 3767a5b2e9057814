"""The band around an earlier run's losses: its reference, its alarm, and what cannot be read."""

import json
import os
from math import exp, nan
from pathlib import Path
from typing import Any

import pytest

from diloco_jax.runtime.syncer.band import Band, Point, continued_band, read_band
from diloco_jax.settings.run import EvaluationConfig


def run_of(folder: Path, *rows: dict[str, Any]) -> EvaluationConfig:
    """A run with these evaluations, and the setting that names it."""
    lines = [{"kind": "wire", "t": 0.0}, *({"kind": "eval", "t": 1.0} | row for row in rows)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return EvaluationConfig(baseline=str(folder), baseline_excess=0.1)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        # 100 tokens are a tenth of the earlier run.
        (99, None),
        (100, 4.0),
        (round(100 * exp(1)), 3.0),
        (round(100 * exp(2)), 2.0),
        (10**9, 1.9),
    ],
)
def test_the_reference_is_linear_in_the_logarithm_of_tokens(tokens: int, expected: float | None) -> None:
    band = Band([Point(10, 9.0), Point(100, 4.0), Point(round(100 * exp(2)), 2.0), Point(1000, 1.9)], 0.1)
    assert band.reference(tokens) == (expected if expected is None else pytest.approx(expected, abs=2e-3))


def test_two_losses_in_a_row_above_the_band_are_an_alarm() -> None:
    band = Band([Point(100, 2.0)], 0.1)
    for loss, tokens in ((9.0, 50), (9.0, 60), (2.3, 100), (2.2, 200), (2.3, 300), (nan, 400), (2.3, 500)):
        band.on_score(Point(tokens, loss))
        assert band.alarms() == [], "one alone, or one at the edge, is none"
    band.on_score(Point(1600, 2.5))
    (alarm,) = band.alarms()
    assert alarm.kind == "band" and "loss 2.5000 after 1,600 tokens is 25.0% above 2.0000" in alarm.text
    band.on_score(Point(1700, 2.1))
    assert band.alarms() == []


@pytest.mark.parametrize(("reference", "equal", "above"), [(0.0, 0.0, 0.5), (-2.0, -1.9, -1.7)])
def test_losses_may_be_negative_or_zero(reference: float, equal: float, above: float) -> None:
    band = Band([Point(100, reference)], 0.1)
    for loss, alarms in ((equal, 0), (equal, 0), (above, 0), (above, 1)):
        band.on_score(Point(100, loss))
        assert len(band.alarms()) == alarms


def test_only_means_over_the_same_corpora_are_compared() -> None:
    both, one = frozenset({"french loss", "dutch loss"}), frozenset({"french loss", "accuracy"})
    band = Band([Point(100, 2.0, both), Point(200, 5.0, one)], 0.1)
    assert band.reference(300, {"french loss", "dutch loss"}) == 2.0
    assert band.reference(300, {"french loss"}, {"dutch loss"}) == 5.0
    assert band.reference(300, {"run loss"}) is None
    for _ in range(2):
        band.on_score(Point(300, 4.0, one), ("french", "dutch"))
    assert band.alarms() == [], "4.0 of French alone is below 5.0 of French alone"
    for _ in range(2):
        band.on_score(Point(300, 4.0, both), ("french", "dutch"))
    assert len(band.alarms()) == 1


def test_the_evaluations_of_a_run_are_read(tmp_path: Path) -> None:
    """Those that a return to a snapshot undid are not its history."""
    rows = [(200, 3.0), (300, 9.0), (400, 9.0), (300, None), (300, 2.5), (400, 2.1)]
    config = run_of(tmp_path, *({"tokens": tokens, "loss": loss} for tokens, loss in rows))
    for place in (tmp_path, tmp_path / "metrics.jsonl"):
        band = read_band(EvaluationConfig(baseline=str(place), baseline_excess=config.baseline_excess))
        assert band is not None and [band.reference(tokens) for tokens in (199, 200, 300, 500)] == [None, 3.0, 2.5, 2.1]
    assert read_band(EvaluationConfig()) is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "a run without evaluations; name one with train.eval_every above 0"),
        ([{"tokens": 5, "loss": None}], "a run without evaluations"),
        ([{"loss": 2.0}], "has an evaluation after None tokens; name another run"),
        ([{"tokens": "many", "loss": 2.0}], "after 'many' tokens"),
        ([{"tokens": True, "loss": 2.0}], "after True tokens"),
        ([{"tokens": 1 << 80, "loss": 2.0}], "after 12089258"),
        ([{"tokens": 5, "loss": "2.0"}], "with the loss '2.0'"),
        ([{"tokens": 5, "loss": nan}], "with the loss nan"),
        ([{"tokens": 5, "loss": 2.0, "scores": None}], "and the scores None"),
    ],
)
def test_a_run_that_does_not_serve_is_refused(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_band(run_of(tmp_path, *rows))


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="is not a file"):
        read_band(EvaluationConfig(baseline=str(tmp_path)))


def test_a_run_that_continues_keeps_its_alarm_and_does_without_a_lost_baseline(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    run_of(tmp_path / "own", {"tokens": 400, "loss": 4.0}, {"tokens": 500, "loss": 4.0})
    config = run_of(tmp_path, {"tokens": 400, "loss": 2.0})
    band = continued_band(config, tmp_path / "own")
    assert band is not None and len(band.alarms()) == 1
    assert continued_band(EvaluationConfig(baseline=str(tmp_path / "gone")), tmp_path / "own") is None


def test_a_folder_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"baseline is '.*gone', and .* cannot be read \(No such file or directory\)"):
        read_band(EvaluationConfig(baseline=str(tmp_path / "gone")))
