"""Actions of faults: they act on processes, links and files from outside, and are undone at the end of a fault.

Only the chaos learner (learner.py) knows of faults, because it sends bad values on order.
"""

import contextlib
import datetime
import json
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from diloco_jax.protocol.messages import SYNCER
from diloco_jax.runtime.records.files import CHAOS, CHECKPOINTS, CLOCK_FILE, CONFIG_FILE, METRICS_FILE, TAPE_FILE
from diloco_jax.runtime.records.tape_file import Tail
from diloco_jax.runtime.records.telemetry import write_json
from diloco_jax.settings.text import load
from diloco_jax.tools.chaos.relay import Direction, Relay
from diloco_jax.tools.chaos.schedule import ChaosFault

BALLAST, BALLAST_BYTES_MAX = "ballast", 1 << 30
# The free space that low-disk leaves.
LEFT_BYTES = 32 << 20
Undo = Callable[[], object]


def block_snapshots(run_dir: Path) -> Undo | None:
    """Replace the snapshots' folder with a file; None if there is no such folder."""
    folder, away = run_dir / CHECKPOINTS, run_dir / f"{CHECKPOINTS}.away"
    if not folder.is_dir():
        return None
    folder.rename(away)
    folder.touch()

    def undo() -> None:
        folder.unlink()
        away.rename(folder)

    return undo


def fill_small_disk(run_dir: Path) -> Undo | None:
    """Fill a disk until LEFT_BYTES are free; None if too little or too much is free."""
    size = shutil.disk_usage(run_dir).free - LEFT_BYTES
    if not 0 < size <= BALLAST_BYTES_MAX:
        return None
    path = run_dir / BALLAST
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    return path.unlink


def age_certificate(run_dir: Path) -> Undo | None:
    """Replace the syncer's certificate by one that is valid for one day; None without the authority's key."""
    named = load(run_dir / CONFIG_FILE).transport.tls_certificate
    folder = Path(named).parent
    if not named or not (folder / "ca.key").exists():
        return None
    # Plaintext does not need the package that this module needs.
    from diloco_jax.transport.trust import certificates

    def renew(days: int) -> None:
        now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        certificates.renew(folder, SYNCER, now, now + datetime.timedelta(days=days))

    renew(1)
    return lambda: renew(365)


# Faults of the syncer's files. Each function returns a function that undoes it, or None if it cannot be inflicted.
HOST_FAULTS: dict[str, Callable[[Path], Undo | None]] = {
    "block-snapshots": block_snapshots,
    "low-disk": fill_small_disk,
    "old-certificate": age_certificate,
}


# A slowed island runs and stops alternately for these times.
RUNS_S, STOPS_S = 0.02, 0.1
# The delay of a recovering learner's link, so that its donor can be killed before all parts have arrived.
DONOR_DELAY_S = 0.5


class Processes(Protocol):
    """The running processes of a job."""

    def pid(self, name: str) -> int | None:
        """Return the process id of an island or of the syncer; None if it has no process."""

    def send(self, name: str, number: signal.Signals) -> bool:
        """Send a signal; False if there is no process."""

    def slice_of(self, island: str, number: int) -> str:
        """Return the name of the process of one slice, whose number is taken modulo their count."""


def order_file(run_dir: Path, name: str) -> Path:
    """Return the file with a chaos learner's order, which it reads on SIGUSR1."""
    return run_dir / CHAOS / f"{name}.order.json"


def began_unix_s(run_dir: Path) -> float:
    """Return the start of the run in Unix time; FileNotFoundError before the start."""
    clock: dict[str, float] = json.loads((run_dir / CLOCK_FILE).read_text(encoding="utf-8"))
    return clock["began_unix_s"]


