"""The processes of a local run, as their supervisor sees them; those of an island live and die together."""

import re
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diloco_jax.runtime.records.signals import FAILED, HUNG, INTERRUPTED, WRONG_INPUT

BRIEF_S = 20.0  # of lives in a row that are shorter, each is followed by twice the wait of the one before
DELAY_MAX_S = 60.0  # for which a process waits at most, if the config does not say more
STEADY_S = 600.0  # after a life that was longer, failures are counted anew
# last words of a program that Python could not load
UNLOADABLE = re.compile(r"(ModuleNotFoundError|ImportError|SyntaxError|IndentationError)\b")
GRACE_S = 5.0  # for the rest of an island to end by itself, once one of its processes has


@dataclass(slots=True)
class Process:
    """One process and its log."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def describe_exit(self) -> str:
        """Say how it ended, and repeat its last line."""
        code = self.process.returncode
        killed = code is not None and code < 0
        how = f"killed by {signal.Signals(-code).name}" if killed else f"ended with status {code}"
        last = "; its last line was" if killed else ""
        return f"{self.name} {how}{last}: {self.last_line()} (log: {self.log})"

    def last_line(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        said = [line for line in lines[-4:] if not line.startswith(("-----", "For simplicity, JAX has removed"))]
        return said[-1][:400] if said else "it said nothing"


@dataclass(slots=True)
class Child:
    """The syncer, or an island, and what is known of it."""

    name: str  # of the learner, or "syncer"
    hosts: Sequence[Process]  # its processes; the first one leads
    starts: int = 1  # how often it was started
    failures: int = 0  # since it lived for a while
    brief: int = 0  # lives in a row that were brief
    again_at_s: float | None = None  # when to start it again
    left: bool = False  # it ended politely, and is not started again
    failed: bool = False  # given up
    first: Process | None = None  # the process that ended first, which is why the others did
    _began_s: float = field(default_factory=time.monotonic)
    _ended_s: float = field(default=0.0)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self.hosts[0].process

    def start_again(self, hosts: Sequence[Process]) -> None:
        """Put other processes in the place of those that ended."""
        self.hosts, self.first, self.again_at_s = hosts, None, None
        self.starts += 1
        self._began_s = time.monotonic()

    def mourn(self, delay_s: float) -> None:
        """Note that it ended too early, and starts again after `delay_s`: later each time while its lives are brief."""
        lived_s = self._ended_s - self._began_s
        self.brief = self.brief + 1 if lived_s < BRIEF_S else 1
        # else it was asked to end, as by a preemption notice, perhaps before it could hear
        failed = self.poll() not in (INTERRUPTED, -signal.SIGTERM)
        self.failures = failed + (0 if lived_s > STEADY_S else self.failures)
        self.again_at_s = time.monotonic() + pause_s(delay_s, self.brief)

    @property
    def unloadable(self) -> bool:
        """Tell whether it ended because Python could not load its program, which another start does not change."""
        return self.poll() == FAILED and bool(UNLOADABLE.match((self.first or self.hosts[0]).last_line()))

    def poll(self) -> int | None:
        """Return the exit status once all processes have ended; after the first, kill the others in a moment."""
        codes = [each.process.poll() for each in self.hosts]
        ended = [each for each, code in zip(self.hosts, codes, strict=True) if code is not None]
        if ended and self.first is None:
            # Of those that ended since we looked, who was killed did not end because of another.
            self.first = min(ended, key=lambda each: (each.process.returncode >= 0, each.process.returncode == 0))
            self._ended_s = time.monotonic()
        if None not in codes:
            return self._status([code for code in codes if code is not None])
        if ended and time.monotonic() > self._ended_s + GRACE_S:
            self.signal(signal.SIGKILL)
        return None

    def _status(self, codes: Sequence[int]) -> int:
        for cause in (WRONG_INPUT, HUNG):  # whoever found it, the others only lost a host
            if cause in codes:
                self.first = self.hosts[codes.index(cause)]
                return cause
        assert self.first is not None
        return int(self.first.process.returncode) or next((code for code in codes if code), 0)

    @property
    def log(self) -> Path:
        return self.hosts[0].log

    def signal(self, number: signal.Signals) -> None:
        for each in self.hosts:
            if each.process.poll() is None:
                each.process.send_signal(number)

    def wait(self, timeout_s: float) -> None:
        """Wait until all have ended; kill those that have not by then."""
        ends_s = time.monotonic() + timeout_s
        for each in self.hosts:
            try:
                each.process.wait(timeout=max(0.0, ends_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.signal(signal.SIGKILL)
                each.process.wait()

    def describe_exit(self) -> str:
        return (self.first or self.hosts[0]).describe_exit()


def pause_s(delay_s: float, brief: int) -> float:
    """Return the seconds until the next start, after so many brief lives in a row; `delay_s` after the first."""
    return min(delay_s * 2.0 ** min(brief - 1, 30), max(delay_s, DELAY_MAX_S))


def free_address() -> str:
    """Find an address of this machine at which nobody listens now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"
