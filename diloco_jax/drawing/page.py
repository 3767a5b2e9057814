"""Colours and style sheets of pages and drawings, by daylight and in the dark; nothing in them needs a network."""

from collections.abc import Mapping
from pathlib import Path

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
PAGE_STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")


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
