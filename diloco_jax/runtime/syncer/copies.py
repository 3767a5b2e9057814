"""The copy of a run's tape and snapshots in its bucket, and the folder that a standby makes of it."""

import contextlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from diloco_jax.runtime.records.files import (
    CHECKPOINTS,
    CLOCK_FILE,
    ISLANDS_FILE,
    TAPE_FILE,
    complete_checkpoints,
    global_step_of,
)
from diloco_jax.runtime.records.tape_file import LINE_BYTES_MAX, TapeStopped, raw_lines
from diloco_jax.transport.store import names
from diloco_jax.transport.store.bucket import Bucket, Leader
from diloco_jax.transport.store.store import StoreError

# One request moves a piece, and has 20 seconds for it.
PIECE_BYTES = 8 << 20
OBJECT_BYTES_MAX = PIECE_BYTES + LINE_BYTES_MAX
MANIFEST_BYTES_MAX = 16 << 20
# Snapshots in the bucket: the newest, and the one before, which a standby may be reading.
SNAPSHOTS_KEPT = 2
AGAIN_S = 1.0
# Between two looks of a standby for a newer snapshot.
SNAPSHOT_LOOK_S = 15.0
# A copy is looked for among this many epochs.
EPOCHS_MAX = 20
# Small files that a standby needs besides.
FILES = (CLOCK_FILE, ISLANDS_FILE)

log = logging.getLogger(__name__)


class TapeCopy:
    """The copy of the tape that the leader keeps; the tape's thread calls it."""

    def __init__(self, bucket: Bucket, leader: Leader) -> None:
        self._bucket = bucket
        self._epoch = leader.epoch

    def begin(self, run_dir: Path) -> None:
        """Copy the tape so far, then delete earlier copies, which it replaces; StoreError if the store fails.

        What an ended run may have left under our names goes first, because it would be taken for a part of this copy.
        """
        self._bucket.store.delete([names.base(self._epoch)])
        self._bucket.delete_below(names.copy(self._epoch))
        tape, position = run_dir / TAPE_FILE, 0
        waiting, size = list[bytes](), 0
        for line in raw_lines(tape) if tape.exists() else ():
            waiting.append(line + b"\n")
            size += len(line) + 1
            if size >= PIECE_BYTES:
                self._bucket.write(names.on_tape(self._epoch, position), b"".join(waiting))
                position, waiting, size = position + size, [], 0
        if waiting:
            self._bucket.write(names.on_tape(self._epoch, position), b"".join(waiting))
        self.copy_files(run_dir)
        self._bucket.write(names.base(self._epoch), b"complete")
        while earlier := [key for key in self._bucket.store.list("copy/") if key < names.copy(self._epoch)]:
            self._bucket.store.delete(earlier)

    def copy_files(self, run_dir: Path) -> None:
        """Copy the small files of the folder; StoreError if the store fails."""
        for name in FILES:
            with contextlib.suppress(FileNotFoundError):
                self._bucket.write(f"{names.copy(self._epoch)}{name}", (run_dir / name).read_bytes())

    def __call__(self, position: int, data: bytes) -> None:
        """Copy lines of the tape, and return when they are safe and this process still leads.

        Raises:
            StoreError: The store does not answer; the same position may be written again, with more lines.
            TapeStopped: Another process leads the run.
        """
        self._bucket.write(names.on_tape(self._epoch, position), data)
        if not self._leads():
            raise TapeStopped("another process leads the run, or has ended it")

    def _leads(self) -> bool:
        """Tell whether our claim is there, and no later one; StoreError if the store does not answer."""
        ours = names.leader(self._epoch)
        listed = self._bucket.store.list(names.LEADER)
        if ours in listed and listed[-1] == ours:
            return True
        # A stranger's object with a later name counts only if it is a leader's.
        newest = self._bucket.leader()
        return newest is not None and newest.epoch == self._epoch

    def copy_snapshot(self, path: Path) -> None:
        """Copy a snapshot; the manifest comes last. A failure is logged: the one before stays."""
        prefix = names.snapshot(global_step_of(path), self._epoch)
        try:
            files = [each for each in sorted(path.rglob("*")) if each.is_file()]
            manifest: list[tuple[str, int]] = [(str(each.relative_to(path)), each.stat().st_size) for each in files]
            for count, piece in enumerate(_pieces(files)):
                self._bucket.write(f"{prefix}{count:012}", piece)
            self._bucket.write(f"{prefix}{names.MANIFEST}", json.dumps(manifest).encode())
            self.copy_files(path.parent.parent)
            self._prune()
        except OSError as error:
            log.warning(f"{path.name} is not in the bucket, a standby would start from an earlier one: {error}")

    def _prune(self) -> None:
        keys = _all(self._bucket, names.SNAPSHOT)
        kept = {prefix for prefix, _ in _snapshots(keys)[:SNAPSHOTS_KEPT]}
        self._bucket.store.delete([key for key in keys if key.rpartition("/")[0] + "/" not in kept])

    def end(self) -> None:
        """Delete the copy at the end of the run, unless another process leads it; StoreError if the store fails."""
        newest = self._bucket.leader()
        if newest is None or newest.epoch <= self._epoch:
            self._bucket.delete_below("copy/")
            self._bucket.delete_below(names.SNAPSHOT)


