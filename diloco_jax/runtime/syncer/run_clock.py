"""The run's clock: seconds since the run started, over all its processes and the time between them."""

import json
import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from diloco_jax.runtime.figures.forms import format_duration
from diloco_jax.runtime.records.files import CLOCK_FILE
from diloco_jax.runtime.records.telemetry import write_json

# What two clocks showed at the run's second 0: the wall clock, and that of the machine since its boot.
BEGAN, ZERO_WALL, BOOT, ZERO_BOOT = "began_unix_s", "zero_unix_s", "boot", "zero_boot_s"
PAUSE_MAX_S = 86_400.0
# Seconds of a million years: a larger number, or none at all, is damage.
NUMBER_MAX = 3e13

log = logging.getLogger(__name__)


class RunClock:
    """Seconds since the run started, which no clock that jumps at a restart can move for good.

    The time without a process is read from the machine's clock since boot, which nobody sets. Only on another machine,
    or after a boot, it is read from the wall clock. It is never negative, and counts for a day at most.

    Args:
        run_dir: where the clock keeps what it showed.
        last_s: the newest time on the run's tape, in seconds.
    """

    def __init__(self, run_dir: Path, last_s: float) -> None:
        wall_s, boot, boot_s = time.time(), _boot(), _since_boot_s()
        path = run_dir / CLOCK_FILE
        kept = _read(path)
        now_s = last_s
        if kept and boot and kept.get(BOOT) == boot:
            now_s = boot_s - kept[ZERO_BOOT]
        elif kept:
            now_s = wall_s - kept.get(ZERO_WALL, kept[BEGAN])
        if now_s - last_s > PAUSE_MAX_S:
            log.warning(
                f"the clocks say that the run had no syncer for {format_duration(now_s - last_s)}; at most "
                f"{format_duration(PAUSE_MAX_S)} of it count as time of the run"
            )
        now_s = min(max(last_s, now_s), last_s + PAUSE_MAX_S)
        # In seconds since 1970; never changes.
        self.began_unix_s: float = kept.get(BEGAN, wall_s - now_s)
        try:
            zero = {BEGAN: self.began_unix_s, ZERO_WALL: wall_s - now_s, BOOT: boot, ZERO_BOOT: boot_s - now_s}
            write_json(path, zero)
        except OSError as error:
            log.warning(f"{path} cannot be written ({error}): after a restart the run's clock may leave the pause out")
        self._zero_s = time.monotonic() - now_s

    def now_s(self) -> float:
        """Return the time in whole microseconds, so that machine and tape get the same short number."""
        return round(time.monotonic() - self._zero_s, 6)


def _read(path: Path) -> dict[str, Any]:
    """Return what the file keeps, with finite numbers where numbers are expected; empty if it is missing or damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        found = json.loads(path.read_text(encoding="utf-8"))
        numbers = {name: float(found[name]) for name in (BEGAN, ZERO_WALL, ZERO_BOOT) if name in found}
        if BEGAN in numbers and all(abs(number) < NUMBER_MAX for number in numbers.values()):
            return {BOOT: found.get(BOOT) if ZERO_BOOT in numbers else None, **numbers}
    return {}


def _boot() -> str:
    """Return the name of this boot of the machine; empty where the system has none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def _since_boot_s() -> float:
    """Return the seconds since the machine's boot, including the time of a suspended machine."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
