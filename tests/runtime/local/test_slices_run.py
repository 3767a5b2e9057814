"""Islands that train on while slices, or hosts of slices, are killed and stand still; the runs are audited."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from diloco_jax.runtime.records import checkpoint
from diloco_jax.settings.text import load
from diloco_jax.tools.replay.replay import Replay
from tests.runtime.helpers import call, replayed, set_pace, wait_for
from tests.runtime.local.slice_processes import leader_of, pids_of, whole_times
from tests.runtime.syncer.test_failover import Job, folder

__all__ = ["folder"]  # a fixture

STEPS = 600
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
        islands={"count": 1, "devices": 1, "slices": 3, "restart_delay_s": 0.1},
        train={"steps": STEPS, "batch_size": 6, "eval_every": 0},
        protocol={"sync_every": 6, "num_fragments": 6, "snapshot_every": 20},
    )
    whole(job, 0, 3)
    merges(job)

    leader, times = leader_of(job.run_dir), whole_times(job.run_dir, 3)
    os.kill(pids_of(job.run_dir, (leader + 1) % 3)[0], signal.SIGKILL)
    merges(job)
    whole(job, times, 3)
    assert leader_of(job.run_dir) == leader, "a follower was lost, and the island has another leader"

    times = whole_times(job.run_dir, 3)
    os.kill(pids_of(job.run_dir, leader)[0], signal.SIGKILL)
    second = another_leads(job, leader)
    merges(job)
    whole(job, times, 3)

    times, stopped = whole_times(job.run_dir, 3), pids_of(job.run_dir, second)[0]
    os.kill(stopped, signal.SIGSTOP)
    try:
        another_leads(job, second)
        merges(job)
    finally:
        os.kill(stopped, signal.SIGCONT)
    whole(job, times, 3)
    audited(job, pace)
    replayed(job.run_dir)


@pytest.mark.long
@pytest.mark.net
def test_a_slice_that_loses_a_host_starts_again_while_the_other_one_trains_on(folder: Path) -> None:
    """With one device for each host every sum has two terms, so a replay in one process has the same bits."""
    pace = folder / "pace"
    set_pace(pace, SLOW_S)
    islands = {"count": 1, "devices": 2, "slices": 2, "hosts": 2, "mesh": {"fsdp": 2}, "restart_delay_s": 0.1}
    job = Job(
        folder,
        pace,
        islands=islands,
        train={"steps": STEPS, "batch_size": 8, "eval_every": 0},
        protocol={"sync_every": 6, "num_fragments": 6, "snapshot_every": 20},
    )
    whole(job, 0, 2)
    merges(job)
    for leads in (False, True):
        leader, times = leader_of(job.run_dir), whole_times(job.run_dir, 2)
        lost = leader if leads else 1 - leader
        own, others = set(pids_of(job.run_dir, lost)), set(pids_of(job.run_dir, 1 - lost))
        assert len(own) == len(others) == 2
        os.kill(pids_of(job.run_dir, lost, "--host 1 ")[0], signal.SIGKILL)
        wait_for(
            lambda own=own, lost=lost: not own & set(pids_of(job.run_dir, lost)), "the end of its slice", job.process
        )
        merges(job)
        whole(job, times, 2)
        assert leader_of(job.run_dir) == 1 - lost and set(pids_of(job.run_dir, 1 - lost)) == others
    merges(job)
    audited(job, pace)
    replay = Replay(load(job.run_dir / "config.yaml"), job.run_dir)
    replay.run()
    again = replay.model.parameters(replay.model.capture())
    learnt, _ = checkpoint.load_parameters(checkpoint.complete(job.run_dir / "checkpoints")[0])
    assert [key for key in learnt if not np.array_equal(again[key], learnt[key])] == []


def audited(job: Job, pace: Path) -> None:
    """Let the job end, and audit its samples."""
    assert job.status["global_step"] < STEPS, "it was over before all slices had returned: more steps are needed"
    set_pace(pace, FAST_S)
    _, summary = job.finish()
    assert summary["complete"] and summary["global_steps"] == STEPS
    audit = call("audit", job.run_dir, "--json")
    assert audit.returncode == 0 and json.loads(audit.stdout)["violations"] == 0, audit.stdout + audit.stderr


def another_leads(job: Job, before: int) -> int:
    wait_for(lambda: leader_of(job.run_dir) != before, f"another leader than slice {before}", job.process)
    return leader_of(job.run_dir)


def whole(job: Job, times: int, slices: int) -> None:
    wait_for(lambda: whole_times(job.run_dir, slices) > times, f"{slices} slices that train together", job.process)


def merges(job: Job) -> None:
    """Wait until rounds that have not begun yet are merged."""
    step = job.status["global_step"]
    wait_for(lambda: job.status["global_step"] >= step + 5, f"rounds after {step}", job.process)
