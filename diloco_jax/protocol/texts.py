"""Cleans texts of other processes, so that they are safe to show in logs, terminals, pages and metrics."""

from typing import Any

# Longer reasons are cut to this many characters.
REASON_LENGTH_MAX = 1000


def clean(text: str, length_max: int | None = None) -> str:
    """Return a text without control characters, cut to `length_max` characters.

    White space becomes a space, and every other unprintable character becomes U+FFFD: the C0 and C1 controls, DEL, and
    the controls of writing direction, which can make one name look like another.
    """
    if length_max is not None:
        text = text[:length_max]
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text)


def clean_all(value: Any) -> Any:
    """Return a JSON value with all of its texts cleaned, including the keys of objects."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean_all(key): clean_all(each) for key, each in value.items()}
    if isinstance(value, list):
        return [clean_all(each) for each in value]
    return value
