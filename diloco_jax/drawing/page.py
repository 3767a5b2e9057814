"""Pages with charts: one file with its style sheet and its script inside, which needs no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

COLOURS = {  # by daylight, and in the dark
    "page": ("#fbfbfa", "#15181c"),
    "ink": ("#1d2126", "#e7eaed"),
    "soft": ("#5d6670", "#98a2ad"),
    "line": ("#e3e5e8", "#2a2f36"),
    "axis": ("#aab1b9", "#59626d"),
    "track": ("#eef0f2", "#20252b"),
    "accent": ("#0072b2", "#4aa8e0"),
    "good": ("#00795a", "#35c79c"),
    "warn": ("#b26a00", "#f0b24a"),
    "bad": ("#c0392b", "#ff7b6b"),
    "k0": ("#0072b2", "#4aa8e0"),
    "k1": ("#d55e00", "#f5864a"),
    "k2": ("#009e73", "#2fc79c"),
    "k3": ("#cc79a7", "#e59cc5"),
    "k4": ("#e69f00", "#f2b84b"),
    "k5": ("#56b4e9", "#a5dcfa"),
    "k6": ("#806000", "#c9b061"),
    "k7": ("#6a4fa3", "#b39ae8"),
}
LIGHT, DARK = ({name: pair[tone] for name, pair in COLOURS.items()} for tone in (0, 1))
IN_THE_DARK = "@media(prefers-color-scheme:dark)"

PAGE_STYLE = """
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
.line.dashed{stroke-dasharray:7 5;stroke-width:1.8}
.dot{fill:var(--c)}.fill{fill:var(--c)}
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


def _variables(colours: Mapping[str, str]) -> str:
    return "".join(f"--{name}:{colour};" for name, colour in colours.items())


STYLE = f":root{{color-scheme:light dark;{_variables(LIGHT)}}}{IN_THE_DARK}{{:root{{{_variables(DARK)}}}}}{PAGE_STYLE}"


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
    f"{_svg_rules(LIGHT)}{IN_THE_DARK}{{{_svg_rules(DARK)}}}"
)

# Reads a chart's values back from its curves, so that no number is stored twice.
SCRIPT = """
const tip=document.body.appendChild(document.createElement('div'));tip.className='tip';tip.hidden=true;
const si=(v,units)=>{let n=0;while(Math.abs(v)>=999.5&&n<4){v/=1e3;n++}
return (n?v.toPrecision(3):v.toFixed(0))+units[n]};
const write={count:v=>si(v,['','k','M','G','T']),bytes:v=>si(v,[' B',' kB',' MB',' GB',' TB']),number:v=>v.toFixed(3),
share:v=>(100*v).toFixed(1)+'%',
time:v=>v<120?v.toFixed(1)+' s':v<7200?(v/60).toFixed(1)+' min':(v/3600).toFixed(2)+' h'};
for(const svg of document.querySelectorAll('svg.chart')){
const d=svg.dataset,[x0,x1]=d.x.split(',').map(Number),[y0,y1]=d.y.split(',').map(Number),kx=d.x.split(',')[2];
const at_share=(low,high,log,share)=>log?low*(high/low)**share:low+share*(high-low);
const ky=d.y.split(',')[2],log_x=d.x.endsWith('1'),log_y=d.y.endsWith('1');
const [left,top,right,bottom]=d.area.split(',').map(Number);
const curves=[...svg.querySelectorAll('.line')].map(
e=>({e,p:e.getAttribute('points').split(' ').map(q=>q.split(',').map(Number))}));
const cross=svg.appendChild(document.createElementNS(svg.namespaceURI,'path'));cross.setAttribute('class','cross');
const hide=()=>{tip.hidden=true;cross.removeAttribute('d')};
svg.addEventListener('pointerleave',hide);
svg.addEventListener('pointermove',ev=>{
const at=new DOMPoint(ev.clientX,ev.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
if(at<left||at>right)return hide();
cross.setAttribute('d',`M${at} ${top}V${bottom}`);tip.replaceChildren();
tip.append(write[kx](at_share(x0,x1,log_x,(at-left)/(right-left))));
for(const {e,p} of curves){
const q=p.reduce((a,b)=>Math.abs(b[0]+left-at)<Math.abs(a[0]+left-at)?b:a),share=1-q[1]/(bottom-top);
const row=tip.appendChild(document.createElement('div')),chip=row.appendChild(document.createElement('i'));
chip.style.setProperty('--c',getComputedStyle(e).stroke);
row.append(e.dataset.name.split(',')[0]+'  '+write[ky](at_share(y0,y1,log_y,share)))}
tip.hidden=false;
tip.style.left=Math.min(ev.clientX+16,innerWidth-tip.offsetWidth-8)+'px';tip.style.top=ev.clientY+16+'px'})}
"""


def figure(title: str, note: str, chart: str, legend: str = "", *, wide: bool = True) -> str:
    """Return a chart with its title, a note (HTML) and its legend."""
    return (
        f'<figure class="{"wide" if wide else "half"}"><h2>{escape(title)}</h2><figcaption>{note}</figcaption>'
        f'{legend}<div class="scroll">{chart}</div></figure>'
    )


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Return the names of a chart's curves with their styles, in this order."""
    items = (f'<li><i class="{style}"></i>{escape(name)}</li>' for name, style in entries)
    return f'<ul class="legend">{"".join(items)}</ul>'


def page(title: str, parts: Sequence[str]) -> str:
    """Return a whole page; the parts are HTML."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}</style></head>'
        f"<body><main>{''.join(parts)}</main><script>{SCRIPT}</script></body></html>\n"
    )
