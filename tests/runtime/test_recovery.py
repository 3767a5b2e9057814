"""Islands that die come back with a healthy island's state, or without; real processes, killed with SIGKILL."""

import json
import os
import shutil
import signal
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from diloco_jax.runtime.records.files import ADDRESS_FILE
from diloco_jax.runtime.records.telemetry import read_metrics
from diloco_jax.tools.chaos.relay import Relay
from tests.limits import HANGS_S
from tests.runtime.helpers import (
    SLOW_STEP_S,
    STEP_S,
    json_lines,
    kill_processes,
    processes_of,
    start,
    status,
    wait_for,
    write_config,
)

pytestmark = pytest.mark.net

PROTOCOL = {"sync_every": 24, "num_fragments": 6, "recovery_attempts": 20, "snapshot_every": 0}
LARGE = {"dim": 256, "num_layers": 8, "num_heads": 4, "num_kv_heads": 4, "head_dim": 64, "mlp_dim": 1024}


class Job:
    """A run without an end."""

    def __init__(self, folder: Path, *, step_s: float = SLOW_STEP_S, **changes: Any) -> None:
        self.run_dir = folder / "run"
        changes = {"train": {"steps": 1_000_000, "eval_every": 0}, "protocol": PROTOCOL, **changes}
        self.config = write_config(folder, **changes)
        self.process = start("train", self.config, "--run-dir", self.run_dir, "--quiet", step_s=step_s)

    def pid(self, name: str) -> int:
        return next(pid for pid, command in processes_of(self.run_dir).items() if f"--island {name}" in command)

    def tapes(self, name: str) -> list[Path]:
        """The tapes of its incarnations, oldest first."""
        return sorted((self.run_dir / "tapes").glob(f"{name}.*.jsonl"))

    def merged_with(self, name: str) -> list[float]:
        return [r["t"] for r in self.records("merged") if name in r["members"]]

    def records(self, kind: str) -> list[dict[str, Any]]:
        return [r for r in read_metrics(self.run_dir / "metrics.jsonl") if r["kind"] == kind]

    def await_everybody(self, names: list[str]) -> None:
        wait_for(lambda: status(self.run_dir).get("global_step", 0) > 10, "training", self.process)
        wait_for(lambda: all(self.merged_with(name) for name in names), "a value of each in a merge", self.process)

    def await_incarnation(self, name: str, number: int) -> list[list[Any]]:
        """Wait for the first step of this incarnation; returns its tape until then."""
        wait_for(lambda: len(self.tapes(name)) >= number, f"incarnation {number} of {name}", self.process)
        path = self.tapes(name)[number - 1]
        wait_for(lambda: any(line[0] == "step" for line in json_lines(path)), f"a step of {path.name}", self.process)
        return json_lines(path)

    def end(self) -> str:
        self.process.send_signal(signal.SIGINT)
        output, _ = self.process.communicate(timeout=HANGS_S)
        assert self.process.returncode == 130, output
        return output


def lines(tape: list[list[Any]], *kinds: str) -> list[list[Any]]:
    return [line for line in tape if line[0] in kinds]


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    started: list[Job] = []
    yield started
    for job in started:
        if job.process.poll() is None:
            job.process.kill()
            job.process.communicate()
        kill_processes(job.run_dir)


