"""Pages and pictures that code makes are what it makes now, and every number of a config says what its ends do."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from manual.__main__ import DOCS, made
from manual.config_page import cell, config_page

from diloco_jax.settings.schema import config_schema, kind_of

MADE = made()
# Facts about the world and names that happen to be numbers: no end of them is better or worse.
FACTS = {"seed", "peak_tflops", "vocab_size", "shuffle_seed", "split_axis", "port"}


@pytest.mark.parametrize("name", MADE)
def test_what_is_made_is_current(name: str) -> None:
    there = (DOCS / name).read_text(encoding="utf-8") if (DOCS / name).exists() else ""
    assert there == MADE[name], f"docs/{name} is old: ./scripts/bless_docs"


def numbers(schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for section, facts in schema["$defs"].items():
        for name, setting in facts["properties"].items():
            if section != "Generation" and setting.get("type") in ("integer", "number"):
                yield f"{section}.{name}", " ".join(setting["description"].split())


def test_every_number_says_what_both_ends_do() -> None:
    found = dict(numbers(config_schema()))
    assert len(found) > 70
    told = {name: text for name, text in found.items() if name.rpartition(".")[2] not in FACTS}
    silent = [name for name, text in told.items() if not re.search(r"High: ", text)]
    silent += [name for name, text in told.items() if not re.search(r"Low: |\b0\b", text)]
    assert not silent, f"say `Low: ...` (or what 0 means) and `High: ...` below {', '.join(silent)}"


def test_every_setting_has_its_row_once() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \|", config_page(config_schema()), re.MULTILINE)
    assert len(rows) == len(set(rows)) > 150
    assert {"name", "train.steps", "islands.mesh.fsdp", "islands.each.NAME.zone", "data.mixture.NAME.weight"} <= set(
        rows
    )


def test_a_row_is_readable() -> None:
    assert cell("a | b\n  <c> *d*. Low: e. High: f.") == r"a \| b &lt;c> \*d\*. <br>**Low:** e. <br>**High:** f."
    assert kind_of("lease_s", {"type": "number"}) == "seconds"
    assert kind_of("devices", {"anyOf": [{"type": "integer"}, {"const": "auto"}]}) == "whole number or `auto`"
