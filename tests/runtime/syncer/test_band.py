"""The band around an earlier run's losses: its reference, its alarm, and what cannot be read."""

import json
from math import exp, nan
from pathlib import Path
from typing import Any

import pytest

from diloco_jax.runtime.syncer.band import Band, read_band
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
    band = Band([(10, 9.0), (100, 4.0), (round(100 * exp(2)), 2.0), (1000, 1.9)], 0.1)
    assert band.reference(tokens) == (expected if expected is None else pytest.approx(expected, abs=2e-3))


def test_two_losses_in_a_row_above_the_band_are_an_alarm() -> None:
    band = Band([(100, 2.0)], 0.1)
    for loss, tokens in ((9.0, 50), (9.0, 60), (2.3, 100), (2.2, 200), (2.3, 300), (nan, 400), (2.3, 500)):
        band.on_loss(loss, tokens)
        assert band.alarms() == [], "one alone, or one at the edge, is none"
    band.on_loss(2.5, 1600)
    (alarm,) = band.alarms()
    assert alarm.kind == "band" and "loss 2.5000 after 1,600 tokens is 25.0% above 2.0000" in alarm.text
    band.on_loss(2.1, 1700)
    assert band.alarms() == []


def test_the_evaluations_of_a_run_are_read(tmp_path: Path) -> None:
    rows = [(200, 3.0), (400, 2.0), (400, 2.1), (300, None)]
    config = run_of(tmp_path, *({"tokens": tokens, "loss": loss} for tokens, loss in rows))
    for place in (tmp_path, tmp_path / "metrics.jsonl"):
        band = read_band(EvaluationConfig(baseline=str(place), baseline_excess=config.baseline_excess))
        assert band is not None and [band.reference(tokens) for tokens in (199, 200, 500)] == [None, 3.0, 2.1]
    assert read_band(EvaluationConfig()) is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "a run without evaluations; name one with train.eval_every above 0"),
        ([{"tokens": 5, "loss": None}], "a run without evaluations"),
        ([{"loss": 2.0}], "has a damaged evaluation"),
        ([{"tokens": "many", "loss": 2.0}], "has a damaged evaluation"),
    ],
)
def test_a_run_that_does_not_serve_is_refused(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_band(run_of(tmp_path, *rows))


def test_a_folder_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"baseline is '.*gone', and .* cannot be read \(No such file or directory\)"):
        read_band(EvaluationConfig(baseline=str(tmp_path / "gone")))
