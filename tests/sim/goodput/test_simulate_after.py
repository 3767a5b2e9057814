"""Uses of what `diloco simulate` found: a plot, and a choice of learners."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diloco_jax.cli.main import main
from diloco_jax.sim.goodput.penalty import PENALTIES
from diloco_jax.sim.goodput.simulate import Options, plan_cells, run

FAST = {"fast": True, "hours": 1.0, "workers": 1, "methods": ("elastic", "decoupled"), "learners": (2, 8)}


def quiet(line: str) -> None:
    del line


def test_each_number_of_chips_has_its_choice() -> None:
    options = Options(chips=("600k", "2.4m"), choose=True, **FAST)  # type: ignore[arg-type]
    told, text = run(options, quiet)
    assert [choice["chips"] for choice in told["choice"]] == [600e3, 2.4e6]
    assert [len(choice["rows"]) for choice in told["choice"]] == [3, 3]
    for choice in told["choice"]:
        assert choice["why"] in " ".join(text.split())
        goodput = {row["learners"]: row["goodput"] for row in told["rows"] if row["chips"] == choice["chips"]}
        assert all(row["goodput"] == goodput[row["learners"]] for row in choice["rows"])


def test_the_command_line_reaches_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "goodput.html"
    words = ["simulate", "--fast", "--hours", "0.5", "--workers", "1", "--methods", "decoupled", "--chips", "1.2m"]
    more = ["--plot", str(path), "--choose", "--penalty", "scaling-laws", "--parameters", "2.4g", "--loss-slope", "0.1"]
    assert main([*words, *more, "--json"]) == 0
    (choice,) = json.loads(capsys.readouterr().out)["choice"]
    costs = {row["learners"]: row["compute"] for row in choice["rows"]}
    assert costs[8] == pytest.approx((2.351 / 2.326) ** 10)
    assert "decoupled M = 16" in path.read_text(encoding="utf-8")


def test_the_help_names_every_penalty(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    assert ", ".join(PENALTIES) in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plot": "x.pdf"}, "ends in '.pdf'"),
        ({"methods": ("sync",), "learners": (8,), "choose": True}, "only 8 would be simulated; give several"),
        ({"choose": True, "penalty": "guess"}, "the penalty 'guess' is unknown"),
        ({"choose": True, "parameters": "many"}, "--parameters is 'many', which is no number"),
        ({"choose": True, "loss_slope": 0.0}, "--loss-slope is 0.0"),
        ({"choose": True, "loss_slope": 1e-9}, "--loss-slope is 1e-09, but must be 0.001 to 10"),
    ],
)
def test_what_cannot_be_told_is_refused_before_the_simulation(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    if "plot" in options:
        options = options | {"plot": tmp_path / str(options["plot"])}
    with pytest.raises(ValueError, match=message):
        plan_cells(Options(**options))  # type: ignore[arg-type]
