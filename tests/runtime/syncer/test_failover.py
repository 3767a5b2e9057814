"""The syncer dies, or its disk is full, and learners notice nothing but a pause between two rounds."""

import itertools
import json
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from diloco_jax.protocol.member import ACTIVE, DISCONNECTED
from diloco_jax.protocol.messages import MetricsReport
from diloco_jax.protocol.syncer.subscribers import Subscriber, Subscribers
from diloco_jax.runtime.records.checkpoint import complete, load_parameters
from diloco_jax.runtime.records.status import read_status
from diloco_jax.runtime.records.telemetry import read_metrics
from diloco_jax.runtime.syncer.run import ADRIFT_S, FAREWELL_S, LATE_S, SUBSCRIBERS_S, SyncerDriver
from diloco_jax.transport.link import Delivery
from diloco_jax.transport.session.calls import ask_status
from tests.limits import HANGS_S
from tests.runtime.helpers import (
    SLOW_STEP_S,
    STEP_S,
    kill_processes,
    processes_of,
    start,
    status,
    wait_for,
    write_config,
)

STEPS = 120
FRAGMENTS = 6


class Job:
    """A small run of two islands with snapshots, in the background."""

    def __init__(self, folder: Path, step_s: float | Path = STEP_S, **changes: Any) -> None:
        self.run_dir, self._step_s = folder / "run", step_s
        self.config = write_config(
            folder,
            **{
                "islands": {"count": 2, "devices": 1, "restart_delay_s": 0.1},
                "train": {"steps": STEPS, "eval_every": 0},
                "protocol": {"sync_every": FRAGMENTS, "num_fragments": FRAGMENTS, "snapshot_every": 15, "quorum": 2},
                **changes,
            },
        )
        self.process = self.begin()

    def begin(self, *options: str) -> subprocess.Popen[str]:
        return start("train", self.config, "--run-dir", self.run_dir, "--quiet", *options, step_s=self._step_s)

    def reached(self, global_step: int, epoch: int = 1) -> None:
        """Wait until this epoch of the syncer has come so far."""
        wait_for(
            lambda: self.status["epoch"] == epoch and self.status["global_step"] >= global_step,
            f"global step {global_step} in epoch {epoch} of the syncer",
            self.process,
        )

    @property
    def status(self) -> dict[str, Any]:
        return status(self.run_dir) or {"epoch": 0, "global_step": 0}

    def pid_of(self, word: str) -> int:
        return next(pid for pid, command in processes_of(self.run_dir).items() if f" {word} " in command)

    def finish(self) -> tuple[str, dict[str, Any]]:
        """Wait for the end; what was said, and the summary."""
        output, _ = self.process.communicate(timeout=HANGS_S)
        assert self.process.returncode == 0, output
        return output, json.loads((self.run_dir / "summary.json").read_text())

    def kill_everybody(self) -> None:
        self.process.kill()
        self.process.communicate()
        kill_processes(self.run_dir)
        wait_for(lambda: not processes_of(self.run_dir), "the end of all processes")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder, and end the processes of its run after the test, also of one that failed."""
    yield tmp_path
    kill_processes(tmp_path)


def tape_of(run_dir: Path) -> list[list[Any]]:
    data = (run_dir / "tape.jsonl").read_bytes()
    assert data.endswith(b"\n"), "the tape's last line is torn"
    return [json.loads(line) for line in data.splitlines()]


def check_end(run_dir: Path) -> None:
    """Every global step is done, no round merged twice, and learners ended with the values that the syncer saved."""
    tape = tape_of(run_dir)
    times = [line[1] for line in tape]
    assert times == sorted(times), "the run's clock went back"
    newest = complete(run_dir / "checkpoints")[0]
    assert newest.name == f"step_{STEPS:08d}"
    meta = load_parameters(newest)[1]
    assert min(meta["versions"]) > STEPS - FRAGMENTS - 3
    ends = [json.loads(p.read_text().splitlines()[-1]) for p in sorted((run_dir / "tapes").iterdir())]
    finals = [end[2] for end in ends if end[:2] == ["end", "run complete"]]
    assert len(finals) == 2, ends
    made = {line[3] for line in tape if line[0] == "merged"}
    for digests in finals:
        # Stop may overtake the values of the last rounds, because they use another connection.
        same = sum(ours == theirs for ours, theirs in zip(digests, meta["digests"], strict=True))
        assert same >= FRAGMENTS - 2 and set(digests) <= made


@pytest.mark.long
@pytest.mark.net
def test_the_syncer_survives_a_full_disk_and_is_killed_twice(folder: Path) -> None:
    # Steps are slow, so that the run cannot end before both kills on a fast machine.
    job = Job(folder, step_s=SLOW_STEP_S)
    job.reached(15)
    fill_the_disk_for_a_while(job)
    for epoch in (1, 2):
        job.reached(20 + 25 * epoch, epoch)
        os.kill(job.pid_of("syncer"), signal.SIGKILL)
    output, summary = job.finish()
    assert output.count("syncer killed by SIGKILL") == 2 and "islands train on" in output, output
    assert summary["complete"] and summary["global_steps"] == STEPS and of_tape(job.status) == [], job.status
    assert all(row["restarts"] == 0 for row in summary["learners"].values()), "no island was lost with the syncer"
    check_end(job.run_dir)
    tape = tape_of(job.run_dir)
    assert [line[0] for line in tape].count("restart") == 2
    merged = [line[2] for line in tape if line[0] == "merged"]
    assert len(merged) == len(set(merged)), "a round was merged twice"
    # what was counted before the kills is counted still
    told = {row["learner"]: row["tokens"] for row in job.status["learners"]}
    assert told == {name: row["tokens"] for name, row in summary["learners"].items()}
    records = list(read_metrics(job.run_dir / "metrics.jsonl"))
    steps = [r for r in records if r["kind"] == "step"]
    assert summary["tokens"] >= sum(
        max(r["tokens"] for r in steps if r["learner"] == name) for name in {r["learner"] for r in steps}
    )
    wire = [r for r in records if r["kind"] == "wire"]
    assert all(a["up_bytes"] <= b["up_bytes"] for a, b in itertools.pairwise(wire))


def of_tape(status: dict[str, Any]) -> list[dict[str, Any]]:
    return [alarm for alarm in status["alarms"] if alarm["kind"] == "tape"]


def fill_the_disk_for_a_while(job: Job) -> None:
    """Every decision is on the tape, learners continue, and the process survives a full disk."""
    syncer = job.pid_of("syncer")
    soft, hard = resource.prlimit(syncer, resource.RLIMIT_FSIZE)
    resource.prlimit(syncer, resource.RLIMIT_FSIZE, (0, hard))
    address = (job.run_dir / "syncer.address").read_text()
    told = wait_for(lambda: of_tape(read_status(address, ask_status)), "an alarm")
    assert "the tape cannot be written" in told[0]["text"] and "free space" in told[0]["remedy"]
    rests = read_status(address, ask_status)
    tapes = sorted((job.run_dir / "tapes").iterdir())
    lines = [len(path.read_text().splitlines()) for path in tapes]
    wait_for(
        lambda: any(len(p.read_text().splitlines()) > n + 20 for p, n in zip(tapes, lines, strict=True)),
        "inner steps while the disk is full",
    )
    assert read_status(address, ask_status)["global_step"] == rests["global_step"], (
        "nothing is decided that is not on the tape"
    )
    resource.prlimit(syncer, resource.RLIMIT_FSIZE, (soft, hard))
    wait_for(
        lambda: read_status(address, ask_status)["global_step"] > rests["global_step"] and not of_tape(job.status),
        "its end",
    )
    assert job.pid_of("syncer") == syncer and '\n["restart"' not in (job.run_dir / "tape.jsonl").read_text()


class Scene:
    """Scene of a real driver with fake surroundings; each look at the listener takes its timeout."""

    def __init__(self, *deliveries: Delivery | None) -> None:
        self.now_s, self._deliveries = 1000.0, list(deliveries)
        self.member = SimpleNamespace(state=ACTIVE, incarnation=1)
        parts, listener, results = MagicMock(), MagicMock(), MagicMock()
        parts.clock.now_s = lambda: self.now_s
        parts.machine.membership = SimpleNamespace(members={"a": self.member}, connected=self.connected)
        parts.taped.on_disconnect, parts.machine.finished, parts.machine.over = self.lose, False, False
        parts.machine.next_deadline_s.return_value = None
        listener.lost = ""
        listener.receive, results.take.return_value = self.receive, []
        parts.stop.is_set.side_effect = lambda: not self._deliveries
        other: Any = MagicMock()
        readers = Subscribers(parts.machine, "")
        self.driver = SyncerDriver(
            parts, listener, results, merges=other, snapshots=other, watch=other, subscribers=readers
        )

    def connected(self) -> list[Any]:
        return [] if self.member.state == DISCONNECTED else [self.member]

    def receive(self, timeout_s: float) -> Delivery | None:
        self.now_s += timeout_s
        return self._deliveries.pop(0) if self._deliveries else None

    def lose(self, *_: object) -> list[Any]:
        self.member.state = DISCONNECTED
        return []


BROKEN, BACK = Delivery("disconnected", "a", reason="lost"), Delivery("message", "a", MetricsReport("a", 1, 0, ()))


@pytest.mark.parametrize(
    ("deliveries", "state", "ago_s", "waits"),
    [
        # The learner may be on its way back, and nobody else can report the end of the run to it.
        ([BROKEN], ACTIVE, 0.0, True),
        # The learner reconnected and has left.
        ([BROKEN, BACK], ACTIVE, 0.0, False),
        ([BROKEN], ACTIVE, ADRIFT_S, False),  # dead
        # The learner had said goodbye.
        ([BROKEN], DISCONNECTED, 0.0, False),
    ],
)
def test_a_learner_whose_link_broke_lately_hears_of_the_end(
    deliveries: list[Delivery], state: str, ago_s: float, waits: bool
) -> None:
    scene = Scene(*deliveries)
    scene.member.state = state
    scene.driver.serve([])
    scene.now_s += ago_s + 1.0
    began_s = scene.now_s
    scene.driver.bid_farewell(lingers=False)
    assert (scene.now_s - began_s >= FAREWELL_S) == waits


@pytest.mark.parametrize(("finished", "waited_s"), [(True, SUBSCRIBERS_S), (False, 0.0)])
def test_only_a_complete_run_waits_for_subscribers_and_not_for_long(finished: bool, waited_s: float) -> None:
    scene = Scene()
    scene.driver.serve([])
    context: Any = scene.driver.context
    context.machine.finished, scene.member.state = finished, DISCONNECTED
    context.stop.is_set.side_effect, context.stop.is_set.return_value = None, False
    scene.driver.subscribers._known["s"] = Subscriber()
    began_s = scene.now_s
    scene.driver.bid_farewell(lingers=False)
    assert scene.now_s - began_s == pytest.approx(waited_s, abs=0.2)


@pytest.mark.parametrize(
    ("deliveries", "over", "waited_s"),
    [([BROKEN], True, LATE_S), ([BROKEN, BACK], True, 0.0), ([BROKEN], False, 0.0)],
)
def test_a_syncer_alone_waits_for_late_islands_of_a_complete_run(
    deliveries: list[Delivery], over: bool, waited_s: float
) -> None:
    scene = Scene(*deliveries)
    scene.driver.serve([])
    context: Any = scene.driver.context
    context.machine.over, context.stop.is_set.side_effect, context.stop.is_set.return_value = over, None, False
    scene.now_s += ADRIFT_S + 1.0
    began_s = scene.now_s
    scene.driver.bid_farewell(lingers=False, late_s=LATE_S)
    assert scene.now_s - began_s == pytest.approx(waited_s, abs=0.2)
