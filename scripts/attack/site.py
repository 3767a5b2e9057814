"""A real syncer in a separate process, with a run folder and a small model that no island trains."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from attack.learner import StubLearner, Way, find_way
from diloco_jax.core.kinds import kind_of
from diloco_jax.runtime.local.processes import free_address
from diloco_jax.runtime.model.layout_text import layout_of
from diloco_jax.runtime.records import checkpoint
from diloco_jax.runtime.records.files import OFFERED, STATUS_FILE, TAPE_FILE
from diloco_jax.transport.link import TransportConfig
from tests.limits import HANGS_S
from tests.runtime.helpers import environment, merged

SAVING = threading.Lock()
POLL_S = 0.05
SHAPES = {"embed": (16, 8), "layer/kernel": (8, 32), "layer/out": (32, 8), "norm": (8,)}
CONFIG: dict[str, Any] = {
    "name": "attacked",
    "model": {"module": "own"},
    "islands": {"count": 2, "devices": 1, "command": [sys.executable, "-c", "import time; time.sleep(600)"]},
    "train": {"steps": 100_000, "eval_every": 0},
    "protocol": {
        "sync_every": 2,
        "num_fragments": 2,
        "snapshot_every": 10,
        "recover_from_peers": False,
        "silence_s": 6.0,
        "heartbeat_s": 1.0,
        "resend_s": 1.0,
        "pull_timeout_s": 10.0,
        "restore_s": 2.0,
    },
    "wire": {"up": "float32", "down": "float32"},
    "trackers": [],
}


def wait_until(condition: Callable[[], object], what: str, within_s: float = HANGS_S) -> Any:
    """Wait until a condition is true and return its value; TimeoutError after the time."""
    until_s = time.monotonic() + within_s
    while not (value := condition()):
        if time.monotonic() > until_s:
            raise TimeoutError(f"{what}: not within {within_s:g} s")
        time.sleep(POLL_S)
    return value


def comes_true(condition: Callable[[], object], within_s: float = HANGS_S) -> bool:
    """Return whether a condition becomes true in time."""
    try:
        return bool(wait_until(condition, "", within_s))
    except TimeoutError:
        return False


class Site:
    """A folder, the config in it, and the syncer's process while it runs."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        folder.mkdir(parents=True)
        self.run_dir, self.config_path = folder / "run", folder / "attacked.yaml"
        self.address = free_address()
        described = merged(merged(CONFIG, {"transport": {"address": self.address}}), changes)
        self.config_path.write_text(yaml.safe_dump(described), encoding="utf-8")
        self.log = folder / "syncer.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._stubs: list[StubLearner] = []
        random = np.random.default_rng(0)
        values = {path: random.normal(0, 0.3, shape).astype(np.float32) for path, shape in SHAPES.items()}
        layout = layout_of(SHAPES, {path: kind_of(shape) for path, shape in SHAPES.items()})
        meta = {"global_step": 0, "layout": layout}
        # Orbax does not save from two threads at a time.
        with SAVING:
            checkpoint.save(self.run_dir / OFFERED, {checkpoint.PARAMETERS: values}, meta)

    def start(self, *words: str, before: Sequence[str] = ()) -> "Site":
        """Start the syncer; `before` is the command of a program that executes it."""
        command = [*before, sys.executable, "-m", "diloco_jax", "syncer", str(self.config_path)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--run-dir", str(self.run_dir), *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(),
                start_new_session=True,
            )
        return self

    @property
    def is_running(self) -> bool:
        """Return whether the syncer's process runs."""
        return self.process is not None and self.process.poll() is None

    @property
    def last_line(self) -> str:
        """Return the last line of the syncer's log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else ""

    def way(self, address: str = "") -> Way:
        """Wait for the syncer and return what learners need; RuntimeError with its last line if it ended."""
        transport = TransportConfig(address=address or self.address, connect_timeout_s=2.0)
        wait_until(lambda: not self.is_running or self._answers(), "the syncer listens")
        if not self.is_running:
            raise RuntimeError(f"the syncer ended: {self.last_line}")
        return find_way(transport)

    def _answers(self) -> bool:
        return "listening at" in self.log.read_text(encoding="utf-8", errors="replace")

    def stub(self, name: str, incarnation: int = 1, *, way: Way | None = None, **how: Any) -> StubLearner:
        """Start a stub learner, which ends with this site."""
        made = StubLearner(way or self.way(), name, incarnation, **how)
        self._stubs.append(made)
        return made

    def honest(self, count: int = 2) -> list[StubLearner]:
        """Start honest learners and wait until some rounds have merged all of them."""
        way = self.way()
        stubs = [self.stub(f"island-{number}", way=way) for number in range(count)]
        wait_until(lambda: all(stub.merged >= 3 for stub in stubs), "the first rounds of the honest learners")
        return stubs

    def signal(self, number: int) -> None:
        """Send a signal to the syncer."""
        assert self.process is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kill the syncer with SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Stop the syncer with SIGTERM and return its exit status."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(HANGS_S)

    def status(self) -> dict[str, Any]:
        """Return the newest status; {} if there is none."""
        path = self.run_dir / STATUS_FILE
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def tape(self) -> list[list[Any]]:
        """Return the complete lines of the tape."""
        with (self.run_dir / TAPE_FILE).open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines if line.endswith("\n")]

    def end_stubs(self) -> None:
        """End all stub learners."""
        for stub in self._stubs:
            stub.end()
        for stub in self._stubs:
            stub.close()

    def close(self) -> None:
        """End the stub learners and the syncer."""
        self.end_stubs()
        if self.is_running:
            self.signal(signal.SIGCONT)
            self.kill()


@contextmanager
def syncer(folder: Path, **changes: Any) -> Iterator[Site]:
    """Yield a site with a starting syncer; it ends with the block."""
    site = Site(folder, **changes)
    try:
        yield site.start()
    finally:
        site.close()
