"""Tapes and records are whole whatever the disk or a kill does, and their writer waits and loses no line."""

import errno
import json
import math
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_jax.runtime.records import tape_file
from diloco_jax.runtime.records.tape_file import LineFile, TapeFile, TapeStopped, last_time_s, read_lines
from diloco_jax.runtime.records.telemetry import Telemetry, finite, read_metrics, write_json


class Disk:
    """os.pwrite of a disk that takes `room` bytes and then refuses, until it has room again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room = room
        self._pwrite = os.pwrite
        monkeypatch.setattr("diloco_jax.runtime.records.tape_file.os.pwrite", self.pwrite)

    def pwrite(self, file: int, data: memoryview, offset: int) -> int:
        taken = min(len(data), self.room)
        if taken == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= taken
        return self._pwrite(file, data[:taken], offset)


def never() -> None:
    raise AssertionError("the tape waits, but the disk takes everything")


def open_tape(path: Path) -> TapeFile:
    return TapeFile(path, threading.Event(), never)


def test_lines_come_back_in_order_and_the_position_is_their_end(tmp_path: Path) -> None:
    tape, path = open_tape(tmp_path / "tape.jsonl"), tmp_path / "tape.jsonl"
    positions = [tape.position]
    for line in ('["tick",1.0]', '["tick",2.5]', '["merged",3.0,7,0,[]]'):
        tape.write(line)
        positions.append(tape.position)
        assert tape.position == path.stat().st_size, "a line is with the operating system when write returns"
    assert list(read_lines(path)) == ['["tick",1.0]', '["tick",2.5]', '["merged",3.0,7,0,[]]']
    assert list(read_lines(path, positions[1])) == ['["tick",2.5]', '["merged",3.0,7,0,[]]']
    assert last_time_s(path) == 3.0


@given(st.integers(min_value=0, max_value=60))
def test_a_tape_cut_anywhere_continues_behind_its_last_whole_line(cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tape.jsonl"
        whole = b'["tick",1.0]\n["tick",2.0]\n["tick",3.0]\n'
        path.write_bytes(whole[:cut])
        count = whole[:cut].count(b"\n")
        assert last_time_s(path) == (float(count) if count else None)
        tape = open_tape(path)
        assert tape.position == 13 * count
        tape.write('["tick",9.0]')
        tape.close()
        assert list(read_lines(path)) == [*(f'["tick",{n}.0]' for n in range(1, count + 1)), '["tick",9.0]']


def test_a_full_disk_makes_it_wait_and_leaves_no_torn_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tape.jsonl"
    disk = Disk(monkeypatch, room=13 + 5)
    monkeypatch.setattr(tape_file, "RETRY_S", 0.0)
    told = []

    def on_wait() -> None:
        told.append(tape.condition)
        assert path.read_bytes() == b'["tick",1.0]\n', "part of a line is taken back"
        disk.room = 5 if len(told) < 3 else 1000

    tape = TapeFile(path, threading.Event(), on_wait)
    tape.write('["tick",1.0]')
    tape.write('["tick",2.0]')
    assert len(told) == 3
    assert all("No space left on device" in text and "free space" in text for text in told)
    assert tape.condition == ""
    assert list(read_lines(path)) == ['["tick",1.0]', '["tick",2.0]']
    assert tape.position == path.stat().st_size


def test_stopping_ends_the_wait_and_the_input_is_not_on_the_tape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Disk(monkeypatch, room=4)
    stop = threading.Event()
    tape = TapeFile(tmp_path / "tape.jsonl", stop, stop.set)
    with pytest.raises(TapeStopped, match="cannot be written"):
        tape.write('["tick",1.0]')
    assert (tmp_path / "tape.jsonl").read_bytes() == b""


def test_a_tape_of_another_snapshot_or_with_a_line_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tape_file, "LINE_BYTES_MAX", 1 << 10)
    path = tmp_path / "tape.jsonl"
    path.write_bytes(b'["tick",1.0]\n' + b"x" * 5000 + b"\n")
    with pytest.raises(ValueError, match="has 5014 bytes, but a snapshot was taken at byte 5015"):
        list(read_lines(path, 5015))
    with pytest.raises(ValueError, match="more than 1024 bytes at byte 13"):
        list(read_lines(path))


def test_many_lines_at_once_are_all_there_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch, room=3)
    file = LineFile(tmp_path / "lines")
    with pytest.raises(OSError, match="No space"):
        file.append(b"a\nb\nc\n")
    assert (tmp_path / "lines").read_bytes() == b"" and file.position == 0
    disk.room = 100
    file.append(b"a\nb\nc\n")
    file.close()
    file.close()
    assert (tmp_path / "lines").read_bytes() == b"a\nb\nc\n"


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=10,
)


def step(t: float, learner: str = "island-0", **fields: Any) -> dict[str, Any]:
    record = {"kind": "step", "t": t, "learner": learner, "incarnation": 0, "local_step": 1, "tokens": 100}
    return record | {"global_step": 1, "loss": 2.5, "step_s": 0.25} | fields


def test_records_come_back_in_order(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path / "new" / "run")
    records = [step(0.5), {"kind": "merged", "t": 1.0, "global_step": 2, "fragment_id": 1, "members": ["island-0"]}]
    for record in records:
        telemetry.write(record)
    telemetry.flush()
    assert list(read_metrics(tmp_path / "new" / "run" / "metrics.jsonl")) == records
    telemetry.close()
    telemetry.close()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_values_become_null(tmp_path: Path, bad: float) -> None:
    telemetry = Telemetry(tmp_path)
    telemetry.write(step(1.0, loss=bad, nested=[{"x": bad}, 1.5]))
    telemetry.close()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line, parse_constant=refuse)
    assert record["loss"] is None
    assert record["nested"] == [{"x": None}, 1.5]


@given(PLAIN)
def test_finite_changes_only_what_is_not_finite(value: Any) -> None:
    # This raises if a non-finite value is left.
    text = json.dumps(finite(value), allow_nan=False)
    expected = json.loads(json.dumps(value), parse_constant=lambda word: None)
    assert json.loads(text) == expected


@given(st.integers(min_value=0, max_value=200))
def test_a_file_cut_anywhere_still_reads(cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        lines = [json.dumps({"n": n, "text": "é"}, ensure_ascii=False) + "\n" for n in range(6)]
        whole = "".join(lines).encode()
        path.write_bytes(whole[:cut])
        complete = whole[:cut].count(b"\n")
        assert [record["n"] for record in read_metrics(path)] == list(range(complete))
        # A restarted writer continues behind the last complete line, so no line in the middle is ever torn.
        telemetry = Telemetry(folder)
        telemetry.write({"n": -1})
        telemetry.close()
        assert [record["n"] for record in read_metrics(path)] == [*range(complete), -1]


def test_a_very_long_torn_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"n":0}\n' + "x" * 200_000)
    Telemetry(tmp_path).close()
    assert path.read_text() == '{"n":0}\n'


@pytest.mark.parametrize("line", ["{broken", "[1]", "", "{}"])
def test_a_bad_line_in_the_middle_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"n":0}}\n{line}\n{{"n":2}}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 .*remove that line"):
        list(read_metrics(path))


def test_write_json_replaces_a_file_whole_or_not_at_all_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_json(path, {"loss": math.nan, "members": ("a", "b")})
    write_json(path, {"loss": 1.0})
    with pytest.raises(TypeError):
        write_json(path, {"bad": object()})
    assert json.loads(path.read_text()) == {"loss": 1.0}
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]
