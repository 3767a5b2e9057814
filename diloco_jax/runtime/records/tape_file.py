"""A file that grows by whole lines and never holds a torn one, whatever happens to its writer or its disk.

A line goes to the operating system with one call, so what a killed process had written is there. A write that the disk
refuses, in whole or in part, is taken back: the file ends where its last whole line does.

The syncer's tape is written ahead, and never given up while the run may go on: a decision that is not on it could not
be repeated after a restart, so nothing that an input led to leaves the process before its line is written. Lines of
inputs that led to nothing wait for the next such moment, and go to the operating system together. While the disk
refuses them the syncer waits, and says so; learners train on meanwhile. A long tape is cut into segments, of which all
but the newest are compressed (segments.py); readers see one stream.
"""

import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from diloco_jax.runtime.records import segments
from diloco_jax.runtime.records.os_errors import remedy
from diloco_jax.runtime.records.segments import Packer, closed_segments, segment_lines
from diloco_jax.runtime.records.tape_chain import TapeChain

LINE_BYTES_MAX = 1 << 24  # that a reader takes; a hello with 4096 learners' worth of names is far below
RETRY_S = 0.5  # between two attempts to write a tape
_BLOCK = 1 << 16
_SHOWN = 24  # bytes of a damaged line in a message

log = logging.getLogger(__name__)


class LineFile:
    """Appends whole lines. One process writes it, one thread at a time.

    A file that is missing is made; a torn last line, as a lost machine leaves it, is cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self.position = whole_bytes(self._file)
            os.ftruncate(self._file, self.position)
        except BaseException:
            os.close(self._file)
            raise

    def append(self, data: bytes) -> None:
        """Write whole lines, all of them or none: OSError if the disk did not take them."""
        view, done = memoryview(data), 0
        try:
            while done < len(data):
                done += os.pwrite(self._file, view[done:], self.position + done)
        except OSError:
            with contextlib.suppress(OSError):  # a reader stops at a torn line, and the next append writes over it
                os.ftruncate(self._file, self.position)
            raise
        self.position += len(data)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Tail:
    """A reader of a file of lines that others write, as far as it is whole. It follows a file that replaces its own."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._file_number = 0
        self.position = 0  # bytes that have been read
        if from_end:
            for _ in self.lines():
                pass

    def lines(self) -> Iterator[bytes]:
        """Yield the lines that have become whole since the last call."""
        try:
            with self._path.open("rb") as file:
                number = os.fstat(file.fileno()).st_ino
                if number != self._file_number:
                    self._file_number, self.position = number, 0
                file.seek(self.position)
                while (line := file.readline(LINE_BYTES_MAX)).endswith(b"\n"):
                    self.position += len(line)
                    yield line
        except FileNotFoundError:
            return


def whole_bytes(file: int, before: int | None = None) -> int:
    """Return the size of an open file, or of what it has before a position, up to the last line break."""
    keep = os.fstat(file).st_size if before is None else before
    while keep > 0:
        start = max(0, keep - _BLOCK)
        last = os.pread(file, keep - start, start).rfind(b"\n")
        if last >= 0:
            return start + last + 1
        keep = start
    return 0


def last_line(path: Path) -> bytes | None:
    """Return the last whole line of a file, without its line break; None if there is none."""
    with path.open("rb") as file:
        end = whole_bytes(file.fileno())
        start = whole_bytes(file.fileno(), end - 1)
        return os.pread(file.fileno(), end - 1 - start, start) if end else None


class TapeStopped(Exception):
    """The run was stopped while the tape could not be written: no effect of its last inputs was executed.

    No input may follow. The lines that wait are written with the next one that the disk takes, if there is any.
    """


class SegmentedFile:
    """Appends whole lines to a tape of any length, and keeps the head of its hash chain. One process writes it.

    `position` is that in the whole tape. Errors of the disk are those of LineFile.
    """

    def __init__(self, path: Path, segment_bytes: int = segments.SEGMENT_BYTES) -> None:
        self.path = path
        self._file = LineFile(path)
        self._segment_bytes = self._closes_at = segment_bytes
        segments.undo_unfinished(path)
        closed = closed_segments(path)
        self._first = closed[-1].end if closed else 0
        self._chain = TapeChain(closed[-1].head if closed else "")
        for line in raw_lines(path, self._first):
            self._chain.add(line)
        self._packer = Packer()
        for segment in closed:
            self._packer.pack(segment)

    @property
    def position(self) -> int:
        return self._first + self._file.position

    @property
    def head(self) -> str:
        return self._chain.head

    def append(self, *lines: bytes) -> None:
        """Write lines, without their line breaks: all of them or none."""
        if self._file.position >= self._closes_at:
            self._close_segment()
        self._file.append(b"".join(line + b"\n" for line in lines))
        for line in lines:
            self._chain.add(line)

    def _close_segment(self) -> None:
        """Make what is written a closed segment, and begin another file; the tape's path is never without one."""
        segment = segments.segment_at(self.path, self._first, self.position, self.head)
        draft = self.path.with_name(self.path.name + segments.DRAFT)
        file = None
        try:
            segment.path.parent.mkdir(exist_ok=True)
            draft.unlink(missing_ok=True)
            file = LineFile(draft)
            os.link(self.path, segment.path)
            os.replace(draft, self.path)
        except OSError as error:
            log.warning(f"{self.path} stays one file for now: no segment of it can be closed ({error})")
            self._closes_at = self._file.position + self._segment_bytes
            if file is not None:
                file.close()
            for path in (segment.path, draft):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
            return
        file.path = self.path
        self._file.close()
        self._file, self._first, self._closes_at = file, segment.end, self._segment_bytes
        self._packer.pack(segment)

    def close(self) -> None:
        """Close the file; a segment that is being compressed is left to the next process."""
        self._packer.close()
        self._file.close()


