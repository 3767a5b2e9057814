"""Keys of the live view, on a terminal of the test's own, which is as before afterwards, whatever happens."""

import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_jax.tools.live.keys import HINT, Keys, PageOpener, Terminal, numbers_of

ISLANDS = ["island-0", "island-1", "island-12"]


class Asked:
    """Keys with a syncer and a page that only note what they are asked."""

    def __init__(self, *, quits: bool = True) -> None:
        self.drained: list[str] = []
        self.keys = Keys(self.drain, lambda: "the page is at http://127.0.0.1:1/#t", quits=quits)

    def drain(self, name: str) -> str:
        self.drained.append(name)
        return f"{name} leaves"

    def press(self, keys: str) -> str:
        for key in keys:
            self.keys.press(key, ISLANDS)
        if self.keys.opener is not None:
            self.keys.opener.join()
        return self.keys.words


@pytest.mark.parametrize(
    ("keys", "drained", "words"),
    [
        ("d0y", ["island-0"], "island-0 leaves"),
        ("d0Y", ["island-0"], "island-0 leaves"),
        ("d0n", [], "island-0 stays"),
        ("d0d", [], "island-0 stays"),
        ("d1", [], "drain which island? 0 island-0, 1 island-1, 12 island-12"),
        ("d1\ny", ["island-1"], "island-1 leaves"),
        ("d12y", ["island-12"], "island-12 leaves"),
        ("d12", [], "let island-12 leave after its current step? y: yes, any other key: no"),
        ("d5y", [], HINT),
        ("d5", [], "no island has the number '5'"),
        ("y", [], HINT),
        ("o", [], "the page is at http://127.0.0.1:1/#t"),
        ("??", [], HINT),
        ("?", [], "d: drain an island   o: open the page in a browser   q: end this view   ?: keys"),
    ],
)
def test_what_keys_do(keys: str, drained: list[str], words: str) -> None:
    asked = Asked()
    assert asked.press(keys) == words
    assert asked.drained == drained and not asked.keys.done


def test_q_ends_a_watch_but_never_a_run() -> None:
    watch, train = Asked(quits=True), Asked(quits=False)
    watch.press("q")
    train.press("q")
    assert watch.keys.done and not train.keys.done
    assert "Ctrl-C: stop the run" in train.press("?")


def test_islands_have_the_numbers_of_their_names_or_places() -> None:
    assert numbers_of(["island-1", "island-3"]) == {"1": "island-1", "3": "island-3"}
    assert numbers_of(["ams", "fra-1"]) == {"0": "ams", "1": "fra-1"}
    assert numbers_of(["a-1", "b-1"]) == {"0": "a-1", "1": "b-1"}
    keys = Keys(str, str, quits=True)
    assert keys.words == HINT
    keys.press("d", [])
    assert keys.words == "there is no island to drain"


def test_a_page_that_the_syncer_serves_is_that_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "needs the run's folder" in PageOpener(None, served=False).open(), "it is elsewhere"
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/syncer.log").write_text("the page is at http://a:1/#x\nthe page is at http://a:2/#x\nmore\n")
    page = PageOpener(tmp_path, served=True)
    if sys.platform != "darwin":
        assert page.open() == "the page is at http://a:2/#x"
    page.close()


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """The two ends of a terminal: ours, and that of a program."""
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


PROGRAM = """
import os, signal, sys
from diloco_jax.runtime.records.signals import stop_on_signals
from diloco_jax.tools.live.keys import Terminal
terminal = Terminal()
if sys.argv[1] == "twice":
    stop_on_signals(terminal.restore)
with terminal:
    assert terminal.has_keys
    print("began", flush=True)
    pressed = ""
    while not pressed.endswith("x"):
        pressed += terminal.read(1.0)
    print(pressed, flush=True)
    if sys.argv[1] == "raise":
        raise OSError("something else")
    if sys.argv[1] == "twice":
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
"""
SHELL = """
import fcntl, signal, subprocess, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, lambda *_: None)
before = termios.tcgetattr(0)
code = subprocess.run([sys.executable, "-c", *sys.argv[1:]]).returncode
print(code, termios.tcgetattr(0) == before)
"""
FLAGS = termios.ICANON | termios.ECHO


@pytest.mark.parametrize(
    ("how", "keys", "said"),
    [
        ("end", "abx", "abx 0 True"),
        ("raise", "\x1b[Ax", "x 1 True"),  # an arrow is no key
        ("twice", "x", "x 130 True"),
        ("interrupt", "\x03", f"{-signal.SIGINT} True"),
    ],
)
def test_a_terminal_is_as_before_whatever_ends_the_view(
    terminal: tuple[int, int], how: str, keys: str, said: str
) -> None:
    ours, theirs = terminal
    shell = subprocess.Popen(
        [sys.executable, "-c", SHELL, PROGRAM, how],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    assert termios.tcgetattr(theirs)[3] & FLAGS == FLAGS
    with shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == "began\n"
        assert not termios.tcgetattr(theirs)[3] & FLAGS, "keys come one by one"
        os.write(ours, keys.encode())
        assert " ".join(shell.stdout.read().split()) == said


def test_what_is_no_terminal_has_no_keys(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+") as stream, Terminal(stream) as keyboard:
        assert not keyboard.has_keys
    with (tmp_path / "file").open() as stream:
        pass
    with Terminal(stream) as keyboard:  # closed
        assert not keyboard.has_keys
