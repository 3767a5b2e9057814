"""Locks of a run's folder: each names the one process that may write there, and ends with it, however that ends.

`syncer.lock` belongs to the process that writes tape, snapshots, status and summary. `supervisor.lock` belongs to the
process that starts the others. A lock file stays in the folder; only the system's lock on it counts.
"""

import contextlib
import fcntl
import json
import logging
import os
import socket
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Self

ABOUT_BYTES_MAX = 4096
ATTEMPTS, PAUSE_S = 3, 0.05
COMMAND_MAX = 160

log = logging.getLogger(__name__)


class FolderInUse(ValueError):
    """Another process holds the lock; the message names it and the remedy."""


class FolderLock:
    """A lock of a run's folder, held until `close`, or until this process ends.

    FolderInUse if another process holds it. A file system without locks gets a warning, and everybody the lock.
    """

    def __init__(self, run_dir: Path, name: str) -> None:
        self._file = os.open(run_dir / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not _lock(self._file, run_dir / name):
                raise FolderInUse(_refusal(self._file, run_dir))
            about = {"pid": os.getpid(), "host": socket.gethostname(), "command": command()[:COMMAND_MAX]}
            about["since"] = datetime.now().astimezone().isoformat(timespec="seconds")
            # A full disk costs a refusal the name of this process, nothing else.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)
                os.pwrite(self._file, json.dumps(about).encode(), 0)
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def refuse_if_locked(run_dir: Path, name: str) -> None:
    """Raise FolderInUse if another process holds a lock of this folder; create nothing."""
    try:
        file = os.open(run_dir / name, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not _lock(file, run_dir / name):
            raise FolderInUse(_refusal(file, run_dir))
    finally:
        os.close(file)


def command() -> str:
    """Return the command line of this process, for people."""
    return " ".join([Path(sys.argv[0]).name.replace("__main__.py", "diloco"), *sys.argv[1:]])


def _lock(file: int, path: Path) -> bool:
    """Try to lock an open file; False if another process holds the lock."""
    for attempt in range(ATTEMPTS):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            # A process that only looks (`refuse_if_locked`) holds the lock for an instant.
            if attempt < ATTEMPTS - 1:
                time.sleep(PAUSE_S)
        except OSError as error:
            # Some network file systems have no locks.
            log.warning(f"{path} cannot be locked ({error.strerror}): take care to start one process only")
            return True
    return False


def _refusal(file: int, run_dir: Path) -> str:
    """Name the process that holds a lock, as far as the lock file tells, and the remedy."""
    holder, since = "another process", ""
    try:
        about = json.loads(os.pread(file, ABOUT_BYTES_MAX, 0))
        where = "" if about["host"] == socket.gethostname() else f" on {about['host']}"
        holder = f"process {int(about['pid'])}{where} ({about['command']}),"
        since = f" since {str(about['since'])[:16].replace('T', ' ')},"
    except (OSError, ValueError, LookupError, TypeError):
        # The holder has the lock, and has not written who it is, or its disk is full.
        pass
    text = f"{holder}{since} writes {run_dir}: stop it first, or choose another --run-dir"
    return "".join(each if each.isprintable() else "?" for each in text)
