"""Three sites and a syncer in network namespaces, each with a user who alone can read its folder; what links carry.

The namespaces of the sites are joined to the syncer's by a cable each. A recorder beside the syncer writes every frame
that passes.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.runtime.helpers import ROOT, environment

PORT = 50051
FIRST_USER = 61000
# A run of bytes of this length from a text is not there by accident, if it has so many different bytes.
FOUND_BYTES, DIFFERENT_MIN = 16, 8
# A recording is searched in parts of this size.
PART_BYTES = 4 << 20
RECORDER = """
import socket, sys
frames = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
frames.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 26)
with open(sys.argv[1], "wb", buffering=0) as file:
    print("ready", flush=True)
    while True:
        file.write(frames.recv(1 << 17))
"""


def python_for_anybody() -> list[str]:
    """Return the words that start Python as any user; skips where an installation is for root only."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, shutil.which(version, path="/usr/bin:/usr/local/bin") or ""):
        as_nobody = ["setpriv", f"--reuid={FIRST_USER}", f"--regid={FIRST_USER}", "--clear-groups"]
        try:
            if python and not subprocess.run([*as_nobody, python, "-c", "import ssl"], capture_output=True).returncode:
                return [python]
        except FileNotFoundError:
            pytest.skip("separate users need the command setpriv")
    pytest.skip("no Python of this version that every user may start")


class Site:
    """One machine: its network namespace, its user, and its folder, which only this user can read."""

    def __init__(self, folder: Path, number: int, within: Sequence[str], python: Sequence[str]) -> None:
        self.folder, self.user = folder, FIRST_USER + number
        folder.mkdir(mode=0o700)
        os.chown(folder, self.user, self.user)
        self._before = [*within, "setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups", *python]
        self.process: subprocess.Popen[str] | None = None

    def own(self) -> None:
        """Give the folder and all that is in it to the user."""
        for path in (self.folder, *self.folder.rglob("*")):
            os.chown(path, self.user, self.user)
            path.chmod(0o700 if path.is_dir() else 0o600)

    def _settings(self) -> dict[str, str]:
        # Packages of this environment, for a Python outside of it. A user's programs are not shared with others.
        packages = next(path for path in sys.path if path.endswith("site-packages"))
        kept = {key: value for key, value in environment(0.1).items() if not key.startswith("JAX_COMPILATION")}
        own = {"HOME": str(self.folder), "TMPDIR": str(self.folder), "NUMBA_CACHE_DIR": str(self.folder / "numba")}
        own["JAX_COMPILATION_CACHE_DIR"] = str(self.folder / "programs")
        return {**kept, **own, "PYTHONPATH": f"{ROOT}:{packages}", "PYTHONDONTWRITEBYTECODE": "1"}

    def command(self, *words: object) -> subprocess.CompletedProcess[str]:
        """Run a command of the site's user to its end."""
        return subprocess.run(
            [*self._before, "-m", "diloco_jax", *map(str, words)],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=self._settings(),
        )

    def start(self, *words: object) -> subprocess.Popen[str]:
        """Start a command of the site's user."""
        with (self.folder.parent / f"{self.folder.name}.log").open("a") as log:
            self.process = subprocess.Popen(
                [*self._before, "-m", "diloco_jax", *map(str, words)],
                stdout=log,
                stderr=log,
                text=True,
                cwd=self.folder,
                env=self._settings(),
                start_new_session=True,
            )
        return self.process

    def kill(self) -> None:
        """SIGKILL for the command that was started."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextlib.contextmanager
def networks(sites: int) -> Iterator[list[list[str]]]:
    """Yield the words that run a command in the syncer's network, and in that of each site; site N has a cable to
    10.98.N.1, where the syncer listens."""
    names = [f"dlsite{os.getpid()}-{number}" for number in range(sites + 1)]

    def ip(*words: str, check: bool = True) -> int:
        return subprocess.run(["ip", *words], check=check, capture_output=True).returncode

    if shutil.which("ip") is None or ip("netns", "add", names[0], check=False):
        pytest.skip("network namespaces need root on Linux, and the command ip")
    try:
        ip("-n", names[0], "link", "set", "lo", "up")
        for number, name in enumerate(names[1:], start=1):
            here, there = f"dls{os.getpid() % 10000}a{number}", f"dls{os.getpid() % 10000}b{number}"
            ip("netns", "add", name)
            ip("link", "add", here, "type", "veth", "peer", "name", there)
            for space, end, host in ((names[0], here, 1), (name, there, 2)):
                ip("link", "set", end, "netns", space)
                ip("-n", space, "addr", "add", f"10.98.{number}.{host}/24", "dev", end)
                ip("-n", space, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            ip("netns", "delete", name, check=False)


@contextlib.contextmanager
def recorded(within: Sequence[str], path: Path) -> Iterator[None]:
    """Record every frame that passes a network in a file."""
    with subprocess.Popen([*within, sys.executable, "-c", RECORDER, str(path)], stdout=subprocess.PIPE) as recorder:
        assert recorder.stdout is not None
        try:
            assert recorder.stdout.readline() == b"ready\n", "frames cannot be recorded"
            yield
        finally:
            recorder.kill()


def words_of(text: bytes) -> np.ndarray:
    """Return every run of FOUND_BYTES bytes of a text, as pairs of 64-bit numbers, one row each."""
    windows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(text, np.uint8), FOUND_BYTES)
    return np.ascontiguousarray(windows).view(np.uint64).reshape(-1, 2)


def found_in(recording: Path, text: bytes) -> list[bytes]:
    """Return the runs of FOUND_BYTES bytes of a text that a recording contains, without monotonous ones."""
    known = {row.tobytes() for row in np.unique(words_of(text), axis=0)}
    known = {run for run in known if len({*run}) >= DIFFERENT_MIN}
    halves = np.array(sorted({int.from_bytes(run[:8], sys.byteorder) for run in known}), np.uint64)
    found, rest = set[bytes](), b""
    with recording.open("rb") as file:
        while part := file.read(PART_BYTES):
            rows = words_of(rest + part)
            # The first half of nearly all rows is in no text, so few rows are compared whole.
            found |= {row.tobytes() for row in rows[np.isin(rows[:, 0], halves)]} & known
            rest = part[-FOUND_BYTES + 1 :]
    return sorted(found)
