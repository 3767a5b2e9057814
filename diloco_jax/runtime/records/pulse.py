"""Signs of life of a loop: files for probes, and the end of a process whose loop hangs.

A collective that lost its partner, a callback that never returns or a disk that does not answer blocks a thread
forever, and nothing can interrupt it. So the process writes the stacks of all threads to its log and ends, and its
supervisor starts it again. An island that is a thread ends its whole process. The probes of `diloco launch` read the
files NAME.alive, NAME.ready and NAME.phase below `health` in the run's folder (docs/troubleshooting.md).
"""

import contextlib
import faulthandler
import logging
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from diloco_jax.runtime.records.files import HEALTH
from diloco_jax.runtime.records.liveness import repeats, tell_phase
from diloco_jax.runtime.records.signals import HUNG, end_now
from diloco_jax.settings.run import WatchdogConfig

MEDIAN_OF = 32  # last steps
# Pause between two looks at a loop, and between two touches of its file, in seconds.
TICK_S = 1.0
# A hanging process has this long for its last message.
FAREWELL_S = 3.0

log = logging.getLogger(__name__)


class Patience:
    """The limit for the time from one beat of a loop to the next.

    One thread beats, another counts. Only counted time passes. So a process that was stopped, as on a closed laptop or
    in a debugger, has as much time left as before.
    """

    def __init__(self, config: WatchdogConfig) -> None:
        self._config = config
        self._last_s: deque[float] = deque(maxlen=MEDIAN_OF)
        self._usual_s: float | None = None
        # (number of the beat, seconds until the next one is late)
        self._now = (0, config.bound_s(None))
        # The next beat may take long.
        self.long = True
        # (beat that the counting thread has seen, seconds since then)
        self._counted = (0, 0.0)

    def beat(self, took_s: float | None = None) -> None:
        """Note progress, and the seconds of a step that is done."""
        if took_s is not None:
            self._last_s.append(took_s)
            self._usual_s = median(self._last_s)
        self.long = self._usual_s is None
        self._now = (self._now[0] + 1, self._config.bound_s(self._usual_s))

    def wait(self, bound_s: float) -> None:
        """Note progress, and allow `bound_s` seconds until the next beat."""
        self.long = True
        self._now = (self._now[0] + 1, bound_s)

    def count(self, elapsed_s: float) -> str:
        """Count the time since the last call; return a description if the loop hangs, else ""."""
        (number, bound_s), (seen, waited_s) = self._now, self._counted
        waited_s = 0.0 if number != seen else waited_s + min(elapsed_s, 2 * TICK_S)
        self._counted = (number, waited_s)
        if waited_s <= bound_s:
            return ""
        usual = "" if self._usual_s is None else f" (the median of its last steps is {self._usual_s:.2f} s)"
        return f"no progress for {waited_s:.0f} s, more than the {bound_s:.0f} s of watchdog.*{usual}"


@dataclass(eq=False)
class Pulse:
    """Signs of life of one loop; its own thread calls `beat`, `patient` and `rest`."""

    config: WatchdogConfig
    # The loop's name in the log.
    what: str
    # Folder and name of the loop's files; None for a loop without files.
    files: tuple[Path, str] | None

    def __post_init__(self) -> None:
        # It may take FAREWELL_S before the process ends.
        self.last_word: Callable[[str], object] = lambda reason: None
        self._patience = Patience(self.config)
        self._alive = self._ready = None
        self._is_ready: bool | None = None
        self._touched_s = 0.0
        self._phase = self._words = ""
        # When the phase and its words began, and how often the log has repeated it.
        self._phase_s = self._words_s = 0.0
        self._repeated = 0
        self._over = threading.Event()
        if self.files is not None:
            folder = self.files[0] / HEALTH
            self._alive, self._ready = (folder / f"{self.files[1]}.{kind}" for kind in ("alive", "ready"))
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
            self._touch()
            self.ready(False)
        # The thread does not keep the pulse alive: an object whose loop never ran, or failed, must not end its process.
        threading.Thread(target=_watch, args=(weakref.ref(self), self._over), name="watchdog", daemon=True).start()

    def beat(self, took_s: float | None = None) -> None:
        """Note progress, and the seconds of a step that is done."""
        self._patience.beat(took_s)
        self._touch()

    def patient(self) -> None:
        """Note progress; the time until the next beat may be long."""
        self._patience.wait(self.config.bound_s(None))
        self._touch()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Watch a part of a user's loop, and be patient with the code after it."""
        self.beat()
        try:
            yield
        except BaseException:
            # The loop decides what happens to the process now.
            self.rest()
            raise
        self.patient()

    def rest(self) -> None:
        """Allow any time until the next beat, because there is nothing to do."""
        self._patience.wait(float("inf"))

    def phase(self, words: str) -> None:
        """Write the phase of the process before the loop is ready."""
        before, self._phase = self._phase, words.partition(",")[0]
        self._words, self._words_s = words, time.monotonic()
        # Counts after the comma are for the phase file, and for `_repeat`.
        if self._phase != before:
            self._phase_s, self._repeated = self._words_s, 0
            if self._phase:
                log.info(self._phase)
        if self.files is not None and not (words and self._is_ready):
            tell_phase(*self.files, words)

    def ready(self, is_ready: bool) -> None:
        """Note whether the loop is connected and trains, or listens."""
        if self._ready is None or is_ready == self._is_ready:
            return
        with contextlib.suppress(OSError):
            if is_ready:
                self._ready.touch()
                self.phase("")
            else:
                self._ready.unlink(missing_ok=True)
            self._is_ready = is_ready

    def close(self) -> None:
        self._over.set()
        self.ready(False)
        self.phase("")

    def _touch(self) -> None:
        now_s = time.monotonic()
        if self._alive is None or now_s < self._touched_s + TICK_S:
            return
        self._touched_s = now_s
        # A full disk must not stop the loop.
        with contextlib.suppress(OSError):
            self._alive.touch()

    def look(self, elapsed_s: float) -> None:
        """Count the time since the last look, and end the process if its loop hangs."""
        if reason := self._patience.count(elapsed_s):
            self._end(reason)
        if self._patience.long:
            self._touch()
        self._repeat(time.monotonic())

    def _repeat(self, now_s: float) -> None:
        """Log a phase again if it lasts, so that people see that the process works."""
        if self.files is None or self._is_ready or not self._words:
            return
        if repeats(now_s - self._phase_s) > self._repeated:
            self._repeated = repeats(now_s - self._phase_s)
            log.info(f"{self._words}, for {now_s - self._words_s:.0f} s")

    def _end(self, reason: str) -> None:
        if sys.__stderr__ is not None:
            faulthandler.dump_traceback(sys.__stderr__)
        farewell = threading.Thread(target=self.last_word, args=(f"{self.what} hung: {reason}",), daemon=True)
        farewell.start()
        farewell.join(FAREWELL_S)
        log.error(f"{self.what} hangs: {reason}; the stacks of its threads are above, the process ends to start again")
        end_now(HUNG)


def _watch(watched: "weakref.ref[Pulse]", over: threading.Event) -> None:
    last_s = time.monotonic()
    while not over.wait(TICK_S):
        now_s = time.monotonic()
        pulse = watched()
        # Nobody holds the pulse any more, so no loop beats it.
        if pulse is None:
            return
        pulse.look(now_s - last_s)
        last_s = now_s
        del pulse
