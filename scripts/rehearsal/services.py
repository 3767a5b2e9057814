"""Services around a rehearsed run: a fake of Google Cloud Storage with its corpus, and the renewal of certificates."""

import datetime
import logging
import os
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import fsspec

from diloco_jax.runtime.local.processes import free_address
from diloco_jax.transport.trust import certificates
from rehearsal.shrink import BUCKET

DILOCO = (sys.executable, "-m", "diloco_jax")
# These files of Python's standard library have 2 MB.
CORPUS = "[a-i]*.py"
# The interval of renewals; the validity of an expiring certificate; the least delay of its renewal.
RENEWAL_S, VALID_S, LATE_S = 15.0, 3.0, 10.0


@contextmanager
def bucket(root: Path) -> Iterator[dict[str, str]]:
    """Serve a bucket with a corpus, and yield the environment that leads gcsfs to it."""
    from gcp_storage_emulator.server import create_server

    logging.getLogger("gcp_storage_emulator").setLevel(logging.ERROR)
    host, port = free_address().split(":")
    server = create_server(host, int(port), in_memory=True, default_bucket=BUCKET.removeprefix("gs://"))
    server.start()
    # The second variable turns off gRPC, because the emulator has none and gcsfs would try it for a minute.
    environment = {"STORAGE_EMULATOR_HOST": f"http://{host}:{port}", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
    os.environ.update(environment)
    try:
        words = [*DILOCO, "tokenize", sysconfig.get_path("stdlib"), "--patterns", CORPUS, "--tokenizer", "bytes"]
        subprocess.run([*words, "--out", str(root / "corpus")], check=True, stdout=subprocess.DEVNULL)
        fsspec.filesystem("gs").put(f"{root / 'corpus'}/", f"{BUCKET}/corpus/", recursive=True)
        yield environment
    finally:
        server.stop()


class Renewer(threading.Thread):
    """Thread that runs `diloco certs --renew` like a CronJob; `failures` has the errors of failed calls."""

    def __init__(self, folder: Path, learners: Sequence[str]) -> None:
        super().__init__(name="renewer", daemon=True)
        self._folder, self._learners, self._late_until_s = folder, learners, 0.0
        self.failures: list[str] = []
        self.renew()
        self.start()

    def run(self) -> None:
        """Renew certificates at intervals, without end."""
        while True:
            time.sleep(RENEWAL_S)
            if time.monotonic() > self._late_until_s:
                self.renew()

    def renew(self) -> None:
        """Renew certificates that would expire within a month."""
        words = [*DILOCO, "certs", str(self._folder), "--learners", ",".join(self._learners), "--renew", "30"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        self.failures += [done.stderr.strip()] * (done.returncode > 0)

    def expire(self, name: str) -> None:
        """Make a certificate expire soon, and delay its renewal."""
        self._late_until_s = time.monotonic() + VALID_S + LATE_S
        now = datetime.datetime.now(datetime.UTC)
        certificates.renew(self._folder, name, now, now + datetime.timedelta(seconds=VALID_S))
