"""Alarms about the syncer's machine: tape, disk, snapshots, certificates, and clocks of islands that differ."""

import contextlib
import shutil
import time
from collections import deque
from pathlib import Path

from diloco_jax.protocol.messages import SYNCER
from diloco_jax.protocol.watch.alarms import Alarm
from diloco_jax.runtime.records import checkpoint
from diloco_jax.runtime.records.files import CHECKPOINTS
from diloco_jax.runtime.syncer.context import SyncerContext
from diloco_jax.runtime.syncer.snapshots import SnapshotWriter
from diloco_jax.transport.link import TransportConfig

# Files are examined so often, values in memory every time.
LOOK_EVERY_S = 2.0
# Free space for tapes, records and logs, beside the next two snapshots.
DISK_SPARE_BYTES = 64 << 20
# A certificate that expires within so many days raises an alarm.
DAYS_LEFT = 7.0
# Clocks may differ by CLOCK_S. The last CLOCKS reports of an island are compared together.
CLOCK_S, CLOCKS = 5.0, 5
# A late snapshot raises an alarm after at least so many seconds.
OVERDUE_LEAST_S = 60.0
DAY = 86_400.0


def expiries(transport: TransportConfig) -> dict[str, float]:
    """Return when the certificates in the syncer's files expire, in seconds since 1970."""
    if not transport.encrypted:
        return {}
    # Plaintext does not need the package that this module needs.
    from diloco_jax.transport.trust.certificates import parse_certificates

    found = {}
    for name, path in (("authority", transport.tls_ca), ("syncer", transport.tls_certificate)):
        # Handshakes report a file that cannot be read.
        with contextlib.suppress(OSError, ValueError):
            chain = parse_certificates(Path(path.replace("{name}", SYNCER)).read_bytes())
            found[name] = min(each.not_valid_after_utc.timestamp() for each in chain)
    return found


def newest_snapshot(run_dir: Path) -> tuple[int, float, Path] | None:
    """Return global step, time since 1970 and folder of the newest snapshot; None if there is none."""
    # The snapshot may just be replaced.
    with contextlib.suppress(OSError):
        for path in checkpoint.complete(run_dir / CHECKPOINTS)[:1]:
            return checkpoint.global_step_of(path), path.stat().st_mtime, path
    return None


class MachineAlarms:
    """Finds what is wrong with the syncer's process and its machine."""

    def __init__(self, context: SyncerContext, writer: SnapshotWriter) -> None:
        self._context, self._writer = context, writer
        self._began_unix_s = time.time()
        self._first_step = context.machine.global_step
        # By island: how far its clock seemed ahead of ours in its last reports, in seconds.
        self._ahead_s: dict[str, deque[float]] = {}
        self._looked_s = 0.0
        self._of_files: list[Alarm] = []
        # The newest snapshot and its bytes.
        self._sized: tuple[Path | None, int] = (None, 0)

    def on_clock(self, learner_id: str, unix_s: float) -> None:
        """Compare an island's clock at the time of sending with ours."""
        self._ahead_s.setdefault(learner_id, deque(maxlen=CLOCKS)).append(unix_s - time.time())

    @property
    def blocked(self) -> str:
        """Return what everybody waits for in this process; "" if nothing."""
        return self._context.tape.condition or self._writer.condition

    def alarms(self, now_s: float) -> list[Alarm]:
        found = [Alarm("tape", "", self._context.tape.condition)] if self._context.tape.condition else []
        if self._writer.condition:
            found.append(Alarm("snapshot", "", self._writer.condition))
        for name, lately_s in self._ahead_s.items():
            # A report that travelled long makes a clock seem late. The quickest report is the most accurate.
            ahead_s = max(lately_s)
            if abs(ahead_s) > CLOCK_S and self._context.machine.membership.members[name].state == "active":
                way = "ahead of" if ahead_s > 0 else "behind"
                found.append(Alarm("clock", name, f"the clock of {name} is {abs(ahead_s):.0f} s {way} the syncer's"))
        if now_s >= self._looked_s + LOOK_EVERY_S:
            self._looked_s = now_s
            self._of_files = [*self._overdue(), *self._disk(), *self._certificates()]
        return found + self._of_files

    def _overdue(self) -> list[Alarm]:
        protocol, step = self._context.config.protocol, self._context.machine.global_step
        newest = newest_snapshot(self._context.run_dir)
        then, when_s = newest[:2] if newest is not None else (self._first_step, self._began_unix_s)
        quiet_s = time.time() - max(when_s, self._began_unix_s)
        every = protocol.snapshot_every
        in_time = not every or step - then <= protocol.snapshot_age_max
        if in_time or quiet_s < OVERDUE_LEAST_S or self._writer.condition:
            return []
        what = f"the newest snapshot is of global step {then}" if newest is not None else "there is no snapshot"
        return [Alarm("snapshot", "", f"{what}, {step - then} ago; protocol.snapshot_every is {every}")]

    def _disk(self) -> list[Alarm]:
        folder = self._context.run_dir
        newest = newest_snapshot(folder)
        if newest is not None and newest[2] != self._sized[0]:
            with contextlib.suppress(OSError):
                self._sized = newest[2], sum(each.stat().st_size for each in newest[2].rglob("*") if each.is_file())
        free, need = shutil.disk_usage(folder).free, 2 * self._sized[1] + DISK_SPARE_BYTES
        what = f"{free / 1e6:.0f} MB free at {folder}, two snapshots and logs take {need / 1e6:.0f}"
        return [Alarm("disk", "", what)] if free < need else []

    def _certificates(self) -> list[Alarm]:
        found = []
        for name, until_s in expiries(self._context.config.transport).items():
            if (days := (until_s - time.time()) / DAY) < DAYS_LEFT:
                when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(until_s))
                what = f"the {name}'s certificate expires on {when} UTC, in {days:.1f} days"
                found.append(Alarm("certificate", "", what))
        return found
