"""Charts of the report as SVG text: lines, bars, and the timeline of rounds.

Colours come from the page's style sheet (classes k0 to k7 and a few roles), so that one drawing serves light and dark.
Sizes are CSS pixels of the drawing's own coordinate system.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

from diloco_jax.runtime.live import format_bytes, format_count

NUM_COLOURS = 8
WIDE, HALF = 1040, 504  # drawing widths: the whole column, and two side by side
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 10, 40  # room around the plotting area
LABEL_WIDTH_MAX = 150
CELLS_MAX = 260  # rounds are grouped so that no row of the timeline has more cells
TIME_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
MARKS = {"joined": "joins", "left": "leaves", "silent": "falls silent", "back": "is heard again"}

Point = tuple[float, float]
Tick = tuple[float, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A direction of a chart: its range, its ticks and what a reader calls it."""

    low: float
    high: float
    ticks: tuple[Tick, ...]
    label: str
    kind: str  # how the page writes a value under the pointer: count, bytes, time or number
    log: bool = False

    def place(self, value: float) -> float:
        """Where a value lies between the ends, as a share; outside [0, 1] when out of range."""
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
    """The smallest of 1, 2, 2.5, 5 times a power of ten that cuts `span` into at most `ticks_max` pieces."""
    raw = max(span, 1e-12) / ticks_max
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))


def _multiples(low: float, high: float, step: float) -> list[float]:
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def number_axis(values: Sequence[float], label: str) -> Axis:
    """An axis around the values, not forced to begin at zero."""
    low, high = min(values), max(values)
    pad = max(0.04 * (high - low), 1e-4 * max(abs(low), abs(high)), 1e-6)  # equal values need some room too
    low, high = low - pad, high + pad
    step = nice_step(high - low, 6)
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) + (1 if f"{step:e}".startswith("2.5") else 0)
    ticks = tuple((value, f"{value:.{digits}f}") for value in _multiples(low, high, step))
    return Axis(low=low, high=high, ticks=ticks, label=label, kind="number")


def count_axis(high: float, label: str) -> Axis:
    """An axis of counts from zero."""
    top = max(high, 1.0)
    ticks = tuple((value, format_count(value)) for value in _multiples(0, top, nice_step(top, 8)))
    return Axis(low=0.0, high=top, ticks=ticks, label=label, kind="count")


