"""Line charts as SVG text: axes, ticks, curves, and the style sheet of a drawing in a file of its own.

Colours come from a style sheet (classes k0 to k7 and a few roles), so that one drawing serves light and dark.
Sizes are CSS pixels of the drawing's own coordinate system.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape

from diloco_jax.runtime.figures.forms import format_count
from diloco_jax.tools.view.page import FOLDER

NUM_COLOURS = 8
STYLE = (FOLDER / "page.css").read_text(encoding="utf-8")  # of the page of a run, by daylight and in the dark
LIGHT, DARK = (dict(re.findall(r"--(\w+):(#\w+)", block)) for block in re.findall(r":root\{([^}]*)\}", STYLE))
WIDE, HALF = 1040, 504  # drawing widths: the whole column, and two side by side
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 10, 40  # room around the plotting area

Point = tuple[float, float]
Tick = tuple[float, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A direction of a chart: its range, its ticks and what a reader calls it."""

    low: float
    high: float
    ticks: tuple[Tick, ...]
    label: str
    kind: str  # how the page writes a value under the pointer: count, share or number
    log: bool = False

    def place(self, value: float) -> float:
        """Return where a value lies between the ends, as a share; outside [0, 1] when out of range."""
        if self.log:
            tiny = self.low * 1e-3
            return math.log(max(value, tiny) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve. `style` is a class of the style sheet, such as k3 or `main`; dots mark single measurements."""

    name: str
    points: Sequence[Point] = field(repr=False)
    style: str
    dots: bool = False


def nice_step(span: float, ticks_max: int) -> float:
    """Return the smallest of 1, 2, 2.5, 5 times a power of ten that cuts `span` into at most `ticks_max` pieces."""
    raw = max(span, 1e-12) / ticks_max
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))


def _multiples(low: float, high: float, step: float) -> list[float]:
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def number_axis(values: Sequence[float], label: str) -> Axis:
    """Return an axis around the values, not forced to begin at zero."""
    low, high = min(values), max(values)
    pad = max(0.04 * (high - low), 1e-4 * max(abs(low), abs(high)), 1e-6)  # equal values need some room too
    low, high = low - pad, high + pad
    step = nice_step(high - low, 6)
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) + (1 if f"{step:e}".startswith("2.5") else 0)
    ticks = tuple((value, f"{value:.{digits}f}") for value in _multiples(low, high, step))
    return Axis(low=low, high=high, ticks=ticks, label=label, kind="number")


def count_axis(high: float, label: str) -> Axis:
    """Return an axis of counts from zero."""
    top = max(high, 1.0)
    ticks = tuple((value, format_count(value)) for value in _multiples(0, top, nice_step(top, 8)))
    return Axis(low=0.0, high=top, ticks=ticks, label=label, kind="count")


def share_axis(label: str) -> Axis:
    """Return an axis from nothing to all, in per cent, with room for a dot at either end."""
    ticks = tuple((part / 5, f"{part / 5:.0%}") for part in range(6))
    return Axis(low=0.0, high=1.01, ticks=ticks, label=label, kind="share")


def settings_axis(values: Sequence[float], label: str) -> Axis:
    """Return a logarithmic axis of counts above 0, which are its ticks as far as there is room."""
    axis = Axis(low=min(values) / 1.2, high=max(values) * 1.2, ticks=(), label=label, kind="count", log=True)
    ticks: list[Tick] = []
    for value in sorted(set(values)):
        if not ticks or axis.place(value) - axis.place(ticks[-1][0]) >= 0.06:
            ticks.append((value, format_count(value)))
    return replace(axis, ticks=tuple(ticks))


def num(value: float) -> str:
    """Return a coordinate."""
    return f"{value:.1f}".rstrip("0").rstrip(".")


def svg(width: float, height: float, label: str, body: Sequence[str], data: str = "") -> str:
    """Return a drawing for a page; `label` is what a screen reader says of it."""
    width_min = 400 if width <= HALF else 720  # below it the page scrolls the chart: text stays readable on a phone
    box = f'viewBox="0 0 {num(width)} {num(height)}" style="min-width:{width_min}px"'
    return f'<svg {box} role="img" aria-label="{escape(label)}"{data}>{"".join(body)}</svg>'


def draw_x_axis(axis: Axis, x: Callable[[float], float], top: float, bottom: float) -> list[str]:
    """Draw the line, the ticks and the name of an axis below the area between `top` and `bottom`."""
    out = [f'<path class="axis" d="M{num(x(axis.low))} {num(bottom)}H{num(x(axis.high))}"/>']
    for value, text in axis.ticks:
        at = num(x(value))
        out.append(f'<path class="grid" d="M{at} {num(top)}V{num(bottom)}"/>')
        out.append(f'<text class="tick" x="{at}" y="{num(bottom + 16)}" text-anchor="middle">{escape(text)}</text>')
    middle = (x(axis.low) + x(axis.high)) / 2
    place = f'x="{num(middle)}" y="{num(bottom + 34)}" text-anchor="middle"'
    return [*out, f'<text class="name" {place}>{escape(axis.label)}</text>']


def line_chart(title: str, lines: Sequence[Line], x_axis: Axis, y_axis: Axis, *, width: int, height: int) -> str:
    """Draw curves over a common axis; what lies outside the axes is cut off."""
    right, bottom = width - RIGHT, height - BOTTOM

    def x(value: float) -> float:
        return LEFT + x_axis.place(value) * (right - LEFT)

    def y(value: float) -> float:
        return bottom - y_axis.place(value) * (bottom - TOP)

    out = draw_x_axis(x_axis, x, TOP, bottom)
    for value, text in y_axis.ticks:
        at = num(y(value))
        out.append(f'<path class="grid" d="M{LEFT} {at}H{right}"/>')
        out.append(f'<text class="tick" x="{LEFT - 8}" y="{at}" dy="0.32em" text-anchor="end">{escape(text)}</text>')
    # nested svg: cuts off what lies outside without an id that two charts on a page would share
    out.append(f'<svg x="{LEFT}" y="{TOP}" width="{right - LEFT + 4}" height="{num(bottom - TOP)}">')
    for line in lines:
        places = [(num(x(a) - LEFT), num(y(b) - TOP)) for a, b in line.points]
        text = " ".join(f"{a},{b}" for a, b in places)
        out.append(f'<polyline class="line {line.style}" data-name="{escape(line.name)}" points="{text}"/>')
        if line.dots:
            out += [f'<circle class="dot {line.style}" cx="{a}" cy="{b}" r="3"/>' for a, b in places]
    out.append("</svg>")
    ends = [f"{end.low:.6g},{end.high:.6g},{end.kind},{int(end.log)}" for end in (x_axis, y_axis)]
    area = f"{LEFT},{TOP},{right},{num(bottom)}"
    data = f' class="chart" data-x="{ends[0]}" data-y="{ends[1]}" data-area="{area}"'
    return svg(width, height, title, out, data)


def _svg_rules(colours: Mapping[str, str]) -> str:
    rules = [
        f".page{{fill:{colours['page']}}}text{{fill:{colours['soft']}}}.title,.key{{fill:{colours['ink']}}}",
        f".grid{{stroke:{colours['line']}}}.axis{{stroke:{colours['axis']}}}",
    ]
    styles = {name: colour for name, colour in colours.items() if name[0] == "k"} | {"main": colours["ink"]}
    for name, colour in styles.items():
        rules.append(f".line.{name}{{stroke:{colour}}}.dot.{name}{{fill:{colour}}}")
    return "".join(rules)


# Of a drawing in a file of its own: spelled out, since many viewers of SVG know neither variables nor the dark.
SVG_STYLE = (
    'text{font:12px system-ui,-apple-system,"Segoe UI",sans-serif}.title{font-size:16px;font-weight:620}'
    ".grid,.axis,.line{fill:none}.line{stroke-width:1.6;stroke-linejoin:round}.line.main{stroke-width:2.4}"
    f".line.dashed{{stroke-dasharray:7 5}}"
    f"{_svg_rules(LIGHT)}@media(prefers-color-scheme:dark){{{_svg_rules(DARK)}}}"
)
