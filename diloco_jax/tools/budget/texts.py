"""Texts of reports, which are in data files, with figures in their places."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from string import Formatter
from typing import Any

from diloco_jax.tools.budget.memory import size


def duration(seconds: float) -> str:
    """Write a time with three digits: 23.4 min."""
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"


def count(number: float) -> str:
    """Write a number of parameters with three digits: 1.23 B."""
    return f"{number / 1e9:.3g} B" if number >= 1e8 else f"{number / 1e6:.3g} M"


FORMS: dict[str | None, Callable[[float], str]] = {"b": size, "t": duration, "c": count}


class Texts(Formatter):
    """The texts of a TOML file. In a place for a figure, {x!b} asks for bytes, {x!t} for a time, {x!c} for a count."""

    def __init__(self, path: Path) -> None:
        self._texts: dict[str, str] = tomllib.loads(path.read_text(encoding="utf-8"))

    def text(self, name: str, /, **values: Any) -> str:
        """Return a text with these figures."""
        return self.vformat(self._texts[name], (), values)

    def lines(self, name: str, /, **values: Any) -> list[str]:
        """Return the lines of a text with these figures."""
        return self.text(name, **values).splitlines()

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        form = FORMS.get(conversion)
        return form(value) if form else value
