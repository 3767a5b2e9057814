"""Settings of a simulation as `--section.name value`: where each comes from, and reading them from a command line."""

from collections.abc import Mapping, Sequence
from dataclasses import Field, field, fields
from difflib import get_close_matches
from typing import Any

YEAR_S = 31_536_000.0
CHIPS_MAX = 1e12
SLICES_MAX = 1_000_000


def setting(default: Any, text: str, source: str) -> Any:
    """Make a field of a settings class, with what `--settings` says of it."""
    return field(default=default, metadata={"help": text, "source": source})


def number(text: str, option: str) -> float:
    """Read 150k, 1.2m or 2400000; ValueError if it is no number."""
    scale = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}.get(text[-1:].lower(), 1.0)
    try:
        return float(text[:-1] if scale != 1.0 else text) * scale
    except ValueError:
        raise ValueError(f"{option} is {text!r}, which is no number; write 150000, 150k, 1.2m or 5g") from None


def compact(value: float) -> str:
    """Writes 150k, 1.2m or 192."""
    for scale, unit in ((1e9, "g"), (1e6, "m"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:g}{unit}"
    return f"{value:g}"


def read(words: Sequence[str], sections: Mapping[str, type]) -> dict[str, Any]:
    """Read the settings of each section from words such as `--hardware.step-s 2.5`; ValueError names a wrong one."""
    known = {
        f"--{name}.{each.name.replace('_', '-')}": (name, each)
        for name, made in sections.items()
        for each in _numbers(made)
    }
    given: dict[str, dict[str, Any]] = {name: {} for name in sections}
    left = list(words)
    while left:
        word, _, value = left.pop(0).partition("=")
        option = word.replace("_", "-")
        if option not in known:
            near = get_close_matches(option, known, 1)
            hint = f"; do you mean {near[0]}?" if near else "; --settings lists them all"
            raise ValueError(f"there is no setting {word}{hint}")
        if not value and not left:
            raise ValueError(f"{word} needs a value")
        section, each = known[option]
        given[section][each.name] = _value(option, each, value or left.pop(0))
    return {name: made(**given[name]) for name, made in sections.items()}


def _numbers(made: type) -> list[Field[Any]]:
    """Return the settings that a word can give: numbers, true or false."""
    return [each for each in fields(made) if isinstance(each.default, int | float)]


def _value(option: str, each: Field[Any], text: str) -> Any:
    default: object = each.default
    kind = type(default)
    if kind is bool:
        words = {"true": True, "false": False}
        if text.lower() not in words:
            raise ValueError(f"{option} is {text!r}; use true or false")
        return words[text.lower()]
    value = number(text, option)
    if kind is int:
        if value != value or value in (float("inf"), float("-inf")) or value != int(value):
            raise ValueError(f"{option} is {text}, but must be a whole number")
        return int(value)
    return value


def describe(sections: Mapping[str, type]) -> str:
    """List all settings with default, meaning and source."""
    lines = []
    for name, made in sections.items():
        for each in _numbers(made):
            option = f"--{name}.{each.name.replace('_', '-')}"
            lines.append(f"{option}  (default: {each.default})")
            if each.metadata:
                lines.append(f"      {each.metadata['help']}; source: {each.metadata['source']}")
    return "\n".join(lines)
