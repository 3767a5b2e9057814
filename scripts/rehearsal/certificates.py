"""The job that renews certificates before they expire, as a CronJob would, and the fault that it comes too late."""

from __future__ import annotations

import datetime
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from diloco_jax.transport.trust import certificates

EVERY_S = 15.0
VALID_S, LATE_S = 3.0, 10.0  # a certificate that expires, and how much later it is renewed at the earliest


class Renewer(threading.Thread):
    """A thread that runs `diloco certs --renew` again and again; `failures` has what it said when it did not work."""

    def __init__(self, folder: Path, learners: Sequence[str]) -> None:
        super().__init__(name="renewer", daemon=True)
        self._folder, self._learners, self._late_until_s = folder, learners, 0.0
        self.failures: list[str] = []
        self.renew()

    def run(self) -> None:
        """Renew for ever."""
        while True:
            time.sleep(EVERY_S)
            if time.monotonic() > self._late_until_s:
                self.renew()

    def renew(self) -> None:
        """Renew what would expire within a month."""
        words = ["certs", str(self._folder), "--learners", ",".join(self._learners), "--renew", "30"]
        done = subprocess.run([sys.executable, "-m", "diloco_jax", *words], capture_output=True, text=True, check=False)
        if done.returncode > 0:
            self.failures.append(done.stderr.strip())

    def expire(self, name: str) -> None:
        """Let a certificate expire in a moment, and be late to renew it."""
        self._late_until_s = time.monotonic() + VALID_S + LATE_S
        now = datetime.datetime.now(datetime.UTC)
        certificates.renew(self._folder, name, now, now + datetime.timedelta(seconds=VALID_S))
