"""The drawing of goodput must say what the rows say: one curve for each, every point in its place."""

import os
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_jax.drawing import charts
from diloco_jax.drawing.charts import BOTTOM, LEFT, NUM_COLOURS, RIGHT, TOP, settings_axis
from diloco_jax.drawing.page import DARK, LIGHT, SVG_STYLE
from diloco_jax.sim.goodput.methods import Row
from diloco_jax.sim.goodput.plot import HEIGHT, SVG_WIDTH, check_plot, drawing, write_plot

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


def luminance(colour: str) -> float:
    """Relative luminance as in WCAG 2."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_curves_stand_out_from_the_page(colours: dict[str, str]) -> None:
    def contrast(name: str) -> float:
        one, other = sorted((luminance(colours[name]), luminance(colours["page"])))
        return (other + 0.05) / (one + 0.05)

    assert contrast("ink") > 7
    assert contrast("soft") > 4.5
    assert all(contrast(f"k{index}") > 2 for index in range(NUM_COLOURS))


def test_the_drawing_needs_no_variables_and_no_network() -> None:
    text = drawing(ROWS).replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?:|var\(|url\(|@import", text)
    assert "prefers-color-scheme:dark" in text


def test_the_page_has_both_charts_and_the_numbers(tmp_path: Path) -> None:
    path = tmp_path / "goodput.html"
    write_plot(ROWS, path)
    page = path.read_text(encoding="utf-8")
    charts = re.findall(r'<div class="scroll">(<svg.*?)</div>', page)
    assert len(charts) == 2
    for chart in charts:
        assert len(list(ElementTree.fromstring(chart).iter("polyline"))) == 5
    assert 'data-x="125000,2.88e+06,count,1" data-y="0,1.01,share,0"' in charts[0]
    for part in ("<td>2.4M</td><td>86.0%</td><td>90.0%</td><td>16.00</td>", "our own", "decoupled M = 2"):
        assert part in page


def test_a_drawing_is_written_by_its_ending(tmp_path: Path) -> None:
    path = tmp_path / "goodput.svg"
    write_plot(ROWS, path)
    assert path.read_text(encoding="utf-8") == drawing(ROWS)


def test_what_cannot_be_written_is_refused_before_the_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"ends in '\.png'; choose a name that ends in \.svg or \.html"):
        check_plot(tmp_path / "goodput.png")
    with pytest.raises(ValueError, match="nowhere does not exist"):
        check_plot(tmp_path / "nowhere" / "goodput.svg")
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(ValueError, match="is a folder"):
        check_plot(tmp_path / "folder.svg")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ValueError, match="cannot be written"):
        check_plot(tmp_path / "goodput.svg")


def test_one_number_of_chips_is_a_plot_too() -> None:
    (place,) = curves(drawing([row("decoupled", 8, 2400, 0.8)]))["decoupled M = 8"][1]
    assert place == pytest.approx(((SVG_WIDTH - LEFT - RIGHT) / 2, 81.1), abs=0.2)


def test_ticks_that_would_touch_are_left_out() -> None:
    axis = settings_axis([1000, 1010, 2000, 1e6], "chips")
    assert [value for value, _ in axis.ticks] == [1000, 2000, 1e6]
    assert all(0 < axis.place(value) < 1 for value, _ in axis.ticks)


@given(st.floats(min_value=1e-6, max_value=1e12), st.integers(min_value=2, max_value=12))
def test_a_nice_step_is_nice(span: float, pieces: int) -> None:
    step_size = charts.nice_step(span, pieces)
    assert span / step_size <= pieces * (1 + 1e-6)
    mantissa = float(f"{step_size:e}".split("e")[0])
    assert any(mantissa == pytest.approx(nice) for nice in (1, 2, 2.5, 5))


@given(st.lists(st.floats(min_value=-1e6, max_value=1e6), min_size=1, max_size=20))
def test_a_number_axis_holds_its_values_and_tells_ticks_apart(values: list[float]) -> None:
    axis = charts.number_axis(values, "loss")
    assert all(0 <= axis.place(value) <= 1 for value in values)
    assert all(-1e-9 <= axis.place(value) <= 1 + 1e-9 for value, _ in axis.ticks)
    texts = [text for _, text in axis.ticks]
    assert 2 <= len(texts) == len(set(texts))
