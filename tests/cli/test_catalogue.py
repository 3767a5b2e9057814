"""A wrong input gets one line of error with value, limit and remedy, and an exit status; no file changes."""

import datetime
import json
import os
import shlex
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco_jax.runtime.local import check_input
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import load
from diloco_jax.tools.doctor import examine
from diloco_jax.tools.doctor.machine import ProcessPart, part_of
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.transport.trust import certificates
from tests.cli.catalogue import COMMAND_LINES, CONFIGS, FOUND_BY_DOCTOR, Wrong
from tests.runtime.helpers import SMALL, call, merged, write_config

pytestmark = pytest.mark.net
PAST = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
# Many rows describe the model, or trace its step: half of the time of these tests.
ONE_LAYER: dict[str, Any] = {"model": {"args": SMALL["model"]["args"] | {"num_layers": 1}}}
# The catalogue names lines of this text.
WRONG_MODELS = """
from flax import nnx
from diloco_jax.training.models.decoder import Decoder


class NoArgs(Decoder):
    @classmethod
    def from_config(cls, args, *, rngs):
        return super().from_config({"dim": args["width"]}, rngs=rngs)


class BadLoss(Decoder):
    def loss(self, batch):
        return batch["tokens"] @ batch["tokens"], {}


class BadValue(Decoder):
    def loss(self, batch):
        raise ValueError("not ours")
"""
# The hash of the snapshot's line is not that of the lines before it.
CHANGED_TAPE = """\
["snapshot",0.5,10,"00"]
["Hello",1.0,"a",1,[["model","abc"]],[0],[0],0,1,0]
["StepReport",2.0,"a",1,1,10,0,[[0,0,0]],1.0,2.5,1,1]
"""
FILES = {
    "short.txt": "x" * 400,
    "some.txt": "x" * 10000,
    "wrong_models.py": WRONG_MODELS,
    "broken_model.py": "class Thing(\n",
    "file": "x",
    "nil": "",
    "damaged/tape.jsonl": "garbage\n",
    "damaged/metrics.jsonl": "garbage\n",
    "damaged/status.json": "{",
    "damaged/syncer.address": "nonsense",
    "damaged/tokenizer.json": "{}",
    "changed/tape.jsonl": CHANGED_TAPE,
    "gap/tape.jsonl": "",
    "gap/tape/000000000000005-000000000000009-00000000000000000000000000000000.jsonl": "line\n",
    "cut/tape.jsonl": '["Hello"]\n',
    "parallel/metrics.jsonl": "{}\n",
    "ended/tape.jsonl": '["begin",0.0,[]]\n',
    "ended/summary.json": '{"complete": true, "global_steps": 80}',
    "orphans/tape.jsonl": "",
    "orphans/checkpoints/step_00000030/meta": "",
    "blank/tape.jsonl": '["begin",0.0,[]]\n',
    "blank/config.yaml": "",
    "old/store.json": '{"version": 0, "finished": true, "made_from": {}, "files": []}',
    "public/config.json": '{"model_type": "llama"}',
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the folder of the files that the catalogue names."""
    place = tmp_path_factory.mktemp("place")
    (place / "empty").mkdir()
    for name, text in FILES.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    for folder in ("damaged", "cut", "changed", "gap"):
        write_config(place / folder, **ONE_LAYER)
    made = certificates.make(place / "certs", ["island-0", "island-1"])
    pair = certificates._new_certificate("late", certificates._read_pair(place / "certs"), PAST, PAST.replace(day=2))
    certificates._write_pair(place / "certs", "late", pair, made)
    certificates.make(place / "theirs", [])
    return place


@pytest.fixture(scope="module")
def taken() -> Iterator[str]:
    """Return an address that is bound, but does not answer."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture(scope="module")
def trace_once() -> Callable[[RunConfig], Blueprint]:
    """Return the check of a model, which answers for settings that it has passed before: many rows have the same."""
    passed: dict[str, Blueprint] = {}
    check_model = check_input._check_model

    def check_once(config: RunConfig) -> Blueprint:
        of_model = config.model, config.optimizer, config.data, config.train, config.islands, config.seed
        if repr(of_model) not in passed:
            passed[repr(of_model)] = check_model(config)
        return passed[repr(of_model)]

    return check_once


@pytest.fixture(autouse=True)
def here(
    place: Path, tmp_path: Path, trace_once: Callable[[RunConfig], Blueprint], monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("the run was started")

    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", [*sys.path, str(place)])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("DILOCO_CACHE", str(tmp_path))
    monkeypatch.setattr(check_input, "_check_model", trace_once)
    monkeypatch.setattr("diloco_jax.cli.train.train_locally", started)
    monkeypatch.setattr("diloco_jax.tools.chaos.run.run_chaos", started)
    write_config(place, **ONE_LAYER)


def write(given: dict[str, Any] | str, taken: str) -> None:
    """Write config.yaml as a row of the catalogue gives it."""
    path = Path("config.yaml")
    if isinstance(given, dict):
        write_config(Path(), **merged(ONE_LAYER, given))
        path.write_text(path.read_text().replace("TAKEN", taken))
    else:
        path.write_text(given, encoding="utf-8", errors="surrogateescape")


def contents(folder: str = ".") -> dict[str, tuple[int, int]]:
    """Return the size of each file below a folder, and when it was written last; of folders only their names."""
    found: dict[str, tuple[int, int]] = {}
    for entry in os.scandir(folder):
        about = entry.stat()
        if entry.is_dir():
            found |= {entry.path: (0, 0)} | contents(entry.path)
        else:
            found[entry.path] = (about.st_size, about.st_mtime_ns)
    return found


def check(wrong: Wrong, words: list[str], taken: str = "") -> None:
    before = contents()
    result = call(*words)
    said = result.stderr
    assert result.returncode == wrong.status and result.stdout == "", result
    assert len(said.splitlines()) == 1 and said.startswith("diloco") and len(said) < 1500, said
    for told in (wrong.value, wrong.limit, wrong.remedy):
        assert told.replace("TAKEN", taken) in said, f"{told!r} is not in: {said}"
    assert "chaos-learner" not in said, "an internal command is shown"
    assert contents() == before, "a file was written or lost"


def name(wrong: Wrong) -> str:
    return str(wrong.given)[:60]


@pytest.mark.parametrize("wrong", [*FOUND_BY_DOCTOR, *CONFIGS], ids=name)
def test_wrong_config(wrong: Wrong, taken: str) -> None:
    write(wrong.given, taken)
    check(wrong, ["train", "config.yaml", "--run-dir", "run"], taken)


@pytest.mark.parametrize("wrong", COMMAND_LINES, ids=name)
def test_wrong_command_line(wrong: Wrong) -> None:
    assert isinstance(wrong.given, str)
    check(wrong, shlex.split(wrong.given))


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> ProcessPart:
    return part_of(load(write_config(tmp_path_factory.mktemp("part"))))


@pytest.mark.parametrize("wrong", FOUND_BY_DOCTOR, ids=name)
def test_doctor_finds_it_before_the_run(
    wrong: Wrong, taken: str, part: ProcessPart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examine.machine, "part_of", lambda *_: part)
    write(wrong.given, taken)
    told = [each.replace("TAKEN", taken) for each in (wrong.value, wrong.limit, wrong.remedy)]
    found: list[str] = []
    # An island's own check is needed only for what the syncer's machine does not have.
    for island in ([], ["--island", "island-0"]):
        if any(all(each in text for each in told) for text in found):
            break
        result = call("doctor", "config.yaml", "--json", "--run-dir", "run", *island)
        found.append(result.stderr)
        if result.returncode == 1:
            failed = [each for each in json.loads(result.stdout)["checks"] if each["status"] == "fail"]
            found += [f"{each['found']}; {each['fix']}" for each in failed]
    assert any(all(each in text for each in told) for text in found), found
    assert not Path("run").exists() and os.listdir("empty") == []
