"""One process of an island on a node of a Ray cluster.

Ray creates a `HostProcess` as an actor on the node. It runs on nodes that do not train, too, so it imports no JAX.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from diloco_jax.runtime.records.signals import PARENT_ENV

# The most output, in bytes, that waits for the supervisor; older output is dropped.
OUTPUT_BYTES_MAX = 1 << 20
READ_BYTES = 1 << 16
# When the process has ended, its last output arrives within this time.
LAST_OUTPUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Launch:
    """A process to start on a node.

    Attributes:
        arguments: the arguments of `diloco`.
        environment: variables that the process gets beside those of the node.
        run_dir: folder of the run, by the same path on all nodes; it is created if the node does not have it.
        files: contents of files in `run_dir` that the process needs, by their names.
        folder: folder where the process starts if the node has it, else `run_dir`.
    """

    arguments: tuple[str, ...]
    environment: dict[str, str]
    run_dir: str
    files: dict[str, bytes]
    folder: str

    def with_arguments(self, more: Sequence[str]) -> "Launch":
        """Return the launch with arguments that only the nodes know, such as an address there."""
        return replace(self, arguments=(*self.arguments, *more))


class HostProcess:
    """A process of an island, its output until the supervisor takes it, and its end."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._output = bytearray()
        self._lock = threading.Lock()
        self._reader = threading.Thread(name="output", target=self._read, daemon=True)

    def free_address(self, peer: str) -> str:
        """Return a free address of this node, on the interface that reaches `peer`; both are host:port."""
        host, _, port = peer.rpartition(":")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # A datagram socket sends nothing when it connects.
            probe.connect((host, int(port)))
            own: str = probe.getsockname()[0]
        with socket.create_server((own, 0)) as listener:
            return f"{own}:{listener.getsockname()[1]}"

    def start(self, launch: Launch) -> None:
        """Write the files that this node lacks, and start the process."""
        run_dir = Path(launch.run_dir)
        for name, content in launch.files.items():
            _write_if_other(run_dir / name, content)
        environment = {**os.environ, **launch.environment}
        # The process must not outlive this one, which Ray ends with the run.
        environment |= {PARENT_ENV: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "diloco_jax", *launch.arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=launch.folder if os.path.isdir(launch.folder) else run_dir,
        )
        self._reader.start()

    def report(self, signals: Sequence[int]) -> tuple[bytes, int | None]:
        """Send signals to the process, and return its new output and its exit status; None while it runs."""
        process = self._process
        assert process is not None
        for number in signals:
            if process.poll() is None:
                process.send_signal(signal.Signals(number))
        status = process.poll()
        if status is not None:
            # A process that the island started may still hold the pipe.
            self._reader.join(LAST_OUTPUT_S)
        with self._lock:
            output = bytes(self._output)
            self._output.clear()
        return output, status

    def _read(self) -> None:
        assert self._process is not None
        stream: IO[bytes] | None = self._process.stdout
        assert stream is not None
        with stream:
            while chunk := os.read(stream.fileno(), READ_BYTES):
                with self._lock:
                    self._output += chunk
                    del self._output[:-OUTPUT_BYTES_MAX]


def _write_if_other(path: Path, content: bytes) -> None:
    """Write a file for this user alone, unless it has this content, as in a folder that all nodes share."""
    if path.exists() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    beside.replace(path)
