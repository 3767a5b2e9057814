"""Every transcript in testdata is what a run prints today; `scripts/bless_transcripts` writes all of them again."""

import difflib
import os
from pathlib import Path

import pytest

from tests.protocol.transcript import FOLDER, Case, parse, run

FILES = sorted(FOLDER.glob("*.txt"))
STORIES = {
    "steady",
    "grace",
    "join_late",
    "leave",
    "crash_while_pulling",
    "below_quorum",
    "lockstep",
    "recover_from_peer",
    "donor_dies",
    "no_donor",
    "syncer_restart",
    "rewind",
    "quarantine",
    "drain_and_elastic",
    "leases",
    "steps",
}


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


def test_parse_keeps_the_text() -> None:
    text = "# one\njoin a\n----\nout\n\n# two\n# more\nstep a\n----\nout\nmore\n"
    cases = list(parse(text))
    assert cases[1] == Case(6, ["# two", "# more"], ["step a"], ["out", "more"])
    assert "\n".join(case.text() for case in cases) == text


def test_a_wrong_output_is_noticed() -> None:
    case = Case(1, ["# c"], ["new", "join a"], ["something else"])
    assert run([case])[0].output[0] == "a -> syncer: Hello, incarnation 1, holds [- -]"
