"""Every transcript in testdata is what slices do today; `scripts/bless_transcripts` writes all of them again."""

import difflib
import os
from pathlib import Path

import pytest

from tests.protocol.transcript import Case, parse
from tests.runtime.slices.transcript import run

FILES = sorted((Path(__file__).parent / "testdata").glob("*.txt"))
STORIES = {"steps", "follower_lost", "shrink", "leader_lost", "stands_still"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_transcript(path: Path) -> None:
    written = path.read_text(encoding="utf-8")
    came_out = "\n".join(case.text() for case in run(list(parse(written))))
    if os.environ.get("DILOCO_BLESS"):
        path.write_text(came_out, encoding="utf-8")
        return
    difference = difflib.unified_diff(written.splitlines(), came_out.splitlines(), path.name, "now", lineterm="", n=6)
    assert written == came_out, "see scripts/bless_transcripts\n" + "\n".join(difference)


def test_the_main_stories_are_told() -> None:
    assert not STORIES - {path.stem for path in FILES}


def test_a_wrong_output_is_noticed() -> None:
    case = Case(1, ["# c"], ["new"], ["something else"])
    assert next(run([case])).output[0] == "1 -> 0: Stand at change 0 of term 0"
