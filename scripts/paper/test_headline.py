"""The headline figure draws the figures that the pages print, each curve in its place."""

import pytest
from plotting.figure import Line

from paper.headline import DOCS, bandwidth, distances, draw


def named(lines: list[Line]) -> dict[str, Line]:
    return {line.name: line for line in lines if line.name}


def test_rates_are_those_of_table_13() -> None:
    """docs/plan.md, steps of 1 s and 8 sites, at 95 %: 201 Gbit/s for data parallel, 0.938 with int4."""
    rates = {name: dict(line.points)[95.0] for name, line in named(list(bandwidth().lines)).items()}
    assert rates["data parallel, 8 sites"] == pytest.approx(201, abs=0.5)
    assert rates["islands, int4, 8 sites"] == pytest.approx(0.938, abs=5e-4)
    marks = [line for line in bandwidth().lines if not line.name]
    assert [dict(line.points)[95.0] for line in marks] == [113, 198, 1.9, 3.3, 0.49, 0.84], "the paper's"


def test_distances_are_those_of_the_records_beside_the_law() -> None:
    """docs/results/parity.md: +3.14 % at 0.12M after 2M tokens; the law's M = 4 is +2.0 % at 35M."""
    lines = named(list(distances().lines))
    ours, (interval, *_) = lines["M = 4, H = 6, int4"].points, lines["M = 4, H = 6, int4"].intervals
    assert len(ours) == 3 and ours[0][1] == pytest.approx(3.14, abs=5e-3)
    assert interval == pytest.approx((2.49, 3.73), abs=5e-3)
    assert lines["law, M = 4"].points[0] == pytest.approx((35e6, 1.9), abs=0.05)
    assert all(law.points[0][1] > law.points[-1][1] for name, law in lines.items() if "law" in name)


@pytest.mark.extra("dev")
def test_the_figure_of_the_manual_is_current() -> None:
    assert draw() == (DOCS / "pictures" / "headline.svg").read_text(encoding="utf-8"), "run ./scripts/paper/headline"
