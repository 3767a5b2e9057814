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

SCHEMA = config_schema()
CHECK = jsonschema.Draft202012Validator(SCHEMA)
WHOLE = yaml.safe_load(dump(load(packed()["mixed"])))  # with an island that has differences
FREE = ("model.args", "islands.mesh.rules", "islands.each", "islands.each.island-1.mesh.rules")  # keys are people's own
CALLED = {"unknown": 1, "Steps": 1, "": 1} | {key: value for each in WHOLE.values() if isinstance(each, dict)
                                              for key, value in each.items()}  # fmt: skip


@pytest.mark.parametrize("name", packed())
def test_the_schema_takes_every_config_of_the_package(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    values = yaml.safe_load(packed()[name].read_text(encoding="utf-8"))
    CHECK.validate(values)
    CHECK.validate(yaml.safe_load(dump(parse(values, name))))


def sections(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, ...]]:
    """The paths of all sections in which a key can be unknown."""
    if prefix not in FREE:
        yield tuple(prefix.split(".")) if prefix else ()
    for key, value in values.items():
        where = f"{prefix}.{key}".removeprefix(".")
        if isinstance(value, dict) and where not in ("model.args", "islands.mesh.rules"):
            yield from sections(value, where)


@given(st.sampled_from([*sections(WHOLE)]), st.sampled_from([*CALLED]) | st.text(max_size=12))
def test_a_key_that_load_does_not_know_is_refused_by_both_and_no_other(where: tuple[str, ...], key: str) -> None:
    values = copy.deepcopy(WHOLE)
    section = values
    for part in where:
        section = section[part]
    known = key in section
    section.setdefault(key, CALLED.get(key, 1))
    assert CHECK.is_valid(values) is known
    if known:
        assert dump(parse(values, "test"))
    else:
        with pytest.raises(ValueError, match="unknown setting"):
            parse(values, "test")


def test_every_setting_has_its_help() -> None:
    told = dict(setting_names(SCHEMA))
    assert told["train.steps"].startswith("T: global steps") and told["islands.mesh.fsdp"].startswith("Devices that")
    assert len(told) > 100 and all(told.values())
