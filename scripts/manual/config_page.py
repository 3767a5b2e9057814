"""docs/config.md: every setting with its unit or choices, its default and its meaning, from the dataclasses alone."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

UNITS = {
    "_s": "seconds",
    "_bytes": "bytes",
    "_bytes_max": "bytes",
    "_gb": "GB",
    "_tflops": "TFLOP/s",
    "_steps": "steps",
}
UNITS |= {"_gb_per_s": "GB/s", "_fraction": "share", "_rate": "rate"}
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


def kind(name: str, facts: Mapping[str, Any]) -> str:
    """Tell the unit of a number, or the values that there are."""
    if "enum" in facts:
        return ", ".join(f"`{each}`" for each in facts["enum"])
    if "const" in facts:
        return f"`{facts['const']}`"
    if "anyOf" in facts:
        return " or ".join(dict.fromkeys(kind(name, each) for each in facts["anyOf"] if each.get("type") != "null"))
    if facts.get("type") in ("integer", "number"):
        unit = next((UNITS[end] for end in sorted(UNITS, key=len, reverse=True) if name.endswith(end)), "")
        return unit or ("whole number" if facts["type"] == "integer" else "number")
    if "$ref" in facts:
        return "section"
    words = {"string": "text", "boolean": "true, false", "array": "list", "object": "mapping"}
    return words[facts["type"]]


def default(facts: Mapping[str, Any], required: bool) -> str:
    """Write a default as YAML has it; empty where none is set."""
    if required:
        return "must be set"
    value = facts.get("default")
    if value in (None, "", [], {}):
        return "none"
    return f"`{json.dumps(value) if not isinstance(value, str) else value}`"


def table(schema: Mapping[str, Any], name: str, prefix: str) -> Iterator[str]:
    """Yield the lines of one section, and of those below it."""
    section = schema["$defs"].get(name, schema)
    below = [(key, facts) for key, facts in section["properties"].items() if "$ref" in facts]
    plain = [(key, facts) for key, facts in section["properties"].items() if "$ref" not in facts]
    yield f"\n## {prefix.rstrip('.') or 'The run'}\n"
    yield cell(section["description"]).replace("<br>", "") + "\n"
    yield "| key | unit or values | default | meaning |\n|---|---|---|---|"
    for key, facts in plain:
        asked = key in section.get("required", ())
        row = (f"`{prefix}{key}`", kind(key, facts), default(facts, asked), cell(facts["description"]))
        yield f"| {' | '.join(row)} |"
    for key, facts in plain:
        held = facts.get("additionalProperties")
        if isinstance(held, dict) and "$ref" in held:
            yield from table(schema, held["$ref"].rpartition("/")[2], f"{prefix}{key}.NAME.")
    for key, facts in below:
        yield from table(schema, facts["$ref"].rpartition("/")[2], f"{prefix}{key}.")


def config_page(schema: Mapping[str, Any]) -> str:
    """Return the page, from what `diloco schema` prints."""
    sections = [(key, facts) for key, facts in schema["properties"].items() if "$ref" in facts]
    rows = [f"| [{key}](#{key}) | {cell(facts['description'])} |\n" for key, facts in sections]
    return HEAD + "".join(rows) + "\n".join(table(schema, "RunConfig", "")) + "\n"
