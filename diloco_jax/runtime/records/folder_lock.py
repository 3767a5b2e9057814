"""Locks of a run's folder: each names the one process that may write there, and ends when that process ends.

`syncer.lock` belongs to the process that writes tape, snapshots, status and summary, `supervisor.lock` to the process
that starts the others, `health/NAME.lock` to a learner. A lock file stays in the folder; only the system's lock on the
file counts.
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
from typing import Any, Self

from diloco_jax.runtime.records.files import HEALTH

ABOUT_BYTES_MAX = 4096
ATTEMPTS, PAUSE_S = 3, 0.05
COMMAND_MAX = 160

log = logging.getLogger(__name__)


class FolderInUse(ValueError):
    """Another process holds the lock; the message names it and the remedy."""


class FolderLock:
    """A lock of a run's folder, held until `close`, or until this process ends.

    FolderInUse if another process holds it. On a file system without locks there is a warning, and every process gets
    the lock.

    Args:
        option: the option that names the folder, for the error.
    """

    def __init__(self, run_dir: Path, name: str, option: str = "--run-dir") -> None:
        self._option = option
        self._file = os.open(run_dir / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if _lock(self._file, run_dir / name):
                _sign(self._file)
            else:
                self._on_held(run_dir, _read(self._file))
        except BaseException:
            os.close(self._file)
            raise

    def _on_held(self, run_dir: Path, about: dict[str, Any]) -> None:
        raise FolderInUse(f"{_holder(about)} writes {run_dir}: stop it first, or choose another {self._option}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class LearnerLock(FolderLock):
    """The lock of a learner's name among the processes of one machine.

    Between machines the syncer decides: it accepts the newer process of a name, because the older one may be lost.
    """

    def __init__(self, run_dir: Path, name: str) -> None:
        (run_dir / HEALTH).mkdir(parents=True, exist_ok=True)
        self._name = name
        super().__init__(run_dir, f"{HEALTH}/{name}.lock")

    def _on_held(self, run_dir: Path, about: dict[str, Any]) -> None:
        if about.get("host") not in (None, socket.gethostname()):
            log.info(f"{_holder(about)} is {self._name} of {run_dir} so far")
            return
        raise FolderInUse(f"{_holder(about)} is {self._name} of {run_dir}: stop it first, or choose another --island")


def refuse_if_locked(run_dir: Path, name: str) -> None:
    """Raise FolderInUse if another process holds this lock of the folder; create no file."""
    try:
        file = os.open(run_dir / name, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not _lock(file, run_dir / name):
            about = _read(file)
            raise FolderInUse(f"{_holder(about)} writes {run_dir}: stop it first, or choose another --run-dir")
    finally:
        os.close(file)


def command() -> str:
    """Return the command line of this process, for people."""
    return " ".join([Path(sys.argv[0]).name.replace("__main__.py", "diloco"), *sys.argv[1:]])


def _lock(file: int, path: Path) -> bool:
    """Try to lock an open file; return False if another process holds the lock."""
    for attempt in range(ATTEMPTS):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            # A process in `refuse_if_locked` holds the lock for an instant.
            if attempt < ATTEMPTS - 1:
                time.sleep(PAUSE_S)
        except OSError as error:
            # Some network file systems have no locks.
            log.warning(f"{path} cannot be locked ({error.strerror}): take care to start one process only")
            return True
    return False


def _sign(file: int) -> None:
    """Write the name of this process into a lock file; on a full disk, refusals do not name the holder."""
    about = {"pid": os.getpid(), "host": socket.gethostname(), "command": command()[:COMMAND_MAX]}
    about["since"] = datetime.now().astimezone().isoformat(timespec="seconds")
    with contextlib.suppress(OSError):
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(about).encode(), 0)


def _read(file: int) -> dict[str, Any]:
    """Read the holder's name from a lock file; empty if it is missing."""
    try:
        about = json.loads(os.pread(file, ABOUT_BYTES_MAX, 0))
    except (OSError, ValueError, RecursionError):
        return {}
    return about if isinstance(about, dict) else {}


def _holder(about: dict[str, Any]) -> str:
    """Describe the process that holds a lock, as far as the lock file names it."""
    try:
        where = "" if about["host"] == socket.gethostname() else f" on {about['host']}"
        since = str(about["since"])[:16].replace("T", " ")
        text = f"process {int(about['pid'])}{where} ({about['command']}), since {since},"
    except (ValueError, LookupError, TypeError):
        return "another process"
    return "".join(each if each.isprintable() else "?" for each in text)
