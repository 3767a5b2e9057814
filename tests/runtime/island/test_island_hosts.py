"""Islands of two processes with two devices each, as real runs."""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_jax.runtime.records import checkpoint
from diloco_jax.settings.text import load
from diloco_jax.tools.replay.replay import Replay
from tests.limits import HANGS_S
from tests.runtime.helpers import (
    kill_processes,
    notes,
    processes_of,
    run,
    start,
    status,
    trained,
    wait_for,
    write_config,
)

pytestmark = [pytest.mark.net, pytest.mark.slow]

ISLANDS = {"devices": 4, "hosts": 2, "mesh": {"fsdp": 4}}


def pids_of(run_dir: Path, words: str) -> set[int]:
    return {pid for pid, command in processes_of(run_dir).items() if re.search(words, command)}


def pid_of(run_dir: Path, words: str) -> int:
    return pids_of(run_dir, words).pop()


def stopped(process: Any) -> str:
    """Interrupt a run, and return its output."""
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=HANGS_S)
    assert process.returncode == 130, output
    return str(output)


def shared(folder: Path, **changes: Any) -> Path:
    """Train to the end, with shares of both islands; returns the run's folder."""
    run_dir = trained(folder, timeout_s=HANGS_S, **{"islands": ISLANDS, **changes})
    assert min(notes(run_dir, "merged", name) for name in ("island-0", "island-1")) > 3
    return run_dir


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Any]:
    """`running(**changes)` starts a run in the background: (process, run_dir)."""
    started = []

    def begin(**changes: Any) -> Any:
        config = write_config(tmp_path, **{"islands": ISLANDS, **changes})
        process = start("train", config, "--run-dir", tmp_path / "run", "--quiet")
        started.append(process)
        return process, tmp_path / "run"

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    kill_processes(tmp_path)


def test_hosts_train_what_one_process_trains_from_the_same_tape(tmp_path: Path) -> None:
    """Every sum over devices is made in another order, by gloo between processes: equal up to that, and no more.

    float32 on the wire, because rounding to 4 bits would turn a last bit into a whole step of the format. The distance
    that remains is compared with the way that training went. Both hosts of an island hold every block.
    """
    islands = {**ISLANDS, "mesh": {"data": 2, "fsdp": 2}}
    wire = {"up": "float32", "down": "float32"}
    run_dir = shared(tmp_path, islands=islands, train={"steps": 30, "eval_every": 0}, wire=wire)
    [path] = checkpoint.complete(run_dir / "checkpoints")[:1]
    learnt, _ = checkpoint.load_parameters(path)
    replay = Replay(load(run_dir / "config.yaml"), run_dir)
    first = {key: np.array(value) for key, value in replay.model.parameters(replay.model.capture()).items()}
    replay.run()
    again = replay.model.parameters(replay.model.capture())
    way = sum(float(np.sum((again[key] - first[key]) ** 2)) for key in first) ** 0.5
    apart = sum(float(np.sum((again[key] - learnt[key]) ** 2)) for key in first) ** 0.5
    assert replay.trainer.steps > 30 and way > 0.1
    assert apart < 1e-4 * way, f"{apart} apart after a way of {way}"
    refused = run("replay", run_dir)
    assert refused.returncode == 2 and "hosts" in refused.stderr


@pytest.mark.parametrize(
    ("host", "how", "words"),
    [
        (0, signal.SIGKILL, "island-1 killed by SIGKILL"),
        (1, signal.SIGKILL, "island-1.host-1 killed by SIGKILL"),
        (
            0,
            signal.SIGSTOP,
            "island-1.host-1 ended .* 1: .*the leader is disconnected .*connection to 'the leader' was lost",
        ),
        (1, signal.SIGSTOP, "island-1 ended with status 1: .*host 1 is disconnected .*connection to 'host 1' was lost"),
    ],
)
def test_an_island_that_loses_a_host_is_started_again_as_a_whole_and_alone(
    running: Any, host: int, how: signal.Signals, words: str
) -> None:
    process, run_dir = running(train={"steps": 100_000, "eval_every": 0})
    wait_for(
        lambda: notes(run_dir, "merged", "island-1") > 2 and notes(run_dir, "merged", "island-0") > 2,
        "training",
        process,
    )
    before, other = notes(run_dir, "merged", "island-1"), pid_of(run_dir, "--island island-0")
    own = pids_of(run_dir, "--island island-1")
    assert len(own) == 2
    os.kill(pid_of(run_dir, f"--island island-1 .*--host {host}"), how)
    wait_for(lambda: not own & pids_of(run_dir, "--island island-1"), "the island's end")
    wait_for(lambda: notes(run_dir, "merged", "island-1") > before + 2, "the return of island-1")
    now = pids_of(run_dir, "--island island-1")
    assert len(now) == 2 and not own & now and other in processes_of(run_dir)
    assert "loaded the state of" in (run_dir / "logs" / "island-1.log").read_text()
    assert status(run_dir)["global_step"] > 0
    output = stopped(process)
    assert re.search(words, output), output
    assert not processes_of(run_dir)


