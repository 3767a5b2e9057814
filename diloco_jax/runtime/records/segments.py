"""The closed segments of a long tape, compressed so that the tape of a long run stays small.

    RUN/tape.jsonl                        the newest lines, which grow
    RUN/tape/FIRST-END-HEAD.jsonl         lines before them: bytes FIRST to END of the whole tape, closed
    RUN/tape/FIRST-END-HEAD.jsonl.xz      the same, compressed without loss

FIRST and END are positions in the whole tape, HEAD is the head of the hash chain at END (tape_chain.py). Positions,
lines and heads belong to one stream, and do not depend on the cuts. A short run has one file.

A process may be killed at any moment. A segment that is the same file as the newest one was not closed. If a segment
exists twice, the file that is not compressed counts.
"""

import contextlib
import logging
import lzma
import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, NamedTuple, cast

# A segment is closed once it is this large.
SEGMENT_BYTES = 1 << 24
# Repetitions in a tape are near each other, so a small window is enough, and it needs little memory and time
# (scripts/bench/tape).
_FILTERS: list[dict[str, int]] = [
    {
        "id": lzma.FILTER_LZMA2,
        "dict_size": 1 << 18,
        "lc": 4,
        "lp": 0,
        "pb": 0,
        "mode": lzma.MODE_NORMAL,
        "mf": lzma.MF_BT4,
        "nice_len": 64,
    }
]
PACKED = ".xz"
DRAFT = ".tmp"
_DIGITS = 15
_NAME = re.compile(r"(\d{15,18})-(\d{15,18})-([0-9a-f]{32})\.jsonl(\.xz)?")
_CHUNK_BYTES = 1 << 20

log = logging.getLogger(__name__)


class Segment(NamedTuple):
    """One closed segment: its range of the whole tape, and its file."""

    first: int
    end: int
    head: str
    path: Path

    @property
    def packed(self) -> bool:
        return self.path.suffix == PACKED


def folder_of(tape: Path) -> Path:
    """Return the folder of a tape's closed segments."""
    return tape.with_suffix("")


def segment_at(tape: Path, first: int, end: int, head: str) -> Segment:
    """Return the segment that is about to be closed."""
    name = f"{first:0{_DIGITS}d}-{end:0{_DIGITS}d}-{head}.jsonl"
    return Segment(first, end, head, folder_of(tape) / name)


def closed_segments(tape: Path) -> list[Segment]:
    """Return the closed segments of a tape in order; ValueError if one between them is missing."""
    try:
        names = sorted(os.listdir(folder_of(tape)))
    except (FileNotFoundError, NotADirectoryError):
        return []
    by_first: dict[int, Segment] = {}
    # "x.jsonl" sorts before "x.jsonl.xz", so the file that is not compressed counts.
    for name in names:
        path = folder_of(tape) / name
        if (match := _NAME.fullmatch(name)) and not _is_newest(path, tape):
            by_first.setdefault(int(match[1]), Segment(int(match[1]), int(match[2]), match[3], path))
    found = [segment for _, segment in sorted(by_first.items())]
    end = 0
    for segment in found:
        if segment.first != end:
            raise ValueError(
                f"{tape}: bytes {end} to {segment.first - 1} of it are missing: restore the file in {folder_of(tape)} "
                "that holds them"
            )
        end = segment.end
    return found


def _is_newest(path: Path, tape: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.samefile(tape)
    return False


def undo_unfinished(tape: Path) -> None:
    """Undo the closing of a segment that a kill interrupted, and remove unfinished files; only for its writer."""
    folder = folder_of(tape)
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        if path.suffix == DRAFT or _is_newest(path, tape):
            path.unlink(missing_ok=True)


def segment_lines(segment: Segment, start: int, line_bytes_max: int) -> Iterator[bytes]:
    """Yield the lines of a segment from a position of the whole tape; ValueError if its file is damaged."""
    position = start
    try:
        with _opened(segment) as file:
            file.seek(start - segment.first)
            while (line := file.readline(line_bytes_max)).endswith(b"\n"):
                position += len(line)
                yield line[:-1]
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{segment.path} is damaged ({error}): restore it from a copy") from error
    if position != segment.end:
        raise ValueError(
            f"{segment.path} is damaged: its lines end at byte {position} of the tape, not at {segment.end}; restore "
            "it from a copy"
        )


def _opened(segment: Segment) -> IO[bytes]:
    """Open a segment's file; its writer may have just compressed it."""
    packed = segment.path if segment.packed else segment.path.with_name(segment.path.name + PACKED)
    if not segment.packed:
        with contextlib.suppress(FileNotFoundError):
            return segment.path.open("rb")
    return cast("IO[bytes]", lzma.open(packed, "rb"))


class Packer:
    """Compressor of closed segments, one after the other, on a separate thread."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._stop = threading.Event()

    def pack(self, segment: Segment) -> None:
        """Start to compress a segment, unless it is compressed already."""
        if segment.packed:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "tape")
        self._thread.submit(self._pack, segment)

    def _pack(self, segment: Segment) -> None:
        target = segment.path.with_name(segment.path.name + PACKED)
        draft = target.with_name(target.name + DRAFT)
        try:
            if self._compressed(segment.path, draft):
                os.replace(draft, target)
                segment.path.unlink()
        except OSError as error:
            log.warning(f"{segment.path} cannot be compressed ({error}); it is kept as it is")
        finally:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)

    def _compressed(self, source: Path, draft: Path) -> bool:
        """Write a compressed copy, and sync it to the disk; return False if it was stopped."""
        with source.open("rb") as raw, draft.open("wb") as file:
            compressor = lzma.LZMACompressor(filters=_FILTERS)
            while chunk := raw.read(_CHUNK_BYTES):
                if self._stop.is_set():
                    return False
                file.write(compressor.compress(chunk))
            file.write(compressor.flush())
            file.flush()
            os.fsync(file.fileno())
        return True

    def wait(self) -> None:
        """Wait until all segments are compressed."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None

    def close(self) -> None:
        """Stop, even in the middle of a segment; the next process compresses that segment."""
        self._stop.set()
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
