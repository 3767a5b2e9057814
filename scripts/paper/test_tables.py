"""The paper's tables have all of its numbers, ours are near them, and the documentation shows the computed ones."""

import json
import math
from pathlib import Path

import pytest

from diloco_jax.sim.goodput.bandwidth import UTILISATIONS
from diloco_jax.sim.goodput.simulate import read_shared
from paper import table13
from paper.__main__ import main, simulate
from paper.goodput import CHIPS, GOODPUT_1A, TABLES, UPTIME_1B, Settings, rmse

DOCS = Path(__file__).resolve().parents[2] / "docs"


def settings(*, fast: bool = False, hours: float | None = None) -> Settings:
    return read_shared((), seed=0, fast=fast, hours=hours)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def test_tables_have_a_row_per_method_and_five_columns() -> None:
    assert GOODPUT_1A.keys() == UPTIME_1B.keys() and len(GOODPUT_1A) == 6
    for key in GOODPUT_1A:
        assert len(GOODPUT_1A[key]) == len(UPTIME_1B[key]) == len(CHIPS)
        assert all(own <= up for own, up in zip(GOODPUT_1A[key], UPTIME_1B[key], strict=True))


def test_rmse() -> None:
    assert rmse([3.0, -4.0]) == pytest.approx(math.sqrt(12.5))


def test_table_1_without_machines_is_within_two_points() -> None:
    """The machines would take a minute, and agree with the fast mode (test_methods.py)."""
    result, text = simulate("table1", settings(fast=True), workers=1)
    assert result["rmse_points"]["goodput"] <= 2.0 and result["rmse_points"]["uptime"] <= 2.0
    assert len(result["paper"]) == len(result["rows"]) == 30
    assert "Table 1b" in text and "our calibration" in text


def test_table_5_shows_the_collapse() -> None:
    result, text = simulate("table5", settings(hours=1.0), workers=1)
    rows = dict(zip(result["labels"], result["rows"], strict=True))
    for paper in result["paper"]:
        assert abs(rows[paper["label"]]["goodput"] - paper["goodput"]) <= 0.03, paper
    assert rows["K=8, grace off"]["contributors_per_round"] == 8.0
    assert rows["K=1, grace on"]["contributors_per_round"] > 7.0
    assert rows["K=1, grace off"]["contributors_per_round"] < 4.0
    assert rows["K=1, grace off"]["rounds"] > 2 * rows["K=1, grace on"]["rounds"]
    assert "51.4, 25.7" in text


def test_the_simulators_own_time_is_measured_in_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert TABLES["day"].workers == TABLES["scale"].workers == 1
    (cell,) = TABLES["day"].cells(settings())
    assert (cell.learners, cell.chips, cell.hours) == (16, 2.4e6, 24.0)
    assert "us/event" in printed(capsys, "day", "--hours", "0.05", "--seed", "1")


def test_table_5_needs_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["table5", "--fast"])
    assert "table5 needs rounds" in capsys.readouterr().err


def test_table_13_within_ten_percent_up_to_95() -> None:
    rows = [row for row in table13.rows() if row["utilisation"] < 0.99]
    assert len(rows) == 4 * 3 * 4
    for row in rows:
        assert row["gbit_per_s"] == pytest.approx(row["paper_gbit_per_s"], rel=0.10), row


def test_ratios_of_table_13() -> None:
    rates = {(row["wire"], row["step_s"], row["sites"], row["utilisation"]): row for row in table13.rows()}
    for share in UTILISATIONS:
        for key in ("gbit_per_s", "needed_gbit_per_s"):
            wide, narrow = (rates[wire, 1.0, 2, share][key] for wire in ("bfloat16", "int4"))
            assert narrow / wide == pytest.approx(1 / 4, rel=0.10)
            assert rates["int4", 5.0, 2, share][key] / narrow == pytest.approx(1 / 5)
        for wire in ("bfloat16", "data_parallel"):
            near, far = (rates[wire, 1.0, sites, share]["gbit_per_s"] for sites in (2, 8))
            assert far / near == pytest.approx(1.75)
        # In our system a site with one learner needs a quarter of the rate of a site with four.
        ours = [rates["int4", 1.0, sites, share]["needed_gbit_per_s"] for sites in (2, 8)]
        assert ours[0] / ours[1] == pytest.approx(4)


def test_what_our_system_needs_at_table_13() -> None:
    # 5.17e9 x 4.125 bits / 24 = 0.889 Gbit, as fast as a version follows another in 0.9 / u steps of 1 s
    expected = 5.17e9 * 4.125 / 24 / (0.9 / 0.9) / 1e9
    assert table13.needed_gbit_per_s("int4", 1.0, 8, 0.9) == pytest.approx(expected)


def test_table_13_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "table13")
    for words in ("104", "106", "3.02", "the paper does not describe", "our system needs"):
        assert words in text
    assert all(len(line) <= 120 for line in text.splitlines())
    assert len(json.loads(printed(capsys, "table13", "--json"))["rows"]) == 60


def test_the_documentation_shows_the_same_table() -> None:
    text = (DOCS / "plan.md").read_text(encoding="utf-8")
    rows = table13.rows()
    for key in table13.TABLE:
        here = [row for row in rows if (row["step_s"], row["sites"], row["wire"]) == key]
        keys = ("paper_gbit_per_s", "gbit_per_s", "needed_gbit_per_s")
        cells = (" / ".join(f"{row[key]:.3g}" for key in keys if key in row) for row in here)
        line = f"| {key[0]:g} s, {key[1]} | {key[2].replace('_', ' ')} | {' | '.join(cells)} |"
        assert line in text, line
