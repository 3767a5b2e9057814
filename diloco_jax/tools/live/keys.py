"""Keys in the live view: a terminal that hands each over as it is pressed, what they ask for, and how it is done."""

import contextlib
import os
import re
import select
import subprocess
import sys
import termios
import threading
import tty
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from diloco_jax.runtime.records.files import LOGS
from diloco_jax.runtime.records.signals import PARENT_ENV
from diloco_jax.runtime.records.status import syncer_at
from diloco_jax.transport.link import TransportConfig
from diloco_jax.transport.session.calls import ask_drain

LEGEND = "d: drain an island   o: open the page in a browser   "
STOP = {"q": "q: end this view   ", "": "Ctrl-C: stop the run   "}
HINT = "?: keys"
SHOW_CURSOR = b"\x1b[?25h"
BYTES_MAX = 64  # of one reading
ADDRESS = re.compile(r"the page is at (\S+)")  # as `diloco view` says it
SPECIAL = re.compile(rb"\x1b(\[[0-9;]*.|O.|.)?", re.DOTALL)  # keys such as arrows


class Terminal:
    """The keyboard of a terminal while this process is in its foreground; elsewhere it has no keys.

    Leaving the context restores the terminal, whatever ended it; `restore` may be called at any time.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = sys.stdin if stream is None else stream
        try:
            self._number = stream.fileno() if stream is not None and stream.isatty() else -1
        except (OSError, ValueError):  # closed, or no file
            self._number = -1
        self._before: list[Any] | None = None  # the terminal's settings, while they are changed

    def __enter__(self) -> "Terminal":
        if self._in_front():
            self._before = termios.tcgetattr(self._number)
            tty.setcbreak(self._number, termios.TCSANOW)  # Ctrl-C stays a signal
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.restore()

    @property
    def has_keys(self) -> bool:
        return self._before is not None

    def restore(self) -> None:
        """Give the terminal its settings back. In the background that would stop this process; the shell did it."""
        before, self._before = self._before, None
        if before is not None and self._in_front():
            termios.tcsetattr(self._number, termios.TCSANOW, before)
            with contextlib.suppress(OSError):
                os.write(self._number, SHOW_CURSOR)  # a view that was cut short has hidden it

    def read(self, timeout_s: float) -> str:
        """Return the keys that were pressed, "" if there were none for so long; sequences of special keys are none."""
        ready, _, _ = select.select([self._number], [], [], timeout_s)
        if not ready or not self._in_front():
            return ""
        try:
            pressed = os.read(self._number, BYTES_MAX)
        except OSError:  # the terminal is gone
            pressed = b""
        if not pressed:
            raise EOFError("the terminal was closed")
        return SPECIAL.sub(b"", pressed).decode("ascii", "ignore")

    def _in_front(self) -> bool:
        try:
            return self._number >= 0 and os.tcgetpgrp(self._number) == os.getpgrp()
        except OSError:  # not the terminal of this process
            return False


def numbers_of(names: Sequence[str]) -> dict[str, str]:
    """Return islands by the number with which people name them: that in the name, or else the place in the list."""
    own = [match[0] if (match := re.search(r"\d+$", name)) else "" for name in names]
    if len(set(own)) < len(own) or "" in own:
        own = [str(place) for place in range(len(names))]
    return dict(zip(own, names, strict=True))


class Keys:
    """The keys of a view: what each asks for, what is asked in return; q ends a view that `quits`.

    Attributes:
        words: what the view shows below its picture.
        done: whether the view shall end.
        opener: the thread that opens the page; None before the first.
    """

    def __init__(self, drain: Callable[[str], str], open_page: Callable[[], str], *, quits: bool) -> None:
        self._drain = drain
        self._open_page = open_page
        self._quits = quits
        self._islands: dict[str, str] = {}  # by number, while one is chosen
        self._typed = ""
        self._chosen = ""  # to be drained, if y says so
        self.words = HINT
        self.done = False
        self.opener: threading.Thread | None = None

    def press(self, key: str, islands: Sequence[str]) -> None:
        """Take one key; the view shows these islands."""
        if self._chosen:
            name, self._chosen = self._chosen, ""
            self.words = f"asking the syncer to let {name} leave"
            self.words = self._drain(name) if key in "yY" else f"{name} stays"
        elif self._islands:
            self._choose(key)
        elif key == "d":
            self._islands, self._typed = numbers_of(islands), ""
            listed = ", ".join(f"{number} {name}" for number, name in self._islands.items())
            self.words = f"drain which island? {listed}" if listed else "there is no island to drain"
        elif key == "o":
            self._open()
        elif key == "q" and self._quits:
            self.done = True
        else:
            legend = LEGEND + STOP["q" if self._quits else ""] + HINT
            self.words = legend if key == "?" and self.words != legend else HINT

    def _open(self) -> None:
        """Open the page on a thread of its own: a server that starts takes seconds, and other keys go on."""
        if self.opener is None or not self.opener.is_alive():
            self.words = "opening the page"
            self.opener = threading.Thread(target=self._tell_page, name="open-page", daemon=True)
            self.opener.start()

    def _tell_page(self) -> None:
        told = self._open_page()
        asks = self._chosen or self._islands
        self.words = f"{told}   {self.words}" if asks else told

    def _choose(self, key: str) -> None:
        """Take a key of an island's number; Enter ends one with which a longer one begins."""
        typed = self._typed + key.strip()
        longer = [number for number in self._islands if number.startswith(typed) and number != typed]
        if typed in self._islands and (not longer or not key.strip()):
            self._chosen = self._islands[typed]
            self.words = f"let {self._chosen} leave after its current step? y: yes, any other key: no"
            self._islands = {}
        elif key.strip() and longer:
            self._typed = typed
        else:
            self.words, self._islands = f"no island has the number {typed!r}", {}


