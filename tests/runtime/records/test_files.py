"""The commands that a run prints work where it was started."""

import shlex
import sys
from pathlib import Path

import pytest

from diloco_jax.runtime.records.files import command, resume_command


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a virtual environment's folder in a folder with a space, and go there."""
    bin_dir = tmp_path / "a b" / ".venv" / "bin"
    bin_dir.mkdir(parents=True)
    for name in ("python", "diloco"):
        (bin_dir / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(bin_dir / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path / "a b")
    return bin_dir


def test_a_program_that_the_shell_does_not_find_is_named_by_its_path(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command() == ".venv/bin/diloco"
    monkeypatch.chdir("/")
    (word,) = shlex.split(command())
    assert Path("/", word) == environment / "diloco"
    monkeypatch.setenv("PATH", str(environment))
    assert command() == "diloco"


def test_the_program_of_another_environment_is_not_meant(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "diloco").touch(mode=0o755)
    assert command("status") == ".venv/bin/diloco status"


def test_a_program_without_a_script_is_a_module(environment: Path) -> None:
    (environment / "diloco").unlink()
    assert command() == ".venv/bin/python -m diloco_jax"


def test_the_command_to_resume_is_one_for_the_shell(environment: Path) -> None:
    words = shlex.split(resume_command(Path("runs/my run")))
    assert words[1:] == ["train", "runs/my run/config.yaml", "--run-dir", "runs/my run", "--resume"]
    assert words[0] == ".venv/bin/diloco"
