"""Every setting of a config in words: the JSON Schema for editors, the manual, and `diloco train CONFIG --settings`."""

import json
import textwrap
import typing
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import getitem
from typing import Any, NamedTuple

from pydantic import ConfigDict, TypeAdapter, with_config

from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import as_plain, section_of

DIALECT = "https://json-schema.org/draft/2020-12/schema"
# Units of numbers, by the ending of a setting's name. The longest ending that matches counts.
UNITS = {
    "_s": "seconds",
    "_bytes": "bytes",
    "_bytes_max": "bytes",
    "_gb": "GB",
    "_tflops": "TFLOP/s",
    "_steps": "steps",
    "_gb_per_s": "GB/s",
    "_fraction": "share",
    "_rate": "rate",
}
KINDS = {"string": "text", "boolean": "true, false", "array": "list", "object": "mapping"}
# The settings of a first run, in the order of their choice. Everything else has a default that fits most runs.
FIRST = (
    "name",
    "data.path",
    "data.format",
    "data.tokenizer",
    "model.module",
    "model.preset",
    "model.weights",
    "train.steps",
    "train.tokens",
    "train.batch_size",
    "train.seq_len",
    "train.eval_every",
    "optimizer.name",
    "optimizer.learning_rate",
    "optimizer.warmup_steps",
    "islands.count",
    "islands.devices",
    "islands.topology",
    "protocol.sync_every",
    "protocol.num_fragments",
    "protocol.overlap_steps",
    "protocol.quorum",
    "protocol.snapshot_every",
    "merge.method",
    "wire.up",
    "wire.down",
)
# The sections that only a launch on a cloud or on GPU machines reads: docs/launch-reference.md has their settings.
LAUNCH = ("cloud", "cloud.extra", "gpu", "islands.generations.NAME")
# Stands in a setting's name for a name that the user chooses, such as that of an island.
ANY_NAME = "NAME"


class Setting(NamedTuple):
    """One setting of a config."""

    # Dotted, such as train.steps.
    name: str
    # Unit of a number, or the values to choose from.
    kind: str
    # A plain value, as in JSON.
    default: Any
    # A section is invalid without its required settings.
    required: bool
    help: str


class Section(NamedTuple):
    """The settings that share a dataclass."""

    # Dotted, such as islands.mesh; "" for the run itself.
    name: str
    help: str
    settings: tuple[Setting, ...]


def config_schema() -> dict[str, Any]:
    """Return the JSON Schema of a config. It refuses every key that `load` refuses as unknown."""
    for section in {*_dataclasses(RunConfig)}:
        with_config(ConfigDict(extra="forbid", use_attribute_docstrings=True))(section)
    return {"$schema": DIALECT, **TypeAdapter(RunConfig).json_schema()}


def sections(schema: Mapping[str, Any], name: str = "RunConfig", prefix: str = "") -> Iterator[Section]:
    """Yield the sections of `config_schema()`, each before the sections below it."""
    section = schema["$defs"].get(name, schema)
    below = {key: facts for key, facts in section["properties"].items() if "$ref" in facts}
    plain = {key: facts for key, facts in section["properties"].items() if "$ref" not in facts}
    required = section.get("required", ())
    settings = tuple(_setting(key, facts, prefix, required=key in required) for key, facts in plain.items())
    yield Section(prefix.rstrip("."), _line(section["description"]), settings)
    for key, facts in plain.items():
        held = facts.get("additionalProperties")
        if isinstance(held, dict) and "$ref" in held:
            yield from sections(schema, _referenced(held), f"{prefix}{key}.{ANY_NAME}.")
    for key, facts in below.items():
        yield from sections(schema, _referenced(facts), f"{prefix}{key}.")


def _setting(key: str, facts: Mapping[str, Any], prefix: str, *, required: bool) -> Setting:
    # The schema leaves out the default of a mapping, which is empty.
    default = facts.get("default", {} if facts.get("type") == "object" else None)
    return Setting(f"{prefix}{key}", kind_of(key, facts), default, required, _line(facts["description"]))


def setting_names(schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the help text of every setting whose name is fixed."""
    for section in sections(schema):
        if ANY_NAME not in section.name.split("."):
            yield from ((setting.name, setting.help) for setting in section.settings)


def describe_settings(config: RunConfig, command: str, width: int, *, every: bool = True) -> str:
    """List the settings with their values in this config and their meanings, in lines of about `width` characters.

    Args:
        command: the command line that takes the settings, up to the config.
        every: whether to list the sections in LAUNCH, too.
    """
    values = as_plain(config)
    about = (
        f"{command}: every setting, its value in this config, and its meaning. The command line changes a setting "
        "when --section.name value follows the config."
    )
    if not every:
        about += f" --settings --all lists {', '.join(LAUNCH)}, too, which only `diloco launch` and `preflight` read."
    lines = textwrap.wrap(about, width)
    first = "; ".join(f"--{name} {_value(reduce(getitem, name.split('.'), values))}" for name in FIRST)
    lines += [
        "",
        *textwrap.wrap(f"The first to choose: {first}", width, break_long_words=False, break_on_hyphens=False),
    ]
    for section in sections(config_schema()):
        if section.name in LAUNCH and not every:
            continue
        lines += ["", *textwrap.wrap(f"{section.name or 'the run'}: {section.help}", width)]
        for setting in section.settings:
            fixed = ANY_NAME not in setting.name.split(".")
            here = f" {_value(reduce(getitem, setting.name.split('.'), values))}" if fixed else ""
            usual = "" if setting.required else f"; default {_value(setting.default)}"
            lines.append(f"  --{setting.name}{here}  ({setting.kind.replace('`', '')}{usual})")
            lines += textwrap.wrap(setting.help, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def _value(value: Any) -> str:
    """Write a value as the command line takes it."""
    if isinstance(value, list) and value:
        return " ".join(map(str, value))
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def kind_of(name: str, facts: Mapping[str, Any]) -> str:
    """Name the unit of a number, or the values to choose from."""
    if "enum" in facts:
        return ", ".join(f"`{each}`" for each in facts["enum"])
    if "const" in facts:
        return f"`{facts['const']}`"
    if "anyOf" in facts:
        return " or ".join(dict.fromkeys(kind_of(name, each) for each in facts["anyOf"] if each.get("type") != "null"))
    if facts.get("type") in ("integer", "number"):
        unit = next((UNITS[end] for end in sorted(UNITS, key=len, reverse=True) if name.endswith(end)), "")
        return unit or ("whole number" if facts["type"] == "integer" else "number")
    return "section" if "$ref" in facts else KINDS[facts["type"]]


def _line(text: str) -> str:
    return " ".join(text.split())


def _referenced(facts: Mapping[str, Any]) -> str:
    return str(facts["$ref"].rpartition("/")[2])


def _dataclasses(section: type) -> Iterator[type]:
    """Yield a dataclass and all dataclasses that its fields hold."""
    yield section
    for hint in typing.get_type_hints(section).values():
        inner = section_of(hint)
        if inner is not None:
            yield from _dataclasses(inner)
