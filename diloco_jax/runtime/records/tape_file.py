"""The syncer's tape on disk: written ahead, line by line, and never given up while the run may go on.

A decision that is not on the tape could not be repeated after a restart, so no input is executed before its line is
written. While the disk refuses it the syncer waits, and says so; learners train on meanwhile.
"""

import json
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from diloco_jax.runtime.records.line_file import LINE_BYTES_MAX, LineFile, last_line

RETRY_S = 0.5

log = logging.getLogger(__name__)


class TapeStopped(Exception):
    """The run was stopped while the tape could not be written: this input was not executed, and none may follow."""


@dataclass(eq=False)
class TapeFile:
    """Appends to a run's tape; a full disk makes it wait, not fail. ValueError if another syncer writes it."""

    path: Path
    stop: threading.Event  # set from outside when the run shall end: then waiting ends too
    on_wait: Callable[[], None]  # called before each wait, on the writing thread, with `condition` set
    condition: str = ""

    def __post_init__(self) -> None:
        self._file = LineFile(self.path, exclusive=True)

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