@pytest.mark.long
def test_a_killed_island_returns_with_a_healthy_ones_state_and_nobody_waits(tmp_path: Path, jobs: list[Job]) -> None:
    """Then a new island joins, and leaves at a preemption notice; finally all islands are stopped."""
    job = Job(tmp_path, islands={"count": 2, "devices": 1})
    jobs.append(job)
    job.await_everybody(["island-0", "island-1"])
    os.kill(job.pid("island-1"), signal.SIGKILL)
    tape = job.await_incarnation("island-1", 2)
    ((_, donor, donor_incarnation, donor_step, fragments),) = lines(tape, "state")
    assert donor == "island-0" and set(fragments) <= set(range(6))
    assert tape.index(lines(tape, "state")[0]) < tape.index(lines(tape, "step")[0])
    (given,) = [path for path in job.tapes(donor) if f".{donor_incarnation}." in path.name]
    assert ["staged_state", donor_step] in json_lines(given)
    returned_s = [r["t"] for r in job.records("joined") if r["members"] == ["island-1"]][-1]
    wait_for(lambda: job.merged_with("island-1")[-1] > returned_s, "a merge with island-1 again")

    config = job.run_dir / "config.yaml"
    notice = tmp_path / "notice"
    words = ["--island", "stranger", "--preemption", notice]
    stranger = start("learner", config, *words, "--islands.batch_size", 8, step_s=SLOW_STEP_S)
    try:
        tape = job.await_incarnation("stranger", 1)
        assert tape[0][1:4] == ["stranger", tape[0][2], 8] and len(lines(tape, "state")) == 1
        wait_for(lambda: job.merged_with("stranger"), "a merge with the stranger")
        notice.touch()
        output, _ = stranger.communicate(timeout=HANGS_S)
        assert stranger.returncode == 130 and "stranger: stopped from outside" in output
        assert "preemption notice" in output
    finally:
        stranger.kill()
    output = job.end()
    assert "Traceback" not in output and processes_of(job.run_dir) == {}
    summary = json.loads((job.run_dir / "summary.json").read_text())
    assert not summary["complete"] and summary["global_steps"] > 10
    assert [summary["learners"][f"island-{i}"]["restarts"] for i in range(2)] == [0, 1]
    assert any((job.run_dir / "checkpoints").iterdir())
    check_nobody_waited(job, "island-1", ["island-0"])


def check_nobody_waited(job: Job, killed: str, others: list[str]) -> None:
    """Check that steps and rounds continued from an island's death until it was merged again."""
    ends = [*job.records("left"), *job.records("disconnected")]
    died_s = min(r["t"] for r in ends if r["members"] == [killed])
    back_s = next(t for t in job.merged_with(killed) if t > died_s)
    rounds = [r for r in job.records("merged") if died_s < r["t"] < back_s]
    assert len(rounds) >= 5, f"{len(rounds)} rounds while {killed} was away"
    for name in others:
        steps = [r for r in job.records("step") if r["learner"] == name and died_s < r["t"] < back_s]
        assert len(steps) >= 5, f"{name} made {len(steps)} steps while {killed} was away"