def drain_in_words(run: str, known: TransportConfig, name: str, *, allow_plaintext: bool = False) -> str:
    """Ask the syncer of a run to let an island leave, for people who look; what is wrong is in the words."""
    try:
        return ask_drain(syncer_at(run, known, allow_plaintext=allow_plaintext), name)[1]
    except (ValueError, OSError) as error:  # TransportError is an OSError
        return f"{name} cannot be asked to leave: {error}"


class PageOpener:
    """The page of a run in a browser: its syncer's if that serves it, or of a `diloco view` that ends with this."""

    def __init__(self, run_dir: Path | None, *, served: bool) -> None:
        self._run_dir = run_dir
        self._served = served
        self._view: subprocess.Popen[str] | None = None
        self._url = ""

    def open(self) -> str:
        """Open the page, and say where it is."""
        if self._run_dir is None:
            return "the page needs the run's folder: `diloco view RUN` on the machine of the syncer"
        self._url = self._url or self._find(self._run_dir)
        if not self._url:
            return f"the page did not start; `diloco view {self._run_dir}` says why"
        opened = _has_browser() and webbrowser.open(self._url)
        return f"the page is {'open in your browser: ' if opened else 'at '}{self._url}"

    def close(self) -> None:
        if self._view is not None:
            self._view.terminate()
            self._view.wait()

    def _find(self, run_dir: Path) -> str:
        log = run_dir / LOGS / "syncer.log"
        text = log.read_text(encoding="utf-8", errors="replace") if self._served and log.exists() else ""
        if told := ADDRESS.findall(text):
            return str(told[-1])
        self._view = subprocess.Popen(
            [sys.executable, "-m", "diloco_jax", "view", str(run_dir)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, PARENT_ENV: str(os.getpid())},
            text=True,
            start_new_session=True,  # a terminal's Ctrl-C is for this process
        )
        assert self._view.stdout is not None, "it was piped"
        told = ADDRESS.findall(self._view.stdout.readline())
        return str(told[0]) if told else ""


def _has_browser() -> bool:
    """Tell whether there is a browser with a window: one of text would take the terminal from the view."""
    if sys.platform != "darwin" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return False
    try:
        return type(webbrowser.get()) is not webbrowser.GenericBrowser  # those of text are exactly that
    except webbrowser.Error:
        return False
