"""A whole run through a bucket loses an island and its syncer, completes all the same, and leaves nothing behind."""

import json
import os
import signal
from pathlib import Path

import pytest

from diloco_jax.transport.store.counts import calls
from diloco_jax.transport.store.store import ObjectStore
from tests.runtime.helpers import SLOW_STEP_S, call, processes_of, replayed, wait_for
from tests.runtime.syncer.test_failover import Job, check_end, folder
from tests.transport.bucket.servers import Scheme, environment, install, serve

__all__ = ["folder"]  # a fixture

# Dead processes are missed after four seconds instead of forty.
TRANSPORT: dict[str, float | bool] = {"poll_s": 0.05, "keepalive_s": 2.0, "keepalive_timeout_s": 2.0}


def check_run(folder: Path, address: str) -> None:
    """Run a job through a bucket, kill an island and then the syncer, and check what both leave."""
    job = Job(folder, step_s=SLOW_STEP_S, transport={"address": address, **TRANSPORT})
    job.reached(15)
    lost = next(pid for pid, command in processes_of(job.run_dir).items() if "--island island-1" in command)
    os.kill(lost, signal.SIGKILL)
    wait_for(lambda: restarts(job) == 1, "the return of island-1", job.process)
    requests = job.status["requests"]
    os.kill(job.pid_of("syncer"), signal.SIGKILL)
    output, summary = job.finish()
    assert output.count("syncer killed by SIGKILL") == 1 and summary["complete"], output
    assert {name: row["restarts"] for name, row in summary["learners"].items()} == {"island-0": 0, "island-1": 1}
    check_end(job.run_dir)
    audit = call("audit", job.run_dir, "--json")
    assert audit.returncode == 0 and json.loads(audit.stdout)["violations"] == 0, audit.stdout + audit.stderr
    replayed(job.run_dir)
    assert ObjectStore(address).list("") == [], "the run left objects in the bucket"
    # The second process continues the counts of the first one.
    assert all(summary["requests"][name] >= count for name, count in requests.items()) and calls(requests) > 100
    shown = call("status", job.run_dir).stdout
    assert f"bucket: {job.status['requests_per_s']:.1f} requests/s of the syncer; " in shown, shown


def restarts(job: Job) -> int:
    rows = {row["learner"]: row for row in job.status["learners"]}
    member = rows.get("island-1", {})
    return int(member.get("restarts", 0)) if member.get("state") == "active" else 0


@pytest.mark.long
@pytest.mark.net
def test_a_run_through_a_folder_survives_its_island_and_its_syncer(folder: Path) -> None:
    check_run(folder, f"file://{folder}/bucket")


@pytest.mark.nightly
@pytest.mark.net
@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_run_through_a_server_survives_its_island_and_its_syncer(
    scheme: Scheme, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        install(scheme)
    except RuntimeError as error:
        pytest.skip(str(error))
    with serve(scheme) as server:
        # The processes of the run take these variables from this one.
        for name, value in environment(server).items():
            monkeypatch.setenv(name, value)
        # moto answers about a hundred requests per second, which three processes would use up with looks.
        for name, value in {"allow_plaintext": True, "poll_s": 0.4, "keepalive_s": 6.0}.items():
            monkeypatch.setitem(TRANSPORT, name, value)
        check_run(folder, server.url("small"))
