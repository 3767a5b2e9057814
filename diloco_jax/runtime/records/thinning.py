"""Thinning of metrics.jsonl, so that the file of a long run stays bounded.

When the file exceeds its bound, a thread writes a shorter one, which replaces it at once. The new file has three parts:

    head    one line of kind "thinned": `removed` bytes left out so far, `exact_from` where the exact part starts,
            `every` records summed up as one
    old     of each stream of PERIODIC records one for `every` successive ones, and all other records
    exact   the newest quarter of the bound, byte for byte as it was written

Every periodic record of the old part has `n`, the number of records that it stands for. Its counters and times are
those of the last of them; `loss`, `step_s` and `values` are means; `counts` of a "merged" record has the number of
rounds of each learner. So sums over the file stay exact. When the old part takes more than half of the bound, `every`
doubles. The first step of an incarnation stays a separate record. Steps of two incarnations are never summed up
together, nor steps before and after a note that names their learner. Records of other kinds are kept until they fill a
quarter of the bound; then the oldest of them are dropped. If the old part is still too long, as with a new learner at
every step, its oldest half is dropped.
"""

import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from diloco_jax.runtime.records.tape_file import LINE_BYTES_MAX, LineFile

# metrics.jsonl is thinned above this size.
BYTES_MAX = 32 << 20
PERIODIC = ("step", "metrics", "merged_metrics", "closed", "merged", "abandoned", "round", "drift", "wire")
# Kind of the first line of a thinned file.
THINNED = "thinned"
# A greater `every` must shrink the old part to this share, or there is nothing to sum up.
SHRINKS = 0.95
_HEAD_BYTES = 160
_COPIED = 1 << 20

log = logging.getLogger(__name__)


def stands_for(record: Mapping[str, Any]) -> int:
    """Return the number of records that a record of metrics.jsonl stands for."""
    count = record.get("n", 1)
    return count if isinstance(count, int) and count > 0 else 1