def time_axis(high_s: float, label: str, ticks_max: int = 10) -> Axis:
    """An axis of seconds since the run began, labelled in the unit that suits its length."""
    top = max(high_s, 1.0)
    wanted = top / ticks_max
    step = next((step for step in TIME_STEPS_S if step >= wanted), 86400 * math.ceil(wanted / 86400))
    unit, name = next((u, n) for u, n in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")) if step >= u or u == 1)
    ticks = tuple((value, f"{value / unit:g} {name}" if value else "0") for value in _multiples(0, top, step))
    return Axis(low=0.0, high=top, ticks=ticks, label=label, kind="time")


def bytes_axis(values: Sequence[float], label: str) -> Axis:
    """A logarithmic axis of sizes over at most four decades below the largest."""
    high = max([*values, 10.0]) * 1.25
    low = min(max(min((value for value in values if value > 0), default=1.0), high * 1e-4), high / 10)
    powers = [10.0**n for n in range(math.floor(math.log10(low)), math.ceil(math.log10(high)))]
    factors = (1,) if high > 300 * low else (1, 2, 5)
    marked = [factor * power for power in powers for factor in factors if low <= factor * power <= high]
    ticks = tuple((value, format_bytes(value)) for value in marked)
    return Axis(low=low, high=high, ticks=ticks, label=label, kind="bytes", log=True)


def _num(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


def _svg(width: float, height: float, label: str, body: Sequence[str], data: str = "") -> str:
    width_min = 400 if width <= HALF else 720  # below it the page scrolls the chart: text stays readable on a phone
    box = f'viewBox="0 0 {_num(width)} {_num(height)}" style="min-width:{width_min}px"'
    return f'<svg {box} role="img" aria-label="{escape(label)}"{data}>{"".join(body)}</svg>'


def _x_axis(axis: Axis, x: Callable[[float], float], top: float, bottom: float) -> list[str]:
    out = [f'<path class="axis" d="M{_num(x(axis.low))} {_num(bottom)}H{_num(x(axis.high))}"/>']
    for value, text in axis.ticks:
        at = _num(x(value))
        out.append(f'<path class="grid" d="M{at} {_num(top)}V{_num(bottom)}"/>')
        out.append(f'<text class="tick" x="{at}" y="{_num(bottom + 16)}" text-anchor="middle">{escape(text)}</text>')
    middle = (x(axis.low) + x(axis.high)) / 2
    place = f'x="{_num(middle)}" y="{_num(bottom + 34)}" text-anchor="middle"'
    return [*out, f'<text class="name" {place}>{escape(axis.label)}</text>']


def line_chart(title: str, lines: Sequence[Line], x_axis: Axis, y_axis: Axis, *, width: int, height: int) -> str:
    """Curves over a common axis; what lies outside the axes is cut off."""
    right, bottom = width - RIGHT, height - BOTTOM

    def x(value: float) -> float:
        return LEFT + x_axis.place(value) * (right - LEFT)

    def y(value: float) -> float:
        return bottom - y_axis.place(value) * (bottom - TOP)

    out = _x_axis(x_axis, x, TOP, bottom)
    for value, text in y_axis.ticks:
        at = _num(y(value))
        out.append(f'<path class="grid" d="M{LEFT} {at}H{right}"/>')
        out.append(f'<text class="tick" x="{LEFT - 8}" y="{at}" dy="0.32em" text-anchor="end">{escape(text)}</text>')
    # nested svg: cuts off what lies outside without an id that two charts on a page would share
    out.append(f'<svg x="{LEFT}" y="{TOP}" width="{right - LEFT + 4}" height="{_num(bottom - TOP)}">')
    for line in lines:
        places = [(_num(x(a) - LEFT), _num(y(b) - TOP)) for a, b in line.points]
        text = " ".join(f"{a},{b}" for a, b in places)
        out.append(f'<polyline class="line {line.style}" data-name="{escape(line.name)}" points="{text}"/>')
        if line.dots:
            out += [f'<circle class="dot {line.style}" cx="{a}" cy="{b}" r="3"/>' for a, b in places]
    out.append("</svg>")
    ends = f"{x_axis.low:.6g},{x_axis.high:.6g},{x_axis.kind}", f"{y_axis.low:.6g},{y_axis.high:.6g},{y_axis.kind}"
    area = f"{LEFT},{TOP},{right},{_num(bottom)}"
    data = f' class="chart" data-x="{ends[0]}" data-y="{ends[1]},{int(y_axis.log)}" data-area="{area}"'
    return _svg(width, height, title, out, data)


def bars(title: str, values: Sequence[tuple[str, float, str]], *, high: float, width: int) -> str:
    """Horizontal bars, one per (name, value, style), with its value in per cent; `high` is the full length."""
    row, left = 24, _label_width([name for name, _, _ in values])
    right = width - 56
    out = []
    for index, (name, value, style) in enumerate(values):
        top, middle = index * row + 4, index * row + row / 2
        length = max(0.0, min(1.0, value / high)) * (right - left)
        out.append(_row_label(name, left, middle))
        out.append(f'<rect class="track" x="{left}" y="{top}" width="{right - left}" height="{row - 8}" rx="2"/>')
        out.append(
            f'<rect class="fill {style}" x="{left}" y="{top}" width="{_num(length)}" height="{row - 8}" rx="2">'
            f"<title>{escape(name)}: {value:.2%}</title></rect>"
        )
        out.append(f'<text class="value" x="{right + 8}" y="{_num(middle)}" dy="0.32em">{value:.1%}</text>')
    return _svg(width, len(values) * row + 4, title, out)


def _label_width(names: Sequence[str]) -> int:
    return min(LABEL_WIDTH_MAX, 16 + round(6.6 * max((len(name) for name in names), default=0)))


def _row_label(name: str, left: float, middle: float) -> str:
    fits = round((LABEL_WIDTH_MAX - 16) / 6.6)
    short = name if len(name) <= fits else name[: fits - 1] + "…"
    place = f'x="{left - 10}" y="{_num(middle)}" dy="0.32em" text-anchor="end"'
    return f'<text class="row" {place}>{escape(short)}<title>{escape(name)}</title></text>'


@dataclass(frozen=True, slots=True)
class Round:
    """A merged round: when, which global step, whose values."""

    t: float
    global_step: int
    members: frozenset[str]


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened to a learner; `kind` is a key of MARKS."""

    t: float
    kind: str
    learner: str
    reason: str


def timeline(
    title: str, learners: Sequence[str], rounds: Sequence[Round], marks: Sequence[Mark], times: tuple[float, float]
) -> str:
    """One row per learner, time to the right; a cell is a few successive rounds, as full as the learner was in them.

    Args:
        learners: the rows, from the top.
        rounds: in order of time.
        marks: what happened to learners.
        times: when the first inner step was reported, before which no round can have begun, and when the run ended.
    """
    row, width = (26, WIDE) if len(learners) <= 16 else (18, WIDE)
    left, top = _label_width(learners), 6
    right, bottom = width - RIGHT, top + row * len(learners) + 4
    axis = time_axis(times[1], "time since the run began", 12)

    def x(t: float) -> float:
        return left + axis.place(t) * (right - left)

    out = _x_axis(axis, x, top, bottom)
    at = {name: top + index * row for index, name in enumerate(learners)}
    for name, y in at.items():
        out.append(_row_label(name, left, y + row / 2))
        out.append(f'<rect class="track" x="{left}" y="{y + 3}" width="{right - left}" height="{row - 6}"/>')
        for begin_s, end, text, share in _cells(name, rounds, times[0]):
            place = f'x="{_num(x(begin_s))}" y="{y + 3}" width="{_num(x(end) - x(begin_s))}" height="{row - 6}"'
            out.append(f'<rect class="cell" {place} opacity="{0.12 + 0.88 * share:.2f}"><title>{text}</title></rect>')
    for mark in marks:
        if mark.learner in at:
            words = f"{mark.learner} {MARKS[mark.kind]} at {mark.t:.1f} s"
            text = escape(f"{words}: {mark.reason}" if mark.reason else words)
            middle = at[mark.learner] + row / 2
            out.append(f'<g class="mark" transform="translate({_num(x(mark.t))} {_num(middle)})">')
            out.append(f"{glyph(mark.kind)}<title>{text}</title></g>")
    return _svg(width, bottom + BOTTOM, title, out)


def _cells(name: str, rounds: Sequence[Round], begin_s: float) -> list[tuple[float, float, str, float]]:
    """(begin, end, words, share of rounds with the learner) of a row's cells; equal neighbours are joined."""
    size = max(1, math.ceil(len(rounds) / CELLS_MAX))
    joined: list[list[float]] = []  # begin_s, end_s, first step, last step, rounds with the learner, rounds
    for start in range(0, len(rounds), size):
        group = rounds[start : start + size]
        hits = sum(name in this.members for this in group)
        last = joined[-1] if joined else None
        if last is not None and last[4] / last[5] == hits / len(group):
            last[1], last[3] = group[-1].t, group[-1].global_step
            last[4], last[5] = last[4] + hits, last[5] + len(group)
        else:
            joined.append([begin_s, group[-1].t, group[0].global_step, group[-1].global_step, hits, len(group)])
        begin_s = group[-1].t
    return [
        (
            begin,
            end,
            f"{escape(name)}, rounds {first:.0f} to {last:.0f}: merged in {hits:.0f} of {count:.0f}",
            hits / count,
        )
        for begin, end, first, last, hits, count in joined
        if hits
    ]


def glyph(kind: str) -> str:
    """The sign of a mark around the origin; the shape tells the kind without colour."""
    shapes = {
        "joined": '<path class="good" d="M-4.5 -6L5.5 0L-4.5 6Z"/>',
        "left": '<path class="halo" d="M-4 -4L4 4M-4 4L4 -4"/><path class="bad" d="M-4 -4L4 4M-4 4L4 -4"/>',
        "silent": '<path class="warn" d="M0 -6L6 0L0 6L-6 0Z"/>',
        "back": '<circle class="halo" r="4"/><circle class="ring" r="4"/>',
    }
    return shapes[kind]


STYLE = """
:root{color-scheme:light dark;--page:#fbfbfa;--ink:#1d2126;--soft:#5d6670;--line:#e3e5e8;--axis:#aab1b9;--track:#eef0f2;
--accent:#0072b2;--good:#00795a;--warn:#b26a00;--bad:#c0392b;
--k0:#0072b2;--k1:#d55e00;--k2:#009e73;--k3:#cc79a7;--k4:#e69f00;--k5:#56b4e9;--k6:#806000;--k7:#6a4fa3}
@media(prefers-color-scheme:dark){:root{--page:#15181c;--ink:#e7eaed;--soft:#98a2ad;--line:#2a2f36;--axis:#59626d;
--track:#20252b;--accent:#4aa8e0;--good:#35c79c;--warn:#f0b24a;--bad:#ff7b6b;
--k0:#4aa8e0;--k1:#f5864a;--k2:#2fc79c;--k3:#e59cc5;--k4:#f2b84b;--k5:#a5dcfa;--k6:#c9b061;--k7:#b39ae8}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1088px;margin:0 auto;padding:40px 24px 72px;display:grid;grid-template-columns:1fr 1fr;gap:44px 32px}
main>*{grid-column:1/-1;min-width:0;margin:0}main>.half{grid-column:auto}
h1{font-size:28px;line-height:1.2;font-weight:650;letter-spacing:-.01em;margin:0;overflow-wrap:anywhere}
h2{font-size:16px;font-weight:620;margin:0}
header p,figcaption{margin:4px 0 0;color:var(--soft);max-width:78ch}figcaption{font-size:13.5px;margin-bottom:12px}
.warning{color:var(--warn);font-weight:600}
.figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(140px,1fr));gap:18px 24px;
border:solid var(--line);border-width:1px 0;padding:18px 0}
.figures dt{font-size:12.5px;color:var(--soft)}.figures dd{margin:0;font-size:21px;font-weight:560}
.figures dd,td,.tick,.value{font-variant-numeric:tabular-nums}
.scroll{overflow-x:auto}.scroll>svg{display:block;width:100%;height:auto}.half svg{max-width:600px}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 18px;margin:0 0 8px;padding:0;font-size:13px}
.legend li{display:flex;align-items:center;gap:7px}.legend svg{width:15px;height:15px}
.legend i{width:16px;border-top:3px solid var(--c);border-radius:2px}.legend .dashed{border-top-style:dashed}
svg text{font:12px system-ui,-apple-system,"Segoe UI",sans-serif;fill:var(--soft)}
svg .row,svg .value{fill:var(--ink)}
.grid{stroke:var(--line);fill:none}.axis{stroke:var(--axis);fill:none}.track{fill:var(--track)}
.line{fill:none;stroke:var(--c);stroke-width:1.6;stroke-linejoin:round}.line.main{stroke-width:2.4}
.line.dashed{stroke-dasharray:7 5;stroke-width:1.8}.dot{fill:var(--c)}.fill{fill:var(--c)}
.cell{fill:var(--accent);shape-rendering:crispEdges}
.mark{paint-order:stroke;stroke:var(--page);stroke-width:2.5;stroke-linejoin:round}
.mark .good{fill:var(--good)}.mark .warn{fill:var(--warn)}.mark .bad{stroke:var(--bad);fill:none}
.mark .ring{stroke:var(--good);fill:var(--page)}.mark .halo{stroke-width:6;fill:none}
.k0{--c:var(--k0)}.k1{--c:var(--k1)}.k2{--c:var(--k2)}.k3{--c:var(--k3)}.k4{--c:var(--k4)}.k5{--c:var(--k5)}
.k6{--c:var(--k6)}.k7{--c:var(--k7)}.main{--c:var(--ink)}.many{--c:var(--accent)}.line.many{stroke-width:1.2;opacity:.4}
table{width:100%;border-collapse:collapse;font-size:14px;margin-top:8px}th{font-weight:500}
th,td{text-align:right;padding:6px 12px 6px 0;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child{text-align:left}thead th{color:var(--soft);font-size:12.5px}
details{border-top:1px solid var(--line);padding-top:18px}summary{cursor:pointer;font-weight:620}
pre{font:12.5px/1.5 ui-monospace,Menlo,Consolas,monospace;overflow-x:auto;background:var(--track);padding:14px 16px;
border-radius:6px}
.tip{position:fixed;pointer-events:none;background:var(--page);border:1px solid var(--axis);border-radius:6px;
padding:7px 10px;font-size:12.5px;line-height:1.45;box-shadow:0 2px 10px #0003;white-space:nowrap;z-index:1}
.tip i{display:inline-block;width:10px;border-top:3px solid var(--c);margin-right:7px;vertical-align:middle}
.cross{stroke:var(--axis);fill:none}
@media(max-width:760px){main>.half{grid-column:1/-1}main{padding:24px 16px 48px;gap:36px}}
@media print{main{max-width:none}figure{break-inside:avoid}}
"""

# Reads a chart's values back from its curves, so that no number is stored twice.
SCRIPT = """
const tip=document.body.appendChild(document.createElement('div'));tip.className='tip';tip.hidden=true;
const si=(v,units)=>{let n=0;while(Math.abs(v)>=999.5&&n<4){v/=1e3;n++}
return (n?v.toPrecision(3):v.toFixed(0))+units[n]};
const write={count:v=>si(v,['','k','M','G','T']),bytes:v=>si(v,[' B',' kB',' MB',' GB',' TB']),number:v=>v.toFixed(3),
time:v=>v<120?v.toFixed(1)+' s':v<7200?(v/60).toFixed(1)+' min':(v/3600).toFixed(2)+' h'};
for(const svg of document.querySelectorAll('svg.chart')){
const d=svg.dataset,[x0,x1]=d.x.split(',').map(Number),[y0,y1]=d.y.split(',').map(Number),kx=d.x.split(',')[2];
const ky=d.y.split(',')[2],log=d.y.endsWith('1'),[left,top,right,bottom]=d.area.split(',').map(Number);
const curves=[...svg.querySelectorAll('.line')].map(
e=>({e,p:e.getAttribute('points').split(' ').map(q=>q.split(',').map(Number))}));
const cross=svg.appendChild(document.createElementNS(svg.namespaceURI,'path'));cross.setAttribute('class','cross');
const hide=()=>{tip.hidden=true;cross.removeAttribute('d')};
svg.addEventListener('pointerleave',hide);
svg.addEventListener('pointermove',ev=>{
const at=new DOMPoint(ev.clientX,ev.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
if(at<left||at>right)return hide();
cross.setAttribute('d',`M${at} ${top}V${bottom}`);tip.replaceChildren();
tip.append(write[kx](x0+(at-left)/(right-left)*(x1-x0)));
for(const {e,p} of curves){
const q=p.reduce((a,b)=>Math.abs(b[0]+left-at)<Math.abs(a[0]+left-at)?b:a),share=1-q[1]/(bottom-top);
const row=tip.appendChild(document.createElement('div')),chip=row.appendChild(document.createElement('i'));
chip.style.setProperty('--c',getComputedStyle(e).stroke);
row.append(e.dataset.name.split(',')[0]+'  '+write[ky](log?y0*(y1/y0)**share:y0+share*(y1-y0)))}
tip.hidden=false;
tip.style.left=Math.min(ev.clientX+16,innerWidth-tip.offsetWidth-8)+'px';tip.style.top=ev.clientY+16+'px'})}
"""
