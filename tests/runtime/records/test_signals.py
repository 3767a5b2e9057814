"""Exit statuses of programs whose authors handle no error of this package."""

import subprocess
import sys

import pytest

from diloco_jax.runtime.records.signals import FAILED, WRONG_INPUT

PROGRAM = """
from diloco_jax.runtime.records.signals import RefusedForGood, end_refused
end_refused()
end_refused()
raise {error}
"""


@pytest.mark.parametrize(
    ("error", "status", "lines"),
    [
        ('RefusedForGood("the run has another model")', WRONG_INPUT, ["diloco_jax: the run has another model"]),
        ('ValueError("the loop\'s own")', FAILED, ["ValueError: the loop's own"]),
    ],
)
def test_only_a_refusal_ends_a_program_so_that_nobody_restarts_it(error: str, status: int, lines: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(error=error)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == status
    printed = ended.stderr.splitlines()
    assert printed[-1:] == lines and ("Traceback" in ended.stderr) == (status == FAILED)
