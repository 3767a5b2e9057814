"""docs/timeouts.md gives the waits of a run the times of their settings and constants, in their order."""

import importlib
import re
from itertools import pairwise
from pathlib import Path

from diloco_jax.settings.run import RunConfig

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "timeouts.md").read_text(encoding="utf-8")
SETTING = re.compile(r"`([a-z]+\.[a-z_]+)` (\d+(?:\.\d+)?)")
CONSTANT = re.compile(r"`([A-Z_]+_S)` (\d+(?:\.\d+)?) s in `([a-z_/]+)`")
NAME = re.compile(r"[a-z_]+(?:/[a-z_]+)*\.[A-Za-z_]+")


def table(heading: str) -> list[str]:
    """Return the rows of the table below a heading."""
    part = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [line for line in part.splitlines() if line.startswith("|")][2:]


def value(name: str) -> float:
    """Return the default of a setting, or the value of a constant."""
    place, _, last = name.rpartition(".")
    if last.isupper():
        return float(getattr(importlib.import_module(f"diloco_jax.{place.replace('/', '.')}"), last))
    return float(getattr(getattr(RunConfig(), place), last))


def told(rows: list[str]) -> list[tuple[str, float]]:
    """Return settings and constants of rows, each with the time that the row shows; a row's first entry comes first."""
    found = []
    for row in rows:
        found += [(f"{place}.{name}", float(number)) for name, number, place in CONSTANT.findall(row)]
        found += [(name, float(number)) for name, number in SETTING.findall(row)]
    return found


HEADINGS = ("Waits counted in steps", "Waits, from the shortest to the longest", "Intervals")


def test_every_time_is_that_of_the_program() -> None:
    said = [each for heading in HEADINGS for each in told(table(heading))]
    assert len(said) > 80
    assert not [f"{name} is {value(name)}, the page says {number}" for name, number in said if value(name) != number]


def test_rows_are_in_their_order() -> None:
    for heading in HEADINGS[1:]:
        first = [told([row])[0] for row in table(heading)]
        late = [f"{b} comes after {a}" for (a, before), (b, after) in pairwise(first) if after < before]
        assert len(first) > 20 and not late


def holds(rule: str) -> bool:
    """Return whether a comparison holds for the defaults and constants that it names."""
    assert re.fullmatch(r"[\w\s./*+<=]+", rule), rule
    return bool(eval(NAME.sub(lambda found: str(value(found[0])), rule), {"__builtins__": {}}))


def test_the_order_holds() -> None:
    rules = [re.findall(r"`([^`]+)`", row)[0] for row in table("Their order")]
    assert len(rules) > 15
    assert not [rule for rule in rules if not holds(rule)]
    assert not holds("protocol.release_s < protocol.silence_s") and not holds(
        "2 * protocol.silence_s <= protocol.silence_s"
    )


def test_the_pause_between_calls_is_that_of_the_program() -> None:
    from diloco_jax.runtime.learner.effects import RECONNECT_DELAYS_S

    *first, last = RECONNECT_DELAYS_S
    words = f"{', '.join(f'{delay:g}' for delay in first)}, and then every {last:g} s"
    assert words in " ".join(PAGE.split())


def test_the_pause_between_calls_of_a_subscriber() -> None:
    from diloco_jax.runtime.subscriber.subscription import RECONNECT_DELAYS_S

    *first, last = RECONNECT_DELAYS_S
    words = f"{', '.join(f'{delay:g}' for delay in first)}, and then {last:g} s, forever"
    assert words in " ".join(PAGE.split())
