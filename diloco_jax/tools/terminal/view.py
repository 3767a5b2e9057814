"""The live view of a run: a picture on a terminal, and a line for each change elsewhere."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from diloco_jax.runtime.figures.forms import format_duration
from diloco_jax.runtime.records.files import STATUS_FILE
from diloco_jax.runtime.records.liveness import ENDED, NOT_RUNNING, QUIET_S, SILENT, StartPhase, read_phases
from diloco_jax.tools.terminal.changes import Changes
from diloco_jax.tools.terminal.picture import History, draw_phases, render

REFRESHES_PER_S = 4
# Time between two readings of a run's files.
LOOK_S = 0.5
# Time between two readings of a run whose syncer may have to be asked over the network.
WATCH_S = 1.0
SHOW_CURSOR = b"\x1b[?25h"

Status = Mapping[str, Any]


class Run(NamedTuple):
    """Two functions that read a run for a view; both may raise OSError or ValueError if there is nothing to read."""

    status: Callable[[], Status]
    phases: Callable[[], Sequence[StartPhase]]


def run_in(run_dir: Path) -> Run:
    """Return functions that read the status and the phases of a run from the files in its folder."""

    def status() -> Status:
        return json.loads((run_dir / STATUS_FILE).read_text(encoding="utf-8"))

    return Run(status, lambda: read_phases(run_dir))


def show_cursor(console: Console) -> None:
    """Show the cursor of a terminal again, for a process that ends while the live view hides it."""
    if console.is_terminal:
        # A signal handler calls this, so it must not wait for the console's lock.
        with contextlib.suppress(OSError, ValueError):
            os.write(console.file.fileno(), SHOW_CURSOR)


class LiveView:
    """A view of a run that lasts as long as its context; it only reads, in a separate thread.

    When the context ends, the last picture stays on the terminal.

    Attributes:
        ended: set when the run has ended.
        status: the newest status that was read; None before the first.
    """

    def __init__(self, run: Run, console: Console, *, every_s: float = LOOK_S) -> None:
        self.ended = threading.Event()
        self._run = run
        self._console = console
        self._every_s = every_s
        self.status: Status | None = None
        self._phases: Sequence[StartPhase] = ()
        self._began_s = self._heard_s = time.monotonic()
        self._history = History()
        self._changes = Changes(self._began_s)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="live-view", daemon=True)
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> "LiveView":
        if self._console.is_terminal:
            live = Live(get_renderable=self.picture, console=self._console, refresh_per_second=REFRESHES_PER_S)
            self._undo.enter_context(live)
        # The last picture shows how the run ended.
        self._undo.callback(self._look)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()
        self._undo.close()

    def _watch(self) -> None:
        """Read the run until the context ends."""
        while not self._stop.is_set():
            self._look()
            self._stop.wait(self._every_s)

    def _look(self) -> None:
        self.poll()
        if not self._console.is_terminal:
            self.print_change()

    def print_change(self) -> None:
        """Print the line that is due, if something has changed."""
        if line := self._changes.look(self._current(), self._phases, time.monotonic()):
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def picture(self) -> RenderableType:
        """Draw the newest status, or what processes do that have not started to train."""
        status = self._current()
        if status is not None:
            curves, span_s = self._history.curves(), self._history.span_s
            return render(status, self._console.width, curves=curves, span_s=span_s, phases=self._phases)
        since = format_duration(time.monotonic() - self._began_s)
        return Group(Text.assemble(("starting", "bold cyan"), (f"  {since}", "dim")), draw_phases(self._phases))

    def _current(self) -> Status | None:
        """Return the newest status; marked as silent if it has not changed for QUIET_S."""
        quiet_s = time.monotonic() - self._heard_s
        if self.status is None or self.status["state"] != "running" or quiet_s < QUIET_S:
            return self.status
        waiting = f"the syncer, which has said nothing for {format_duration(quiet_s)}"
        return {**self.status, "state": SILENT, "waiting_for": waiting}

    def poll(self) -> None:
        """Read status and phases; keep the previous ones if that fails."""
        with contextlib.suppress(OSError, ValueError):
            self._phases = self._run.phases()
        # TransportError is an OSError.
        try:
            status = self._run.status()
        except (OSError, ValueError):
            return
        if not isinstance(status, Mapping) or "learners" not in status:
            return
        if status != self.status:
            self._heard_s = time.monotonic()
        self._history.add(status)
        self.status = status
        if status["state"] in (*ENDED, NOT_RUNNING):
            self.ended.set()
