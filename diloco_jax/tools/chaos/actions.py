"""Faults done to processes, links and files from outside, and taken back. No program knows of them but the chaos
learner (learner.py), which sends bad values when it is told to.
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
from pathlib import Path
from typing import Any, Protocol

from diloco_jax.protocol.messages import SYNCER
from diloco_jax.runtime.records.files import CHECKPOINTS, CLOCK_FILE, CONFIG_FILE, METRICS_FILE, TAPE_FILE
from diloco_jax.runtime.records.tape_file import Tail
from diloco_jax.runtime.records.telemetry import write_json
from diloco_jax.settings.text import load
from diloco_jax.tools.chaos.relay import Direction, Relay
from diloco_jax.tools.chaos.schedule import ChaosFault
from diloco_jax.transport.trust import certificates

BALLAST, BALLAST_BYTES_MAX = "ballast", 1 << 30
LEFT_BYTES = 32 << 20  # what low-disk leaves
Undo = Callable[[], object]


def block_snapshots(run_dir: Path) -> Undo | None:
    """Put a file in the place of the snapshots' folder."""
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
    """Leave LEFT_BYTES of a disk that has little more than that."""
    size = shutil.disk_usage(run_dir).free - LEFT_BYTES
    if not 0 < size <= BALLAST_BYTES_MAX:
        return None
    path = run_dir / BALLAST
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    return path.unlink


def age_certificate(run_dir: Path) -> Undo | None:
    """Sign the syncer's certificate anew for one day, if the authority's key is beside it."""
    named = load(run_dir / CONFIG_FILE).transport.tls_certificate
    folder = Path(named).parent
    if not named or not (folder / "ca.key").exists():
        return None

    def renew(days: int) -> None:
        now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        certificates.renew(folder, SYNCER, now, now + datetime.timedelta(days=days))

    renew(1)
    return lambda: renew(365)


# by files of the syncer's machine; each returns how to take it back, or None where it cannot be done
HOST_FAULTS: dict[str, Callable[[Path], Undo | None]] = {
    "block-snapshots": block_snapshots,
    "low-disk": fill_small_disk,
    "old-certificate": age_certificate,
}


CHAOS = "chaos"  # folder in a run's folder: orders to chaos learners, and what they saw
RUNS_S, STOPS_S = 0.02, 0.1  # of an island that is slowed down
DONOR_DELAY_S = 0.5  # on the link of a learner that recovers: time enough to hit its donor before all parts are there


class Processes(Protocol):
    """The running processes of a job."""

    def pid(self, name: str) -> int | None:
        """Return the process of an island or of the syncer; None while it has none."""

    def send(self, name: str, number: signal.Signals) -> bool:
        """Send a signal; False if there is no process."""


def order_file(run_dir: Path, name: str) -> Path:
    """Return the file in which a chaos learner reads what to send when SIGUSR1 comes."""
    return run_dir / CHAOS / f"{name}.order.json"


def began_unix_s(run_dir: Path) -> float:
    """Return when the run began; FileNotFoundError before that."""
    clock: dict[str, float] = json.loads((run_dir / CLOCK_FILE).read_text(encoding="utf-8"))
    return clock["began_unix_s"]


class Saboteur:
    """The one who inflicts faults."""

    def __init__(self, run_dir: Path, processes: Processes, relays: Mapping[str, Relay]) -> None:
        self._run_dir = run_dir
        self._processes = processes
        self._relays = relays
        self._undo: dict[int, Undo] = {}  # number of a fault -> how to take it back
        (run_dir / CHAOS).mkdir(parents=True, exist_ok=True)

    def inflict(self, fault: ChaosFault) -> bool:
        """Do it; False, and nothing is done, if its target has no process now."""
        match fault.kind:
            case "kill" | "kill-syncer":
                return self._processes.send(fault.target, signal.SIGKILL)
            case "kill-donor":
                self._change_link(fault, "down", delay_s=DONOR_DELAY_S)
                return self._processes.send(fault.target, signal.SIGKILL)
            case "stop" | "stop-syncer":
                return self._stop(fault)
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
        """End a fault that lasts; nothing if it is over already."""
        with contextlib.suppress(ProcessLookupError):  # it died meanwhile
            self._undo.pop(number, lambda: None)()

    def take_back_all(self) -> None:
        """End all faults: the run is over, and a stopped process could not hear of it."""
        for number in list(self._undo):
            self.take_back(number)

    def _order(self, target: str, **order: Any) -> bool:
        write_json(order_file(self._run_dir, target), order)
        return self._processes.send(target, signal.SIGUSR1)

    def _slow_down(self, fault: ChaosFault) -> bool:
        """Let the island run for RUNS_S, again and again, with a stop of STOPS_S between."""
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
            if self._processes.pid(fault.target) == pid:  # a later process of that name was not stopped
                self._processes.send(fault.target, signal.SIGCONT)

        self._undo[fault.number] = go_on
        return True

    def _fill_disk(self, fault: ChaosFault) -> bool:
        """Let no file of the process grow beyond what its tape and metrics are now."""
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
    """Return who has sent this learner a part of a state, by what is new on the tape; an empty string if nobody has."""
    for line in tape.lines():
        if line.startswith(b'["StatePart"'):
            _, _, donor, _, receiver, *_ = json.loads(line)
            if receiver == learner:
                return str(donor)
    return ""