class Saboteur:
    """The actions of faults, which `inflict` performs and `take_back` undoes."""

    def __init__(self, run_dir: Path, processes: Processes, relays: Mapping[str, Relay]) -> None:
        self._run_dir = run_dir
        self._processes = processes
        self._relays = relays
        # The functions that undo lasting faults, by the fault's number.
        self._undo: dict[int, Undo] = {}
        (run_dir / CHAOS).mkdir(parents=True, exist_ok=True)

    def inflict(self, fault: ChaosFault) -> bool:
        """Inflict a fault; return False, without any effect, if it is impossible now, such as without a process."""
        match fault.kind:
            case "kill" | "kill-syncer":
                return self._processes.send(fault.target, signal.SIGKILL)
            case "kill-donor":
                self._change_link(fault, "down", delay_s=DONOR_DELAY_S)
                return self._processes.send(fault.target, signal.SIGKILL)
            case "stop" | "stop-syncer":
                return self._stop(fault)
            case "kill-slice":
                return self._processes.send(self._processes.slice_of(fault.target, fault.amount), signal.SIGKILL)
            case "stop-slice":
                return self._stop(replace(fault, target=self._processes.slice_of(fault.target, fault.amount)))
            case "full-disk":
                return self._fill_disk(fault)
            case "nan":
                return self._order(fault.target, values=fault.amount, how=fault.how)
            case "bad-loss" | "wrong-clock":
                self._undo[fault.number] = lambda: self._order(fault.target)
                return self._order(fault.target, bad_loss=fault.kind == "bad-loss", ahead_s=fault.amount)
            case "slow":
                return self._slow_down(fault)
            case "block-snapshots" | "low-disk" | "old-certificate":
                undo = HOST_FAULTS[fault.kind](self._run_dir)
                if undo is not None:
                    self._undo[fault.number] = undo
                return undo is not None
            case "cut":
                return self._relays[fault.target].cut("rst" if fault.how == "rst" else "fin") > 0
            case "corrupt":
                self._relays[fault.target].damage(fault.direction, flip_after=fault.amount)
            case "duplicate":
                self._relays[fault.target].damage(fault.direction, repeat=fault.amount)
            case "black-hole":
                self._change_link(fault, fault.direction, hold=True)
            case "slow-link":
                self._change_link(fault, "both", bytes_per_s=float(fault.amount), delay_s=0.1)
        return True

    def take_back(self, number: int) -> None:
        """End a lasting fault; do nothing if it has ended already."""
        # The target may have been killed in the meantime.
        with contextlib.suppress(ProcessLookupError):
            self._undo.pop(number, lambda: None)()

    def take_back_all(self) -> None:
        """End all faults, because a stopped process could not finish at the end of the run."""
        for number in list(self._undo):
            self.take_back(number)

    def _order(self, target: str, **order: Any) -> bool:
        write_json(order_file(self._run_dir, target), order)
        return self._processes.send(target, signal.SIGUSR1)

    def _slow_down(self, fault: ChaosFault) -> bool:
        """Stop the island for STOPS_S after every RUNS_S, until the fault is undone."""
        over = threading.Event()

        def pulse() -> None:
            while not over.wait(RUNS_S) and self._processes.send(fault.target, signal.SIGSTOP):
                over.wait(STOPS_S)
                self._processes.send(fault.target, signal.SIGCONT)

        thread = threading.Thread(target=pulse, name=f"slow {fault.target}")

        def undo() -> None:
            over.set()
            thread.join()

        self._undo[fault.number] = undo
        thread.start()
        return True

    def _change_link(self, fault: ChaosFault, direction: Direction, **weather: Any) -> None:
        relay = self._relays[fault.target]
        relay.change(direction, **weather)
        self._undo[fault.number] = relay.heal

    def _stop(self, fault: ChaosFault) -> bool:
        pid = self._processes.pid(fault.target)
        if pid is None or not self._processes.send(fault.target, signal.SIGSTOP):
            return False

        def go_on() -> None:
            # A later process with this name was not stopped.
            if self._processes.pid(fault.target) == pid:
                self._processes.send(fault.target, signal.SIGCONT)

        self._undo[fault.number] = go_on
        return True

    def _fill_disk(self, fault: ChaosFault) -> bool:
        """Limit the size of the process's files to the present sizes of tape and metrics."""
        pid = self._processes.pid(fault.target)
        if pid is None:
            return False
        size = min(os.stat(self._run_dir / name).st_size for name in (TAPE_FILE, METRICS_FILE))
        soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))

        def free() -> None:
            if self._processes.pid(fault.target) == pid:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))

        self._undo[fault.number] = free
        return True


def next_donor(tape: Tail, learner: str) -> str:
    """Return the donor that sent a learner a part of a state, from new lines of the tape; "" if there is none."""
    for line in tape.lines():
        if line.startswith(b'["StatePart"'):
            _, _, donor, _, receiver, *_ = json.loads(line)
            if receiver == learner:
                return str(donor)
    return ""
