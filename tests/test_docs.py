"""Links in README, CONTRIBUTING and docs/ lead to files and headings that are there, and the map names real places."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\(([^()\s]+)\)")
ROOMS = "cli|tools|runtime|settings|sim|transport|training|protocol|core|drawing"
CODE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def anchors_of(page: Path) -> set[str]:
    """What GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> Iterator[str]:
    for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith(("https://", "http://")):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists():
            yield f"{page.name}: {link} does not exist"
        elif anchor and anchor not in anchors_of(target):
            yield f"{page.name}: {link} names no heading of that page"


def test_links_lead_somewhere() -> None:
    assert len(pages()) > 20
    assert not [text for page in pages() for text in broken_links(page)]


def test_the_map_names_what_is_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(rf"[`(](?:diloco_jax/)?((?:{ROOMS})/[\w/.]*)[`)]", text))
    assert len(named) > 30
    assert not [name for name in sorted(named) if not (ROOT / "diloco_jax" / name).exists()]
    tree = text[text.index("```text") : text.index("tests/ ")]
    folders = {line.split("/")[0].strip() for line in tree.splitlines() if "/ " in line}
    rooms = {path.parent.name for path in (ROOT / "diloco_jax").rglob("__init__.py")} - {"diloco_jax", "proto"}
    assert folders == rooms


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# The life of X, again\n\n[a](page.md#the-life-of-x-again) [b](#the-life) ![c](picture.svg)\n")
    assert list(broken_links(page)) == [
        "page.md: #the-life names no heading of that page",
        "page.md: picture.svg does not exist",
    ]
