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
CORPUS = "[a-i]*.py"  # of Python's standard library: 2 MB
# Between two looks of the job that renews; of a certificate that expires, and how much later it is renewed at least.
RENEWAL_S, VALID_S, LATE_S = 15.0, 3.0, 10.0


@contextmanager
def bucket(root: Path) -> Iterator[dict[str, str]]:
    """Serve a bucket with a corpus, made as an operator would; yields the environment with which gcsfs finds it."""
    from gcp_storage_emulator.server import create_server

    logging.getLogger("gcp_storage_emulator").setLevel(logging.ERROR)
    host, port = free_address().split(":")
    server = create_server(host, int(port), in_memory=True, default_bucket=BUCKET.removeprefix("gs://"))
    server.start()
    # without the second one gcsfs asks by gRPC, which the emulator does not speak, for a minute
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
    """A CronJob that runs `diloco certs --renew`; `failures` has what it said when it did not work."""

    def __init__(self, folder: Path, learners: Sequence[str]) -> None:
        super().__init__(name="renewer", daemon=True)
        self._folder, self._learners, self._late_until_s = folder, learners, 0.0
        self.failures: list[str] = []
        self.renew()
        self.start()

    def run(self) -> None:
        """Renew for ever."""
        while True:
            time.sleep(RENEWAL_S)
            if time.monotonic() > self._late_until_s:
                self.renew()

    def renew(self) -> None:
        """Renew what would expire within a month."""
        words = [*DILOCO, "certs", str(self._folder), "--learners", ",".join(self._learners), "--renew", "30"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        self.failures += [done.stderr.strip()] * (done.returncode > 0)

    def expire(self, name: str) -> None:
        """Let a certificate expire in a moment, and be late to renew it."""
        self._late_until_s = time.monotonic() + VALID_S + LATE_S
        now = datetime.datetime.now(datetime.UTC)
        certificates.renew(self._folder, name, now, now + datetime.timedelta(seconds=VALID_S))
