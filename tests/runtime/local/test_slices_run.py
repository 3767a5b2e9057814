"""An island of three slices trains on while slices are killed and stand still; the run is audited and replayed."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.runtime.helpers import call, processes_of, replayed, set_pace, wait_for
from tests.runtime.syncer.test_failover import Job, folder

__all__ = ["folder"]  # a fixture

SLICES, STEPS = 3, 600
# Processes that start need most of the time; the run must not end before all of them have returned.
SLOW_S, FAST_S = 0.4, 0.01


@pytest.mark.long
@pytest.mark.net
def test_an_island_trains_on_when_its_slices_are_lost_and_stand_still(folder: Path) -> None:
    pace = folder / "pace"
    set_pace(pace, SLOW_S)
    job = Job(
        folder,
        pace,
        islands={"count": 1, "devices": 1, "slices": SLICES, "restart_delay_s": 0.1},
        train={"steps": STEPS, "batch_size": 6, "eval_every": 0},
        protocol={"sync_every": 6, "num_fragments": 6, "snapshot_every": 20},
    )
    whole(job, 0)
    merges(job)

    leader, times = leader_of(job), whole_times(job)
    os.kill(pid_of(job, (leader + 1) % SLICES), signal.SIGKILL)
    merges(job)
    whole(job, times)
    assert leader_of(job) == leader, "a follower was lost, and the island has another leader"

    times = whole_times(job)
    os.kill(pid_of(job, leader), signal.SIGKILL)
    second = another_leads(job, leader)
    merges(job)
    whole(job, times)

    times, stopped = whole_times(job), pid_of(job, second)
    os.kill(stopped, signal.SIGSTOP)
    try:
        another_leads(job, second)
        merges(job)
    finally:
        os.kill(stopped, signal.SIGCONT)
    whole(job, times)

    assert job.status["global_step"] < STEPS, "it was over before all slices had returned: more steps are needed"
    set_pace(pace, FAST_S)
    _, summary = job.finish()
    assert summary["complete"] and summary["global_steps"] == STEPS
    audit = call("audit", job.run_dir, "--json")
    assert audit.returncode == 0 and json.loads(audit.stdout)["violations"] == 0, audit.stdout + audit.stderr
    replayed(job.run_dir)


def found(job: Job, pattern: str) -> list[re.Match[str]]:
    """Return what matches in the logs of all slices."""
    logs = (job.run_dir / "logs").glob("island-0.slice-*.log")
    return [match for path in logs for match in re.finditer(pattern, path.read_text())]


def leader_of(job: Job) -> int:
    """Return the slice that leads in the newest term."""
    return max((int(m[2]), int(m[1])) for m in found(job, r"slice (\d) leads island-0 in term (\d+)"))[1]


def another_leads(job: Job, before: int) -> int:
    wait_for(lambda: leader_of(job) != before, f"another leader than slice {before}", job.process)
    return leader_of(job)


def whole_times(job: Job) -> int:
    """Return how often all slices have come together."""
    return len(found(job, rf"; {SLICES} train\n"))


def whole(job: Job, times: int) -> None:
    wait_for(lambda: whole_times(job) > times, f"{SLICES} slices that train together", job.process)


def merges(job: Job) -> None:
    """Wait until rounds that have not begun yet are merged."""
    step = job.status["global_step"]
    wait_for(lambda: job.status["global_step"] >= step + 5, f"rounds after {step}", job.process)


def pid_of(job: Job, number: int) -> int:
    return next(pid for pid, words in processes_of(job.run_dir).items() if f" --slice {number} " in words)
