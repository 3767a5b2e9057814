"""Folders like those of real runs, for tests: with given records, or written from a simulation."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from diloco_jax.protocol.effects import Note
from diloco_jax.protocol.messages import LearnerMessage, StepReport
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.sim.node import Effects, Observer
from twin.calibration import Calibration
from twin.cluster import LocalRun, Meter
from twin.faults import simulated
from twin.real_run import RealFault, RunSettings

BEGAN_UNIX_S = 1_700_000_000.0
NAMES = ("island-0", "island-1", "island-2")
PROTOCOL = ProtocolConfig(
    sync_every=4,
    num_fragments=2,
    overlap_steps=2,
    silence_s=3.0,
    heartbeat_s=0.5,
    resend_s=0.5,
    pull_timeout_s=2.0,
    snapshot_every=20,
)
SETTINGS = RunSettings(
    protocol=PROTOCOL,
    names=NAMES,
    total_steps=120,
    restart_delay_s=4.0,
    syncer_restart_delay_s=0.25,
    connect_timeout_s=5.0,
)
CALIBRATION = Calibration(
    step_s={"island-0": 0.5, "island-1": 0.5, "island-2": 0.5},
    gap_s=0.0,
    step_noise=0.02,
    first_step_s={"island-0": 0.0, "island-1": 0.25, "island-2": 0.5},
    merge_s=0.01,
    value_bytes=1000,
    notice_s=0.125,
    boot_s=2.0,
    ready_s=0.75,
    syncer_boot_s=1.5,
    restarts=1,
    syncer_restarts=1,
)


def fault(kind: str, target: str, at_s: float = 0.0, *, number: int = 1, at_step: int = 0, **fields: Any) -> RealFault:
    """Return a fault of a real run."""
    facts: dict[str, Any] = {"duration_s": 0.0, "direction": "both", "how": "", "amount": 0} | fields
    return RealFault(number=number, kind=kind, target=target, at_s=at_s, at_step=at_step, **facts)


def write_run(
    folder: Path, records: Iterable[dict[str, Any]], summary: dict[str, Any], faults: Iterable[dict[str, Any]] = ()
) -> Path:
    """Write the folder of a run with these records, and return it."""
    (folder / "chaos").mkdir(parents=True)
    written = {"complete": True, "goodput": 0.5, "uptime": 1.0, "contributors_per_round": 2.0}
    written |= {"wire": {"up_bytes": 4000}} | summary
    (folder / "summary.json").write_text(json.dumps(written))
    (folder / "clock.json").write_text(json.dumps({"began_unix_s": BEGAN_UNIX_S}))
    for name, lines in (("metrics.jsonl", records), ("chaos/faults.jsonl", faults)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


class Recorder(Observer):
    """Observer that records what a real syncer would write; `offset_s` is the real time of virtual time 0."""

    def __init__(self, run: LocalRun, offset_s: float) -> None:
        self.records: list[dict[str, Any]] = []
        self._cluster, self._offset_s = run.cluster, offset_s
        self._steps: dict[tuple[str, int], int] = {}
        # The number of each process, as the supervisor gives it.
        self._started: dict[tuple[str, int], int] = {}

    def _write(self, kind: str, now_s: float, **fields: Any) -> None:
        self.records.append({"kind": kind, "t": now_s + self._offset_s, **fields})

    def _number(self, incarnation: tuple[str, int], now_s: float) -> int:
        """Return the start of a process, which is before its greeting, in milliseconds of the clock."""
        started_s = BEGAN_UNIX_S + now_s + self._offset_s - CALIBRATION.boot_s
        return self._started.setdefault(incarnation, round(1000 * started_s))

    def on_delivery(self, message: LearnerMessage, now_s: float) -> None:
        if not isinstance(message, StepReport):
            return
        incarnation = (message.learner_id, message.incarnation)
        member = self._cluster.syncer.membership.get(*incarnation)
        if member is not None and message.local_step > self._steps.get(incarnation, 0):
            self._steps[incarnation] = message.local_step
            facts = {
                "learner": incarnation[0],
                "incarnation": self._number(incarnation, now_s),
                "local_step": message.local_step,
            }
            self._write("step", now_s, **facts, step_s=message.step_s)

    def on_syncer(self, given: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        for effect in effects:
            if isinstance(effect, Note):
                reason = effect.reason
                if effect.kind == "joined":
                    incarnation = effect.members[0], int(reason.rpartition(" ")[2])
                    reason = f"incarnation {self._number(incarnation, now_s)}"
                facts = {"global_step": effect.global_step, "members": list(effect.members), "reason": reason}
                self._write(effect.kind, now_s, **facts)

    def on_syncer_back(self, machine: Syncer, rewound_to: int, now_s: float) -> None:
        self._write("restarted", now_s, reason="epoch 2")


def simulate_run(folder: Path, faults: Sequence[RealFault], seed: int = 0, offset_s: float = 10.0) -> Path:
    """Simulate a run and write the folder of a real run from it; times of `faults` are on the folder's clock."""
    planned = [each for one in faults for each in simulated(one, one.at_s - offset_s, SETTINGS, CALIBRATION)]
    run = LocalRun(SETTINGS, CALIBRATION, planned, seed)
    meter, recorder = Meter(run), Recorder(run, offset_s)
    run.cluster.watch(meter, recorder)
    run.cluster.run(10_000.0)
    measured = meter.measured()
    book = []
    for one in faults:
        line = {"event": "begin", "t": one.at_s, "fault": one.number, "kind": one.kind, "target": one.target}
        line |= {name: getattr(one, name) for name in ("at_step", "direction", "how", "amount")}
        book += [line, {**line, "event": "end", "t": one.at_s + one.duration_s}]
    up_bytes = measured["contributors_per_round"] * measured["rounds"] * CALIBRATION.value_bytes
    return write_run(folder, recorder.records, {**measured, "wire": {"up_bytes": up_bytes}}, book)
