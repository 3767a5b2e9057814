"""The lines that an island of a user's loop prints, if the program has configured no logging."""

import json
import subprocess
import sys

import pytest

from tests.runtime.helpers import ROOT

SHOW = """
import logging, sys
from diloco_jax.runtime.records.log_lines import show_lines
{before}
show_lines()
show_lines()
{after}
logging.getLogger("diloco_jax.runtime.own_loop.stepping").info("a line")
logging.getLogger("another").info("not ours")
"""
ROOT_HANDLER = "logging.basicConfig(level=logging.INFO, stream=sys.stdout, format='root %(message)s')"


def lines(before: str = "", after: str = "", **environment: str) -> tuple[str, str]:
    """Return what a program that logs one line prints to stdout and to stderr."""
    code = SHOW.format(before=before, after=after)
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={"PATH": "", **environment}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, ended.stderr


def test_without_logging_a_line_goes_to_stderr_once() -> None:
    out, err = lines()
    assert out == "" and err.endswith(" a line\n") and err.count("\n") == 1
    _, err = lines(DILOCO_LOG="json")
    assert json.loads(err)["message"] == "a line"


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_logging_of_the_program_prints_instead(when: str) -> None:
    out, err = lines(**{when: ROOT_HANDLER})
    assert err == "" and out.startswith("root a line\n")


def test_a_handler_of_the_root_logger_gets_the_lines_at_its_default_level() -> None:
    # Orbax's import does this, so that its users would see no line below WARNING.
    handler = "logging.getLogger().addHandler(logging.StreamHandler(sys.stdout))"
    assert lines(before=handler) == ("a line\n", "")


def test_a_quiet_program_stays_quiet() -> None:
    assert lines(before="logging.getLogger('diloco_jax').addHandler(logging.NullHandler())") == ("", "")
    assert lines(before="logging.getLogger().addHandler(logging.NullHandler())") == ("", "")
    assert lines(before="logging.getLogger('diloco_jax').setLevel(logging.ERROR)") == ("", "")
    assert lines(before="logging.basicConfig(level=logging.ERROR)") == ("", "")
