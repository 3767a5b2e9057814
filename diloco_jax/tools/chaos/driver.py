"""The thread that inflicts the faults of a schedule while a job runs, and follows the recovery from each."""

import json
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from diloco_jax.protocol.messages import SYNCER
from diloco_jax.runtime.records.files import CHAOS, FAULTS_FILE, METRICS_FILE, TAPE_FILE
from diloco_jax.runtime.records.tape_file import LineFile, Tail
from diloco_jax.runtime.records.thinning import RecordTail
from diloco_jax.tools.chaos.actions import Processes, Saboteur, began_unix_s, next_donor
from diloco_jax.tools.chaos.ledger import Ledger
from diloco_jax.tools.chaos.schedule import ChaosFault

POLL_S = 0.02
# A fault is inflicted only if at least this many leases are left of the run.
HEAL_SILENCES = 3.0
# The time that a killed learner has to start its recovery.
HUNT_S = 600.0
# The fields of a fault that are recorded for `scripts/twin/compare`.
DETAILS = ("at_step", "duration_s", "direction", "how", "amount")


class Driver:
    """A driver of a schedule: it inflicts each fault when the fault is due, and its target and enough islands are well.

    Args:
        islands: names of all islands; at least one island stays well at any time.
        silence_s: an island that is silent for this time counts as lost.
    """

    def __init__(
        self,
        schedule: Sequence[ChaosFault],
        islands: Sequence[str],
        steps: int,
        silence_s: float,
        run_dir: Path,
        processes: Processes,
        saboteur: Saboteur,
        say: Callable[[str], None],
    ) -> None:
        self._schedule = schedule
        self._waiting = list(schedule)
        self._islands = islands
        self._steps = steps
        self._run_dir = run_dir
        self._processes = processes
        self._saboteur = saboteur
        self._say = say
        self.ledger = Ledger(silence_s)
        self.inflicted = 0
        self._metrics = RecordTail(run_dir / METRICS_FILE)
        self._book = LineFile(run_dir / CHAOS / FAULTS_FILE)
        # Lasting faults with the time of their end.
        self._lasting: list[tuple[float, ChaosFault]] = []
        # Waits for a donor to kill: (when to give up, fault, tape that will name the donor).
        self._hunts: list[tuple[float, ChaosFault, Tail]] = []
        # The indices of recoveries that were announced.
        self._told: set[int] = set()
        # The start of the run; 0 if unknown.
        self._began_unix_s = 0.0
        # The longest of all recoveries and of the run's start.
        self._slowest_s = 0.0
        self._heal_s = HEAL_SILENCES * silence_s

    @property
    def skipped(self) -> int:
        """Return the number of faults that the run was too short for."""
        return len(self._schedule) - self.inflicted

    def run(self, stop: threading.Event) -> None:
        """Inflict faults until `stop` is set, then end all faults."""
        try:
            while not stop.is_set():
                self.poll()
                stop.wait(POLL_S)
        finally:
            self._saboteur.take_back_all()

    def conclude(self) -> None:
        """Read the last records after the end of the run, and end all faults."""
        self._read()
        self._saboteur.take_back_all()
        self.ledger.close()
        self._announce()
        self._book.close()

    def poll(self) -> None:
        """Read new records, end the faults that are over, and inflict the next fault if it is due."""
        self._read()
        if not self._began_unix_s:
            try:
                self._began_unix_s = began_unix_s(self._run_dir)
            except FileNotFoundError:
                return
        now_s = self._now_s()
        if self.ledger.finished:
            self._saboteur.take_back_all()
            return
        for due_s, fault in self._lasting:
            if now_s >= due_s:
                self._saboteur.take_back(fault.number)
                self.ledger.end(fault, now_s)
                self._write("end", now_s, fault, fault.target)
        self._lasting = [each for each in self._lasting if each[0] > now_s]
        for hunt in list(self._hunts):
            self._follow(hunt, now_s)
        self._announce()
        if self._waiting and self._may_begin(self._waiting[0]):
            self._begin(self._waiting[0])

    def _may_begin(self, fault: ChaosFault) -> bool:
        ledger = self.ledger
        if not ledger.merged_once.issuperset(self._islands):
            self._slowest_s = ledger.now_s
            return False
        return ledger.allows(fault, self._islands) and ledger.steps_per_s() > 0 and self._fits(fault)

    def _fits(self, fault: ChaosFault) -> bool:
        """Return whether the rest of the run is long enough to recover from the fault; if not, skip the fault."""
        heal_s = max(self._heal_s, 2 * self._slowest_s if fault.kills or fault.kind == "nan" else 0.0)
        left_s = (self._steps - self.ledger.global_step) / self.ledger.steps_per_s()
        if left_s > heal_s + fault.duration_s:
            return True
        self._waiting.remove(fault)
        return False

    def _begin(self, fault: ChaosFault) -> None:
        tape = Tail(self._run_dir / TAPE_FILE, from_end=True) if fault.kind == "kill-donor" else None
        if not self._saboteur.inflict(fault):
            # The target's process is restarting; the next poll tries again.
            return
        self._waiting.remove(fault)
        self.inflicted += 1
        now_s = self._enter(fault, fault.target, killed=fault.kills)
        self._say(f"{now_s:7.1f} s  {fault}")
        if tape is not None:
            self._hunts.append((now_s + HUNT_S, fault, tape))
        elif fault.duration_s:
            self._lasting.append((now_s + fault.duration_s, fault))

    def _follow(self, hunt: tuple[float, ChaosFault, Tail], now_s: float) -> None:
        """Kill the donor when there is one; give up when the learner has recovered without a donor."""
        until_s, fault, tape = hunt
        donor = next_donor(tape, fault.target)
        recovered = fault.target not in self.ledger.unwell
        if not donor and not recovered and now_s < until_s:
            return
        self._hunts.remove(hunt)
        if donor and donor != fault.target and self._processes.send(donor, signal.SIGKILL):
            now_s = self._enter(fault, donor, killed=True)
            self._say(f"{now_s:7.1f} s  #{fault.number} kill {donor}, the donor of {fault.target}")
        else:
            self._say(f"{now_s:7.1f} s  #{fault.number} {fault.target} had no donor that could be killed")
        self._saboteur.take_back(fault.number)

    def _enter(self, fault: ChaosFault, target: str, *, killed: bool) -> float:
        """Record that a fault has hit its target, and return the time."""
        now_s = self._now_s()
        self.ledger.begin(fault, target, now_s, killed=killed)
        self._write("begin", now_s, fault, target)
        return now_s

    def _announce(self) -> None:
        for number, recovery in enumerate(self.ledger.recoveries):
            if recovery.settled and number not in self._told:
                self._told.add(number)
                fault, merged_s, seconds = recovery.fault, recovery.merged_s or 0.0, recovery.seconds or 0.0
                self._slowest_s = max(self._slowest_s, seconds)
                self._write("recovered", merged_s, fault, recovery.target)
                what = "rounds continue" if recovery.target == SYNCER else f"{recovery.target} is merged again"
                self._say(f"{merged_s:7.1f} s  #{fault.number} {what} after {seconds:.2f} s")

    def _read(self) -> None:
        for line in self._metrics.lines():
            self.ledger.feed(json.loads(line))

    def _now_s(self) -> float:
        return time.time() - self._began_unix_s

    def _write(self, event: str, now_s: float, fault: ChaosFault, target: str) -> None:
        record = {"event": event, "t": round(now_s, 3), "fault": fault.number, "kind": fault.kind, "target": target}
        details = {name: getattr(fault, name) for name in DETAILS}
        self._book.append((json.dumps(record | details | {"what": str(fault)}) + "\n").encode())
