"""Real runs of two islands with a small decoder; the attacks set the pace of their steps."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attack.paced import PACE_ENV
from attack.site import comes_true, wait_until
from attack.table import Findings
from tests.runtime.helpers import ROOT, environment, kill_processes, notes, processes_of, run, write_config

STEPS = 200
QUICK_S, SLOW_S = 0.02, 1.0
END_S = 240.0
BEGIN_S = 240.0
SMALL: dict[str, Any] = {
    "islands": {"devices": 1},
    "model": {
        "module": "attack.paced:PacedDecoder",
        "args": {"dim": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "mlp_dim": 64}
        | {"seq_len_max": 32},
    },
    "train": {"steps": STEPS, "eval_every": 0, "eval_batches": 1, "final_eval_batches": 1},
    "protocol": {"snapshot_every": 40},
    "checkpoints": {"keep": 100},
}


class Folder:
    """The folder of one run, its config, and the file that sets the pace of its islands."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.config, self.run_dir, self._pace = (
            write_config(folder, **{**SMALL, **changes}),
            folder / "run",
            folder / "pace",
        )
        self.pace(QUICK_S)

    def pace(self, step_s: float) -> None:
        """Set the least time of a step, in seconds."""
        new = self._pace.with_suffix(".new")
        new.write_text(str(step_s), encoding="utf-8")
        new.replace(self._pace)

    def start(self, *words: object) -> subprocess.Popen[str]:
        """Start the `diloco` command."""
        return subprocess.Popen(
            [sys.executable, "-m", "diloco_jax", *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment() | {"PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}", PACE_ENV: str(self._pace)},
            start_new_session=True,
        )

    def train(self, *words: object) -> subprocess.Popen[str]:
        """Start `diloco train` in this folder."""
        return self.start("train", self.config, "--run-dir", self.run_dir, "--quiet", *words)

    def end(self, process: subprocess.Popen[str], within_s: float) -> str:
        """Wait for the end of a command and return its last line; after the time it is killed (status -9)."""
        try:
            output, _ = process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        lines = output.strip().splitlines()
        return lines[-1] if lines else "nothing"

    def merges(self) -> bool:
        """Return whether rounds have merged both islands."""
        return all(notes(self.run_dir, "merged", name) > 0 for name in ("island-0", "island-1"))


@contextmanager
def training(folder: Path, **changes: Any) -> Iterator[tuple[Folder, subprocess.Popen[str]]]:
    """Start a run, and yield its folder and its supervisor; both end with the block."""
    place = Folder(folder, **changes)
    supervisor = place.train()
    try:
        yield place, supervisor
    finally:
        supervisor.kill()
        supervisor.wait()
        kill_processes(place.run_dir)


def under_way(place: Folder, supervisor: subprocess.Popen[str]) -> None:
    """Wait until rounds merge both islands, then slow the run down."""
    wait_until(lambda: place.merges() or supervisor.poll() is not None, "merges of both islands", BEGIN_S)
    place.pace(SLOW_S)


def lose_an_island(place: Folder, seen: Findings) -> None:
    """Kill island-0 of a running run, and expect that it returns."""
    found = [pid for pid, words in processes_of(place.run_dir).items() if "--island island-0" in words]
    joined = notes(place.run_dir, "joined", "island-0")
    seen.expect(found, "island-0 killed", "island-0 has no process")
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    comes_true(lambda: notes(place.run_dir, "joined", "island-0") > joined or not processes_of(place.run_dir), 90.0)
    seen.expect(notes(place.run_dir, "joined", "island-0") > joined, "it returned", "it did not return")


def completes(place: Folder, supervisor: subprocess.Popen[str], seen: Findings) -> None:
    """Let a run end, and expect that it is complete and its audit is clean."""
    place.pace(0.0)
    last = place.end(supervisor, END_S)
    summary = place.run_dir / "summary.json"
    complete = summary.exists() and json.loads(summary.read_text(encoding="utf-8"))["complete"]
    seen.expect(supervisor.returncode == 0 and complete, "complete", f"status {supervisor.returncode}: {last}")
    audited(place.run_dir, seen)


def audited(run_dir: Path, seen: Findings) -> None:
    """Expect a clean audit."""
    audit = run("audit", run_dir, "--json")
    seen.expect(audit.returncode == 0, "audit clean", f"audit: {(audit.stdout + audit.stderr).strip()[-240:]}")


def lines_of(texts: Sequence[Path]) -> str:
    """Return the joined contents of those logs that exist."""
    return "".join(path.read_text(encoding="utf-8", errors="replace") for path in texts if path.exists())
