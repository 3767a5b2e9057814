"""The drawing of goodput has a curve for each method and number of learners, with every point in its place."""

from xml.etree import ElementTree

import pytest

from diloco_jax.sim.goodput.methods import Row
from paper.plot import curves, drawing

CHIPS = (150e3, 600e3, 2.4e6)


def row(method: str, learners: int, chips: float, goodput: float, uptime: float = 0.9) -> Row:
    contributors = None if method in ("rigid", "elastic") else float(learners)
    return Row(method, learners, chips, goodput, uptime, contributors, 10, 20, 30)


ROWS = [
    *(row("rigid", 1, chips, value) for chips, value in zip(CHIPS, (0.72, 0.38, 0.18), strict=True)),
    *(row("elastic", 1, chips, value) for chips, value in zip(CHIPS, (0.88, 0.69, 0.40), strict=True)),
    *(row("decoupled", 2, chips, value) for chips, value in zip(CHIPS, (0.94, 0.80, 0.54), strict=True)),
    *(row("decoupled", 16, chips, value) for chips, value in zip(CHIPS, (0.99, 0.96, 0.86), strict=True)),
    *(row("sync", 16, chips, value) for chips, value in zip(CHIPS, (0.9, 0.8, 0.7), strict=True)),
]


def test_one_curve_for_each_method_and_number_of_learners() -> None:
    names = ["decoupled M = 16", "sync M = 16", "decoupled M = 2"]
    names += ["elastic data parallel", "rigid data parallel"]
    assert [line.name for line in curves(ROWS)] == names, "the best at the most chips comes first"


def test_points_are_the_rows_in_ascending_order() -> None:
    shuffled = [ROWS[index] for index in (2, 0, 1, *range(3, len(ROWS)))]
    found = {line.name: line.points for line in curves(shuffled)}
    assert found["rigid data parallel"] == list(zip(CHIPS, (0.72, 0.38, 0.18), strict=True))


def test_methods_have_different_looks_and_equal_numbers_of_learners_one_colour() -> None:
    found = {line.name: (line.colour, line.dashed) for line in curves(ROWS)}
    assert len(set(found.values())) == len(found)
    assert found["sync M = 16"][0] == found["decoupled M = 16"][0]


@pytest.mark.extra("dev")
def test_axes_are_labelled() -> None:
    texts = [(text.text or "").strip() for text in ElementTree.fromstring(drawing(ROWS)).iter() if text.text]
    for text in ("goodput", "chips of all learners together", "150k", "2.4M", "0%", "100%"):
        assert text in texts
