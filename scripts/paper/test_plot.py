"""The drawing of goodput must say what the rows say: one curve for each, every point in its place."""

import re
from xml.etree import ElementTree

import pytest
from plotting.charts import BOTTOM, LEFT, NUM_COLOURS, RIGHT, SVG_STYLE, TOP

from diloco_jax.sim.goodput.methods import Row
from paper.plot import HEIGHT, SVG_WIDTH, drawing

SVG = "{http://www.w3.org/2000/svg}"
CHIPS = (150e3, 600e3, 2.4e6)  # equal ratios


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


def curves(text: str) -> dict[str, tuple[str, list[tuple[float, float]]]]:
    """Name -> (style, places in the chart's area)."""
    found = {}
    for curve in ElementTree.fromstring(text).iter(f"{SVG}polyline"):
        places = [place.split(",") for place in (curve.get("points") or "").split()]
        found[curve.get("data-name") or ""] = (curve.get("class") or "", [(float(x), float(y)) for x, y in places])
    return found


def test_one_curve_for_each_method_and_number_of_learners() -> None:
    names = ["decoupled M = 16", "sync M = 16", "decoupled M = 2"]
    names += ["elastic data parallel", "rigid data parallel"]
    assert list(curves(drawing(ROWS))) == names  # the best at the most chips first
    keys = [key.text for key in ElementTree.fromstring(drawing(ROWS)).iter(f"{SVG}text") if key.get("class") == "key"]
    assert keys == names


def test_points_lie_where_the_rows_say() -> None:
    width, height = SVG_WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    shuffled = [ROWS[index] for index in (2, 0, 1, *range(3, len(ROWS)))]
    for name, values in (("rigid data parallel", (0.72, 0.38, 0.18)), ("decoupled M = 16", (0.99, 0.96, 0.86))):
        places = curves(drawing(shuffled))[name][1]
        xs = [x for x, _ in places]
        assert 0 < xs[0] < xs[1] < xs[2] < width
        assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)  # a logarithmic axis
        for (_, y), value in zip(places, values, strict=True):
            assert y == pytest.approx(height * (1 - value / 1.01), abs=0.06)


def test_methods_are_told_apart() -> None:
    styles = {name: style for name, (style, _) in curves(drawing(ROWS)).items()}
    assert len(set(styles.values())) == len(styles)
    assert styles["sync M = 16"] == styles["decoupled M = 16"] + " dashed"  # one colour per learner number
    for learners in range(NUM_COLOURS):
        assert f".line.k{learners}{{" in SVG_STYLE


def test_more_learner_numbers_than_colours_are_drawn() -> None:
    rows = [row("decoupled", learners, 1e6, 1 - 1 / learners) for learners in range(2, NUM_COLOURS + 4)]
    styles = [style for style, _ in curves(drawing(rows)).values()]
    assert len(styles) == len(rows)
    assert all(f".{style.replace(' ', '.')}{{" in SVG_STYLE for style in styles)


def test_axes_are_labelled() -> None:
    texts = [text.text for text in ElementTree.fromstring(drawing(ROWS)).iter(f"{SVG}text")]
    for text in ("goodput", "chips of all learners together", "150k", "2.4M", "0%", "100%"):
        assert text in texts


def test_the_drawing_needs_no_variables_and_no_network() -> None:
    text = drawing(ROWS).replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?:|var\(|url\(|@import", text)
    assert "prefers-color-scheme:dark" in text


def test_one_number_of_chips_is_a_plot_too() -> None:
    (place,) = curves(drawing([row("decoupled", 8, 2400, 0.8)]))["decoupled M = 8"][1]
    assert place == pytest.approx(((SVG_WIDTH - LEFT - RIGHT) / 2, 81.1), abs=0.2)
