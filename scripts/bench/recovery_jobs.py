"""Two jobs of three processes each for kills: torchft's DiLoCo, and `diloco train`.

Both train the same small model with the same pause between steps. Both report the times of rounds, and the times when
the victim's new process reached its milestones. All times are seconds of the system's clock.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
WORKERS = 3
VICTIM = 1
WARM_ROUNDS = 12
WAIT_S = 180.0
POLL_S = 0.1
PR_SET_PDEATHSIG = 1
MODEL = {"vocab_size": 256, "dim": 512, "mlp_dim": 768}  # 2**20 parameters
BATCH_SIZE, SEQ_LEN = 4, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Settings that both sides have in common."""

    step_s: float = 0.02
    """Least seconds from the start of one inner step to the start of the next."""
    sync_every: int = 20
    """H: inner steps between two synchronisations of the same parameters."""
    restart_s: float = 1.0
    """Seconds from the kill of the victim to the start of its new process."""
    fragments: int = 1
    """P of our side. torchft always has one."""
    standby: bool = False
    """Whether our side keeps a spare process for each island, which replaces the island at once."""


class Round(NamedTuple):
    """A synchronisation with its result at the survivors."""

    t: float
    with_victim: bool
    contributors: int


class JobFailed(RuntimeError):
    """A job did not reach the measurement; the message names the folder of its logs."""


class Tail:
    """The records of a JSON-lines file that is being written; each look reads only new lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = []
        self._read_bytes = 0

    def look(self) -> list[dict[str, Any]]:
        """Return all complete records so far."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._read_bytes)
            new = file.read()
            new = new[: new.rfind(b"\n") + 1]
            self._read_bytes += len(new)
            self.records += [json.loads(line) for line in new.splitlines()]
        return self.records


def _die_with_parent() -> None:
    """Make the child process get SIGTERM after any end of the benchmark (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Job(ABC):
    """A job in its own folder; as a context manager it ends all of its processes."""

    def __init__(self, folder: Path, setting: Setting) -> None:
        self.folder = folder
        self.setting = setting
        self.killed_s = 0.0
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        if folder.exists():
            raise JobFailed(f"{folder} holds an earlier measurement; choose another folder")
        folder.mkdir(parents=True)

    def __enter__(self) -> Job:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children.values():
            if child.poll() is None:
                child.send_signal(signal.SIGINT)
        for child in self._children.values():
            try:
                child.wait(timeout=30)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def spawn(self, name: str, command: list[str], environment: dict[str, str] | None = None) -> None:
        """Start a process whose output goes to NAME.log."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self._children[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=ROOT,
                preexec_fn=_die_with_parent,
            )

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until a condition is true; JobFailed after WAIT_S."""
        ends_s = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > ends_s:
                raise JobFailed(f"{what} did not happen within {WAIT_S:.0f} s; read the logs in {self.folder}")
            time.sleep(POLL_S)

    def interval_s(self) -> float:
        """Return the usual time between two of the newest rounds."""
        times = [r.t for r in self.rounds()][-WARM_ROUNDS:]
        return statistics.median(b - a for a, b in pairwise(times))

    def is_warm(self) -> bool:
        """Return whether most of the newest rounds have merged all workers."""
        newest = self.rounds()[-WARM_ROUNDS:]
        return len(newest) == WARM_ROUNDS and sum(r.contributors == WORKERS for r in newest) > WARM_ROUNDS // 2

    def kill_at(self, phase: float) -> None:
        """Kill the victim when `phase` of a round interval has passed since a round."""
        interval_s, t = self.interval_s(), self.rounds()[-1].t + phase * self.interval_s()
        while t < time.time() + 0.1:
            t += interval_s
        time.sleep(t - time.time())
        self.kill()

    def back(self) -> Round | None:
        """Return the first round with the victim's new process; None if there is none."""
        began_s = self.victim().get("started", math.inf)
        return next((r for r in self.rounds() if r.with_victim and r.t > began_s), None)

    @abstractmethod
    def start(self) -> None:
        """Start the processes of the job."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the victim with SIGKILL."""

    @abstractmethod
    def rounds(self) -> list[Round]:
        """Return all rounds so far, in their order."""

    @abstractmethod
    def victim(self) -> dict[str, float]:
        """Return the times of the new process's milestones: started, imported, ready, and others of the side."""