@pytest.mark.slow
def test_another_donor_replaces_one_that_dies_in_the_middle(tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(
        tmp_path,
        islands={"count": 3, "devices": 1},
        train={"steps": 1_000_000, "eval_every": 0, "batch_size": 3, "seq_len": 16},
        # The state has 100 MB, so that the transfer lasts a while.
        model={"args": {**LARGE, "seq_len_max": 16}},
        protocol={**PROTOCOL, "sync_every": 960},
        step_s=STEP_S,
    )
    jobs.append(job)
    job.await_everybody(["island-0", "island-1", "island-2"])
    os.kill(job.pid("island-1"), signal.SIGKILL)
    donor = wait_for_donor(job, ("island-0", "island-2"))
    victim = job.pid(donor)
    # The transfer must not finish while the test looks.
    os.kill(victim, signal.SIGSTOP)
    wait_for(lambda: len(job.tapes("island-1")) == 2, "the second incarnation")
    assert lines(json_lines(job.tapes("island-1")[1]), "state") == [], "the transfer was over too soon for this test"
    os.kill(victim, signal.SIGKILL)
    ((_, second, *_),) = lines(job.await_incarnation("island-1", 2), "state")
    assert second in ("island-0", "island-2") and second != donor
    job.end()


def wait_for_donor(job: Job, names: tuple[str, ...]) -> str:
    """Who has just begun to give; looks often, a transfer is short."""
    ends_s = time.monotonic() + HANGS_S
    while time.monotonic() < ends_s:
        for name in names:
            if any(b'"staged_state"' in path.read_bytes() for path in job.tapes(name)):
                return name
        time.sleep(0.002)
    raise AssertionError("nobody was asked for a state")


@pytest.mark.long
def test_an_island_without_peers_loads_what_it_saved_or_continues_from_the_syncer_alone(
    tmp_path: Path, jobs: list[Job]
) -> None:
    job = Job(tmp_path, islands={"count": 1, "devices": 1}, protocol={**PROTOCOL, "snapshot_every": 20})
    jobs.append(job)
    folder = job.run_dir / "states" / "island-0"
    wait_for(lambda: any(lines(json_lines(tape), "saved")[1:] for tape in job.tapes("island-0")), "saves")
    os.kill(job.pid("island-0"), signal.SIGKILL)
    tape = job.await_incarnation("island-0", 2)
    ((_, donor, incarnation, local_step, _),) = lines(tape, "state")
    first = json_lines(job.tapes("island-0")[0])
    assert (donor, incarnation) == ("", first[0][2])
    assert local_step in [line[1] for line in lines(first, "saved")]

    wait_for(lambda: lines(json_lines(job.tapes("island-0")[1]), "adopt"), "a value from the syncer")
    os.kill(job.pid("island-0"), signal.SIGKILL)
    # The next process of the island must not find its state.
    shutil.rmtree(folder)
    tape = job.await_incarnation("island-0", 3)
    assert lines(tape, "state", "staged_state") == []
    left = max(line[2] for line in lines(json_lines(job.tapes("island-0")[1]), "adopt"))
    assert max(line[2] for line in lines(tape, "adopt")) >= left > 0, "it began again from the initial model"
    wait_for(lambda: status(job.run_dir)["global_step"] > left + 10, "rounds after the return")

    job.process.kill()
    job.process.communicate()
    wait_for(lambda: not processes_of(job.run_dir), "the end of all children of a killed supervisor")


@pytest.mark.slow
def test_moments_that_travel_for_five_turns_arrive_and_no_round_waits_for_them(tmp_path: Path, jobs: list[Job]) -> None:
    """6.4 MB of moments pass where 600 kB/s do, beside the rounds, which take half of that."""
    turn, fragments = 12, 6
    job = Job(
        tmp_path,
        islands={"count": 2, "devices": 1},
        train={"steps": 1_000_000, "eval_every": 0, "batch_size": 2, "seq_len": 16},
        model={"args": {**LARGE, "dim": 128, "num_heads": 2, "num_kv_heads": 2, "mlp_dim": 512, "seq_len_max": 16}},
        protocol={**PROTOCOL, "sync_every": turn, "num_fragments": fragments, "recovery_turns": 60},
        transport={"stripes": 1},
        wire={"states": "bfloat16"},
        step_s=0.25,
    )
    jobs.append(job)
    job.await_everybody(["island-0", "island-1"])
    with Relay((job.run_dir / ADDRESS_FILE).read_text().strip()) as narrow:
        narrow.change("down", bytes_per_s=600_000.0)
        words = ["--island", "stranger", "--syncer", narrow.address, "--islands.batch_size", 1]
        stranger = start("learner", job.run_dir / "config.yaml", *words, step_s=0.25)
        try:
            ((_, donor, _, donor_step, _),) = lines(job.await_incarnation("stranger", 1), "state")
            took = len([line for line in lines(json_lines(job.tapes(donor)[0]), "step") if line[1] > donor_step])
            joined_s = next(r["t"] for r in job.records("joined") if r["members"] == ["stranger"])
            rounds = [r["t"] for r in job.records("merged")]
            wait_for(lambda: job.merged_with("stranger"), "a merge with the stranger")
        finally:
            stranger.kill()
            stranger.communicate()
    copies = [line for path in job.tapes(donor) for line in lines(json_lines(path), "staged_state")]
    assert len(copies) == 1 and took >= 5 * turn, f"{took} steps of the donor, {len(copies)} attempts"
    before, during = ([b - a for a, b in pairwise(rounds) if (a > joined_s) == late] for late in (False, True))
    assert len(during) >= 5 * fragments, f"{len(during)} rounds while the moments travelled"
    figures = (took / turn, len(during), statistics.median(before), statistics.median(during), max(during))
    print(
        "{:.1f} H, {} rounds meanwhile; s between rounds: {:.2f} before, {:.2f} then, at most {:.2f}".format(*figures)
    )
    job.end()


@pytest.mark.nightly
def test_stopping_while_the_inner_step_compiles_is_quick_and_polite(tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(
        tmp_path, islands={"count": 1, "devices": 1}, model={"args": {**LARGE, "num_layers": 5, "seq_len_max": 32}}
    )
    jobs.append(job)
    wait_for(lambda: (job.run_dir / ADDRESS_FILE).exists(), "the syncer")
    wait_for(lambda: job.tapes("island-0"), "a tape")
    os.kill(job.pid("island-0"), signal.SIGTERM)
    # Status 130 is not a success.
    wait_for(lambda: len(job.tapes("island-0")) == 2, "another start")
    log = (job.run_dir / "logs" / "island-0.log").read_text()
    first = log.partition("island-0: stopped from outside")
    assert first[1] and "compiled" not in first[0] and "terminate" not in log and "Traceback" not in log
    assert json_lines(job.tapes("island-0")[0])[-1][1] == "stopped from outside"
    job.end()
