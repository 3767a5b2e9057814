"""The trainers of others, resolved beside this package by uv for each Python; the result is a table in docs/install.md.

A neighbour is resolved alone first. So a cell shows whether this package is the reason why a resolution fails.
"""

import argparse
import datetime
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "install.md"
BEGIN, END = "<!-- neighbours: written by ./scripts/neighbours -->", "<!-- neighbours: end -->"
PYTHONS = ("3.11", "3.12", "3.13")
# Requirements without a version mean the newest one. levanter has only development versions for these Pythons.
NEIGHBOURS = (
    "maxtext[tpu]",
    "maxtext[cuda12]",
    "google-tunix",
    "levanter>=1.2.dev0",
    "marin-levanter",
    "pathwaysutils",
    "kauldron",
    "easydel",
)
# These packages decide whether programs of two trainers can share an environment.
SHOWN = ("jax", "flax", "protobuf")
RESOLVE_S = 300.0


class Row(NamedTuple):
    """A neighbour with its version, and a cell for each Python."""

    name: str
    version: str
    cells: tuple[str, ...]


def resolve(python: str, *sources: str | Path, requirement: str) -> dict[str, str]:
    """Return the newest compatible versions by package; empty if there are none."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "neighbour.in"
        wanted.write_text(f"{requirement}\n", encoding="utf-8")
        options = ["--quiet", "--no-header", "--no-annotate", "--python-version", python]
        words = [sys.executable, "-m", "uv", "pip", "compile", *options, *map(str, sources), str(wanted)]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=RESOLVE_S)
    if done.returncode and "No solution found" not in done.stderr:
        raise RuntimeError(f"uv could not resolve {requirement} for Python {python}: {done.stderr.strip()}")
    return dict(re.findall(r"(?m)^([\w.-]+)==(\S+)", done.stdout)) if not done.returncode else {}


def row_of(requirement: str) -> Row:
    """Resolve a neighbour's newest version for each Python, alone and beside this package."""
    name = re.split(r"[<>=]", requirement)[0]
    package = name.partition("[")[0]
    version = resolve(PYTHONS[-1], requirement=requirement)[package]
    pinned, cells = f"{name}=={version}", []
    for python in PYTHONS:
        found = resolve(python, "pyproject.toml", requirement=pinned)
        if found:
            cells.append(", ".join(f"{each} {found[each]}" for each in SHOWN if each in found))
        else:
            cells.append("**no**" if resolve(python, requirement=pinned) else "not made for it")
    return Row(name, version, tuple(cells))


def table_of(rows: list[Row], day: str) -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"| {day} | version | {' | '.join(f'Python {python}' for python in PYTHONS)} |"
    yield "|---" * (2 + len(PYTHONS)) + "|"
    for row in rows:
        yield f"| {row.name} | {row.version} | {' | '.join(row.cells)} |"


def replaced(page: str, table: str) -> str:
    """Return a page with this table between its marks; ValueError if it has no marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} lacks the marks of the table; write {BEGIN} and {END} there")
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"


def refused(text: str) -> set[tuple[str, str]]:
    """Return the neighbours and Pythons that a table shows as impossible beside this package."""
    found = set()
    for line in text.splitlines():
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        found |= {(name, python) for python, cell in zip(PYTHONS, cells[1:], strict=False) if cell == "**no**"}
    return found


def main() -> int:
    """Write the table, or compare it with the page; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="only print the table; fail if a trainer no longer resolves"
    )
    check = parser.parse_args().check
    lines = list(table_of([row_of(requirement) for requirement in NEIGHBOURS], f"{datetime.date.today():%Y-%m-%d}"))
    page, table = PAGE.read_text(encoding="utf-8"), "\n".join(lines)
    print(table)
    if not check:
        PAGE.write_text(replaced(page, table), encoding="utf-8")
        return 0
    for name, python in sorted(refused(table) - refused(page)):
        print(f"{name} no longer resolves beside this package on Python {python}", file=sys.stderr)
    return bool(refused(table) - refused(page))


if __name__ == "__main__":
    sys.exit(main())
