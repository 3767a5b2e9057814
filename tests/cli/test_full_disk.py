"""A run's folder on a full disk: a start that changes nothing writes nothing, and errors name the folder."""

import argparse
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco_jax.cli import runs
from diloco_jax.cli.main import main
from diloco_jax.runtime.records.files import CONFIG_FILE, TAPE_FILE
from diloco_jax.runtime.records.signals import FAILED
from diloco_jax.settings import text
from diloco_jax.settings.run import RunConfig


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def words(tmp_path: Path) -> argparse.Namespace:
    """A run that has begun, and its config in another file, as of a syncer that a person starts again by hand."""
    run_dir, config = tmp_path / "run", tmp_path / "my.yaml"
    run_dir.mkdir()
    config.write_text("name: x\ntrain:\n  steps: 30\n")
    text.save(text.load(config), run_dir / CONFIG_FILE)
    (run_dir / TAPE_FILE).write_text('["begin",0.0,[]]\n')
    return argparse.Namespace(name="syncer", config=str(config), run_dir=str(run_dir), rewind=False)


def test_an_unchanged_config_is_not_written(words: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "save", full)
    config = text.load(Path(words.config))
    with runs._run_folder(words, config) as (run_dir, used):
        assert (str(run_dir), used) == (words.run_dir, config)


def start(words: argparse.Namespace, config: RunConfig, inside: Callable[[], None]) -> None:
    with runs._run_folder(words, config):
        inside()


def test_an_error_of_the_disk_names_the_folder(words: argparse.Namespace) -> None:
    with pytest.raises(OSError, match="No space left on device") as raised:
        start(words, text.load(Path(words.config)), full)
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, words.run_dir)


def test_the_command_names_folder_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(text, "save", full)
    run_dir = tmp_path / "new"
    assert main(["syncer", "quickstart", "--run-dir", str(run_dir)]) == FAILED
    assert capsys.readouterr().err.endswith(f"{run_dir}: No space left on device; free space there\n")
