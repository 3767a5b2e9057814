"""A run on a Ray cluster whose nodes come and go. All nodes are on this machine; nothing of the job is simulated."""

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco_jax.runtime.records.telemetry import read_metrics
from tests.limits import HANGS_S, SLOW_HANGS_S
from tests.runtime.helpers import (
    SLOW_STEP_S,
    interrupted,
    kill_processes,
    processes_of,
    run,
    start,
    status,
    wait_for,
    write_config,
)

pytestmark = [
    pytest.mark.extra("ray"),
    pytest.mark.nightly,
    pytest.mark.net,
    pytest.mark.filterwarnings("default"),  # Ray's own
]

STORE_BYTES = 80_000_000
# The free resources of a cluster, and its placement groups that are not removed.
LEFT = """
import sys, time, ray
ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
for _ in range(60):
    groups = [each for each in ray.util.placement_group_table().values() if each["state"] != "REMOVED"]
    used = ray.cluster_resources().get("island", 0) - ray.available_resources().get("island", 0)
    if not groups and not used:
        sys.exit(0)
    time.sleep(1)
sys.exit(f"{groups}; islands that have a place: {used}")
"""


class Nodes:
    """A Ray cluster of this machine: a head without islands, and nodes with room for one island each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": STORE_BYTES}
        self._cluster = patiently(lambda: Cluster(initialize_head=True, head_node_args=head))
        self.address: str = self._cluster.address
        self._nodes: list[Any] = []

    def add(self, count: int) -> None:
        more: dict[str, Any] = {"num_cpus": 1, "resources": {"island": 1}, "object_store_memory": STORE_BYTES}
        for _ in range(count):
            self._nodes.append(patiently(lambda: self._cluster.add_node(**more, wait=False)))
        self._cluster.wait_for_nodes(timeout=HANGS_S)

    def lose(self, count: int) -> None:
        """Let nodes lose power: all their processes end at the same moment, and nobody says goodbye."""
        for node in self._nodes[-count:]:
            tree = descendants([node.all_processes["raylet"][0].process.pid])
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in tree:
                    os.kill(pid, number)
            self._cluster.remove_node(node, allow_graceful=False)
        del self._nodes[-count:]

    def close(self) -> None:
        self._cluster.shutdown()


def patiently(begin: Callable[[], Any]) -> Any:
    """Start a node; try again if it does not start within Ray's own limit of 30 s, as on a busy machine."""
    for _ in range(8):
        before = {*descendants([os.getpid()])}
        try:
            return begin()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
            for pid in {*descendants([os.getpid()])} - before:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    raise AssertionError("no node of Ray starts on this machine")


def descendants(pids: list[int]) -> list[int]:
    """List these processes and all that they started."""
    rows = subprocess.run(["ps", "-eo", "pid,ppid"], text=True, capture_output=True, check=True).stdout
    parents = dict(map(int, row.split()) for row in rows.splitlines()[1:])
    found = list(pids)
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    made = Nodes()
    yield made
    made.close()


def config_of(folder: Path, address: str, steps: int) -> Path:
    return write_config(
        folder,
        islands={"count": 6, "devices": 1, "ray": address, "resources": {"CPU": 1, "island": 1}},
        train={"steps": steps, "batch_size": 12, "eval_every": 0},
        protocol={"snapshot_every": 400},
        cloud={"env": {"DILOCO_TEST_STEP_S": str(SLOW_STEP_S)}},
    )


def islands_per_round(run_dir: Path) -> list[int]:
    """Return M of each round in the order of the rounds: how many islands it merged."""
    path = run_dir / "metrics.jsonl"
    return [len(r["members"]) for r in (read_metrics(path) if path.exists() else ()) if r["kind"] == "merged"]


def test_islands_follow_the_nodes(tmp_path: Path, nodes: Nodes) -> None:
    """From 2 nodes to 6, to 3, to 2, and with a new one to 3: the run completes, and no sample is lost."""
    run_dir, phases = tmp_path / "run", list[tuple[str, int]]()
    nodes.add(2)
    config = config_of(tmp_path, nodes.address, steps=2400)
    process = start("train", config, "--run-dir", run_dir, "--quiet")

    def await_rounds(phase: str, islands: int, rounds: int = 12) -> None:
        """Wait for so many rounds in a row that merged exactly these islands or, in between, fewer."""

        def there() -> bool:
            since = islands_per_round(run_dir)[phases[-1][1] if phases else 0 :]
            return since[-rounds:].count(islands) > rounds // 2 and max(since[-rounds:]) == islands

        wait_for(there, f"rounds of {islands} islands", process)
        phases.append((phase, len(islands_per_round(run_dir))))

    try:
        await_rounds("2 nodes", 2)
        nodes.add(4)
        await_rounds("6 nodes", 6)
        nodes.lose(3)
        await_rounds("3 nodes", 3)
        nodes.lose(1)
        await_rounds("2 nodes", 2)
        nodes.add(1)
        await_rounds("3 nodes", 3)
        output, _ = process.communicate(timeout=SLOW_HANGS_S)
    finally:
        kill_processes(run_dir)
        process.kill()
    counts = islands_per_round(run_dir)
    print(output, phases, [(m, len([*same])) for m, same in itertools.groupby(counts)], sep="\n")
    assert process.returncode == 0 and "complete: evaluation loss" in output, output
    audit = run("audit", run_dir)
    assert audit.returncode == 0 and "every lease of a sample has one fate" in audit.stdout, audit.stdout + audit.stderr
    print(audit.stdout)
    assert "raylet" not in output and "has been marked dead" in (run_dir / "logs/ray.log").read_text(), output
    # Four islands wait at first. Three that lost their nodes wait again; the place of the fourth may be there at once.
    assert len(re.findall(r"island-\d waits for {CPU: 1, island: 1}\n", output)) in (7, 8), output
    assert len(re.findall(r"island-\d ended with status 143: Ray lost its node \w+ at", output)) == 4, output
    assert len(re.findall(r"island-\d starts on node \w+ at", output)) == 7, output
    assert not processes_of(run_dir)
    left = subprocess.run([sys.executable, "-c", LEFT, nodes.address], text=True, capture_output=True, timeout=HANGS_S)
    assert left.returncode == 0, left.stderr


def test_an_interrupt_leaves_nothing_on_the_cluster(tmp_path: Path, nodes: Nodes) -> None:
    """One island trains and five wait when Ctrl-C ends the run, which then resumes."""
    run_dir = tmp_path / "run"
    nodes.add(1)
    config = config_of(tmp_path, nodes.address, steps=100_000)
    process = start("train", config, "--run-dir", run_dir, "--quiet")
    try:
        wait_for(lambda: status(run_dir).get("global_step", 0) > 10, "training", process)
        output = interrupted(process)
        assert "stopped after" in output and "Traceback" not in output, output
        wait_for(lambda: not processes_of(run_dir), "the end of all processes")
        left = [sys.executable, "-c", LEFT, nodes.address]
        done = subprocess.run(left, text=True, capture_output=True, timeout=HANGS_S)
        assert done.returncode == 0, done.stderr
        step = status(run_dir)["global_step"]
        process = start("train", run_dir / "config.yaml", "--run-dir", run_dir, "--resume", "--quiet")
        wait_for(lambda: status(run_dir).get("global_step", 0) > step + 10, "training after the pause", process)
        interrupted(process)
    finally:
        kill_processes(run_dir)
        process.kill()
