"""Pauses of an island that loses a host of a slice, and of the island beside it; for slices --lose.

Two islands of two slices train, and the first one loses one process at a time. `pause_s` is the longest time between
two step reports of the island that the syncer received, from the signal until all slices are back. `other_s` is that of
the other island, and `before_s` the longest of both islands in the steps before the signal.
"""

import contextlib
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from slices import reports

from tests.runtime.helpers import kill_processes
from tests.runtime.local.slice_processes import leader_of, pids_of, whole_times

SLICES = 2
ISLAND, OTHER = "island-0", "island-1"
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
# The steps before a signal whose times are compared with those after it.
QUIET = 20
# The steps of the others while a process is suspended.
SUSPENDED = 30
# An island may pause for two steps and this time.
PAUSE_S = 5.0
LOOK_S = 0.2
# Processes that start may wait for others that compile.
PATIENCE_S = 900.0


class Loss(NamedTuple):
    """A process that is lost: host `host` of the slice that leads, or of one that follows."""

    leads: bool
    host: int

    def __str__(self) -> str:
        return f"host {self.host} of the slice that {'leads' if self.leads else 'follows'}"


class Job:
    """Two islands that train in the background."""

    def __init__(self, folder: Path, hosts: int, step_s: float) -> None:
        self.run, self.hosts = folder / "run", hosts
        config = folder / "slices.yaml"
        config.write_text(yaml.safe_dump(settings(hosts, step_s)), encoding="utf-8")
        command = [sys.executable, "-m", "diloco_jax", "train", str(config), "--run-dir", str(self.run), "--quiet"]
        paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        around = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=around)

    def steps(self, island: str) -> list[float]:
        """Return when the syncer received each step report of an island, in seconds."""
        return reports(self.run, island)

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until something has happened; SystemExit if it does not, or the job ends."""
        ends_s = time.monotonic() + PATIENCE_S
        while not condition():
            if self.process.poll() is not None or time.monotonic() > ends_s:
                raise SystemExit(f"the job in {self.run} has not come to {what}")
            time.sleep(LOOK_S)

    def more_steps(self, count: int) -> None:
        """Wait until both islands have made so many further steps."""
        goals = {island: len(self.steps(island)) + count for island in (ISLAND, OTHER)}
        self.wait_for(lambda: all(len(self.steps(each)) >= goal for each, goal in goals.items()), f"{count} steps")

    def pid_of(self, loss: Loss) -> int:
        leader = leader_of(self.run, ISLAND)
        return pids_of(
            self.run,
            leader if loss.leads else 1 - leader,
            f" --host {loss.host} " if self.hosts > 1 else "",
            ISLAND,
        )[0]

    def lose(self, loss: Loss, how: str) -> dict[str, Any]:
        """Send a signal to a process, wait until all slices are back, and return the pauses."""
        self.more_steps(QUIET + 1)
        before = {island: self.steps(island) for island in (ISLAND, OTHER)}
        times, pid = whole_times(self.run, SLICES, ISLAND), self.pid_of(loss)
        os.kill(pid, SIGNALS[how])
        if how == "stop":
            self.more_steps(SUSPENDED)
            # Its slice may have ended meanwhile.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.wait_for(lambda: whole_times(self.run, SLICES, ISLAND) > times, "slices that are back")
        self.more_steps(2)
        quiet = {island: gaps(steps[-QUIET - 1 :]) for island, steps in before.items()}
        after = {island: gaps(self.steps(island)[len(steps) - 1 :]) for island, steps in before.items()}
        usual_s = statistics.median(quiet[ISLAND])
        return {
            "hosts": self.hosts,
            "signal": SIGNALS[how].name,
            "lost": str(loss),
            "pause_s": max(after[ISLAND]),
            "bar_s": 2 * usual_s + PAUSE_S,
            "other_s": max(after[OTHER]),
            "before_s": max(max(each) for each in quiet.values()),
            "step_s": usual_s,
        }


def settings(hosts: int, step_s: float) -> dict[str, Any]:
    """Return the config of two islands of two slices, whose steps take at least `step_s` seconds."""
    islands = {"count": 2, "slices": SLICES, "hosts": hosts, "devices": hosts, "mesh": {"fsdp": hosts}}
    model = {"vocab_size": 256, "dim": 64, "mlp_dim": 128, "step_s": step_s}
    return {
        "name": "slices-lost",
        "islands": {**islands, "restart_delay_s": 0.1, "restarts_max": 1000},
        "train": {"steps": 1_000_000, "batch_size": 8, "seq_len": 32, "eval_every": 0},
        "model": {"module": "_paced_model:PacedModel", "args": model},
        "optimizer": {"warmup_steps": 5},
        "protocol": {"sync_every": 6, "num_fragments": 6, "quorum": 1, "snapshot_every": 0},
        "trackers": [],
    }


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


@contextmanager
def training(hosts: int, step_s: float) -> Iterator[Job]:
    """Start two islands, wait until all slices train, and end all processes at the end."""
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder:
        job = Job(Path(folder), hosts, step_s)
        try:
            for island in (ISLAND, OTHER):
                job.wait_for(lambda island=island: whole_times(job.run, SLICES, island) > 0, f"all slices of {island}")
            yield job
        finally:
            job.process.kill()
            job.process.wait()
            kill_processes(job.run)


def lose(hosts: list[int], how: list[str], step_s: float) -> Iterator[dict[str, Any]]:
    """Yield the pauses of each loss: every host of a slice that follows, and of the one that leads."""
    for count in hosts:
        with training(count, step_s) as job:
            for name in how:
                for leads in (False, True):
                    for host in reversed(range(count)):
                        yield job.lose(Loss(leads, host), name)
