"""Generated pages and pictures are current, and every setting has one readable row."""

import re

import pytest
from manual.__main__ import DOCS, made
from manual.config_page import cell, config_page

from diloco_jax.settings.schema import config_schema, kind_of, sections

MADE = made()


@pytest.mark.parametrize("name", MADE)
def test_generated_files_are_current(name: str) -> None:
    there = (DOCS / name).read_text(encoding="utf-8") if (DOCS / name).exists() else ""
    assert there == MADE[name], f"docs/{name} is old: ./scripts/bless_docs"


def test_the_meaning_of_zero_is_explained() -> None:
    """The help of a number with the default 0 explains 0, unless 0 is a number like others."""
    found = {setting.name: setting for section in sections(config_schema()) for setting in section.settings}
    assert len(found) > 150
    zero = [name for name, each in found.items() if each.default == 0 and each.kind not in ("true, false", "text")]
    unsaid = [name for name in zero if not re.search(r"\b0\b", found[name].help)]
    assert unsaid == ["seed", "data.shuffle_seed", "fragments.split_axis"], f"explain the meaning of 0: {unsaid}"


def test_every_setting_has_its_row_once() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \|", config_page(config_schema()), re.MULTILINE)
    assert len(rows) == len(set(rows)) > 150
    assert {"name", "train.steps", "islands.mesh.fsdp", "islands.each.NAME.zone", "data.mixture.NAME.weight"} <= set(
        rows
    )


def test_a_row_is_readable() -> None:
    assert cell("a | b\n  <c> *d*. Low: e. High: f.") == r"a \| b &lt;c> \*d\*. <br>**Low:** e. <br>**High:** f."
    assert kind_of("silence_s", {"type": "number"}) == "seconds"
    assert kind_of("devices", {"anyOf": [{"type": "integer"}, {"const": "auto"}]}) == "whole number or `auto`"
