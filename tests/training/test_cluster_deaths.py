"""Commands that start a Ray cluster to tokenize: killed workers and drivers, an interrupt, too little memory."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.limits import HANGS_S
from tests.runtime.helpers import wait_for
from tests.training.test_stores import contents

pytestmark = [pytest.mark.extra("ray"), pytest.mark.nightly, pytest.mark.net]


# `diloco` with smaller parts, so that a small source has many.
SMALL = """
import sys
from diloco_jax.cli.main import main
from diloco_jax.training.data import documents, tokenizing
documents.PIECE_BYTES = tokenizing.PIECE_BYTES = 2_000_000
sys.exit(main())
"""


def tokenize(source: Path, out: Path, *more: str, env: Mapping[str, str] = os.environ) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SMALL, "tokenize", str(source), "--tokenizer", "train:400", "--out", str(out)]
    return subprocess.Popen([*command, *more], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def write_large(folder: Path) -> Path:
    folder.mkdir()
    line = json.dumps({"text": "an island sends gradients, and the syncer merges them\n" * 400})
    for number in range(4):
        (folder / f"{number}.jsonl").write_text(f"{line}\n" * 200)
    return folder


def tasks(command: int) -> list[int]:
    """The processes that run a task for a command that started its own Ray."""
    rows = subprocess.run(["ps", "-eo", "pid,ppid,args"], text=True, capture_output=True, check=True).stdout
    table = [
        (int(pid), int(parent), args) for pid, parent, args in (row.split(None, 2) for row in rows.splitlines()[1:])
    ]
    nodes = {pid for pid, parent, _ in table if parent == command}
    return [pid for pid, parent, args in table if parent in nodes and args.startswith("ray::_encoded")]


def test_killed_workers_and_a_killed_driver_leave_the_same_store(tmp_path: Path) -> None:
    """A worker dies and Ray repeats its task; then the command dies with its cluster, and the next one resumes."""
    source, one, many = write_large(tmp_path / "texts"), tmp_path / "one", tmp_path / "many"
    local = tokenize(source, one)
    assert local.wait(HANGS_S) == 0
    first = tokenize(source, many, "--engine", "ray", "--workers", "2")
    os.kill(wait_for(lambda: tasks(first.pid), "a task")[0], signal.SIGKILL)
    wait_for(lambda: [*many.glob("part-*.json")], "a part")
    working = tasks(first.pid)
    first.kill()
    first.communicate()
    kept = sorted(path.name for path in many.glob("part-*.json"))
    assert 0 < len(kept) < len([*one.glob("tokens-*")])
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in working), "the end of all tasks")
    tokens = [many / name.replace("part", "tokens").replace("json", "bin") for name in kept]
    times = [path.stat().st_mtime_ns for path in tokens]

    again = tokenize(source, many, "--engine", "ray", "--workers", "2")
    output, _ = again.communicate(timeout=HANGS_S)
    assert again.returncode == 0, output
    assert contents(many) == contents(one)
    assert [path.stat().st_mtime_ns for path in tokens] == times


def test_an_interrupt_ends_the_cluster_of_the_command(tmp_path: Path) -> None:
    source, out = write_large(tmp_path / "texts"), tmp_path / "out"
    command = tokenize(source, out, "--engine", "ray", "--workers", "1")
    working = wait_for(lambda: tasks(command.pid), "a task")
    command.send_signal(signal.SIGINT)
    output, _ = command.communicate(timeout=HANGS_S)
    assert command.returncode == 130 and "Traceback" not in output, output
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in working), "the end of all tasks")


def test_tasks_without_memory_end_the_command(tmp_path: Path) -> None:
    """Ray's monitor of memory kills every task, as on a node whose memory is full."""
    full = {**os.environ, "RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "50"}
    command = tokenize(write_large(tmp_path / "texts"), tmp_path / "out", "--engine", "ray", "--workers", "1", env=full)
    output, _ = command.communicate(timeout=HANGS_S)
    assert command.returncode == 2 and "were lost 4 times (OutOfMemoryError), perhaps because memory ran out" in output
