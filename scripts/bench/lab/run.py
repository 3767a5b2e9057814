"""A real run in a laboratory, with `diloco syncer` at its site and a `diloco learner` at each island."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from lab.network import ROOT, SYNCER, Lab, Traffic
from recovery_jobs import Tail

from diloco_jax.runtime.local.run import child_environment, core_share
from diloco_jax.runtime.records.files import ADDRESS_FILE, METRICS_FILE, SUMMARY_FILE
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import load

PORT = 7700
SETTINGS_FILE = "settings.yaml"
START_S, END_S = 300.0, 120.0
LOST_KINDS = ("left", "disconnected", "silent", "abandoned")


class Mark(NamedTuple):
    """A moment of a run."""

    # Seconds on the run's clock.
    t: float
    global_step: int
    traffic: dict[str, Traffic]
    # The bytes that the syncer received and sent, as its transport counts them.
    frame_bytes: tuple[int, int]


class Window(NamedTuple):
    """Figures between two marks; bytes and steps of all islands together."""

    seconds: float
    global_steps: int
    up_bytes: int
    down_bytes: int
    frame_bytes: tuple[int, int]
    inner_steps: int
    # The median time of an inner step.
    step_s: float
    # The share of time in inner steps, by island.
    utilisation: dict[str, float]
    # The fragment and the number of contributors of each merged round.
    merged: tuple[tuple[int, int], ...]
    # The syncer's notes about missing learners.
    lost: tuple[str, ...]

    @property
    def contributors(self) -> float:
        return statistics.mean(count for _, count in self.merged) if self.merged else 0.0


def job(islands: int | Mapping[str, Any], model: Mapping[str, Any], **sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run with one emulated device per island and cheap evaluations.

    Args:
        islands: number of islands, or a whole section.
        model: arguments of the built-in decoder, or a whole section with "module".
        sections: additions to sections of the configuration, by name.
    """
    config: dict[str, Any] = {
        "name": "wan",
        "islands": {"count": islands, "devices": 1} if isinstance(islands, int) else islands,
        "train": {"steps": 1_000_000, "eval_batch_size": 4, "final_eval_batches": 1},
        "model": model if "module" in model else {"args": model},
        "protocol": {"sync_every": 24, "num_fragments": 24},
        "trackers": [],
    }
    for name, section in sections.items():
        config[name] = {**config.get(name, {}), **section}
    return config


def host_name(name: str, host: int) -> str:
    """Return the name of a child: that of its island, with the number of its host if that is not the first."""
    return f"{name}.host-{host}" if host else name


def spawn_python(
    lab: Lab, config: RunConfig, name: str, site: str, words: Sequence[object], folder: Path, host: int = 0
) -> subprocess.Popen[bytes]:
    """Start a Python program at a site of a lab, like the supervisor of a local run.

    Args:
        lab: the laboratory.
        config: configuration with emulated devices and shares of cores.
        name: name of the child; a child with an island's name gets that island's cores.
        site: site in the lab.
        words: arguments of the interpreter.
        folder: folder for the child's log.
        host: number of the process in an island of several.
    """
    environment = dict(child_environment(config, name, place=host))
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "scripts" / "bench")])
    title = host_name(name, host)
    with (folder / f"{title}.log").open("ab") as log:
        child = lab.spawn(title, site, [sys.executable, *words], stdout=log, environment=environment)
    if cores := core_share(config.islands, name, sorted(os.sched_getaffinity(0))):
        os.sched_setaffinity(child.pid, cores)
    return child


