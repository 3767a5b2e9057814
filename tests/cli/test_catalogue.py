"""Wrong input: one line of error with the value, the limit and the remedy, a status that is not 0, nothing written."""

import datetime
import json
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco_jax.settings.text import load
from diloco_jax.tools.doctor import examine
from diloco_jax.tools.doctor.host import ProcessPart, part_of
from diloco_jax.transport.trust import certificates
from tests.cli.catalogue import CONFIGS, FIRST, FOUND, SETTINGS, WORDS, Wrong
from tests.runtime.helpers import call, write_config

pytestmark = pytest.mark.net
PAST = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
FILES = {"short.txt": "x" * 400, "some.txt": "x" * 10000, **CONFIGS["files"]}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the catalogue names."""
    place = tmp_path_factory.mktemp("place")
    (place / "empty").mkdir()
    for name, text in FILES.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    for folder in ("damaged", "cut", "changed", "gap"):
        write_config(place / folder)
    made = certificates.make(place / "certs", ["island-0", "island-1"])
    pair = certificates._new_certificate("late", certificates._read_pair(place / "certs"), PAST, PAST.replace(day=2))
    certificates._write_pair(place / "certs", "late", pair, made)
    certificates.make(place / "theirs", [])
    return place


@pytest.fixture(scope="module")
def taken() -> Iterator[str]:
    """An address that another process has, and where nobody answers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture(autouse=True)
def here(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def begun(*_: Any, **__: Any) -> None:
        raise AssertionError("the run was begun")

    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", [*sys.path, str(place)])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("DILOCO_CACHE", str(tmp_path))
    monkeypatch.setattr("diloco_jax.cli.train.train_locally", begun)
    monkeypatch.setattr("diloco_jax.tools.chaos.run.run_chaos", begun)
    write_config(place)


def write(given: dict[str, Any] | str, taken: str) -> None:
    """Make config.yaml what a row of the catalogue gives."""
    path = Path("config.yaml")
    if isinstance(given, dict):
        write_config(Path(), **given)
        path.write_text(path.read_text().replace("TAKEN", taken))
    else:
        path.write_text(given, encoding="utf-8", errors="surrogateescape")


def contents() -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in Path().rglob("*")}


def check(wrong: Wrong, words: list[str], taken: str = "") -> None:
    before = contents()
    result = call(*words)
    said = result.stderr
    assert result.returncode == wrong.status and result.stdout == "", result
    assert len(said.splitlines()) == 1 and said.startswith("diloco") and len(said) < 1500, said
    for told in (wrong.value, wrong.limit, wrong.remedy):
        assert told.replace("TAKEN", taken) in said, f"{told!r} is not in: {said}"
    assert "chaos-learner" not in said and "merge-shard" not in said, "these are not for people"
    assert contents() == before, "something was written, or lost"


def name(wrong: Wrong) -> str:
    return str(wrong.given)[:60]


def test_the_catalogue_is_long_enough() -> None:
    rows = [*FOUND, *SETTINGS, *WORDS]
    assert len(rows) >= 80 and len(FOUND) >= FIRST and len({repr(row.given)[:2000] for row in rows}) == len(rows)


@pytest.mark.parametrize("wrong", [*FOUND, *SETTINGS], ids=name)
def test_wrong_config(wrong: Wrong, taken: str) -> None:
    write(wrong.given, taken)
    check(wrong, ["train", "config.yaml", "--run-dir", "run"], taken)


@pytest.mark.parametrize("wrong", WORDS, ids=name)
def test_wrong_command_line(wrong: Wrong) -> None:
    assert isinstance(wrong.given, str)
    check(wrong, shlex.split(wrong.given))


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> ProcessPart:
    return part_of(load(write_config(tmp_path_factory.mktemp("part"))))


@pytest.mark.parametrize("wrong", FOUND, ids=name)
def test_doctor_finds_it_before_the_run(
    wrong: Wrong, taken: str, part: ProcessPart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examine.host, "part_of", lambda *_: part)
    write(wrong.given, taken)
    found = []
    for island in ([], ["--island", "island-0"]):
        result = call("doctor", "config.yaml", "--json", "--run-dir", "run", *island)
        found.append(result.stderr)
        if result.returncode == 1:
            failed = [each for each in json.loads(result.stdout)["checks"] if each["status"] == "fail"]
            found += [f"{each['found']}; {each['fix']}" for each in failed]
    told = [each.replace("TAKEN", taken) for each in (wrong.value, wrong.limit, wrong.remedy)]
    assert any(all(each in text for each in told) for text in found), found
    assert not Path("run").exists() and os.listdir("empty") == []
