"""Each error of the operating system has its remedy, also where a library hides the error."""

import errno
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_jax.runtime.records import tape_file
from diloco_jax.runtime.records.os_errors import number_of, remedy
from diloco_jax.runtime.records.tape_file import TapeFile, TapeStopped

HERE = Path("/run")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "free space"),
        (errno.EDQUOT, "quota"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ENFILE, "fs.file-max"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permissions"),
        (errno.EIO, "look at the disk"),
    ],
)
def test_an_error_has_its_own_remedy(number: int, words: str) -> None:
    plain = OSError(number, os.strerror(number))
    assert words in remedy(plain, HERE)
    assert words in remedy(ValueError(f"RESOURCE_EXHAUSTED: opening file: {os.strerror(number).lower()} [x]"), HERE)
    try:
        try:
            raise plain
        except OSError as error:
            raise ValueError("the checkpoint failed") from error
    except ValueError as error:
        assert number_of(error) == number and words in remedy(error, HERE)
    others = {errno.ENOSPC, errno.EMFILE, errno.EROFS, errno.EACCES} - {number}
    assert all(remedy(plain, HERE) != remedy(OSError(other, ""), HERE) for other in others)


def test_an_unknown_error_names_the_place() -> None:
    assert "/run" in remedy(ValueError("odd"), HERE)


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """This process has no descriptor left."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, before[1]))
    try:
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        assert error.errno == errno.EMFILE
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    for each in taken:
        os.close(each)


@pytest.mark.usefixtures("few_descriptors")
def test_without_descriptors_the_advice_is_about_descriptors(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Too many open files") as found:
        (tmp_path / "step_1").open("w")
    assert "ulimit -n" in remedy(found.value, tmp_path) and "space" not in remedy(found.value, tmp_path)


def test_a_tape_says_what_keeps_it_from_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    tape = TapeFile(tmp_path / "tape.jsonl", stop, stop.set)

    def refuse(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tape_file.os, "pwrite", refuse)
    with pytest.raises(TapeStopped, match=r"Read-only file system .*mount it for writing"):
        tape.write('["tick",1.0]')
    assert "free space" not in tape.condition


def test_lines_that_wait_are_written_together_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "tape.jsonl"
    tape = TapeFile(path, threading.Event(), lambda: None)
    for number in range(3):
        tape.put(f'["tick",{number}.0]')
    assert path.read_bytes() == b"" and tape.position == 0
    tape.flush()
    assert path.read_text() == '["tick",0.0]\n["tick",1.0]\n["tick",2.0]\n' and tape.position == path.stat().st_size
    tape.put('["tick",3.0]')
    tape.close()
    assert path.read_text().count("\n") == 4
