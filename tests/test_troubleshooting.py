"""docs/troubleshooting.md quotes messages: each must be one that the program can print."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIECE_MIN = 4  # shorter pieces of a message, between two variable parts, prove nothing


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
