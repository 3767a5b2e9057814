"""A long tape in segments: one stream for its readers, whatever its writer's end was; and the chain over its lines."""

import json
import lzma
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco_jax.runtime.records import segments
from diloco_jax.runtime.records.segments import Packer, Segment, closed_segments
from diloco_jax.runtime.records.tape_chain import TapeChain, TapeMark, checked
from diloco_jax.runtime.records.tape_file import (
    Tail,
    TapeFile,
    last_time_s,
    line_before,
    raw_lines,
    read_lines,
    tape_bytes,
)

LINES = [json.dumps(["tick", float(number)], separators=(",", ":")) for number in range(60)]
SEGMENT = 100


def open_tape(path: Path) -> TapeFile:
    return TapeFile(path, threading.Event(), lambda: None, segment_bytes=SEGMENT)


def written(path: Path, lines: list[str] = LINES) -> TapeFile:
    """A tape of these lines, in segments that are all compressed."""
    tape = open_tape(path)
    for line in lines:
        tape.write(line)
    tape._file._packer.wait()
    return tape


def head_of(lines: list[str]) -> str:
    chain = TapeChain()
    for line in lines:
        chain.add(line.encode())
    return chain.head


def test_a_long_tape_reads_as_one_stream_from_every_line_on(tmp_path: Path) -> None:
    path = tmp_path / "tape.jsonl"
    tape = written(path)
    closed = closed_segments(path)
    assert len(closed) > 5 and all(segment.packed for segment in closed)
    assert path.stat().st_size < 2 * SEGMENT and tape.position == tape_bytes(path) == sum(len(x) + 1 for x in LINES)
    position = 0
    for number, line in enumerate(LINES):
        assert list(read_lines(path, position)) == LINES[number:]
        before, position = position, position + len(line) + 1
        assert line_before(path, position) == line.encode() and line_before(path, before + 1) is None
    assert line_before(path, 0) is line_before(path, position + 1) is None
    assert list(read_lines(path, position)) == []
    with pytest.raises(ValueError, match=f"has {position} bytes, but a snapshot was taken at byte {position + 1}"):
        list(read_lines(path, position + 1))
    assert last_time_s(path) == 59.0
    assert tape.head == head_of(LINES)
    assert [segment.head for segment in closed] == [head_of(LINES[: index_at(segment.end)]) for segment in closed]
    tape.close()


def index_at(position: int) -> int:
    """How many lines end at or before a position."""
    ends = [sum(len(line) + 1 for line in LINES[: number + 1]) for number in range(len(LINES))]
    return sum(end <= position for end in ends)


def test_a_short_tape_is_one_file(tmp_path: Path) -> None:
    tape = TapeFile(tmp_path / "tape.jsonl", threading.Event(), lambda: None)
    for line in LINES:
        tape.write(line)
    tape.close()
    assert [path.name for path in tmp_path.iterdir()] == ["tape.jsonl"]
    assert (tmp_path / "tape.jsonl").read_text().splitlines() == LINES


def test_position_and_head_continue_where_the_process_before_ended(tmp_path: Path) -> None:
    path = tmp_path / "tape.jsonl"
    for start in range(0, 60, 7):
        tape = open_tape(path)
        assert (tape.position, tape.head) == (sum(len(x) + 1 for x in LINES[:start]), head_of(LINES[:start]))
        for line in LINES[start : start + 7]:
            tape.write(line)
        tape.close()
    assert list(read_lines(path)) == LINES


def raw_copy(path: Path) -> None:
    """Killed before the compressed segment's source was removed."""
    packed = closed_segments(path)[1].path
    packed.with_suffix("").write_bytes(lzma.decompress(packed.read_bytes()))


def half_packed(path: Path) -> None:
    """Killed while it compressed."""
    raw_copy(path)
    packed = closed_segments(path)[1].path.with_name(closed_segments(path)[1].path.name + ".xz")
    packed.with_name(packed.name + ".tmp").write_bytes(packed.read_bytes()[:10])
    packed.unlink()


def linked(path: Path) -> None:
    """Killed between the name of a closed segment and the new file."""
    closed = closed_segments(path)
    name = segments.segment_at(path, closed[-1].end, tape_bytes(path), head_of(LINES)).path
    name.hardlink_to(path)


def new_file(path: Path) -> None:
    """Killed just after a segment was closed."""
    linked(path)
    path.unlink()
    path.touch()


@pytest.mark.parametrize("killed", [raw_copy, half_packed, linked, new_file])
def test_a_writer_that_was_killed_anywhere_leaves_a_whole_tape(tmp_path: Path, killed: Callable[[Path], None]) -> None:
    path = tmp_path / "tape.jsonl"
    written(path).close()
    killed(path)
    assert list(read_lines(path)) == LINES and last_time_s(path) == 59.0
    tape = open_tape(path)
    assert tape.head == head_of(LINES)
    tape.write('["tick",60.0]')
    tape._file._packer.wait()
    tape.close()
    assert list(read_lines(path)) == [*LINES, '["tick",60.0]']
    names = [file.name for file in (tmp_path / "tape").iterdir()]
    assert all(name.endswith(".jsonl.xz") for name in names), names


