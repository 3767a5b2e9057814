"""docs/troubleshooting.md quotes messages: each must be one that the program can print."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

from diloco_jax.settings.run import RunConfig
from diloco_jax.transport.group.group import SILENCE_S

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


def test_every_time_of_the_table_is_that_of_the_program() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").partition("## Who waits how long")[2]
    settings = re.findall(r"`([a-z]+)\.([a-z_]+)` (\d+)", text)
    constants = re.findall(r"`([A-Z_]+)` (\d+) s in `([a-z_/]+)`", text)
    assert len(settings) >= 10 and len(constants) >= 5, "the table was not found"
    config = RunConfig()
    for section, name, value in settings:
        assert getattr(getattr(config, section), name) == int(value), f"{section}.{name}"
    for name, value, module in constants:
        assert getattr(importlib.import_module(f"diloco_jax.{module.replace('/', '.')}"), name) == int(value), name
    assert int(re.findall(r"`SILENCE_S` (\d+) s", text)[0]) == SILENCE_S
    protocol, transport = config.protocol, config.transport
    assert 2 * protocol.heartbeat_s < protocol.lease_s < protocol.release_s
    assert transport.keepalive_s + transport.keepalive_timeout_s > protocol.lease_s
