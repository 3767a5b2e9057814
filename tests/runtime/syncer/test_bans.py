"""A real run whose operator bans an island, and admits it again."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from diloco_jax.protocol.syncer.subscribers import Subscribers
from diloco_jax.protocol.syncer.tape import TapedSyncer
from diloco_jax.runtime.records.signals import WRONG_INPUT
from diloco_jax.runtime.syncer.run import SyncerDriver
from diloco_jax.transport.session.operator_requests import ADMIT, BAN, DRAIN, OperatorRequest
from tests.limits import HANGS_S
from tests.protocol.syncer_inputs import running
from tests.runtime.helpers import (
    call,
    interrupted,
    kill_processes,
    notes,
    processes_of,
    run,
    start,
    status,
    wait_for,
    write_config,
)

WHY = "its values stand out"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder, and end the processes of its run after the test."""
    yield tmp_path
    kill_processes(tmp_path)


def test_the_answers_to_an_operator_and_the_order_of_their_records() -> None:
    machine, done = running("a", "b", quorum=2), list[str]()
    taped = TapedSyncer(machine, lambda line: done.append(json.loads(line)[0]))
    context: Any = SimpleNamespace(
        taped=taped,
        tape=SimpleNamespace(flush=lambda: done.append("flush")),
        machine=machine,
        model=None,
        clock=SimpleNamespace(now_s=lambda: 4.0),
        config=SimpleNamespace(protocol=machine.config),
    )
    listener = MagicMock(send=lambda peer, message, payload=b"": done.append(type(message).__name__))
    watch, other = MagicMock(tell=lambda: done.append("status")), MagicMock()
    driver = SyncerDriver(context, listener, other, other, other, watch, Subscribers(machine, ""))
    driver._adrift["b"] = 3.0
    lifts = "`diloco admit b RUN` lifts the ban"
    pauses = "rounds pause until 2 learners are live (protocol.quorum), 1 are"
    assert listener.on_operator(OperatorRequest(BAN, "b", WHY)) == f"b is banned and expelled; {lifts}; {pauses}"
    assert done[:3] == ["ban", "flush", "Expel"] and done[-1] == "status" and not driver._adrift
    assert listener.on_operator(OperatorRequest(BAN, "c", WHY)).startswith("c is banned; `diloco admit c RUN` lifts")
    assert listener.on_operator(OperatorRequest(ADMIT, "b")) == (
        "b is admitted: it may join again, so start its process again"
    )
    assert listener.on_operator(OperatorRequest(DRAIN, "a")).startswith("a leaves after its current step")
    with pytest.raises(ValueError, match="'b' is not banned"):
        listener.on_operator(OperatorRequest(ADMIT, "b"))


@pytest.mark.nightly
@pytest.mark.net
def test_an_island_is_banned_refused_after_a_restart_of_the_syncer_and_admitted(folder: Path) -> None:
    run_dir = folder / "run"
    config = write_config(
        folder,
        islands={"count": 2, "devices": 1, "restart_delay_s": 0.1},
        train={"steps": 1_000_000, "eval_every": 0},
        protocol={"sync_every": 4, "num_fragments": 2, "quorum": 1, "snapshot_every": 10},
    )
    process = start("train", config, "--quiet", "--run-dir", run_dir, step_s=0.04)
    for name in ("island-0", "island-1"):
        wait_for(lambda name=name: notes(run_dir, "merged", name) > 2, f"merges of {name}", process)
    assert call("ban", "island-1", run_dir).returncode == WRONG_INPUT, "a ban needs a reason"
    # A busy syncer answers that the operator shall ask again.
    words = "diloco admit: 'island-1' is not banned; `diloco status` lists the banned names\n"
    wait_for(lambda: call("admit", "island-1", run_dir).stderr == words, "the refusal", process)
    done = wait_for(lambda: call("ban", "island-1", run_dir, "--why", WHY).stdout, "the ban", process)
    assert done == "island-1 is banned and expelled; `diloco admit island-1 RUN` lifts the ban\n"
    island = run_dir / "logs" / "island-1.log"
    last = f"island-1 is banned from this run: {WHY}; to let it return, lift the ban"
    wait_for(lambda: last in island.read_text(), "its error", process)
    wait_for(lambda: not any("--island island-1 " in words for words in processes_of(run_dir).values()), "its end")
    # The supervisor does not start it again, nor does a new syncer let it in.
    os.kill(next(pid for pid, words in processes_of(run_dir).items() if " syncer " in words), signal.SIGKILL)
    wait_for(lambda: status(run_dir).get("epoch") == 2 and status(run_dir)["state"] == "running", "failover", process)
    again = ("learner", run_dir / "config.yaml", "--island", "island-1", "--run-dir", run_dir)
    ended = run(*again)
    assert ended.returncode == WRONG_INPUT and last in ended.stderr.splitlines()[-1], ended.stderr
    assert "Traceback" not in ended.stderr
    merged = notes(run_dir, "merged", "island-1")
    assert f"banned: island-1 ({WHY})" in call("status", run_dir).stdout
    wait_for(lambda: call("admit", "island-1", run_dir).returncode == 0, "the admission", process)
    returned = start(*again, step_s=0.04)
    wait_for(lambda: notes(run_dir, "merged", "island-1") > merged, "a merge of the admitted island", returned)
    output = interrupted(process)
    returned.communicate(timeout=HANGS_S)
    assert output.count("island-1 is banned; not started again") == 1
    assert notes(run_dir, "banned", "island-1") == notes(run_dir, "admitted", "island-1") == 1
    audit = json.loads(call("audit", run_dir, "--json").stdout)
    assert audit["violations"] == 0
    assert [(each["action"], each["learner"]) for each in audit["operations"]] == [
        ("ban", "island-1"),
        ("admit", "island-1"),
    ]