def test_a_segment_that_is_missing_cut_or_damaged_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tape.jsonl"
    written(path).close()
    closed = closed_segments(path)
    file = closed[2].path
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=rf"{file.name} is damaged"):
        list(read_lines(path))
    file.write_bytes(lzma.compress(lzma.decompress(whole)[:-13]))
    with pytest.raises(ValueError, match=rf"{file.name} is damaged: its lines end at byte .*, not at {closed[2].end}"):
        list(read_lines(path))
    file.unlink()
    with pytest.raises(ValueError, match=f"bytes {closed[2].first} to {closed[2].end - 1} of it are missing: restore"):
        list(read_lines(path))


def test_a_disk_that_cannot_close_a_segment_keeps_one_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tape").write_text("in the way")
    written(tmp_path / "tape.jsonl").close()
    assert list(read_lines(tmp_path / "tape.jsonl")) == LINES
    assert "stays one file for now" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tape", "tape.jsonl"]


def test_a_full_disk_keeps_the_segment_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: Packer, source: Path, draft: Path) -> bool:
        draft.write_bytes(b"part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Packer, "_compressed", full)
    path = tmp_path / "tape.jsonl"
    written(path).close()
    assert list(read_lines(path)) == LINES and not any(segment.packed for segment in closed_segments(path))
    assert "No space left on device" in caplog.text and not list((tmp_path / "tape").glob("*.tmp"))


def test_a_reader_follows_a_segment_that_is_compressed_under_it(tmp_path: Path) -> None:
    path = tmp_path / "tape.jsonl"
    written(path).close()
    first = closed_segments(path)[0]
    raw = Segment(first.first, first.end, first.head, first.path.with_suffix(""))
    assert list(segments.segment_lines(raw, 0, 1 << 20)) == [line.encode() for line in LINES[: index_at(first.end)]]


def test_a_tail_continues_in_the_file_that_replaces_its_file(tmp_path: Path) -> None:
    path = tmp_path / "tape.jsonl"
    tape = open_tape(path)
    tail, seen = Tail(path), list[bytes]()
    for line in LINES:
        tape.write(line)
        seen += tail.lines()
    tape.close()
    assert b"".join(seen).decode().splitlines() == LINES


def chained() -> list[str]:
    """Lines with three snapshots among them."""
    lines: list[str] = []
    for number in range(30):
        lines.append(json.dumps(["tick", number]))
        if number % 10 == 9:
            lines.append(json.dumps(["snapshot", number, number, head_of(lines)]))
    return lines


def through(lines: list[str], *marks: TapeMark) -> list[str]:
    return [line.decode() for line in checked((line.encode() for line in lines), "tape.jsonl", marks)]


def test_a_line_that_is_missing_doubled_or_changed_is_between_two_named_ones() -> None:
    lines = chained()
    assert through(lines) == lines
    doubled = [*lines[:15], lines[14], *lines[15:]]
    missing = [*lines[:14], *lines[15:]]
    changed = [*lines[:14], lines[14].replace("13", "31"), *lines[15:]]
    assert len(changed) == len(lines) and changed != lines
    for wrong, last in ((doubled, 23), (missing, 21), (changed, 22)):
        with pytest.raises(ValueError, match=f"between its lines 11 and {last} one is missing, doubled or changed"):
            through(wrong)


def test_a_file_of_another_history_or_behind_the_end_is_named() -> None:
    lines = chained()
    size = sum(len(line) + 1 for line in lines)
    at = sum(len(line) + 1 for line in lines[:11])
    own = json.loads(lines[10])[3]
    assert (
        through(lines, TapeMark(size, head_of(lines), "the summary"), TapeMark(at, own, "step 9", in_line=True))
        == lines
    )
    with pytest.raises(ValueError, match=f"is not the tape of the summary at its byte {size} .line 33"):
        through(lines, TapeMark(size, own, "the summary"))
    for mark in (TapeMark(at, head_of(lines), "step 9", in_line=True), TapeMark(at - 1, own, "step 9", in_line=True)):
        with pytest.raises(ValueError, match="is not the tape of step 9 at its byte"):
            through(lines, mark)
    with pytest.raises(ValueError, match=f"ends at byte {size}, but the summary was made at byte {size + 9}: restore"):
        through(lines, TapeMark(size + 9, own, "the summary"))


def test_raw_lines_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tape.jsonl"
    path.write_bytes(b'["tick",1.0]\n\xff\n["tick"')
    assert list(raw_lines(path)) == [b'["tick",1.0]', b"\xff"]
