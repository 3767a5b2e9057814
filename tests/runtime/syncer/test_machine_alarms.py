"""Alarms of the syncer's machine: disk, snapshots, certificates and clocks."""

import datetime
import shutil
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_jax.protocol.messages import SYNCER
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.runtime.syncer import machine_alarms
from diloco_jax.runtime.syncer.machine_alarms import CLOCK_S, CLOCKS, OVERDUE_LEAST_S, MachineAlarms
from diloco_jax.transport.link import TransportConfig
from diloco_jax.transport.trust import certificates

Usage = namedtuple("Usage", "total used free")


class Machine:
    """Stand-in for a syncer's context: a folder, a tape, a writer and one member."""

    def __init__(self, folder: Path, **transport: Any) -> None:
        config = SimpleNamespace(protocol=ProtocolConfig(snapshot_every=10), transport=TransportConfig(**transport))
        self.tape, self.writer = SimpleNamespace(condition=""), SimpleNamespace(condition="")
        self.member = SimpleNamespace(state="active")
        self.machine = SimpleNamespace(global_step=0, membership=SimpleNamespace(members={"a": self.member}))
        parts: Any = SimpleNamespace(config=config, run_dir=folder, tape=self.tape, machine=self.machine)
        self.alarms = MachineAlarms(parts, self.writer)  # type: ignore[arg-type]
        self._now_s = 100.0

    def told(self) -> list[tuple[str, str]]:
        self._now_s += machine_alarms.LOOK_EVERY_S
        return [(alarm.kind, alarm.text) for alarm in self.alarms.alarms(self._now_s)]


def snapshot(folder: Path, step: int, size: int = 1000) -> None:
    path = folder / "checkpoints" / f"step_{step:08d}"
    path.mkdir(parents=True)
    (path / "values").write_bytes(bytes(size))


def test_a_healthy_machine_has_no_alarm(tmp_path: Path) -> None:
    assert Machine(tmp_path).told() == []


def test_what_cannot_be_written(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.tape.condition, machine.writer.condition = "the tape cannot be written: x", "the snapshot of y"
    assert machine.told() == [("tape", "the tape cannot be written: x"), ("snapshot", "the snapshot of y")]
    assert machine.alarms.blocked == "the tape cannot be written: x"


def test_a_disk_that_is_nearly_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, free = Machine(tmp_path), 64 << 20
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(1 << 30, 0, free))
    assert machine.told() == []
    snapshot(tmp_path, 5, 2_000_000)
    assert machine.told() == [("disk", f"67 MB free at {tmp_path}, two snapshots and logs take 71")]
    free += 4_000_000
    assert machine.told() == []


def test_no_snapshot_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, began_s = Machine(tmp_path), time.time()
    machine.machine.global_step = 21
    assert machine.told() == [], "a short run is over before"
    monkeypatch.setattr(time, "time", lambda: began_s + OVERDUE_LEAST_S + 1)
    assert machine.told() == [("snapshot", "there is no snapshot, 21 ago; protocol.snapshot_every is 10")]
    snapshot(tmp_path, 1)
    assert machine.told() == []
    machine.machine.global_step = 22
    text = "the newest snapshot is of global step 1, 21 ago; protocol.snapshot_every is 10"
    assert machine.told() == [("snapshot", text)]


def test_a_certificate_that_expires_within_a_week(tmp_path: Path) -> None:
    certificates.make(tmp_path, ["a"])
    machine = Machine(tmp_path, **certificates.settings(tmp_path))
    assert machine.told() == []
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    until = now + datetime.timedelta(days=6.5)
    certificates.renew(tmp_path, SYNCER, now, until)
    text = f"the syncer's certificate expires on {until:%Y-%m-%d %H:%M} UTC, in 6.5 days"
    assert machine.told() == [("certificate", text)]


def test_an_islands_clock(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.alarms.on_clock("a", time.time() - CLOCK_S + 1.0)
    assert machine.told() == []
    machine.alarms.on_clock("a", time.time() - 30.0)
    assert machine.told() == [], "it was under way for long"
    machine.alarms.on_clock("a", time.time() + 3600.4)
    assert machine.told() == [("clock", "the clock of a is 3600 s ahead of the syncer's")]
    for _ in range(CLOCKS):
        machine.alarms.on_clock("a", time.time() - 30.0)
    assert machine.told() == [("clock", "the clock of a is 30 s behind the syncer's")]
    machine.member.state = "gone"
    assert machine.told() == []
