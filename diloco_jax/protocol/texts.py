"""Texts that other processes sent, made safe for the people who read them in logs, terminals, pages and metrics."""

from typing import Any

REASON_LENGTH_MAX = 1000  # characters of a reason that are kept


def clean(text: str, length_max: int | None = None) -> str:
    """Return a text without control characters, at most `length_max` characters of it.

    White space becomes a space, and every other character that cannot be printed becomes U+FFFD: the controls C0 and
    C1, DEL, and the controls of writing direction, which can show a name as another one.
    """
    if length_max is not None:
        text = text[:length_max]
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text)


def clean_all(value: Any) -> Any:
    """Return a value as JSON has it with all of its texts cleaned, also the keys of its objects."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean_all(key): clean_all(each) for key, each in value.items()}
    if isinstance(value, list):
        return [clean_all(each) for each in value]
    return value
