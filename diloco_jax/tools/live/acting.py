"""Acts of people who look at a run: let an island leave, open its page."""

import os
import re
import subprocess
import sys
import webbrowser
from pathlib import Path

from diloco_jax.runtime.records.files import LOGS
from diloco_jax.runtime.records.signals import PARENT_ENV
from diloco_jax.runtime.records.status import syncer_at
from diloco_jax.transport.link import TransportConfig
from diloco_jax.transport.questions import ask_drain

ADDRESS = re.compile(r"the page is at (\S+)")  # as `diloco view` says it


def drain(run: str, name: str, known: TransportConfig, *, allow_plaintext: bool = False) -> tuple[bool, str]:
    """Ask the syncer of a run to let an island leave; whether it does, and its words.

    Args:
        run, known, allow_plaintext: as `syncer_at` takes them.

    Raises:
        ValueError: the run has no address, or credentials cannot be used.
        TransportError: nobody answered.
    """
    return ask_drain(syncer_at(run, known, allow_plaintext=allow_plaintext), name)


def drain_in_words(run: str, known: TransportConfig, name: str, *, allow_plaintext: bool = False) -> str:
    """Ask the same for people who look at a view; what is wrong is in the words."""
    try:
        return drain(run, name, known, allow_plaintext=allow_plaintext)[1]
    except (ValueError, OSError) as error:  # TransportError is an OSError
        return f"{name} cannot be asked to leave: {error}"


class PageOpener:
    """The page of a run in a browser: that of its syncer, or else of a `diloco view` that ends with this object.

    Args:
        run_dir: None if only the address of the syncer is known.
        served: whether the syncer serves the page.
    """

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