class TorchftJob(Job):
    """A lighthouse and three replicas."""

    def __init__(self, folder: Path, setting: Setting, python: Path) -> None:
        super().__init__(folder, setting)
        self._python = python
        self._started_s = 0.0
        self._events = [Tail(folder / f"replica-{index}.jsonl") for index in range(WORKERS)]

    def start(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._address = f"127.0.0.1:{probe.getsockname()[1]}"
        limits = ["--heartbeat_timeout_ms", "2000", "--join_timeout_ms", "1000"]
        lighthouse = str(self._python.with_name("torchft_lighthouse"))
        self.spawn("lighthouse", [lighthouse, "--bind", self._address, "--min_replicas", "1", *limits])
        for index in range(WORKERS):
            self._start_replica(index)

    def _start_replica(self, index: int) -> None:
        name = f"replica-{index}"
        settings: dict[str, Any] = {
            "name": name,
            "events": str(self._events[index].path),
            "lighthouse": f"http://{self._address}",
            "host": "localhost",
            "timeout_s": 60,
            "replicas_min": 1,
            "syncs": None,
            "fragments": 1,
            "diloco": {},
        }
        settings |= {"model": MODEL, "batch_size": BATCH_SIZE, "seq_len": SEQ_LEN}
        settings |= {"step_s": self.setting.step_s, "sync_every": self.setting.sync_every}
        self.spawn(name, [str(self._python), str(HERE / "_torchft_replica.py"), json.dumps(settings)])

    def kill(self) -> None:
        child = self._children[f"replica-{VICTIM}"]
        child.kill()
        self.killed_s = time.time()
        child.wait()
        time.sleep(max(0.0, self.killed_s + self.setting.restart_s - time.time()))
        self._started_s = time.time()
        self._start_replica(VICTIM)

    def rounds(self) -> list[Round]:
        commits: dict[int, Round] = {}
        for survivor in self._events[:VICTIM] + self._events[VICTIM + 1 :]:
            for event in survivor.look():
                if event["event"] == "commit":
                    made = Round(event["t"], event["participants"] == WORKERS, event["participants"])
                    commits[event["step"]] = min(made, commits.get(event["step"], made))
        return sorted(commits.values())

    def victim(self) -> dict[str, float]:
        if not self._started_s:
            return {}
        found = {"started": self._started_s}
        for event in self._events[VICTIM].look():
            if event["t"] > self._started_s and event["event"] != "commit":
                found.setdefault(event["event"], event["t"])
        return found


class DilocoJob(Job):
    """`diloco train` with three islands; its supervisor restarts the victim."""

    def __init__(self, folder: Path, setting: Setting) -> None:
        super().__init__(folder, setting)
        self._run_dir = folder / "run"
        self._events = folder / "events"
        self._events.mkdir()
        self._metrics = Tail(self._run_dir / "metrics.jsonl")
        # The system's time minus the run's time.
        self._offset_s = math.inf

    def start(self) -> None:
        corpus = self.folder / "corpus.txt"
        corpus.write_text("".join(f"{n} times {n + 1} is {n * (n + 1)}\n" for n in range(40_000)), encoding="utf-8")
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_"))}
        environment |= {"JAX_PLATFORMS": "cpu", "DILOCO_BENCH_EVENTS": str(self._events)}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(HERE)])
        config = self.folder / "config.yaml"
        config.write_text(yaml.safe_dump(self._config(corpus)), encoding="utf-8")
        command = [sys.executable, "-m", "diloco_jax", "train", str(config), "--run-dir", str(self._run_dir), "--quiet"]
        self.spawn("train", command, environment)

    def _config(self, corpus: Path) -> dict[str, Any]:
        setting = self.setting
        return {
            "name": "vs-torchft",
            "islands": {
                "count": WORKERS,
                "devices": 1,
                "restart_delay_s": setting.restart_s,
                "standby": setting.standby,
            },
            "train": {"steps": 1_000_000, "batch_size": WORKERS * BATCH_SIZE, "seq_len": SEQ_LEN}
            | {"eval_batch_size": BATCH_SIZE, "final_eval_batches": 1},
            "model": {"module": "_paced_model:PacedModel", "args": MODEL | {"step_s": setting.step_s}},
            "optimizer": {"name": "adamw", "learning_rate": 0.001, "warmup_steps": 10},
            "data": {"path": str(corpus)},
            "protocol": {"sync_every": setting.sync_every, "num_fragments": setting.fragments, "overlap_steps": 5},
            "trackers": [],
        }

    def is_warm(self) -> bool:
        spares = list((self._run_dir / "health").glob("*.standby"))
        return super().is_warm() and len(spares) == (WORKERS if self.setting.standby else 0)

    def _records(self) -> list[dict[str, Any]]:
        """Return all metrics."""
        known = len(self._metrics.records)
        records = self._metrics.look()
        # The file changed after the time of its newest record.
        if len(records) > known:
            self._offset_s = min(self._offset_s, self._metrics.path.stat().st_mtime - records[-1]["t"])
        return records

    def rounds(self) -> list[Round]:
        """Return the rounds; the time of a round is a survivor's next report with its global step."""
        records, victim = self._records(), f"island-{VICTIM}"
        found, open_rounds = [], []
        for record in records:
            if record["kind"] == "merged":
                open_rounds.append(record)
            elif record["kind"] == "step" and record["learner"] != victim:
                for merged in [r for r in open_rounds if r["global_step"] <= record["global_step"]]:
                    open_rounds.remove(merged)
                    members = merged["members"]
                    found.append(Round(record["t"] + self._offset_s, victim in members, len(members)))
        return found

    def _pid(self) -> int:
        """Return the process id of the victim."""
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().decode().split("\0")
                ours = str(self._run_dir) in command and "learner" in command and "--standby" not in command
                if ours and f"island-{VICTIM}" in command:
                    return int(entry.name)
        raise JobFailed(f"island-{VICTIM} has no process; read the logs in {self.folder}")

    def kill(self) -> None:
        os.kill(self._pid(), signal.SIGKILL)
        self.killed_s = time.time()

    def victim(self) -> dict[str, float]:
        if not self.killed_s:
            return {}
        found: dict[str, float] = {}
        for path in self._events.glob("*.jsonl"):
            events = Tail(path).look()
            if not events or f"island-{VICTIM}" not in events[0]["command"]:
                continue
            spare, before = "--standby" in events[0]["command"], events[0]["started"] < self.killed_s
            # Milestones of a spare process before the kill take no time.
            if spare and before:
                found = {name: max(t, self.killed_s) for name, t in self._milestones(events).items()}
            elif not spare and not before:
                found = self._milestones(events)
        for record in self._records():
            if record.get("members") == [f"island-{VICTIM}"] and record["t"] + self._offset_s > self.killed_s:
                found.setdefault(record["kind"], record["t"] + self._offset_s)
        # A report of a round from before the kill may arrive after it.
        if self.setting.standby:
            found["started"] = found.get("joined", math.inf)
        return found

    @staticmethod
    def _milestones(events: list[dict[str, Any]]) -> dict[str, float]:
        """Return the milestones; a process is ready when the newest traced program is compiled."""
        found = {"started": events[0]["started"], "imported": events[0]["t"]}
        traced = [e for e in events if e["event"] == "traced"]
        if traced:
            compiled = [e for e in events if e["event"] == "compiled" and e["t"] > traced[-1]["t"]]
            same = [e["t"] for e in compiled if e["thread"] == traced[-1]["thread"]]
            found |= {"traced": traced[-1]["t"]} | ({"ready": min(same)} if same else {})
        steps = [e["t"] for e in events if e["event"] == "step"]
        return found | ({"first step": min(steps)} if steps else {})
