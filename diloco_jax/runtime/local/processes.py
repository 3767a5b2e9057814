"""The processes of a local run for their supervisor; the processes of one island start and end together."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from diloco_jax.runtime.records.signals import FAILED, HUNG, WRONG_INPUT, after_end

# The delay before a restart doubles while a process keeps failing within this time.
BRIEF_S = 20.0
# The longest delay before a restart, unless the config sets a longer one.
DELAY_MAX_S = 60.0
# The count of failures restarts after a process has run for so long.
STEADY_S = 600.0
# The exception of a program that Python could not load.
UNLOADABLE = re.compile(r"(ModuleNotFoundError|ImportError|SyntaxError|IndentationError)\b")
# When a process of an island has ended, the others have so long to end by themselves.
GRACE_S = 5.0
# Lines before tracebacks that do not end a process, and how many lines may follow one that does.
HANDLED, EXIT_LINES = re.compile("Exception ignored|Exception in thread|Process |--- Logging error"), 8
# A process that waits computes less than this in minutes, for its clocks and threads.
COMPUTED_S = 1.0
# How much of a log's end is read for the reason of an end, and how much of it is shown, in characters.
READ_BYTES, TEXT_MAX = 1 << 20, 400


class Handle(Protocol):
    """Handle of a process, with what the supervisor uses of a subprocess.Popen; on another machine too."""

    @property
    def pid(self) -> int: ...
    @property
    def stdin(self) -> IO[bytes] | None: ...
    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


@dataclass(slots=True)
class Process:
    """One process and its log."""

    name: str
    process: Handle
    log: Path
    # Where the lines of this process begin in its log.
    log_begins: int = 0

    def describe_exit(self) -> str:
        """Describe how the process ended, with its exception or its last line."""
        code = self.process.returncode
        killed = code is not None and code < 0
        how = f"killed by {signal.Signals(-(code or 0)).name}" if killed else f"ended with status {code}"
        last = "; its last line was" if killed else ""
        return f"{self.name} {how}{last}: {self.reason()} (log: {self.log})"

    def reason(self) -> str:
        """Return the exception that ended the process, else its last line."""
        lines = self._lines() if self.process.returncode == FAILED else []
        begins = [
            number
            for number, line in enumerate(lines)
            if line.startswith("Traceback (most recent call last)") and not HANDLED.match(lines[max(number - 1, 0)])
        ]
        after = [line for line in lines[begins[-1] + 1 :] if line.strip() and not line[0].isspace()] if begins else []
        # What Python runs at its exit may write a few lines. After more the exception has not ended the process.
        return after[0][:TEXT_MAX] if 0 < len(after) <= EXIT_LINES else self.last_line()

    def last_line(self) -> str:
        lines = self._lines()
        said = [line for line in lines[-4:] if not line.startswith(("-----", "For simplicity, JAX has removed"))]
        return said[-1][:TEXT_MAX] if said else "it printed nothing"

    def _lines(self) -> list[str]:
        with self.log.open("rb") as file:
            file.seek(max(self.log_begins, file.seek(0, os.SEEK_END) - READ_BYTES))
            return file.read().decode("utf-8", "replace").strip().splitlines()


class Machines(Protocol):
    """Machines where the islands of a run start, beside the machine of its supervisor."""

    def describe(self) -> str:
        """Return one line about the machines and the islands."""
        ...

    def start(self, name: str, address: str, incarnation: str) -> Sequence[Process]:
        """Start an incarnation of an island, or wait for a machine; `address` is that of the syncer."""
        ...

    def watch(self, stop: threading.Event) -> None:
        """Set `stop` if the machines cannot be reached any more."""
        ...


class Silence:
    """Counts the seconds since a starting process has computed or written to its log.

    A start on a busy machine may take many times as long as on an idle one, so its duration says nothing.
    """

    def __init__(self, watched: Process) -> None:
        self.watched = watched
        self._seen = self._look()
        self._since_s = time.monotonic()

    def seconds(self) -> float:
        """Return the seconds since the last sign of progress; call it every few seconds at least."""
        used_s, written = self._look()
        if used_s >= self._seen[0] + COMPUTED_S or written != self._seen[1]:
            self._seen, self._since_s = (used_s, written), time.monotonic()
        return time.monotonic() - self._since_s

    def ended(self) -> bool:
        return self.watched.process.poll() is not None

    def _look(self) -> tuple[float, int]:
        """Return the used processor time and the size of the log; 0 for what the system does not tell."""
        used_s, written = 0.0, 0
        with contextlib.suppress(OSError, ValueError):
            fields = Path(f"/proc/{self.watched.process.pid}/stat").read_text(encoding="ascii", errors="replace")
            user, system = fields.rpartition(")")[2].split()[11:13]
            used_s = (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
        with contextlib.suppress(OSError):
            written = self.watched.log.stat().st_size
        return used_s, written


@dataclass(slots=True)
class Child:
    """The syncer or an island: its processes, and the history of its failures."""

    # Name of the learner, or "syncer".
    name: str
    # The first process leads.
    hosts: Sequence[Process]
    starts: int = 1
    # Failures since it last ran for STEADY_S.
    failures: int = 0
    # Consecutive ends within BRIEF_S of the start.
    brief: int = 0
    # Time of the next start; None if none is planned.
    again_at_s: float | None = None
    # It left the run, and is not restarted.
    left: bool = False
    # It is given up.
    failed: bool = False
    # The process that ended first. The others ended because of it.
    first: Process | None = None
    _began_s: float = field(default_factory=time.monotonic)
    _ended_s: float = field(default=0.0)

    @property
    def process(self) -> Handle:
        return self.hosts[0].process

    def start_again(self, hosts: Sequence[Process]) -> None:
        """Replace the processes that ended."""
        self.hosts, self.first, self.again_at_s = hosts, None, None
        self.starts += 1
        self._began_s = time.monotonic()

    def plan_restart(self, delay_s: float) -> None:
        """Count a failure and plan the next start after `delay_s`, or later if it keeps failing soon after starts."""
        lived_s = self._ended_s - self._began_s
        self.brief = self.brief + 1 if lived_s < BRIEF_S else 1
        # Another process, such as a preemption notice, may have asked it to end. That is not a failure.
        status = self.poll()
        failed = status is None or after_end(status).failed
        self.failures = failed + (0 if lived_s > STEADY_S else self.failures)
        self.again_at_s = time.monotonic() + pause_s(delay_s, self.brief)

    @property
    def unloadable(self) -> bool:
        """Tell whether Python could not load its program, so that a restart would fail as well."""
        return self.poll() == FAILED and bool(UNLOADABLE.match((self.first or self.hosts[0]).reason()))

    def poll(self) -> int | None:
        """Return the exit status once all processes have ended; kill the others GRACE_S after the first has ended."""
        codes = [each.process.poll() for each in self.hosts]
        ended = [each for each, code in zip(self.hosts, codes, strict=True) if code is not None]
        if ended and self.first is None:
            # A process that was killed did not end because of another one.
            self.first = min(
                ended, key=lambda each: ((each.process.returncode or 0) >= 0, each.process.returncode == 0)
            )
            self._ended_s = time.monotonic()
        if None not in codes:
            return self._status([code for code in codes if code is not None])
        if ended and time.monotonic() > self._ended_s + GRACE_S:
            self.signal(signal.SIGKILL)
        return None

    def _status(self, codes: Sequence[int]) -> int:
        # The process with such a status caused the end. The others only lost a host.
        for cause in (WRONG_INPUT, HUNG):
            if cause in codes:
                self.first = self.hosts[codes.index(cause)]
                return cause
        assert self.first is not None
        return int(self.first.process.returncode or 0) or next((code for code in codes if code), 0)

    @property
    def log(self) -> Path:
        return self.hosts[0].log

    def signal(self, number: signal.Signals) -> None:
        for each in self.hosts:
            if each.process.poll() is None:
                each.process.send_signal(number)

    def wait(self, timeout_s: float) -> None:
        """Wait until all processes have ended, and kill those that are left after `timeout_s`."""
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
    """Return the seconds until the next start after `brief` consecutive failures soon after a start."""
    return min(delay_s * 2.0 ** min(brief - 1, 30), max(delay_s, DELAY_MAX_S))


def free_address() -> str:
    """Return a free address of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"
