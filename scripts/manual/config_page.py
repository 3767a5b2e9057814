"""docs/config.md: every setting with its unit or choices, its default and its meaning, from the dataclasses alone."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from diloco_jax.settings.schema import Section, Setting, sections

ENDS = re.compile(r"\b(Low|High): ")

HEAD = """# Every setting

<!-- made by `./scripts/bless_docs` from the docstrings of the settings; do not edit -->

A config is a YAML file with these keys; what it leaves out has its default. On a command line a setting is written
`--section.name value`. **Low** and **High** say what happens at the two ends of a number. Often 0 has a meaning of its
own, which is said before. `diloco train CONFIG --settings` prints the same for one config, and `diloco schema` is for
editors ([install](install.md#a-config-in-an-editor)).

[Timeouts](timeouts.md) has all waits in order; [concepts](concepts.md) explains H, P, tau, K and the grace window.

| section | is |
|---|---|
"""


def cell(text: str) -> str:
    """Make text that stands in a table; the ends of a number begin lines of their own."""
    plain = re.sub(r"([|*])", r"\\\1", " ".join(text.split()).replace("<", "&lt;"))
    return ENDS.sub(r"<br>**\1:** ", plain)


def default(setting: Setting) -> str:
    """Write a default as YAML has it; empty where none is set."""
    if setting.required:
        return "must be set"
    if setting.default in (None, "", [], {}):
        return "none"
    return f"`{setting.default if isinstance(setting.default, str) else json.dumps(setting.default)}`"


def table(section: Section) -> Iterator[str]:
    """Yield the lines of one section."""
    yield f"\n## {section.name or 'The run'}\n"
    yield cell(section.help).replace("<br>", "") + "\n"
    yield "| key | unit or values | default | meaning |\n|---|---|---|---|"
    for setting in section.settings:
        row = (f"`{setting.name}`", setting.kind, default(setting), cell(setting.help))
        yield f"| {' | '.join(row)} |"


def config_page(schema: Mapping[str, Any]) -> str:
    """Return the page, from what `diloco schema` prints."""
    named = [(key, facts) for key, facts in schema["properties"].items() if "$ref" in facts]
    rows = [f"| [{key}](#{key}) | {cell(facts['description'])} |\n" for key, facts in named]
    lines = [line for section in sections(schema) for line in table(section)]
    return HEAD + "".join(rows) + "\n".join(lines) + "\n"
