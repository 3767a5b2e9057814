"""docs/timeouts.md has every wait of a run, with the times that settings and constants have, in their order."""

import ast
import importlib
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.schema import config_schema, setting_names

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "diloco_jax"
PAGE = (ROOT / "docs" / "timeouts.md").read_text(encoding="utf-8")
SETTING = re.compile(r"`([a-z]+\.[a-z_]+)` (\d+(?:\.\d+)?)")
CONSTANT = re.compile(r"`([A-Z_]+_S)` (\d+(?:\.\d+)?) s in `([a-z_/]+)`")
NAME = re.compile(r"[a-z_]+(?:/[a-z_]+)*\.[A-Za-z_]+")
# Simulated time, faults on purpose and programs before a run are not waits of the run.
ELSEWHERE = ("sim", "tools/chaos", "tools/plan", "tools/preflight")
NO_WAIT = {"REFRESHES_PER_S", "FAR_S", "RECONNECT_DELAYS_S"}  # a rate, a distance, and what the page says in words


def table(heading: str) -> list[str]:
    """The rows below a heading, without the table's head."""
    part = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [line for line in part.splitlines() if line.startswith("|")][2:]


def value(name: str) -> float:
    """What a setting has by default, or a constant."""
    place, _, last = name.rpartition(".")
    if last.isupper():
        return float(getattr(importlib.import_module(f"diloco_jax.{place.replace('/', '.')}"), last))
    return float(getattr(getattr(RunConfig(), place), last))


def told(rows: list[str]) -> list[tuple[str, float]]:
    """Each setting and constant that rows name, with the number that they say, the first of each row first."""
    found = []
    for row in rows:
        found += [(f"{place}.{name}", float(number)) for name, number, place in CONSTANT.findall(row)]
        found += [(name, float(number)) for name, number in SETTING.findall(row)]
    return found


def constants() -> set[str]:
    """Every constant of the package that is a time."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE).with_suffix("").as_posix()
        if place.startswith(ELSEWHERE):
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            target: Any = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            name = getattr(target, "id", "")
            if name.endswith("_S") and name not in NO_WAIT:
                found.add(f"{place}.{name}")
    return found


HEADINGS = ("Waits counted in steps", "Waits, from the shortest to the longest", "Intervals")


def test_every_time_is_that_of_the_program() -> None:
    said = [each for heading in HEADINGS for each in told(table(heading))]
    assert len(said) > 80
    assert not [f"{name} is {value(name)}, the page says {number}" for name, number in said if value(name) != number]


def test_no_wait_is_missing() -> None:
    said = {name for heading in HEADINGS for name, _ in told(table(heading))}
    settings = {name for name, _ in setting_names(config_schema()) if name.endswith("_s")}
    assert len(settings) > 15 and len(constants()) > 60
    assert not sorted(settings - said), "add a row to docs/timeouts.md"
    assert not sorted(constants() - said), "add a row to docs/timeouts.md"


def test_rows_are_in_their_order() -> None:
    for heading in HEADINGS[1:]:
        first = [told([row])[0] for row in table(heading)]
        late = [f"{b} comes after {a}" for (a, before), (b, after) in pairwise(first) if after < before]
        assert len(first) > 20 and not late


def holds(rule: str) -> bool:
    """Whether a comparison of sums holds for defaults and constants."""
    assert re.fullmatch(r"[\w\s./*+<=]+", rule), rule
    return bool(eval(NAME.sub(lambda found: str(value(found[0])), rule), {"__builtins__": {}}))


def test_the_order_holds() -> None:
    rules = [re.findall(r"`([^`]+)`", row)[0] for row in table("Their order")]
    assert len(rules) > 15
    assert not [rule for rule in rules if not holds(rule)]
    assert not holds("protocol.release_s < protocol.lease_s") and not holds("2 * protocol.lease_s <= protocol.lease_s")


def test_the_pause_between_calls_is_that_of_the_program() -> None:
    from diloco_jax.runtime.learner.effects import RECONNECT_DELAYS_S

    *first, last = RECONNECT_DELAYS_S
    words = f"{', '.join(f'{delay:g}' for delay in first)}, and then every {last:g} s"
    assert words in " ".join(PAGE.split())
