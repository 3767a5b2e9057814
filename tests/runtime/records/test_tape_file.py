"""The tape must be whole whatever the disk does, and the writer must wait, not fail and not lose a line."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_jax.runtime.records import tape_file
from diloco_jax.runtime.records.line_file import LineFile
from diloco_jax.runtime.records.tape_file import TapeFile, TapeStopped, last_time_s, read_lines


class Disk:
    """os.pwrite of a disk that takes `room` bytes and then refuses, until it has room again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room = room
        self._pwrite = os.pwrite
        monkeypatch.setattr("diloco_jax.runtime.records.line_file.os.pwrite", self.pwrite)

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
    assert list(read_lines(path, 0, positions[2])) == ['["tick",1.0]', '["tick",2.5]']
    assert last_time_s(path) == 3.0


@given(st.integers(min_value=0, max_value=60))
def test_a_tape_cut_anywhere_goes_on_behind_its_last_whole_line(cut: int) -> None:
    import tempfile

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


def test_two_syncers_cannot_write_one_tape(tmp_path: Path) -> None:
    tape = open_tape(tmp_path / "tape.jsonl")
    with pytest.raises(ValueError, match="another process writes"):
        open_tape(tmp_path / "tape.jsonl")
    tape.close()
    open_tape(tmp_path / "tape.jsonl").close()


def test_a_snapshot_of_another_tape_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "tape.jsonl"
    path.write_text('["tick",1.0]\n')
    with pytest.raises(ValueError, match="has 13 bytes, but a snapshot was taken at byte 14"):
        list(read_lines(path, 14))


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape_file, "LINE_BYTES_MAX", 1 << 10)
    path = tmp_path / "tape.jsonl"
    path.write_bytes(b'["tick",1.0]\n' + b"x" * 5000 + b"\n")
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
