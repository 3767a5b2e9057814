"""The objects of one process of a syncer that whoever begins, drives, watches and saves it shares, and its clock."""

import json
import logging
import threading
import time
from pathlib import Path
from typing import NamedTuple

from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.tape import TapedSyncer
from diloco_jax.protocol.watch.stats import RunStats
from diloco_jax.runtime.model.global_model import GlobalModel
from diloco_jax.runtime.records.files import CLOCK_FILE
from diloco_jax.runtime.records.tape_file import TapeFile
from diloco_jax.runtime.records.telemetry import write_json
from diloco_jax.settings.run import RunConfig

log = logging.getLogger(__name__)


class RunClock:
    """Seconds since the run began, over all its processes: never before `last_s`, and on while no syncer runs."""

    def __init__(self, run_dir: Path, last_s: float) -> None:
        path, wall_s = run_dir / CLOCK_FILE, time.time()
        began_s = wall_s - last_s
        try:
            began_s = float(json.loads(path.read_text(encoding="utf-8"))["began_unix_s"])
        except (OSError, ValueError, KeyError, TypeError):
            try:
                write_json(path, {"began_unix_s": began_s})
            except OSError as error:
                what = f"{path} cannot be written ({error})"
                log.warning(f"{what}: after a restart the run's clock goes on from its tape")
        # the wall clock of another machine, or one that was set back, must not turn time round
        self._zero_s = time.monotonic() - max(last_s, wall_s - began_s)

    def now_s(self) -> float:
        return time.monotonic() - self._zero_s


class Parts(NamedTuple):
    """The objects of one process of a syncer."""

    config: RunConfig
    run_dir: Path
    stop: threading.Event
    clock: RunClock
    tape: TapeFile
    machine: Syncer
    taped: TapedSyncer  # the machine behind its tape
    model: GlobalModel  # whose values it merges
    stats: RunStats  # counts what the machine does not
