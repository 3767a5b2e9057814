"""Faults of the syncer's machine by its files. Each returns how to take it back, or None where it cannot be done."""

import datetime
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from diloco_jax.protocol.messages import SYNCER
from diloco_jax.runtime.records.files import CHECKPOINTS, CONFIG_FILE
from diloco_jax.settings.text import load
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


HOST_FAULTS: dict[str, Callable[[Path], Undo | None]] = {
    "block-snapshots": block_snapshots,
    "low-disk": fill_small_disk,
    "old-certificate": age_certificate,
}
