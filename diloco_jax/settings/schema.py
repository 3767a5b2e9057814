"""The JSON Schema of a config, for editors: the settings of RunConfig with their types, defaults and help texts."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ConfigDict, TypeAdapter, with_config

from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import section_of

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def config_schema() -> dict[str, Any]:
    """Return the schema; it refuses every key that `load` refuses as unknown."""
    for section in {*_sections(RunConfig)}:
        with_config(ConfigDict(extra="forbid", use_attribute_docstrings=True))(section)
    return {"$schema": DIALECT, **TypeAdapter(RunConfig).json_schema()}


def setting_names(schema: Mapping[str, Any], section: str = "RunConfig", prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield every setting that has a name of its own as section.name, with its help text."""
    properties = schema["$defs"].get(section, schema)["properties"]
    for name, facts in properties.items():
        if "$ref" in facts:
            yield from setting_names(schema, facts["$ref"].rpartition("/")[2], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", facts["description"]


def _sections(section: type) -> Iterator[type]:
    yield section
    for hint in typing.get_type_hints(section).values():
        inner = section_of(hint)
        if inner is not None:
            yield from _sections(inner)
