"""Whole runs are killed at random moments, again and again, while snapshots lag behind; each is resumed."""

import json
import os
import random
import shutil
import time
from pathlib import Path

import pytest

from tests.runtime.helpers import call, json_lines, kill_processes, replayed, start, wait_for
from tests.runtime.syncer.test_failover import Job, folder, tape_of

__all__ = ["folder"]  # a fixture

KILLS = int(os.environ.get("DILOCO_TEST_KILLS", "3"))
# The number of kills before a process has merged anything.
STARTS = 2
# The other kills come at most so many seconds after the first merge of a process.
LATEST_S = 5.0
# The tape starts each epoch of the syncer with one of these lines.
EPOCH_STARTS = ("begin", "restart", "rewind")
STEPS = 100 + 80 * KILLS


@pytest.mark.slow
@pytest.mark.net
def test_a_run_that_is_killed_often_is_resumed_audited_and_replayed(folder: Path) -> None:
    """Snapshots every two global steps are asked for faster than they are written: some are skipped."""
    chance = random.Random(KILLS)
    numbers = {"sync_every": 6, "num_fragments": 6, "quorum": 1, "snapshot_every": 2}
    job = Job(folder, 0.05, train={"steps": STEPS, "eval_every": 0}, protocol=numbers)
    epochs = 0
    for number in range(KILLS):
        if number in range(1, 1 + STARTS):
            time.sleep(chance.uniform(1.0, 10.0))
        else:
            trains(job.run_dir, epochs)
            time.sleep(chance.uniform(0.0, LATEST_S))
        job.kill_everybody()
        assert not (job.run_dir / "summary.json").exists(), "it was over before it was killed: more steps are needed"
        epochs = len(begun(job.run_dir))
        job.process = job.begin("--resume")
    trains(job.run_dir, epochs)
    failover_starts(job)
    _, summary = job.finish()
    assert summary["complete"] and summary["global_steps"] == STEPS
    tape = tape_of(job.run_dir)
    captured = [line[2] for line in tape if line[0] == "snapshot"]
    assert begun(job.run_dir).count("rewind") >= KILLS - STARTS and len(captured) < STEPS // 2, "none was skipped"
    assert summary["tape_bytes"] == (job.run_dir / "tape.jsonl").stat().st_size
    audit = call("audit", job.run_dir, "--json")
    assert audit.returncode == 0 and json.loads(audit.stdout)["violations"] == 0, audit.stdout + audit.stderr
    replayed(job.run_dir)


def trains(run_dir: Path, epochs: int) -> None:
    """Wait until an epoch of the syncer after so many has merged three rounds."""

    def merged() -> int:
        kinds = [line[0] for line in json_lines(run_dir / "tape.jsonl")] if (run_dir / "tape.jsonl").exists() else []
        begins = [number for number, kind in enumerate(kinds) if kind in EPOCH_STARTS]
        return kinds[begins[epochs] :].count("merged") if len(begins) > epochs else 0

    wait_for(lambda: merged() >= 3, f"rounds of epoch {epochs + 1}")


def failover_starts(job: Job) -> None:
    """Start a syncer on a copy of the folder that has lost all snapshots but the oldest one."""
    copy, ignored = job.run_dir.with_name("copy"), ("*.lock", "status.json", "*.part", "*.arrays", "health")

    def copied() -> bool:
        """Copy the folder; False if the running syncer removed an old snapshot meanwhile."""
        shutil.rmtree(copy, ignore_errors=True)
        try:
            shutil.copytree(job.run_dir, copy, ignore=shutil.ignore_patterns(*ignored))
        except shutil.Error:
            return False
        return True

    wait_for(copied, "a copy")
    for newer in sorted((copy / "checkpoints").glob("step_*"))[1:]:
        shutil.rmtree(newer)
    epochs = len(begun(copy))
    process = start("syncer", copy / "config.yaml", "--run-dir", copy)
    try:
        wait_for(lambda: len(begun(copy)) > epochs or process.poll() is not None, "its epoch")
        assert begun(copy)[-1] == "restart", process.communicate()[0]
    finally:
        process.kill()
        process.communicate()
        kill_processes(copy)


def begun(run_dir: Path) -> list[str]:
    """Return the first words of the lines that start the syncer's epochs."""
    return [line[0] for line in json_lines(run_dir / "tape.jsonl") if line[0] in EPOCH_STARTS]
