"""Whole runs are killed at random moments, again and again, while snapshots lag behind; each is resumed."""

import json
import os
import random
import shutil
import time
from pathlib import Path

import pytest

from tests.runtime.helpers import call, kill_processes, replayed, start, wait_for
from tests.runtime.syncer.test_failover import Job, folder, tape_of

__all__ = ["folder"]  # a fixture

KILLS = int(os.environ.get("DILOCO_TEST_KILLS", "3"))
SOONEST_S, LATEST_S = 3.0, 12.0
STARTS = 2  # that are killed before anybody trains
STEPS = 600


@pytest.mark.slow
@pytest.mark.net
@pytest.mark.timeout(1800)
def test_a_run_that_is_killed_often_is_resumed_audited_and_replayed(folder: Path) -> None:
    """Snapshots every two global steps are asked for faster than they are written: some are skipped."""
    chance = random.Random(KILLS)
    numbers = {"sync_every": 6, "num_fragments": 6, "quorum": 1, "snapshot_every": 2}
    job = Job(folder, train={"steps": STEPS, "eval_every": 0}, protocol=numbers)
    epoch = 1
    job.reached(4, epoch)
    for number in range(KILLS):
        at_start = number < STARTS
        if not at_start:
            epoch = wait_for(lambda: job.status["epoch"] if job.status["global_step"] else 0, "another life", 100)
        time.sleep(chance.uniform(0.5, SOONEST_S) if at_start else chance.uniform(SOONEST_S, LATEST_S))
        job.kill_everybody()
        assert not (job.run_dir / "summary.json").exists(), "it was over before it was killed: more steps are needed"
        job.process = job.begin("--resume")
    failover_starts(job)
    _, summary = job.finish()
    assert summary["complete"] and summary["global_steps"] == STEPS
    tape = tape_of(job.run_dir)
    captured = [line[2] for line in tape if line[0] == "snapshot"]
    assert any(line[0] == "rewind" for line in tape) and len(captured) < STEPS // 2, "no snapshot was skipped"
    assert summary["tape_bytes"] == (job.run_dir / "tape.jsonl").stat().st_size
    audit = call("audit", job.run_dir, "--json")
    assert audit.returncode == 0 and json.loads(audit.stdout)["violations"] == 0, audit.stdout + audit.stderr
    replayed(job.run_dir)


def failover_starts(job: Job) -> None:
    """A syncer that finds this folder, with its older snapshots alone, and learners that may be alive."""
    job.reached(job.status["global_step"] + 4, job.status["epoch"])
    copy = job.run_dir.with_name("copy")
    shutil.copytree(job.run_dir, copy, ignore=shutil.ignore_patterns("*.lock", "status.json", "*.part", "*.arrays", "health"))
    snapshots = sorted((copy / "checkpoints").glob("step_*"))
    for newer in snapshots[1:]:
        shutil.rmtree(newer)
    before = len(tape_of(copy)) if (copy / "tape.jsonl").read_bytes().endswith(b"\n") else 0
    process = start("syncer", copy / "config.yaml", "--run-dir", copy)
    try:
        wait_for(lambda: '["restart"' in "".join(json.dumps(line[:1]) for line in tape_of(copy)[before:]), "its life", 60)
    finally:
        process.kill()
        process.communicate()
        kill_processes(copy)
