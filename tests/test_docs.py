"""Links in the pages of the root and of docs/ have a target, and quoted messages exist in the package."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from diloco_jax.protocol.releases import RELEASE

ROOT = Path(__file__).resolve().parent.parent
# A link of Markdown, or of HTML within it.
LINK = re.compile(r"(?:\]\(|(?:src|srcset|href)=\")([^()\s\"]+)[)\"]")
ROOMS = "cli|tools|adapters|runtime|settings|sim|transport|training|protocol|core"
CODE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    root = ("README.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md")
    return [*(ROOT / name for name in root), *sorted((ROOT / "docs").rglob("*.md"))]


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


def test_pages_name_the_present_version() -> None:
    named = {
        (page.name, version)
        for page in pages()
        if page.parent.name != "decisions" and page.name not in ("log.md", "findings.md")
        for version in re.findall(r"diloco_jax-(\d[\d.]*)-py3|^Version ([\d.]+),", page.read_text("utf-8"), re.M)
    }
    assert {name for name, _ in named} >= {"README.md", "install.md"}
    assert {"".join(version) for _, version in named} == {RELEASE}


def listed_in(page: Path) -> list[str]:
    """The pages of all toctrees of a page, without their endings."""
    blocks = re.findall(r"^```\{toctree\}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line and not line.startswith(":")]


def test_every_page_is_once_in_the_manual_or_in_the_records() -> None:
    docs = ROOT / "docs"
    manual, records = listed_in(docs / "index.md"), listed_in(docs / "records.md")
    there = {path.stem for path in docs.glob("*.md")} - {"index", "records"} | {"notebook", "examples/README"}
    assert len(manual) == len(set(manual)) and there == {*manual, *records} - {
        "results/README",
        "results/[a-z]*",
        "decisions/*",
    }
    assert not {*manual} & {*records}


def test_every_page_of_the_site_links_to_the_glossary() -> None:
    """The site's template has the link for all pages; readers of the repository find it in README and index."""
    docs = ROOT / "docs"
    assert "pathto('glossary')" in (docs / "_templates" / "page.html").read_text(encoding="utf-8")
    assert 'templates_path = ["_templates"]' in (docs / "conf.py").read_text(encoding="utf-8")
    assert all("glossary.md)" in page.read_text(encoding="utf-8") for page in (ROOT / "README.md", docs / "index.md"))


def test_the_manual_starts_with_the_pages_of_a_first_reader() -> None:
    first = ["start", "concepts", "join", "settings", "two-machines", "results"]
    assert listed_in(ROOT / "docs" / "index.md")[: len(first)] == first


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# The course of X, again\n\n[a](page.md#the-course-of-x-again) [b](#the-course) ![c](picture.svg)\n"
    )
    assert list(broken_links(page)) == [
        "page.md: #the-course names no heading of that page",
        "page.md: picture.svg does not exist",
    ]


def test_the_quickstart_takes_the_same_time_on_every_page() -> None:
    pages = ("README.md", "docs/start.md", "configs/quickstart.yaml")
    read = {name: " ".join((ROOT / name).read_text(encoding="utf-8").replace("#", "").split()) for name in pages}
    times = {name: set(re.findall(r"[\w-]+ to [\w-]+ minutes on two idle cores", text)) for name, text in read.items()}
    assert len(set.union(*times.values())) == 1 and all(times.values()), times
    installs = {name: re.findall(r"[\w-]+ to [\w-]+ minutes, once", read[name]) for name in pages[:2]}
    assert installs["README.md"] == installs["docs/start.md"] and len(installs["README.md"]) == 1, installs


# Shorter pieces of a message, between two variable parts, prove nothing.
PIECE_MIN = 4


def quoted(text: str) -> list[str]:
    """Messages in the first column of the tables."""
    rows = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    return [row for row in rows if row != "message"]


def texts_of_package() -> list[str]:
    """Every string in the sources; the parts of an f-string one by one, what stands side by side as one."""
    found = []
    for path in (ROOT / "diloco_jax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_every_quoted_message_is_one_of_the_program() -> None:
    messages = quoted((ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))
    assert len(messages) > 30, "the tables were not found"
    texts = texts_of_package()
    for message in messages:
        pieces = [piece.strip() for piece in message.split("...") if len(piece.strip()) >= PIECE_MIN]
        assert pieces, f"{message!r} says nothing that could be looked for"
        for piece in pieces:
            assert any(piece in text for text in texts), f"nothing prints {piece!r}, of {message!r}"