@dataclass(eq=False)
class TapeFile:
    """Appends to a run's tape; a full disk makes it wait, not fail. Its process holds the folder's `syncer.lock`."""

    path: Path
    stop: threading.Event  # set from outside when the run shall end: then waiting ends too
    on_wait: Callable[[], None]  # called before each wait, on the writing thread, with `condition` set
    segment_bytes: int = segments.SEGMENT_BYTES
    condition: str = ""

    def __post_init__(self) -> None:
        self._file = SegmentedFile(self.path, self.segment_bytes)
        self._waiting: list[bytes] = []

    @property
    def position(self) -> int:
        """Return the size of what is written; lines that wait are not in it."""
        return self._file.position

    @property
    def head(self) -> str:
        """Return the head of the hash chain over what is written."""
        return self._file.head

    def put(self, line: str) -> None:
        """Let a line wait for the next `flush`."""
        self._waiting.append(line.encode())

    def write(self, line: str) -> None:
        """Append a line at once; see `flush`."""
        self.put(line)
        self.flush()

    def flush(self) -> None:
        """Return when the operating system has every line, or raise TapeStopped if the run was stopped."""
        while self._waiting:
            try:
                self._file.append(*self._waiting)
            except OSError as error:
                self._blocked(error)
                continue
            self._waiting.clear()
            if self.condition:
                log.info(f"{self.path} can be written again; rounds go on")
                self.condition = ""
            return

    def _blocked(self, error: OSError) -> None:
        if not self.condition:
            self.condition = (
                f"the tape cannot be written: {error.strerror} ({self.path}): {remedy(error, self.path)}; "
                "no round is merged until then"
            )
            log.warning(self.condition)
        self.on_wait()
        if self.stop.wait(RETRY_S):
            raise TapeStopped(f"stopped while {self.condition}")

    def close(self) -> None:
        """Close the file; lines that the disk does not take now are lost, and with them inputs that led to nothing."""
        if self._waiting:
            with contextlib.suppress(OSError):
                self._file.append(*self._waiting)
        self._waiting.clear()
        self._file.close()


def tape_bytes(path: Path) -> int:
    """Return the size of a whole tape, with its closed segments."""
    closed = closed_segments(path)
    return (closed[-1].end if closed else 0) + path.stat().st_size


def raw_lines(path: Path, start: int = 0) -> Iterator[bytes]:
    """Yield the whole lines of a tape from a byte position on, without line breaks, also while it is being written.

    ValueError if a line is longer than any that a syncer writes, `start` lies behind the end, or a segment is missing.
    """
    file, closed = _opened(path)
    with file:
        first = closed[-1].end if closed else 0
        size = first + file.seek(0, 2)
        if start > size:
            raise ValueError(
                f"{path} has {size} bytes, but a snapshot was taken at byte {start}: the tape is not this snapshot's; "
                "restore the tape, or start a new run"
            )
        for segment in closed:
            if segment.end > start:
                yield from segment_lines(segment, max(start, segment.first), LINE_BYTES_MAX)
        position = first + file.seek(max(0, start - first))
        while (line := file.readline(LINE_BYTES_MAX)).endswith(b"\n"):
            position += len(line)
            yield line[:-1]
        if len(line) == LINE_BYTES_MAX:
            raise ValueError(f"{path} has a line of more than {LINE_BYTES_MAX} bytes at byte {position}")


def _opened(path: Path) -> tuple[IO[bytes], list[segments.Segment]]:
    """Open a tape's newest file, with the closed segments before it: its writer may close one in between."""
    while True:
        file = path.open("rb")
        try:
            closed = closed_segments(path)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file, closed
        except BaseException:
            file.close()
            raise
        file.close()


def read_lines(path: Path, start: int = 0) -> Iterator[str]:
    """Yield the lines of a tape as `raw_lines` does, as text."""
    for line in raw_lines(path, start):
        yield line.decode(errors="replace")


def line_before(path: Path, position: int) -> bytes | None:
    """Return the whole line of a tape that ends at a position; None if none does."""
    closed = closed_segments(path)
    for segment in closed:
        if segment.first < position <= segment.end:
            return _last_line_until(segment_lines(segment, segment.first, LINE_BYTES_MAX), position - segment.first)
    first = closed[-1].end if closed else 0
    with path.open("rb") as file:
        end = position - first
        if end <= 0 or end > file.seek(0, 2) or whole_bytes(file.fileno(), end) != end:
            return None
        start = whole_bytes(file.fileno(), end - 1)
        return os.pread(file.fileno(), end - 1 - start, start)


def _last_line_until(lines: Iterator[bytes], position: int) -> bytes | None:
    for line in lines:
        position -= len(line) + 1
        if position <= 0:
            return line if position == 0 else None
    return None


def last_time_s(path: Path) -> float | None:
    """Return the time of a tape's newest input, in seconds since the run began; None without a whole line."""
    line = last_line(path)
    if line is None and (closed := closed_segments(path)):
        line = line_before(path, closed[-1].end)
    if line is None:
        return None
    try:
        return float(json.loads(line)[1])
    except (ValueError, TypeError, LookupError):
        more = f"... of {len(line)} bytes" if len(line) > _SHOWN else ""
        raise ValueError(f"{path} is damaged: its last line is {line[:_SHOWN]!r}{more}; remove that line") from None
