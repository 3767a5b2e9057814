"""The live view of a run: a picture with keys on a terminal, a line for each change elsewhere."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from diloco_jax.runtime.records.files import STATUS_FILE
from diloco_jax.runtime.records.liveness import ENDED, NOT_RUNNING, QUIET_S, SILENT, StartPhase, read_phases
from diloco_jax.tools.live.changes import Changes
from diloco_jax.tools.live.keys import Keys, Terminal
from diloco_jax.tools.live.picture import History, draw_phases, render
from diloco_jax.tools.live.words import format_duration

REFRESHES_PER_S = 4
LOOK_S = 0.5  # between two looks at the run, and for the end of the view
WATCH_S = 1.0  # between two looks at a run whose syncer may have to be asked

Status = Mapping[str, Any]


class Run(NamedTuple):
    """A run, as a view looks at it; both may raise OSError or ValueError where there is nothing to see."""

    status: Callable[[], Status]
    phases: Callable[[], Sequence[StartPhase]]


def run_in(run_dir: Path) -> Run:
    """Return the run of a folder, as its files say."""

    def status() -> Status:
        return json.loads((run_dir / STATUS_FILE).read_text(encoding="utf-8"))

    return Run(status, lambda: read_phases(run_dir))


class LiveView:
    """A view of a run until the context ends. It only reads, from threads of its own; else the last picture stays.

    Attributes:
        ended: set when the run has, or a key ends the view.
        status: newest that was read, None before there is one.
    """

    def __init__(
        self,
        run: Run,
        console: Console,
        keys: Keys | None = None,
        terminal: Terminal | None = None,
        *,
        every_s: float = LOOK_S,
    ) -> None:
        self.ended = threading.Event()
        self._run = run
        self._console = console
        self._keys, self._terminal = keys, terminal
        self._every_s = every_s
        self.status: Status | None = None
        self._phases: Sequence[StartPhase] = ()
        self._began_s = self._heard_s = time.monotonic()
        self._history = History()
        self._changes = Changes(self._began_s)
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> "LiveView":
        if self._console.is_terminal:
            if self._terminal is not None and self._keys is not None:
                self._undo.enter_context(self._terminal)
                if self._terminal.has_keys:
                    self._start("keys", self._read_keys)
            live = Live(get_renderable=self.picture, console=self._console, refresh_per_second=REFRESHES_PER_S)
            self._undo.enter_context(live)
        self._undo.callback(self._look)  # for the last picture
        self._start("live-view", self._watch)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._undo.close()

    def _start(self, name: str, body: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=body, name=name, daemon=True))
        self._threads[-1].start()

    def _watch(self) -> None:
        """Look until the context ends: the body of the thread "live-view"."""
        while not self._stop.is_set():
            self._look()
            self._stop.wait(self._every_s)

    def _look(self) -> None:
        self.poll()
        if not self._console.is_terminal:
            self.print_change()

    def _read_keys(self) -> None:
        """Take keys until the context ends: the body of the thread "keys"."""
        assert self._keys is not None and self._terminal is not None
        while not self._stop.is_set():
            try:
                pressed = self._terminal.read(LOOK_S)
            except (EOFError, OSError, ValueError):  # the terminal was closed
                return
            for key in pressed:
                status = self.status
                self._keys.press(key, [row["learner"] for row in status["learners"]] if status else [])
            if self._keys.done:
                self.ended.set()

    def print_change(self) -> None:
        """Print the line that is due, if something has changed."""
        if line := self._changes.look(self._current(), self._phases, time.monotonic()):
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def picture(self) -> RenderableType:
        """Draw what is known now."""
        status, width = self._current(), self._console.width
        told: list[RenderableType] = []
        if status is None:
            since = format_duration(time.monotonic() - self._began_s)
            told = [Text.assemble(("starting", "bold cyan"), (f"  {since}", "dim")), draw_phases(self._phases)]
        else:
            curves = self._history.curves()
            told = [render(status, width, curves=curves, phases=self._phases)]
        if self._terminal is not None and self._terminal.has_keys and self._keys is not None:
            told.append(Text(self._keys.words, style="dim"))
        return Group(*told)

    def _current(self) -> Status | None:
        """Return the last status; when it has become old, with a word about that instead of an estimate."""
        quiet_s = time.monotonic() - self._heard_s
        if self.status is None or self.status["state"] != "running" or quiet_s < QUIET_S:
            return self.status
        waiting = f"the syncer, which has said nothing for {format_duration(quiet_s)}"
        return {**self.status, "state": SILENT, "waiting_for": waiting}

    def poll(self) -> None:
        """Look at the run; keep the last status when that fails."""
        with contextlib.suppress(OSError, ValueError):
            self._phases = self._run.phases()
        try:
            status = self._run.status()
        except (OSError, ValueError):  # TransportError is an OSError
            return
        if not isinstance(status, Mapping) or "learners" not in status:
            return
        if status != self.status:
            self._heard_s = time.monotonic()
        self._history.add(status)
        self.status = status
        if status["state"] in (*ENDED, NOT_RUNNING):
            self.ended.set()
