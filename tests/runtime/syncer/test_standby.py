"""A syncer's machine is lost: a standby with its own folder takes over through the bucket, and the run completes."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco_jax.transport.store.store import ObjectStore
from tests.limits import HANGS_S
from tests.runtime.helpers import SLOW_STEP_S, call, kill_processes, replayed, start, status, wait_for, write_config

pytestmark = pytest.mark.net

STEPS = 150


class Fleet:
    """A syncer, its standby and two islands, each a process that nobody supervises, with only a bucket in common."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, f"file://{folder}/bucket"
        self.config = write_config(
            folder,
            islands={"count": 2, "devices": 1},
            train={"steps": STEPS, "eval_every": 0},
            protocol={"snapshot_every": 30, "quorum": 2},
            syncer={"standby": True},
            transport={"address": self.address, "poll_s": 0.05, "connect_timeout_s": HANGS_S},
        )
        self.standby = self._begin("syncer", "--standby", "--run-dir", folder / "second")
        self.syncer = self._begin("syncer", "--run-dir", folder / "first")
        self.islands = [
            self._begin("learner", "--island", f"island-{number}", "--run-dir", folder / f"site-{number}")
            for number in range(2)
        ]

    def _begin(self, command: str, *options: object) -> "subprocess.Popen[str]":
        return start(command, self.config, *options, step_s=SLOW_STEP_S)

    def reached(self, global_step: int, name: str, process: "subprocess.Popen[str]") -> None:
        def came() -> bool:
            return int((status(self.folder / name) or {}).get("global_step", 0)) >= global_step

        wait_for(came, f"global step {global_step} of the {name} syncer", process)

    def check_end(self) -> dict[str, Any]:
        """The standby completes the run; its folder has the whole history, and the bucket nothing."""
        output, _ = self.standby.communicate(timeout=HANGS_S)
        assert self.standby.returncode == 0 and "taking over" in output, output
        for island in self.islands:
            said, _ = island.communicate(timeout=HANGS_S)
            assert island.returncode == 0, said
        second = self.folder / "second"
        summary: dict[str, Any] = json.loads((second / "summary.json").read_text())
        assert summary["complete"] and summary["global_steps"] == STEPS
        # The islands' own tapes are where the islands are.
        (second / "tapes").mkdir(exist_ok=True)
        for tape in self.folder.glob("site-*/tapes/*"):
            shutil.copy(tape, second / "tapes")
        audit = call("audit", second, "--json")
        assert audit.returncode == 0 and json.loads(audit.stdout)["violations"] == 0, audit.stdout + audit.stderr
        replayed(second)
        lines = [json.loads(line) for line in (second / "tape.jsonl").read_text().splitlines()]
        merged = [line[2] for line in lines if line[0] == "merged"]
        assert len(merged) == len(set(merged)), "a round was merged twice"
        assert [line[0] for line in lines].count("restart") == 1
        return summary


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    yield Fleet(tmp_path)
    kill_processes(tmp_path)


def lines_of(run_dir: Path) -> list[str]:
    return (run_dir / "tape.jsonl").read_text().splitlines()


@pytest.mark.nightly
def test_a_standby_takes_over_from_a_machine_that_is_lost(fleet: Fleet) -> None:
    fleet.reached(45, "first", fleet.syncer)
    os.kill(fleet.syncer.pid, signal.SIGKILL)
    fleet.check_end()
    assert ObjectStore(fleet.address).list("") == [], "the run left objects in the bucket"


@pytest.mark.nightly
def test_a_syncer_that_was_stopped_finds_the_standby_leading_and_lets_nothing_out(fleet: Fleet) -> None:
    fleet.reached(45, "first", fleet.syncer)
    os.kill(fleet.syncer.pid, signal.SIGSTOP)
    fleet.reached(60, "second", fleet.standby)
    os.kill(fleet.syncer.pid, signal.SIGCONT)
    said, _ = fleet.syncer.communicate(timeout=HANGS_S)
    assert "another process leads the run" in said, said
    fleet.check_end()
    # What the first one had on its tape before it was stopped is the beginning of the second one's.
    first, second = lines_of(fleet.folder / "first"), lines_of(fleet.folder / "second")
    shared = next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))
    assert shared >= len(first) - 5, "more was lost than what came in while it was stopped"
