"""Generated pages and pictures are current, and every setting has one readable entry."""

import re

import pytest
from manual.__main__ import DOCS, made
from manual.config_page import ADVICE, config_page, entry, launch_settings

from diloco_jax.settings.schema import Setting, config_schema, kind_of, sections

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


def test_every_setting_has_its_entry_once() -> None:
    pages = config_page(config_schema()) + launch_settings(config_schema())
    names = re.findall(r"^### `([\w.]+)`$", pages, re.MULTILINE)
    assert len(names) == len(set(names)) > 150
    assert {"name", "train.steps", "islands.mesh.fsdp", "islands.each.NAME.zone", "data.mixture.NAME.weight"} <= set(
        names
    )
    # A link names a setting without its dots.
    assert len({name.replace(".", "") for name in names}) == len(names)


def test_an_entry_has_values_default_meaning_and_advice() -> None:
    setting = Setting(
        "a.b_s", "seconds", 2.0, False, "Seconds of x | y. 0: <none>. Raise it if x *is* late. It is cheap."
    )
    assert "\n".join(entry(setting)) == (
        "\n### `a.b_s`\n\nseconds; default: `2.0`\n\nSeconds of x \\| y. 0: &lt;none>.\n"
        "\n**When to change it:** Raise it if x \\*is\\* late. It is cheap."
    )
    assert not any("When to change it" in line for line in entry(setting._replace(help="Set it or raise it.")))
    assert kind_of("silence_s", {"type": "number"}) == "seconds"
    assert kind_of("devices", {"anyOf": [{"type": "integer"}, {"const": "auto"}]}) == "whole number or `auto`"


def test_every_setting_says_when_to_change_it() -> None:
    """Advice is a sentence after the meaning, so that a help text is never advice alone."""
    found = [setting for section in sections(config_schema()) for setting in section.settings]
    missing = [each.name for each in found if len(ADVICE.split(each.help, maxsplit=1)) < 2]
    assert not missing, f"end the docstring with a sentence such as 'Raise it if ...': {missing}"
    unfinished = [each.name for each in found if not each.help.endswith((".", ".)"))]
    assert not unfinished, unfinished
