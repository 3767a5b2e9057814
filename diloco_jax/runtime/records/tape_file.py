"""A file that grows by whole lines and never keeps a torn one, whatever happens to its writer or its disk.

A line goes to the operating system with one call, so the lines of a killed process are kept. If the disk refuses a
write, in whole or in part, the write is undone: the file ends after its last whole line.

The syncer writes its tape ahead, and never continues without it, because a decision that is not on the tape could not
be repeated after a restart. So no effect of an input leaves the process before the input's line is written. Lines of
inputs without effects wait until then, and go to the operating system together. While the disk refuses lines, the
syncer waits and reports it; learners continue to train. A long tape is cut into segments, and all but the newest are
compressed (segments.py); readers see one stream.
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

# The limit for a reader; a hello with the names of 4096 learners is far below.
LINE_BYTES_MAX = 1 << 24
RETRY_S = 0.5  # between attempts
_BLOCK = 1 << 16
# A message shows this many bytes of a damaged line.
_SHOWN = 24

log = logging.getLogger(__name__)


class LineFile:
    """A file of whole lines; one process writes it, one thread at a time.

    A missing file is created. A torn last line, which a lost machine can leave, is cut off.
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
        """Write whole lines, all of them or none; OSError if the disk refused them."""
        view, done = memoryview(data), 0
        try:
            while done < len(data):
                done += os.pwrite(self._file, view[done:], self.position + done)
        except OSError:
            # A reader stops at a torn line, and the next append overwrites it.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self.position)
            raise
        self.position += len(data)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Tail:
    """A reader of a growing file of lines; it follows a file that replaces the present one."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._file_number = 0
        self.position = 0  # bytes read
        if from_end:
            for _ in self.lines():
                pass

    def lines(self) -> Iterator[bytes]:
        """Yield the lines that were completed since the last call."""
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
    """Return the position after the last line break of an open file, or after the last one before a position."""
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
    """The run was stopped while the tape could not be written; no effect of its last inputs was executed.

    No input may follow. The waiting lines are written with the next line that the disk accepts, if there is one.
    """


class SegmentedFile:
    """A tape of any length, with the head of its hash chain; one process writes it.

    `position` counts the whole tape. Errors of the disk are those of LineFile.
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
        """Write lines, given without line breaks, all of them or none."""
        if self._file.position >= self._closes_at:
            self._close_segment()
        self._file.append(b"".join(line + b"\n" for line in lines))
        for line in lines:
            self._chain.add(line)

    def _close_segment(self) -> None:
        """Close the present file as a segment, and start another one; the tape's path always has a file."""
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
        """Close the file; the next process continues an interrupted compression."""
        self._packer.close()
        self._file.close()


@dataclass(eq=False)
class TapeFile:
    """The tape of a run; a full disk makes it wait instead of fail. Its process holds the folder's `syncer.lock`."""

    path: Path
    # Set from outside when the run shall end; it also ends a wait.
    stop: threading.Event
    # Called before each wait, on the writing thread, with `condition` set.
    on_wait: Callable[[], None]
    segment_bytes: int = segments.SEGMENT_BYTES
    condition: str = ""
    # Gets the position of written lines and their bytes, and returns when they are safe elsewhere, too. OSError if
    # that failed for now, TapeStopped if this process may not continue.
    copy: Callable[[int, bytes], None] | None = None

    def __post_init__(self) -> None:
        self._file = SegmentedFile(self.path, self.segment_bytes)
        self._waiting: list[bytes] = []
        self._uncopied: list[bytes] = []

    @property
    def position(self) -> int:
        """Return the size of the written lines, without waiting ones."""
        return self._file.position

    @property
    def head(self) -> str:
        """Return the head of the hash chain over the written lines."""
        return self._file.head

    def put(self, line: str) -> None:
        """Keep a line for the next `flush`."""
        self._waiting.append(line.encode())

    def write(self, line: str) -> None:
        """Append a line at once, as `flush` does."""
        self.put(line)
        self.flush()

    def flush(self, *, safe: bool = True) -> None:
        """Wait until the operating system has every line, and the copy, too; TapeStopped if the run was stopped.

        Args:
            safe: False: no effect of these lines leaves this process now, so the copy may get them later.
        """
        while self._waiting:
            try:
                self._file.append(*self._waiting)
            except OSError as error:
                self._blocked(f"{error.strerror} ({self.path}): {remedy(error, self.path)}")
                continue
            if self.copy is not None:
                self._uncopied += self._waiting
            self._waiting.clear()
            self._goes_on()
        while safe and self._uncopied and self.copy is not None:
            data = b"".join(line + b"\n" for line in self._uncopied)
            try:
                self.copy(self._file.position - len(data), data)
            except OSError as error:
                self._blocked(f"its copy failed: {error}")
                continue
            self._uncopied.clear()
            self._goes_on()

    def _goes_on(self) -> None:
        if self.condition:
            log.info(f"{self.path} can be written again; rounds continue")
            self.condition = ""

    def _blocked(self, why: str) -> None:
        if not self.condition:
            self.condition = f"the tape cannot be written: {why}; no round is merged until then"
            log.warning(self.condition)
        self.on_wait()
        if self.stop.wait(RETRY_S):
            raise TapeStopped(f"stopped while {self.condition}")

    def close(self) -> None:
        """Close the file; waiting lines of inputs without effects are lost if the disk refuses them."""
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
    """Yield the whole lines of a tape from a byte position, without line breaks, even while it is being written.

    Raises:
        ValueError: A line is longer than any line of a syncer, `start` is behind the end, or a segment is missing.
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
    """Open a tape's newest file and list its closed segments; repeat if its writer closes one in between."""
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
    """Yield the lines of a tape as text, as `raw_lines` does in bytes."""
    for line in raw_lines(path, start):
        yield line.decode(errors="replace")


def line_before(path: Path, position: int) -> bytes | None:
    """Return the whole line of a tape that ends at a position; None if no line does."""
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
