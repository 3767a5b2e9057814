"""The schema of a config: it takes what comes with the package, and refuses the same keys as `load`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from diloco_jax.settings.packed import packed
from diloco_jax.settings.schema import config_schema, setting_names
from diloco_jax.settings.text import dump, load, parse

CHECK = jsonschema.Draft202012Validator(config_schema())
WHOLE = yaml.safe_load(dump(load(packed()["mixed"])))  # with an island that has differences
FREE = (
    "model.args",
    "data.args",
    "data.mixture",
    "data.evaluation",
    "optimizer.args",
    "outer.args",
    "evaluation.args",
    "islands.mesh.rules",
    "islands.each",
    "islands.each.island-1.mesh.rules",
)  # keys are people's own
NAMES = [key for section in WHOLE.values() if isinstance(section, dict) for key in section]


@pytest.mark.parametrize("name", packed())
def test_the_schema_takes_every_config_of_the_package(name: str) -> None:
    values = yaml.safe_load(packed()[name].read_text(encoding="utf-8"))
    CHECK.validate(values)
    CHECK.validate(yaml.safe_load(dump(parse(values, name))))


def sections(values: dict[str, Any], prefix: str = "") -> Iterator[list[str]]:
    """The paths of all sections in which a key can be unknown."""
    if prefix not in FREE:
        yield prefix.split(".")[bool(not prefix) :]
    for key, value in values.items():
        if isinstance(value, dict):
            yield from sections(value, f"{prefix}.{key}".removeprefix("."))


@given(st.sampled_from([*sections(WHOLE)]), st.sampled_from([*NAMES, "Steps"]) | st.text(max_size=12))
def test_a_key_that_load_does_not_know_is_refused_by_both_and_no_other(where: list[str], key: str) -> None:
    values = section = copy.deepcopy(WHOLE)
    for part in where:
        section = section[part]
    known = key in section
    section.setdefault(key, 1)
    assert CHECK.is_valid(values) is known
    if known:
        parse(values, "test")
    else:
        with pytest.raises(ValueError, match="unknown setting"):
            parse(values, "test")


def test_every_setting_has_its_help() -> None:
    told = dict(setting_names(CHECK.schema))
    assert told["islands.mesh.fsdp"].startswith("Devices that") and len(told) > 100 and all(told.values())