def copy_files(copy: TapeCopy | None, run_dir: Path) -> None:
    """Copy the small files of a run that keeps a copy; they are copied again with each snapshot."""
    if copy is not None:
        with contextlib.suppress(StoreError):
            copy.copy_files(run_dir)


def end_copy(copy: TapeCopy | None) -> None:
    """Delete the copy of a run that keeps one, as far as the store answers."""
    if copy is not None:
        with contextlib.suppress(StoreError):
            copy.end()


class Mirror:
    """A standby's folder: it follows the copy of the newest leader's tape, and its newest snapshot.

    What an earlier standby left in the folder is removed.
    """

    def __init__(self, bucket: Bucket, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._bucket = bucket
        self._epoch = 0
        self._position = 0
        self._last = ""
        # Whether lines are listed behind a part that is missing.
        self._gap = False
        self._draft = run_dir / f"{TAPE_FILE}.standby"
        self._draft.unlink(missing_ok=True)
        shutil.rmtree(run_dir / CHECKPOINTS, ignore_errors=True)
        self._snapshot = ""
        self._looked_s = -SNAPSHOT_LOOK_S

    @property
    def complete(self) -> bool:
        """Tell whether a complete copy of a tape was found, so that this process could continue the run."""
        return bool(self._epoch)

    def refresh(self, epoch: int) -> bool:
        """Fetch what is new of the newest complete copy, and return whether something was.

        Raises:
            StoreError: The store does not answer.
            OSError: The disk refuses what was fetched; the next call fetches it again.
        """
        newest = self._newest(epoch)
        if newest is None:
            return False
        if newest != self._epoch:
            self._epoch, self._position, self._last = newest, 0, ""
            self._draft.unlink(missing_ok=True)
        found = self._fetch_tape(f"{names.copy(newest)}tape/")
        if time.monotonic() >= self._looked_s + SNAPSHOT_LOOK_S:
            with contextlib.suppress(ValueError):
                self._fetch_snapshot()
            self._looked_s = time.monotonic()
        return found

    def _fetch_tape(self, prefix: str) -> bool:
        found = self._gap = False
        for key in self._bucket.store.list(prefix, after=self._last):
            number = names.number_of(key)
            if number is None or number < self._position:
                continue
            content = self._bucket.read(key, OBJECT_BYTES_MAX) if number == self._position else None
            # A listing may be late: what is missing shows up with the next one.
            if content is None:
                self._gap = True
                break
            with self._draft.open("r+b" if self._draft.exists() else "wb") as file:
                # A full disk may have taken a part before.
                file.truncate(self._position)
                file.seek(self._position)
                file.write(content)
            self._position, self._last, found = self._position + len(content), key, True
        return found

    def _newest(self, epoch: int) -> int | None:
        """Return the newest epoch with a complete copy, up to `epoch`; None if there is none.

        A copy is deleted only after a later one is complete. So a look from the earliest to the latest finds one,
        whatever happens meanwhile.
        """
        first = max(1, self._epoch, epoch - EPOCHS_MAX)
        found = [each for each in range(first, epoch + 1) if self._bucket.store.exists(names.base(each))]
        return found[-1] if found else None

    def finish(self, epoch: int, stop: threading.Event) -> None:
        """Fetch everything after this process claimed the run, and make the folder that of the run.

        Args:
            epoch: Of the leader that was lost.

        Raises:
            ValueError: There is no copy of a tape, a later process leads the run, or `stop` was set.
        """
        while not stop.is_set():
            try:
                # A leader that has claimed the run before this process may delete the copy that is being read, after
                # it has completed its own one.
                if not self.refresh(epoch) and not self._gap and self._is_there():
                    self._fetch_files()
                    os.replace(self._draft, self.run_dir / TAPE_FILE)
                    return
                self._check_newest(epoch)
            except OSError as error:
                log.warning(f"the copy of the run cannot be read or kept, trying again: {error}")
                stop.wait(AGAIN_S)
        raise ValueError("stopped before the copy of the run was complete")

    def _is_there(self) -> bool:
        return bool(self._epoch) and self._draft.exists() and self._bucket.store.exists(names.base(self._epoch))

    def _check_newest(self, lost: int) -> None:
        """Check that this process may still find a copy to continue.

        Raises:
            ValueError: A later process leads the run, and may have replaced the copy; or there is no copy.
        """
        # A leader claims the run before it deletes the copy, so its claim is seen after a look that misses the copy.
        copied = self._newest(lost) is not None
        newest = self._bucket.leader()
        if newest is not None and newest.epoch > lost + 1:
            raise ValueError("another process has become the run's syncer meanwhile")
        if not copied:
            raise ValueError("the run has no copy of a tape in its bucket; set syncer.standby for its syncer")

    def _fetch_files(self) -> None:
        for name in FILES:
            content = self._bucket.read(f"{names.copy(self._epoch)}{name}", MANIFEST_BYTES_MAX)
            if content is not None:
                (self.run_dir / name).write_bytes(content)

    def _fetch_snapshot(self) -> None:
        found = _snapshots(_all(self._bucket, names.SNAPSHOT))
        if not found or found[0][0] == self._snapshot:
            return
        prefix, step = found[0]
        content = self._bucket.read(f"{prefix}{names.MANIFEST}", MANIFEST_BYTES_MAX)
        if content is None:
            return
        folder = self.run_dir / CHECKPOINTS
        draft, target = folder / f"standby_{step}", folder / f"step_{step:08d}"
        shutil.rmtree(draft, ignore_errors=True)
        if not self._fetch_files_of(prefix, json.loads(content), draft):
            return
        shutil.rmtree(target, ignore_errors=True)
        os.replace(draft, target)
        self._snapshot = prefix
        for old in complete_checkpoints(folder)[SNAPSHOTS_KEPT:]:
            shutil.rmtree(old, ignore_errors=True)

    def _fetch_files_of(self, prefix: str, manifest: Any, draft: Path) -> bool:
        """Write the files of a snapshot; False if a piece is gone, because a newer snapshot has replaced it."""
        count, waiting = 0, memoryview(b"")
        for name, size in manifest:
            path = (draft / str(name)).resolve()
            if not path.is_relative_to(draft.resolve()):
                raise ValueError(f"a snapshot has a file {str(name)[:80]!r} outside of it")
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                while (missing := size - file.tell()) > 0:
                    if not waiting:
                        waiting = memoryview(self._bucket.read(f"{prefix}{count:012}", PIECE_BYTES) or b"")
                        count += 1
                    if not waiting:
                        return False
                    file.write(waiting[:missing])
                    waiting = waiting[missing:]
        return True


def _pieces(files: Sequence[Path]) -> Iterator[bytes]:
    """Yield the bytes of all files, one after the other, in pieces: a snapshot has hundreds of small files."""
    waiting = bytearray()
    for path in files:
        with path.open("rb") as file:
            while read := file.read(PIECE_BYTES - len(waiting)):
                waiting += read
                if len(waiting) == PIECE_BYTES:
                    yield bytes(waiting)
                    waiting.clear()
    if waiting:
        yield bytes(waiting)


def _all(bucket: Bucket, prefix: str) -> list[str]:
    """Return all names that start with a prefix; a listing has a limit. StoreError if the store does not answer."""
    found, last = list[str](), ""
    while page := [key for key in bucket.store.list(prefix, after=last) if key > last]:
        found, last = found + page, page[-1]
    return found


def _snapshots(keys: Sequence[str]) -> list[tuple[str, int]]:
    """Return prefix and step of the complete snapshots among names, newest first."""
    found = []
    for key in keys:
        prefix, _, last = key.rpartition("/")
        step = prefix.removeprefix(names.SNAPSHOT).partition(".")[0]
        if last == names.MANIFEST and step.isdecimal():
            found.append((f"{prefix}/", int(step)))
    return sorted(found, reverse=True)
