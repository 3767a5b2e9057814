"""Attacks with their expected results, and the verdicts."""

import random
import textwrap
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HELD, FAILED = "held", "FAILED"
TEXT_LENGTH_MAX = 400


@dataclass(eq=False)
class Ground:
    """The resources of one attack: a separate folder and random numbers."""

    folder: Path
    seed: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(f"{self.seed} {self.folder.name}")


@dataclass(eq=False)
class Findings:
    """Observations during an attack, each with a text and whether it was expected."""

    seen: list[tuple[bool, str]] = field(default_factory=list)

    def expect(self, ok: object, good: str, bad: str = "") -> bool:
        """Record an observation; `bad` is its text if it is not as expected."""
        text = good if ok else bad or f"not so: {good}"
        self.seen.append((bool(ok), text[:TEXT_LENGTH_MAX]))
        return bool(ok)

    @property
    def held(self) -> bool:
        """Return whether there were observations and all were as expected."""
        return bool(self.seen) and all(ok for ok, _ in self.seen)

    @property
    def words(self) -> str:
        """Return the observations; unexpected ones are first."""
        return "; ".join(text for _, text in sorted(self.seen, key=lambda each: each[0]))


@dataclass(frozen=True)
class Attack:
    """One attack; a `long` attack takes minutes and runs only on demand."""

    name: str
    expected: str
    carry_out: Callable[[Ground, Findings], None]
    long: bool = False

    @property
    def about(self) -> str:
        """Return its description in one line."""
        return (self.carry_out.__doc__ or "").strip().splitlines()[0]


@dataclass(frozen=True)
class Verdict:
    """The result of one attack."""

    attack: Attack
    held: bool
    happened: str
    took_s: float

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        verdict = HELD if self.held else FAILED
        facts = {"attack": self.attack.name, "about": self.attack.about, "expected": self.attack.expected}
        return {**facts, "happened": self.happened, "verdict": verdict, "took_s": round(self.took_s, 1)}


class Catalogue:
    """The known attacks, by name, in the order of their definition."""

    def __init__(self) -> None:
        self.attacks: dict[str, Attack] = {}

    def add(self, name: str, expected: str, *, long: bool = False) -> Callable[[Any], Any]:
        """Return a decorator that adds a function to the catalogue."""

        def keep(function: Any) -> Any:
            assert name not in self.attacks, f"two attacks are called {name}"
            self.attacks[name] = Attack(name, expected, function, long)
            return function

        return keep

    def chosen(self, names: Iterable[str], *, long: bool) -> list[Attack]:
        """Return the attacks whose names start with one of these, or all; ValueError names an unknown one."""
        wanted = tuple(names)
        for name in wanted:
            if not any(known.startswith(name) for known in self.attacks):
                raise ValueError(f"no attack is called {name!r}; --list shows all names")
        if wanted:
            return [each for each in self.attacks.values() if each.name.startswith(wanted)]
        return [each for each in self.attacks.values() if long or not each.long]


CATALOGUE = Catalogue()


def carry_out(attack: Attack, folder: Path, seed: int) -> Verdict:
    """Carry one attack out; an error of the attack itself is a failure too."""
    ground, found, began_s = Ground(folder / attack.name, seed), Findings(), time.monotonic()
    ground.folder.mkdir(parents=True)
    try:
        attack.carry_out(ground, found)
    except Exception as error:
        (ground.folder / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")
        found.expect(False, "", f"stopped by {type(error).__name__}: {str(error)[:300]}")
    return Verdict(attack, found.held, found.words, time.monotonic() - began_s)


def carry_all_out(
    attacks: Iterable[Attack], folder: Path, seed: int, at_once: int, say: Callable[[str], None]
) -> list[Verdict]:
    """Carry out attacks, `at_once` at a time, and print each verdict."""

    def one(attack: Attack) -> Verdict:
        found = carry_out(attack, folder, seed)
        say(f"{HELD if found.held else FAILED}  {attack.name} ({found.took_s:.0f} s): {found.happened}")
        return found

    with ThreadPoolExecutor(at_once, "attack") as pool:
        return list(pool.map(one, attacks))


def as_text(verdicts: Iterable[Verdict]) -> str:
    """Return a table in Markdown."""
    rows = ["| attack | expected | what happened | verdict |", "|---|---|---|---|"]
    for each in verdicts:
        happened = textwrap.shorten(each.happened.replace("|", "/"), 300, placeholder=" ...")
        verdict = HELD if each.held else FAILED
        rows.append(f"| {each.attack.name} | {each.attack.expected} | {happened} | {verdict} |")
    return "\n".join(rows)
