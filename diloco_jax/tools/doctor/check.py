"""One finding of `diloco doctor`."""

from __future__ import annotations

from typing import Literal, NamedTuple

Status = Literal["ok", "warn", "fail"]


class Check(NamedTuple):
    """The finding of one check."""

    name: str  # of what was looked at
    status: Status  # fail: a run would not work, or not for long. warn: it would, but somebody should know.
    found: str  # what is there
    fix: str = ""  # what to do about it; empty if nothing


def of_error(name: str, error: Exception, fix: str = "") -> Check:
    """Make a failed check from an error of this package, whose message ends with the remedy.

    Args:
        error: "what is wrong; remedy" or "what is wrong: remedy".
    """
    text = str(error)
    for separator in ("; ", ": "):
        found, _, remedy = text.rpartition(separator)
        if found:
            return Check(name, "fail", found, remedy)
    return Check(name, "fail", text, fix)


def mbit(bytes_per_s: float) -> str:
    """Write a rate for people, in Mbit/s."""
    value = bytes_per_s * 8 / 1e6
    return f"{value:,.0f} Mbit/s" if value >= 100 else f"{value:.3g} Mbit/s"
