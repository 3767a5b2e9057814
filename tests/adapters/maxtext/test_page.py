"""The examples of docs/maxtext.md: a config that loads, and a launcher of a few lines."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_jax.adapters.maxtext.arguments import own_command, read_arguments
from diloco_jax.maxtext.__main__ import main
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


def test_islands_by_hand_have_the_arguments_of_the_config_and_a_config_that_loads(tmp_path: Path) -> None:
    (text,) = (text for text in blocks("bash") if "cat > two.yaml" in text)
    files = dict(re.findall(r"^cat > (\S+) <<'END'\n(.*?)^END$", text, re.MULTILINE | re.DOTALL))
    by_hand = parse_text(files["two.yaml"], "two.yaml")
    (packed,) = blocks("yaml")
    by_train = parse_text(packed, "mx.yaml")
    assert (by_hand.model, by_hand.train, by_hand.protocol) == (by_train.model, by_train.train, by_train.protocol)
    arguments = files["island.sh"].replace("\\\n", " ").split()
    first = arguments.index("base.yml")
    assert set(arguments[first:]) == set(by_train.islands.command[3:])
    # A command of this name prints what the script starts.
    (tmp_path / "python").write_text('#!/bin/bash\necho "$@"\n')
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "island.sh").write_text(files["island.sh"])
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for words, syncer in ((["a"], by_hand.transport.address), (["b", "host:1"], "host:1")):
        call = ["bash", str(tmp_path / "island.sh"), *words]
        started = subprocess.run(call, env=environment, check=True, capture_output=True, text=True).stdout
        assert started.startswith(f"-m diloco_jax.maxtext --name {words[0]} --syncer {syncer} --run-dir runs/hand base")


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


def test_maxtexts_own_commands_are_those_that_an_export_prints(tmp_path: Path) -> None:
    """The words after the dots of the page follow the arguments of the model."""
    configs = tmp_path / "configs"
    configs.mkdir()
    (configs / "base.yml").touch()
    given = read_arguments(["base.yml", "hardware=cpu"], configs)
    folder, known = tmp_path / "exported", {f"{configs}/base.yml", "hardware=cpu", "run_name=exported"}
    text = next(text for text in blocks("bash") if "load_parameters_path" in text).replace("\\\n", " ")
    printed = [line.replace("$PWD", str(tmp_path)) for line in text.splitlines() if "pre_train.train" in line]
    for line, evaluates in zip(printed, (False, True), strict=True):
        made = set(own_command(given, folder, evaluates=evaluates).split()) - known
        assert made == set(line.split()) - {"/path/of/maxtext/configs/base.yml", "hardware=cpu", "..."}


COMMANDS = ("diloco_jax.maxtext", "diloco_jax.maxtext.export")


def command(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
    call = [sys.executable, "-X", "importtime", "-m", module, *words]
    return subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("module", COMMANDS)
def test_help_needs_neither_maxtext_nor_jax(module: str) -> None:
    ended = command(module, "--help")
    assert ended.returncode == 0 and ended.stdout.startswith(f"usage: python -m {module} ")
    assert "diloco_jax.adapters.maxtext.arguments" in ended.stderr and " jax\n" not in ended.stderr


@pytest.mark.parametrize("module", COMMANDS)
def test_without_maxtext_the_command_says_so(module: str) -> None:
    ended = command(module, *["run", "out"][: 2 * module.endswith("export")])
    assert ended.returncode == 2 and "MaxText is not installed here" in ended.stderr


def test_an_export_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "model").touch()
    ended = command(COMMANDS[1], "run", str(tmp_path))
    assert ended.returncode == 2 and f"{tmp_path} exists and is not an empty folder" in ended.stderr
    ended = command(COMMANDS[1], "run", str(tmp_path / (300 * "n")))
    assert ended.returncode == 2 and "File name too long" in ended.stderr and "Traceback" not in ended.stderr


def test_the_words_and_the_place_in_the_run_are_checked_before_maxtext_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A package of this name stands for MaxText; it raises if it is imported."""
    (tmp_path / "maxtext" / "configs").mkdir(parents=True)
    (tmp_path / "maxtext" / "__init__.py").write_text("raise AssertionError")
    (tmp_path / "maxtext" / "configs" / "base.yml").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("DILOCO_SYNCER", "DILOCO_ISLAND"):
        monkeypatch.delenv(name, raising=False)
    for words, message in (
        (["base.yml", "steps"], "'steps' is not an argument of MaxText"),
        (["base.yml"], "join() needs syncer=, or DILOCO_SYNCER"),
        (["base.yml", "--syncer", "127.0.0.1:1"], "join() needs name=, or DILOCO_ISLAND"),
    ):
        monkeypatch.setattr(sys, "argv", ["maxtext", *words])
        assert main() == 2 and message in capsys.readouterr().err
