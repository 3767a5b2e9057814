"""The examples of docs/maxtext.md: a config that loads, and a launcher of a few lines."""

import re

import pytest

from diloco_jax.settings.text import parse_text
from tests.runtime.helpers import ROOT

PAGE = (ROOT / "docs" / "maxtext.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


def test_the_config_loads() -> None:
    (text,) = blocks("yaml")
    config = parse_text(text, "docs/maxtext.md")
    assert config.islands.command[1:4] == ("-m", "diloco_jax.maxtext", "base.yml")
    assert config.planned_steps == 500


def test_a_launcher_needs_at_most_ten_lines() -> None:
    (text,) = blocks("python")
    compile(text, "docs/maxtext.md", "exec")
    assert len([line for line in text.splitlines() if line.strip()]) <= 10


def test_the_command_needs_no_line() -> None:
    commands = [line for text in blocks("bash") for line in text.splitlines() if "-m diloco_jax.maxtext " in line]
    alone = [
        line for text in blocks("bash") for line in text.splitlines() if "pre_train.train base.yml run_name" in line
    ]
    # The arguments of MaxText are the same ones.
    assert commands[0].split("base.yml")[1] == alone[0].split("base.yml")[1]


def test_importing_the_package_needs_no_maxtext(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        import diloco_jax.maxtext.__main__  # noqa: F401
    assert "MaxText is not installed here" in capsys.readouterr().err
