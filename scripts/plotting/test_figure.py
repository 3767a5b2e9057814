"""Figures show each curve once, with its name, and equal input gives equal bytes."""

from xml.etree import ElementTree

import pytest

from plotting.figure import COLOURS, Line, Panel, line_figure, panel_figure

# matplotlib draws them.
pytestmark = pytest.mark.extra("dev")

SVG = "{http://www.w3.org/2000/svg}"
LINES = [
    Line(name="one", points=[(1000.0, 0.5), (2000.0, 0.7), (1e6, 0.9)], colour=COLOURS[0]),
    Line(name="two", points=[(1000.0, 0.4), (1010.0, 0.4), (1e6, 0.2)], colour=COLOURS[1], dots=True, dashed=True),
]


def texts(drawing: str) -> list[str]:
    return [(text.text or "").strip() for text in ElementTree.fromstring(drawing).iter(f"{SVG}text")]


def test_a_figure_names_its_curves_and_axes() -> None:
    found = texts(line_figure("Title", LINES, "chips", "goodput", settings=True, share=True))
    assert {"Title", "one", "two", "chips", "goodput", "1k", "2k", "1M", "0%", "100%"} <= set(found)


def test_an_interval_is_a_line_through_its_point_and_places_have_names() -> None:
    points = [(0.0, 0.5), (1.0, 0.25)]
    line = Line(
        name="one", points=points, colour=COLOURS[0], dots=True, joined=False, intervals=[(0.4, 0.6), (0.2, 0.3)]
    )
    drawing = line_figure("Title", [line], "task", "right", share=True, names=["copy", "sort"])
    assert {"copy", "sort"} <= set(texts(drawing))
    group = next(
        each for each in ElementTree.fromstring(drawing).iter(f"{SVG}g") if "LineCollection" in each.get("id", "")
    )
    ends = [
        [float(n) for n in path.get("d", "").replace("M", "").replace("L", "").split()]
        for path in group.iter(f"{SVG}path")
    ]
    heights = [abs(end[3] - end[1]) for end in ends]
    assert len(ends) == 2 and all(end[0] == end[2] for end in ends)
    assert heights[0] == pytest.approx(2 * heights[1], rel=1e-4), "0.2 is twice 0.1"


def test_ticks_that_would_touch_are_excluded() -> None:
    found = texts(line_figure("", LINES, "", "", settings=True))
    assert "1k" in found and "1.01k" not in found


def test_equal_input_gives_equal_bytes_and_no_date() -> None:
    one, other = (line_figure("Title", LINES, "x", "y") for _ in range(2))
    assert one == other and "dc:date" not in one


def test_panels_have_their_own_axes_and_a_curve_without_a_name_is_in_no_legend() -> None:
    mark = Line(name="", points=[(1000.0, 0.5)], colour=COLOURS[0], dots=True, marker="^", joined=False)
    panels = [
        Panel(title="First", lines=[LINES[0], mark], x_label="chips", y_label="goodput", settings=True, share=True),
        Panel(title="Second", lines=[LINES[1]], x_label="parameters", y_label="Gbit/s", log="xy"),
    ]
    drawing = panel_figure(panels)
    found = texts(drawing)
    assert {"First", "Second", "one", "two", "chips", "parameters", "100%"} <= set(found)
    assert not any(text.startswith("_") for text in found)
    heights = [float(ElementTree.fromstring(each).get("height", "0").rstrip("pt")) for each in (
        drawing, line_figure("", LINES, "", "")
    )]  # fmt: skip
    assert heights[0] == 2 * heights[1]
