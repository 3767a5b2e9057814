"""A folder of a run belongs to one process, which a refusal names, and to nobody once that process has ended."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_jax.runtime.records.files import SYNCER_LOCK
from diloco_jax.runtime.records.folder_lock import FolderInUse, FolderLock, refuse_if_locked

HOLDER = """
import subprocess, sys
from pathlib import Path
from diloco_jax.runtime.records.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]), "syncer.lock")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_by_name_and_changes_nothing(tmp_path: Path) -> None:
    with FolderLock(tmp_path, SYNCER_LOCK):
        before = (tmp_path / SYNCER_LOCK).read_bytes()
        for attempt in (lambda: FolderLock(tmp_path, SYNCER_LOCK), lambda: refuse_if_locked(tmp_path, SYNCER_LOCK)):
            with pytest.raises(
                FolderInUse, match=rf"process {os.getpid()} \(.*\), since 20.*: stop it first, or choose"
            ):
                attempt()
        assert (tmp_path / SYNCER_LOCK).read_bytes() == before
        with FolderLock(tmp_path, "other.lock"):
            pass
    refuse_if_locked(tmp_path, SYNCER_LOCK)
    FolderLock(tmp_path, SYNCER_LOCK).close()


def test_a_look_at_a_lock_creates_nothing(tmp_path: Path) -> None:
    refuse_if_locked(tmp_path, SYNCER_LOCK)
    refuse_if_locked(tmp_path / "missing", SYNCER_LOCK)
    assert list(tmp_path.iterdir()) == []


def test_a_holder_that_was_killed_leaves_the_lock_though_its_children_live(tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdin=pipe, stdout=pipe, text=True)
    assert holder.stdout is not None and holder.stdin is not None
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(FolderInUse, match=f"process {holder.pid} "):
            FolderLock(tmp_path, SYNCER_LOCK)
        holder.kill()
        holder.wait()
        os.kill(child, 0)
        FolderLock(tmp_path, SYNCER_LOCK).close()
    finally:
        os.kill(child, signal.SIGKILL)
        holder.stdin.close()
        holder.stdout.close()


@pytest.mark.parametrize("about", [b"", b"[1, 2", b"[]", b'{"pid": "x"}', b"\xff\x00"])
def test_a_lock_file_that_says_nothing_still_refuses(tmp_path: Path, about: bytes) -> None:
    with FolderLock(tmp_path, SYNCER_LOCK):
        (tmp_path / SYNCER_LOCK).write_bytes(about)
        with pytest.raises(FolderInUse, match="another process writes"):
            FolderLock(tmp_path, SYNCER_LOCK)


def test_a_command_cannot_forge_lines_of_a_terminal(tmp_path: Path) -> None:
    with FolderLock(tmp_path, SYNCER_LOCK):
        told = json.loads((tmp_path / SYNCER_LOCK).read_text(encoding="utf-8"))
        told |= {"command": "diloco\n\x1b[2Jtrain", "host": "far away"}
        (tmp_path / SYNCER_LOCK).write_text(json.dumps(told), encoding="utf-8")
        with pytest.raises(FolderInUse, match=r"on far away \(diloco\?\?\[2Jtrain\)"):
            FolderLock(tmp_path, SYNCER_LOCK)


def test_a_file_system_without_locks_gets_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with FolderLock(tmp_path, SYNCER_LOCK), FolderLock(tmp_path, SYNCER_LOCK):
        assert "cannot be locked" in caplog.text
