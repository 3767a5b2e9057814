"""Upgrade a run while it trains: ./scripts/upgrade [OLD_REF].

A syncer and three islands start with the program of OLD_REF. One island after another leaves and returns with the
program of HEAD, and then the syncer is killed and restarted, so newer islands use an older syncer for a while. If the
older syncer refuses them, the syncer is upgraded first. All islands must be merged after the upgrade.
"""

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from diloco_jax.runtime.learner.tape import learner_tape_path
from diloco_jax.runtime.records.files import ADDRESS_FILE, STATUS_FILE, SUMMARY_FILE
from diloco_jax.runtime.records.signals import INTERRUPTED, PARENT_ENV
from diloco_jax.runtime.records.tape_file import read_lines
from diloco_jax.runtime.records.telemetry import read_object
from releasing.paced import STEP_S_ENV

ROOT = Path(__file__).resolve().parents[2]
SYNCER, ISLANDS = "syncer", ("island-0", "island-1", "island-2")
PATIENCE_S = 120.0
WHO = "import diloco_jax as d; from diloco_jax.protocol.messages import PROTOCOL; print(d.__version__, PROTOCOL)"


class Refused(Exception):
    """A process of the newer program ended at its start; the message has the last line of its log."""


def tree_of(ref: str, folder: Path) -> Path:
    """Write the files of a commit into a folder, and return the folder.

    Raises:
        ValueError: the commit does not exist.
    """
    found = subprocess.run(["git", "archive", "--format=tar", ref], cwd=ROOT, capture_output=True, check=False)
    if found.returncode:
        raise ValueError(f"{ref!r} names no commit of this repository: {found.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


def last_tag(root: Path = ROOT) -> str:
    """Return the newest tag of a release.

    Raises:
        ValueError: the repository has no such tag.
    """
    words = ["git", "describe", "--tags", "--abbrev=0", "--match", "v[0-9]*"]
    found = subprocess.run(words, cwd=root, capture_output=True, text=True, check=False)
    if found.returncode:
        raise ValueError("no release has a tag yet; name the commit to upgrade from: ./scripts/upgrade OLD_REF")
    return found.stdout.strip()


class Fleet:
    """A syncer and three islands, each on one of two programs.

    Args:
        folder: folder of the run, its logs and its config.
        trees: folders of the old program and of the new one.
        say: function that prints a line.
    """

    def __init__(
        self, folder: Path, trees: Sequence[Path], steps: int, step_s: float, say: Callable[[str], None]
    ) -> None:
        self.run, self._folder, self._say = folder / "run", folder, say
        self._patience_s = PATIENCE_S + 2 * steps * step_s
        self._programs = [self._environment(tree, step_s) for tree in trees]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        # The number of processes so far, by name.
        self._incarnations: Counter[str] = Counter()
        # The global step at the end of the old program, by name.
        self.since: dict[str, int] = {}
        values: dict[str, Any] = {
            "name": "upgrade",
            "islands": {"count": len(ISLANDS), "devices": 1},
            "train": {"steps": steps, "batch_size": 12, "seq_len": 32, "eval_every": 0, "final_eval_batches": 1},
            "model": {"module": "releasing.paced:Paced"},
            "optimizer": {"warmup_steps": 5},
            "protocol": {"sync_every": 6, "num_fragments": 6, "snapshot_every": 100},
            "trackers": [],
        }
        (folder / "upgrade.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")

    def _environment(self, tree: Path, step_s: float) -> dict[str, str]:
        found = f"{tree}:{Path(__file__).parents[1]}"
        here = {"PYTHONPATH": found, STEP_S_ENV: str(step_s), PARENT_ENV: str(os.getpid())}
        # The environment of a test has more devices than an island of this run.
        return {**os.environ, **here, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}

    def who(self, number: int) -> str:
        """Return the release and the protocol of a program."""
        words, around = [sys.executable, "-c", WHO], self._programs[number]
        found = subprocess.run(words, cwd=self._folder, env=around, capture_output=True, text=True, check=False)
        return "diloco-jax {}, protocol {}".format(*found.stdout.split() or ("without", "a number"))

    def start(self, name: str, number: int) -> None:
        """Start a process with one of the programs."""
        words = [SYNCER] if name == SYNCER else ["learner", "--island", name]
        words[1:1] = ["upgrade.yaml", "--run-dir", str(self.run)]
        if name != SYNCER:
            self._incarnations[name] += 1
            address = (self.run / ADDRESS_FILE).read_text(encoding="utf-8").strip()
            words += ["--syncer", address, "--incarnation", str(self._incarnations[name])]
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", "diloco_jax", *words],
                cwd=self._folder, env=self._programs[number], stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def replace(self, name: str) -> None:
        """End a process, start it with the new program, and wait until rounds use it again.

        Raises:
            Refused: the new process ended.
        """
        step = self.since.setdefault(name, self.global_step())
        # There is no process if an earlier attempt was refused.
        if (process := self._processes.pop(name, None)) is not None:
            # SIGTERM to the syncer would end the run.
            process.send_signal(signal.SIGKILL if name == SYNCER else signal.SIGTERM)
            if process.wait(PATIENCE_S) not in (INTERRUPTED, -signal.SIGKILL):
                raise ValueError(f"{name} did not leave cleanly: {self.last_line(name)}")
        self.start(name, 1)
        self.wait(lambda: self.global_step() > step + 1 if name == SYNCER else self.merged(name), f"{name} is back")
        self._say(f"{name} came back with the new program after global step {step}, at {self.global_step()}")

    def wait(self, condition: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
        """Wait for a condition while all processes run.

        Raises:
            Refused: a process failed; it is removed from the fleet.
            TimeoutError: the condition did not come true in time.
        """
        ends_s = time.monotonic() + patience_s
        while not condition():
            for name, process in self._processes.items():
                if process.poll():
                    del self._processes[name]
                    raise Refused(f"{name} ended with status {process.returncode}: {self.last_line(name)}")
            if time.monotonic() > ends_s:
                raise TimeoutError(f"not within {patience_s:.0f} s: {what}")
            time.sleep(0.1)

    def global_step(self) -> int:
        """Return the newest global step in the syncer's status; -1 if there is no status."""
        path = self.run / STATUS_FILE
        return int(read_object(path, "global_step")["global_step"]) if path.exists() else -1

    def merged(self, name: str) -> int:
        """Return the newest round that merged a value of an island's present process; 0 if there is none."""
        tape = learner_tape_path(self.run, name, self._incarnations[name])
        adopted = (line for line in (read_lines(tape) if tape.exists() else ()) if line.startswith('["adopt"'))
        return max((json.loads(line)[5] for line in adopted), default=0)

    def last_line(self, name: str) -> str:
        """Return the last line of a process's log."""
        return (self._folder / f"{name}.log").read_text(errors="replace").strip().rpartition("\n")[2]

    def end(self) -> dict[str, Any]:
        """Wait until all processes have ended without an error, and return the run's summary."""
        running = self._processes.values()
        self.wait(lambda: all(process.poll() == 0 for process in running), "the end of the run", self._patience_s)
        return read_object(self.run / SUMMARY_FILE)

    def kill(self) -> None:
        """Kill the remaining processes."""
        for process in self._processes.values():
            process.kill()
            process.wait()


def upgrade(fleet: Fleet, say: Callable[[str], None]) -> list[str]:
    """Upgrade a run, wait for its end, and return the problems.

    Raises:
        Refused: the releases do not work with each other in any order.
    """
    fleet.start(SYNCER, 0)
    fleet.wait((fleet.run / ADDRESS_FILE).exists, "the syncer listens")
    for name in ISLANDS:
        fleet.start(name, 0)
    fleet.wait(lambda: all(map(fleet.merged, ISLANDS)), "all islands are merged")
    say(f"all trained with the old program at global step {fleet.global_step()}")
    left = deque([*ISLANDS, SYNCER])
    while left:
        name = left.popleft()
        try:
            fleet.replace(name)
        except Refused as refusal:
            if SYNCER not in left or "upgrade the syncer first" not in str(refusal):
                raise
            say(f"REFUSED {refusal}")
            left.remove(SYNCER)
            left.extendleft([name, SYNCER])
    summary = fleet.end()
    rounds = {name: fleet.merged(name) for name in ISLANDS}
    for name in (SYNCER, *ISLANDS):
        tail = f", merged until round {rounds[name]}" if name in rounds else ""
        say(f"{name:9} old program to global step {fleet.since[name]}, new program from there to the end{tail}")
    found = [] if summary["complete"] else ["the run is not complete"]
    last = max(fleet.since.values())
    return found + [f"{name} was not merged after the last upgrade" for name in ISLANDS if rounds[name] <= last]


def main(arguments: Sequence[str] | None = None) -> int:
    """Upgrade a run, and return the exit status: 2 if the commit to upgrade from is missing."""
    parser = argparse.ArgumentParser(prog="scripts/upgrade", description=__doc__.splitlines()[0])
    parser.add_argument("old_ref", nargs="?", help="commit or tag to upgrade from; default: the last tag of a release")
    parser.add_argument("--steps", type=int, default=900, help="global steps of the run; default: 900")
    parser.add_argument("--step-s", type=float, default=0.1, help="least seconds of an inner step; default: 0.1")
    options = parser.parse_args(arguments)
    began_s, say = time.monotonic(), lambda line: print(line, flush=True)
    with tempfile.TemporaryDirectory(prefix="diloco-upgrade-") as folder:
        try:
            refs = (options.old_ref or last_tag(), "HEAD")
            trees = [tree_of(ref, Path(folder, name)) for ref, name in zip(refs, ("old", "new"), strict=True)]
        except ValueError as error:
            parser.error(str(error))
        fleet = Fleet(Path(folder), trees, options.steps, options.step_s, say)
        for number, ref in enumerate(refs):
            say(f"{('old', 'new')[number]} program: {ref}, {fleet.who(number)}")
        try:
            found = upgrade(fleet, say)
        except (Refused, TimeoutError, ValueError) as error:
            found = [str(error)]
        finally:
            fleet.kill()
    say("\n".join(f"FAILED {each}" for each in found) or "complete: all islands were merged after the upgrade")
    say(f"{time.monotonic() - began_s:.0f} s")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