def test_a_killed_island_continues_with_its_own_moments_bit_for_bit(
    tmp_path: Path, running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILOCO_TEST_MOMENTS", str(tmp_path))
    process, run_dir = running(
        islands={**ISLANDS, "count": 1},
        train={"steps": 100_000, "eval_every": 0},
        protocol={"snapshot_every": 6},
        model={"module": "tests.runtime.island.kept_moments:KeptDecoder"},
    )
    records = run_dir / "states" / "island-0"
    wait_for(lambda: len(list(records.glob("host-*-of-2/*.json"))) == 4, "two states on both hosts")
    for pid in pids_of(run_dir, "--island island-0"):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: list(tmp_path.glob("island-0.restored.*.npz")), "a restart")
    before = notes(run_dir, "merged", "island-0")
    wait_for(lambda: notes(run_dir, "merged", "island-0") > before + 2, "shares after the restart")
    first, second = (
        [json.loads(line) for line in path.read_text().splitlines()[:-1]]
        for path in sorted((run_dir / "tapes").glob("island-0.*.jsonl"))
    )
    ((_, donor, _, local_step, _),) = [line for line in second if line[0] == "state"]
    assert donor == ""
    number = [line[1] for line in first if line[0] == "saved"].index(local_step)
    for host in range(2):
        saved, restored = (
            np.load(tmp_path / f"island-0.{name}.{host}.npz") for name in (f"saved-{number}", "restored")
        )
        assert sorted(saved.files) == sorted(restored.files) and any("|mu|" in name for name in saved.files)
        for name in saved.files:
            np.testing.assert_array_equal(restored[name], saved[name], err_msg=name)
        assert any(np.any(saved[name] != 0) for name in saved.files if "|mu|" in name)
    stopped(process)


def test_all_hosts_find_a_syncer_that_was_started_again(running: Any) -> None:
    process, run_dir = running(train={"steps": 100_000, "eval_every": 0}, protocol={"snapshot_every": 6})
    names = ("island-0", "island-1")
    wait_for(lambda: min(notes(run_dir, "merged", name) for name in names) > 2, "training")
    hosts = pids_of(run_dir, " learner ")
    os.kill(pid_of(run_dir, "diloco_jax syncer"), signal.SIGKILL)
    wait_for(lambda: status(run_dir)["epoch"] == 2, "another syncer")
    before = [notes(run_dir, "merged", name) for name in names]
    for name, count in zip(names, before, strict=True):
        wait_for(lambda: notes(run_dir, "merged", name) > count + 2, f"shares of {name}")  # noqa: B023
    assert hosts == pids_of(run_dir, " learner ")
    stopped(process)


def test_a_host_that_is_asked_to_end_ends_its_island_politely(running: Any) -> None:
    process, run_dir = running(train={"steps": 100_000, "eval_every": 0}, protocol={"quorum": 1})
    wait_for(lambda: notes(run_dir, "merged", "island-1") > 1, "training")
    leader, follower = (pid_of(run_dir, f"--island island-1 .*--host {host}") for host in (0, 1))
    os.kill(follower, signal.SIGTERM)
    words = run_dir / "logs" / "syncer.log"
    wait_for(lambda: "island-1 left: stopped from outside" in words.read_text(), "a polite leave")
    before = {leader, follower}
    wait_for(lambda: len(now := pids_of(run_dir, "--island island-1")) == 2 and not now & before, "an incarnation")
    assert "ended with status 130" in stopped(process)
