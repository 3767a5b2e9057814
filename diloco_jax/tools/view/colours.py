"""Colours of pages and drawings, by daylight and in the dark."""

from collections.abc import Mapping

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


def _variables(colours: Mapping[str, str]) -> str:
    return "".join(f"--{name}:{colour};" for name, colour in colours.items())


VARIABLES = f":root{{color-scheme:light dark;{_variables(LIGHT)}}}{IN_THE_DARK}{{:root{{{_variables(DARK)}}}}}"
