"""The forms of numbers for people: counts, sizes, durations and shares; figures have no other form anywhere."""

from collections.abc import Callable
from typing import NamedTuple

NO_VALUE = "–"


def format_count(value: float) -> str:
    """Return a count in at most four characters and a unit: 950, 1.23k, 45.6M."""
    units = ["", "k", "M", "G", "T"]
    while abs(value) >= 999.5 and len(units) > 1:
        value /= 1000
        del units[0]
    unit = units[0]
    return f"{value:.0f}{unit}" if not unit or abs(value) >= 100 else f"{value:.3g}{unit}"


def format_bytes(value: float) -> str:
    """Return a size in decimal units: 950 B, 1.23 MB."""
    text = format_count(value)
    number, unit = (text[:-1], text[-1]) if text[-1].isalpha() else (text, "")
    return f"{number} {unit}B"


def format_duration(seconds: float) -> str:
    """Return a duration with its two largest units: 9 s, 2 min 05 s, 3 h 07 min, 2 d 04 h.

    Half a second is rounded up, as in `time` of tools/page/elements.js.
    """
    whole = int(max(0.0, seconds) + 0.5)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


class Form(NamedTuple):
    """A form of a number.

    Attributes:
        write: function that writes a known number as text.
    """

    write: Callable[[float], str]

    def text(self, value: float | None) -> str:
        """Return the number as text; a dash if it is None."""
        return NO_VALUE if value is None else self.write(value)


PLAIN = Form("{:,}".format)
COUNT = Form(format_count)
BYTES = Form(format_bytes)
DURATION = Form(format_duration)
SECONDS = Form("{:.3g} s".format)
PERCENT = Form("{:.0%}".format)
SHARE = Form("{:.1%}".format)
MEAN = Form("{:.2f}".format)
LOSS = Form("{:.4f}".format)
STEP_LOSS = Form("{:.3f}".format)
DIGITS = Form("{:.3g}".format)
# The number of a round; 0 if there was none.
ROUND = Form(lambda number: f"{number:,}" if number else NO_VALUE)
