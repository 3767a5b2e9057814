"""Tests of the table, of the exit status, and of a few attacks on a real syncer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attack import __main__ as program
from attack.table import CATALOGUE, Attack, Catalogue, Findings, Ground


def holds(ground: Ground, seen: Findings) -> None:
    """An attack that does no harm."""
    seen.expect(ground.folder.is_dir(), "a folder")


def harms(ground: Ground, seen: Findings) -> None:
    """An attack that does harm."""
    seen.expect(True, "something held")
    seen.expect(False, "all well", "the syncer ended")


def breaks(ground: Ground, seen: Findings) -> None:
    """An attack that cannot be carried out."""
    raise TimeoutError("no answer")


def sees_nothing(ground: Ground, seen: Findings) -> None:
    """An attack that looks at nothing."""


FAKES: dict[str, Callable[[Ground, Findings], None]] = {
    "holds": holds,
    "harms": harms,
    "breaks": breaks,
    "sees-nothing": sees_nothing,
}


def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Run the program on fakes, and return its exit status and its output."""
    fakes = Catalogue()
    fakes.attacks = {name: Attack(name, "no harm", function) for name, function in FAKES.items()}
    monkeypatch.setattr(program, "CATALOGUE", fakes)
    status = program.main(words)
    return status, capsys.readouterr().out


def test_a_broken_expectation_and_a_broken_attack_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = printed(monkeypatch, capsys)
    rows = text.splitlines()[2:6]
    assert status == 1 and rows[0] == "| holds | no harm | a folder | held |"
    assert rows[1] == "| harms | no harm | the syncer ended; something held | FAILED |"
    assert rows[2] == "| breaks | no harm | stopped by TimeoutError: no answer | FAILED |"
    assert rows[3].endswith("FAILED |"), "an attack that looked at nothing proves nothing"
    assert text.endswith("4 attacks, 3 failed, seed 0\n")


def test_attacks_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = printed(monkeypatch, capsys, "--only", "holds", "--json", "--seed", "3")
    result: dict[str, Any] = json.loads(text)
    assert status == 0 and (result["attacks"], result["failed"], result["seed"]) == (1, 0, 3)
    assert result["rows"][0]["verdict"] == "held" and result["rows"][0]["about"] == "An attack that does no harm."
    with pytest.raises(SystemExit):
        printed(monkeypatch, capsys, "--only", "unknown")


def test_every_attack_has_a_description(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(CATALOGUE.attacks) and all(line.endswith(".") for line in lines)


@pytest.mark.net
def test_a_quick_attack_on_a_real_syncer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = program.main(["--only", "wire-replay", "--json", "--keep", str(tmp_path / "kept")])
    result = json.loads(capsys.readouterr().out)
    assert status == 0 and result["failed"] == 0, result


@pytest.mark.long
@pytest.mark.net
def test_hostile_learners_of_a_real_syncer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--only", "value-nan", "report-steps-back", "nonsense", "--json", "--keep", str(tmp_path / "kept")]
    status = program.main(words)
    result = json.loads(capsys.readouterr().out)
    assert status == 0 and result["attacks"] == 3, result