def merged_counts(record: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of rounds of a "merged" record that merged each learner."""
    return dict(record["counts"] if "counts" in record else dict.fromkeys(record["members"], 1))


def _mean(one: Any, other: Any, weight: float) -> Any:
    """Return the mean of two values, the second with a weight in [0, 1]; without two numbers, one of the values."""
    if not isinstance(one, int | float) or not isinstance(other, int | float):
        return one if other is None else other
    return float(f"{one + (other - one) * weight:.6g}")


def combine(one: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record that stands for two of one stream."""
    count, more = stands_for(one), stands_for(later)
    weight = more / (count + more)
    found = {**later, "n": count + more}
    # Only the newest rounds are shown with the times of their broadcasts.
    found.pop("arrived", None)
    for key in found.keys() & {"loss", "step_s"}:
        found[key] = _mean(one.get(key), found[key], weight)
    if isinstance(values := found.get("values"), Mapping) and found["kind"] != "round":
        earlier = one.get("values", {})
        found["values"] = {name: _mean(earlier.get(name), value, weight) for name, value in values.items()}
    if found["kind"] == "merged":
        found["counts"] = counts = merged_counts(one)
        for name, rounds in merged_counts(later).items():
            counts[name] = counts.get(name, 0) + rounds
    return found


class Combiner:
    """Sums of a run's records, given as lines in order; one record stands for `every`."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._open: dict[tuple[str, str], dict[str, Any]] = {}
        self._incarnations: dict[str, int] = {}

    def take(self, line: bytes) -> Iterator[tuple[bytes, bool]]:
        """Add a line; yield the lines that are complete now, each with whether its record is periodic."""
        record: Any = None
        # Lines of other programs stay as they are.
        with contextlib.suppress(ValueError):
            record = json.loads(line)
        if not isinstance(record, dict) or record.get("kind") not in PERIODIC:
            members = record.get("members", ()) if isinstance(record, dict) else ()
            yield from self._close([key for key in self._open if key[1] in members])
            yield line, False
            return
        key = record["kind"], str(record.get("learner", ""))
        before = self._open.get(key)
        if before is not None and before.get("incarnation") != record.get("incarnation"):
            yield from self._close([key])
            before = None
        try:
            self._open[key] = record if before is None else combine(before, record)
        except (ValueError, KeyError, TypeError, AttributeError):
            yield from self._close([key])
            yield line, True
            return
        # Readers count an incarnation's time from its first step.
        begins = record["kind"] == "step" and self._incarnations.get(key[1]) != record.get("incarnation")
        if begins:
            self._incarnations[key[1]] = record.get("incarnation", 0)
        if begins or stands_for(self._open[key]) >= self._every:
            yield from self._close([key])

    def rest(self) -> Iterator[tuple[bytes, bool]]:
        """Yield the remaining lines at the end."""
        yield from self._close(list(self._open))

    def _close(self, keys: list[tuple[str, str]]) -> Iterator[tuple[bytes, bool]]:
        for key in keys:
            record = self._open.pop(key)
            record.setdefault("n", 1)
            yield json.dumps(record, separators=(",", ":")).encode() + b"\n", True


def read_head(line: bytes) -> dict[str, Any] | None:
    """Return the head of a thinned file from its first line; None if that is an ordinary record."""
    if not line.startswith(b'{"kind":"thinned"'):
        return None
    with contextlib.suppress(ValueError):
        head = json.loads(line)
        if isinstance(head, dict) and all(isinstance(head.get(key), int) for key in ("removed", "exact_from", "every")):
            return head
    return None


def _line_after(file: BinaryIO, position: int) -> int:
    """Return the start of the first line that starts at a position or later."""
    if position <= 0:
        return 0
    file.seek(position - 1)
    file.readline(LINE_BYTES_MAX)
    return file.tell()


class _Thinning:
    """One rewriting of the first `end` bytes of a file, in a thread; `error` is set if it failed."""

    def __init__(self, path: Path, draft: Path, end: int, bound: int) -> None:
        self.path, self.draft, self.end, self._bound = path, draft, end, bound
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, name="thinning", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            with self.path.open("rb") as file, self.draft.open("w+b") as draft:
                self._write(file, draft)
                draft.flush()
                # The records must survive if the machine is lost right after the replacement.
                os.fsync(draft.fileno())
        # A run must not end because its records cannot be shortened.
        except Exception as error:
            self.error = error

    def _write(self, file: BinaryIO, draft: BinaryIO) -> None:
        first = file.readline(LINE_BYTES_MAX)
        head = read_head(first)
        start = len(first) if head else 0
        every, removed, known = (head["every"], head["removed"], head["exact_from"]) if head else (2, 0, start)
        cut = max(known, _line_after(file, self.end - self._bound // 4))
        rare_skipped, last = 0, 0
        while True:
            draft.truncate(_HEAD_BYTES)
            draft.seek(_HEAD_BYTES)
            _copy(file, draft, start, known)
            rare = self._combine(file, draft, known, cut, every, rare_skipped)
            size, most = draft.tell(), self._bound // 2
            if size <= most:
                break
            if known > start:
                # Sum up all of the old part, instead of only the lines that became old since.
                known, every = start, 2 * every
            elif rare > self._bound // 4:
                rare_skipped += rare - self._bound // 8
            elif not last or size < SHRINKS * last:
                last, every = size, every * 2 ** max(1, (size // most).bit_length() - 1)
            else:
                known = start = _line_after(file, (start + cut) // 2)
        told = {"kind": THINNED, "t": 0.0, "global_step": 0, "removed": removed + cut - size, "exact_from": size}
        _copy(file, draft, cut, self.end)
        draft.seek(0)
        draft.write(json.dumps(told | {"every": every}, separators=(",", ":")).encode().ljust(_HEAD_BYTES - 1) + b"\n")

    def _combine(self, file: BinaryIO, draft: BinaryIO, start: int, cut: int, every: int, skip: int) -> int:
        """Write the sums of the lines between two positions, without the first `skip` bytes that are not periodic.

        Returns:
            The number of written bytes that are not periodic.
        """
        combiner, rare, left = Combiner(every), 0, cut - start
        file.seek(start)
        while left > 0:
            line = file.readline(LINE_BYTES_MAX)
            left -= len(line)
            for each, periodic in combiner.take(line):
                if not periodic and skip > 0:
                    skip -= len(each)
                    continue
                rare += 0 if periodic else len(each)
                draft.write(each)
        for each, _ in combiner.rest():
            draft.write(each)
        return rare


def _copy(file: BinaryIO, draft: BinaryIO, start: int, end: int) -> None:
    file.seek(start)
    while start < end and (data := file.read(min(_COPIED, end - start))):
        draft.write(data)
        start += len(data)


class ThinnedFile:
    """A file of records that is thinned when it exceeds its bound; for one thread."""

    def __init__(self, path: Path, bound: int = BYTES_MAX) -> None:
        self._path, self._bound = path, bound
        self._draft = path.with_name(f".{path.name}.thinned")
        # A process that was killed may have left it.
        self._draft.unlink(missing_ok=True)
        self._file = LineFile(path)
        self._next = bound
        self._job: _Thinning | None = None

    def append(self, data: bytes) -> None:
        """Append whole lines; OSError if the disk refused them."""
        self._file.append(data)
        if self._job is None and self._file.position > self._next:
            self._job = _Thinning(self._path, self._draft, self._file.position, self._bound)
        elif self._job is not None and not self._job.thread.is_alive():
            self.settle()

    def settle(self) -> None:
        """Wait for the thinned file, if one is being written, and put it in place."""
        job, self._job = self._job, None
        if job is None:
            return
        job.thread.join()
        try:
            if job.error is not None:
                raise job.error
            with self._path.open("rb") as file, self._draft.open("r+b") as draft:
                draft.seek(0, os.SEEK_END)
                _copy(file, draft, job.end, self._file.position)
            os.replace(self._draft, self._path)
        except Exception as error:
            self._next = self._file.position + self._bound // 4
            log.warning(f"{self._path} cannot be thinned ({error}); it is tried again at {self._next} bytes")
            return
        self._file.close()
        self._file = LineFile(self._path)
        self._next = max(self._bound, self._file.position + self._bound // 8)

    def close(self) -> None:
        self.settle()
        self._draft.unlink(missing_ok=True)
        self._file.close()


class RecordTail:
    """A reader that follows a file of records while it grows, is thinned, or is replaced by another run's.

    Attributes:
        position: Bytes of the present file before the next line.
        lost: Whether records were missed, because they were summed up before they were read, or the run is another.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.position = 0
        self.lost = False
        self._first = b""
        self._removed = 0

    def lines(self) -> Iterator[bytes]:
        """Yield the lines that were completed since the last call, each once."""
        try:
            with self._path.open("rb") as file:
                self._find(file)
                file.seek(self.position)
                while (line := file.readline(LINE_BYTES_MAX)).endswith(b"\n"):
                    self.position += len(line)
                    yield line
        except FileNotFoundError:
            return

    def _find(self, file: BinaryIO) -> None:
        """Find the next line in a file that may have replaced the previous one."""
        first, size = file.readline(LINE_BYTES_MAX), os.fstat(file.fileno()).st_size
        if not first.endswith(b"\n"):
            first = b""
        if first == self._first and self.position <= size:
            return
        head, read = read_head(first), self.position
        removed, self.position = 0, 0
        if head is not None:
            removed = head["removed"]
            if read:
                at = self._removed + read - removed
                self.lost = self.lost or not head["exact_from"] <= at <= size
                self.position = at if head["exact_from"] <= at <= size else head["exact_from"]
        else:
            self.lost = self.lost or read > 0
        self._first, self._removed = first, removed
