"""Axes hold their values and tell their ticks apart, and colours stand out from the page."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plotting import charts
from plotting.charts import DARK, LIGHT, NUM_COLOURS, settings_axis


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