class WanRun:
    """One run; its processes are children of the lab and end with it.

    Args:
        lab: the laboratory; its islands have the names of the configuration.
        folder: folder for configuration, logs and the run's files.
        settings: the configuration without addresses.
    """

    def __init__(self, lab: Lab, folder: Path, settings: Mapping[str, Any]) -> None:
        self._lab = lab
        self.folder = folder
        folder.mkdir(parents=True)
        self._file = folder / SETTINGS_FILE
        transport = {**settings.get("transport", {}), "address": f"{lab.address(SYNCER)}:{PORT}"}
        plain = {**settings, "transport": {"keepalive_s": 5.0, **transport, "allow_plaintext": True}}
        self._file.write_text(yaml.safe_dump(plain), encoding="utf-8")
        self.config: RunConfig = load(self._file)
        assert self.config.islands.names == lab.islands, "islands of the lab and of the run differ"
        self._metrics = Tail(folder / METRICS_FILE)
        self.peak_rss_bytes: dict[str, int] = {}

    def start(self) -> None:
        """Start the syncer, wait until it listens, and start the islands."""
        self._spawn("syncer", SYNCER, ["syncer", self._file])
        self._await(lambda: (self.folder / ADDRESS_FILE).exists(), START_S, "the syncer's listening")
        for name in self._lab.islands:
            self.start_island(name)

    def start_island(self, name: str, incarnation: int = 1) -> None:
        """Start all processes of an island."""
        words = ["learner", self._file, "--island", name, "--incarnation", incarnation]
        words += ["--syncer", self.config.transport.address]
        hosts = self.config.island(name).hosts
        if hosts > 1:
            # Each start uses another port, since the last one may not be free yet.
            words += ["--coordinator", f"{self._lab.address(name)}:{PORT + incarnation}"]
        for host in range(hosts):
            self._spawn(name, name, [*words, "--host", host] if hosts > 1 else words, host)

    def stop_island(self, name: str) -> None:
        """Ask all processes of an island to leave the run, and wait for their end."""
        self._lab.stop(*(host_name(name, host) for host in range(self.config.island(name).hosts)))

    def _spawn(self, name: str, site: str, words: list[object], host: int = 0) -> None:
        command = ["-m", "diloco_jax", *words, "--run-dir", self.folder]
        spawn_python(self._lab, self.config, name, site, command, self.folder, host)

    def _await(self, condition: Callable[[], bool], limit_s: float, what: str) -> None:
        self._lab.wait_for(condition, limit_s, what, self._look_at_memory)

    def _look_at_memory(self) -> None:
        for name, child in self._lab.children.items():
            try:
                status = Path(f"/proc/{child.pid}/status").read_text(encoding="utf-8")
            except OSError:
                continue
            for line in status.splitlines():
                if line.startswith("VmHWM:"):
                    self.peak_rss_bytes[name] = int(line.split()[1]) << 10

    def records(self, begin: Mark, end: Mark) -> list[dict[str, Any]]:
        """Return the records of metrics.jsonl between two marks."""
        return [r for r in self._metrics.look() if begin.t < r["t"] <= end.t]

    def _steps_of(self, island: str) -> int:
        return sum(r["kind"] == "step" and r["learner"] == island for r in self._metrics.look())

    def _has_made(self, island: str, steps: int) -> bool:
        return self._steps_of(island) >= steps

    def await_everybody(self, steps: int = 3, limit_s: float = START_S) -> None:
        """Wait until every island has reported this many inner steps since the start of the run."""
        for name in self._lab.islands:
            self._await(partial(self._has_made, name, steps), limit_s, f"step {steps} of {name}")

    def await_incarnation(self, island: str, incarnation: int, limit_s: float) -> None:
        """Wait until an island has reported a step of this incarnation."""
        wanted = {"kind": "step", "learner": island, "incarnation": incarnation}
        self._await(
            lambda: any(wanted.items() <= r.items() for r in self._metrics.look()),
            limit_s,
            f"the first step of incarnation {incarnation} of {island}",
        )

    def await_inner_steps(self, count: int, limit_s: float = 3600.0) -> None:
        """Wait until every island has made `count` more inner steps."""
        self.await_everybody(max(map(self._steps_of, self._lab.islands)) + count, limit_s)

    def await_steps(self, count: int, limit_s: float) -> None:
        """Wait for `count` more global steps."""
        target = self.mark().global_step + count
        self._await(lambda: self._global_step() >= target, limit_s, f"global step {target}")

    def _global_step(self) -> int:
        return max((r["global_step"] for r in self._metrics.look() if r["kind"] == "wire"), default=0)

    def await_end(self, limit_s: float) -> dict[str, Any]:
        """Wait until the run has written its summary, and return the summary."""
        path = self.folder / SUMMARY_FILE
        self._await(path.exists, limit_s, "the end of the run")
        self._await(lambda: self._lab.children["syncer"].poll() is not None, END_S, "the end of the syncer")
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return summary

    def mark(self) -> Mark:
        """Return the moment after the next record of the syncer, which writes two per second."""
        known = len(self._metrics.look())
        self._await(
            lambda: any(r["kind"] == "wire" for r in self._metrics.look()[known:]), START_S, "a record of the syncer"
        )
        traffic = {name: self._lab.traffic(name) for name in self._lab.islands}
        newest = next(r for r in reversed(self._metrics.records) if r["kind"] == "wire")
        return Mark(newest["t"], newest["global_step"], traffic, (newest["up_bytes"], newest["down_bytes"]))

    def window(self, begin: Mark, end: Mark) -> Window:
        """Return the figures between two marks."""
        records = self.records(begin, end)
        utilisation, steps = {}, [r for r in records if r["kind"] == "step"]
        for name in self._lab.islands:
            own = [r for r in steps if r["learner"] == name]
            # The first step started before the window.
            if len(own) > 1:
                utilisation[name] = sum(r["step_s"] for r in own[1:]) / (own[-1]["t"] - own[0]["t"])
        both = [(begin.traffic[name], end.traffic[name]) for name in self._lab.islands]
        return Window(
            end.t - begin.t,
            end.global_step - begin.global_step,
            sum(after.up - before.up for before, after in both),
            sum(after.down - before.down for before, after in both),
            (end.frame_bytes[0] - begin.frame_bytes[0], end.frame_bytes[1] - begin.frame_bytes[1]),
            len(steps),
            statistics.median(r["step_s"] for r in steps),
            utilisation,
            tuple((r["fragment_id"], len(r["members"])) for r in records if r["kind"] == "merged"),
            tuple(f"{r['kind']}: {r['reason']}" for r in records if r["kind"] in LOST_KINDS),
        )
