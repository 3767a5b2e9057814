"""A file that grows by whole lines and never holds a torn one, whatever happens to its writer or its disk.

A line goes to the operating system with one call, so what a killed process had written is there. A write that the disk
refuses, in whole or in part, is taken back: the file ends where its last whole line does.

The syncer's tape is written ahead, and never given up while the run may go on: a decision that is not on it could not
be repeated after a restart, so no input is executed before its line is written. While the disk refuses it the syncer
waits, and says so; learners train on meanwhile.
"""

import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

LINE_BYTES_MAX = 1 << 24  # that a reader takes; a hello with 4096 learners' worth of names is far below
RETRY_S = 0.5  # between two attempts to write a tape
_BLOCK = 1 << 16

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
    """A reader of a file of lines that others write, as far as it is whole."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self.position = 0  # bytes that have been read
        if from_end:
            for _ in self.lines():
                pass

    def lines(self) -> Iterator[bytes]:
        """Yield the lines that have become whole since the last call."""
        try:
            with self._path.open("rb") as file:
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
    """The run was stopped while the tape could not be written: this input was not executed, and none may follow."""


@dataclass(eq=False)
class TapeFile:
    """Appends to a run's tape; a full disk makes it wait, not fail. Its process holds the folder's `syncer.lock`."""

    path: Path
    stop: threading.Event  # set from outside when the run shall end: then waiting ends too
    on_wait: Callable[[], None]  # called before each wait, on the writing thread, with `condition` set
    condition: str = ""

    def __post_init__(self) -> None:
        self._file = LineFile(self.path)

    @property
    def position(self) -> int:
        return self._file.position

    def write(self, line: str) -> None:
        """Append a line; returns when the operating system has it, or raises TapeStopped if the run was stopped."""
        data = line.encode() + b"\n"
        while True:
            try:
                self._file.append(data)
            except OSError as error:
                self._blocked(error)
                continue
            if self.condition:
                log.info(f"{self.path} can be written again; rounds go on")
                self.condition = ""
            return

    def _blocked(self, error: OSError) -> None:
        if not self.condition:
            self.condition = (
                f"the tape cannot be written: {error.strerror} ({self.path}): free space there; "
                "no round is merged until then"
            )
            log.warning(self.condition)
        self.on_wait()
        if self.stop.wait(RETRY_S):
            raise TapeStopped(f"stopped while {self.condition}")

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path, start: int = 0) -> Iterator[str]:
    """Yield the whole lines of a tape from a byte position on, without line breaks, also while it is being written.

    ValueError if a line is longer than any that a syncer writes, or `start` lies behind the end.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if start > size:
            raise ValueError(
                f"{path} has {size} bytes, but a snapshot was taken at byte {start}: the tape is not this snapshot's; "
                "restore the tape, or start a new run"
            )
        position = file.seek(start)
        while (line := file.readline(LINE_BYTES_MAX)).endswith(b"\n"):
            position += len(line)
            yield line[:-1].decode(errors="replace")
        if len(line) == LINE_BYTES_MAX:
            raise ValueError(f"{path} has a line of more than {LINE_BYTES_MAX} bytes at byte {position}")


def last_time_s(path: Path) -> float | None:
    """Return the time of a tape's newest input, in seconds since the run began; None without a whole line."""
    if (line := last_line(path)) is None:
        return None
    try:
        return float(json.loads(line)[1])
    except (ValueError, TypeError, LookupError):
        raise ValueError(f"{path} is damaged: its last line is {line[:80]!r}; remove that line") from None
