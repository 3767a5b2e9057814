"""Times and faults of a real local run, read from its folder.

All times are seconds on the run's clock. Reads JSON only: the settings of config.yaml come from whoever can read it.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from diloco_jax.protocol.messages import SYNCER
from diloco_jax.protocol.pacing import ProtocolConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Settings of a run's config that a simulation needs."""

    protocol: ProtocolConfig
    """The algorithm."""
    names: tuple[str, ...]
    """The islands."""
    total_steps: int
    """Global steps of the run."""
    restart_delay_s: float
    """From an island's death to its next start."""
    syncer_restart_delay_s: float
    """From the syncer's death to its next start."""
    connect_timeout_s: float
    """How long a learner that starts waits for the syncer before it ends, and is started again."""


class RealFault(NamedTuple):
    """A fault that was inflicted, one entry for each that it hit."""

    number: int
    kind: str
    target: str
    at_s: float
    duration_s: float  # until it was taken back; 0 for what is over at once
    at_step: int  # global step at which it was due; -1 if the book does not say
    direction: str
    how: str
    amount: int


@dataclass(slots=True)
class Life:
    """One process of an island."""

    name: str
    started_s: float
    joined_s: float | None = None  # the syncer heard of it
    stepped_s: float | None = None  # its first step began
    steps: int = 0
    ended_s: float = 0.0  # its newest step


@dataclass(slots=True)
class RealRun:
    """A run that is complete."""

    folder: Path
    settings: RunSettings
    began_s: float = 0.0  # the first inner step
    ended_s: float = 0.0
    goodput: float = 0.0
    uptime: float = 0.0
    contributors_per_round: float = 0.0
    rounds: int = 0  # merged
    faults: list[RealFault] = field(default_factory=list)
    lives: dict[tuple[str, int], Life] = field(default_factory=dict)
    periods_s: dict[str, list[float]] = field(default_factory=dict)  # from one step's end to the next
    steps_s: dict[str, list[float]] = field(default_factory=dict)  # as reported
    syncs_s: list[float] = field(default_factory=list)  # from the end of a round to the new version
    syncer_back_s: list[float] = field(default_factory=list)  # restarts of its machine
    value_bytes: float = 0.0  # of one encoded fragment, on its way up

    @property
    def rounds_per_s(self) -> float:
        """Merged rounds in a second, since the first inner step began."""
        return self.rounds / (self.ended_s - self.began_s)


def read_run(folder: Path, settings: RunSettings) -> RealRun:
    """Read clock.json, metrics.jsonl, summary.json and, of a chaos run, chaos/faults.jsonl.

    Args:
        folder: of the run.
        settings: of its config.

    Raises:
        ValueError: it is not the folder of a complete run.
    """
    for name in ("summary.json", "clock.json", "metrics.jsonl"):
        if not (folder / name).exists():
            raise ValueError(f"{folder} has no {name}; name the folder of a run that has ended")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    if not summary["complete"]:
        raise ValueError(f"{folder} holds a run that ended early; use one that made all of its global steps")
    run = RealRun(folder, settings)
    run.goodput, run.uptime = summary["goodput"], summary["uptime"]
    run.contributors_per_round = summary["contributors_per_round"]
    began_unix_s = json.loads((folder / "clock.json").read_text(encoding="utf-8"))["began_unix_s"]
    _read_metrics(run, began_unix_s)
    parts = run.contributors_per_round * run.rounds
    run.value_bytes = summary["wire"]["up_bytes"] / parts if parts else 0.0
    run.faults = list(_read_faults(folder / "chaos" / "faults.jsonl"))
    return run


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines of a file of JSON objects."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is not JSON ({error.msg}); remove that line") from None


def _read_metrics(run: RealRun, began_unix_s: float) -> None:
    closed_s: dict[int, float] = {}
    began_s: list[float] = []
    for record in _lines(run.folder / "metrics.jsonl"):
        kind, now_s = record["kind"], record["t"]
        if kind == "step":
            life = _life(run, record["learner"], record["incarnation"], began_unix_s)
            _on_step(run, life, record)
            began_s.append(now_s - record["step_s"])
        elif kind == "joined":
            incarnation = int(record["reason"].rpartition(" ")[2])
            life = _life(run, record["members"][0], incarnation, began_unix_s)
            life.joined_s = now_s if life.joined_s is None else life.joined_s
        elif kind == "closed":
            closed_s[record["global_step"]] = now_s
        elif kind == "merged":
            run.rounds += 1
            if record["global_step"] in closed_s:
                run.syncs_s.append(now_s - closed_s[record["global_step"]])
        elif kind == "restarted":
            run.syncer_back_s.append(now_s)
        elif kind == "finished":
            run.ended_s = now_s
    if not began_s or run.ended_s <= min(began_s):
        raise ValueError(f"{run.folder}/metrics.jsonl has no steps, or no end; name the folder of a run that has ended")
    run.began_s = min(began_s)


def _life(run: RealRun, name: str, incarnation: int, began_unix_s: float) -> Life:
    """Find the life of that number; the supervisor numbers them by the clock, in milliseconds."""
    return run.lives.setdefault((name, incarnation), Life(name, incarnation / 1000 - began_unix_s))


def _on_step(run: RealRun, life: Life, record: Mapping[str, Any]) -> None:
    now_s, step = record["t"], record["local_step"]
    if life.stepped_s is None:
        life.stepped_s = now_s - record["step_s"]
    elif step == life.steps + 1:
        run.periods_s.setdefault(life.name, []).append(now_s - life.ended_s)
        run.steps_s.setdefault(life.name, []).append(record["step_s"])
    life.steps, life.ended_s = step, now_s


def _read_faults(path: Path) -> Iterator[RealFault]:
    """Yield the faults in the order in which they began."""
    if not path.exists():
        return
    begun: list[dict[str, Any]] = []
    ended_s: dict[int, float] = {}
    for record in _lines(path):
        if record["event"] == "begin":
            begun.append(record)
        elif record["event"] == "end":
            ended_s[record["fault"]] = record["t"]
    for record in begun:
        yield RealFault(
            record["fault"],
            record["kind"],
            record["target"],
            record["t"],
            max(0.0, ended_s.get(record["fault"], record["t"]) - record["t"]),
            record.get("at_step", -1),
            record.get("direction", "both"),
            record.get("how", ""),
            record.get("amount", 0),
        )


def deaths(run: RealRun) -> Iterator[tuple[RealFault, Life]]:
    """Islands that were killed, each with the process that took the place of the dead one."""
    for fault in run.faults:
        if fault.kind in ("kill", "kill-donor"):
            later = [life for life in run.lives.values() if life.name == fault.target and life.started_s > fault.at_s]
            if later:
                yield fault, min(later, key=lambda life: life.started_s)


def syncer_deaths(run: RealRun) -> Iterator[tuple[RealFault, float]]:
    """Yield the deaths of the syncer, each with the time at which its machine went on."""
    for fault in run.faults:
        if fault.kind == "kill-syncer" and fault.target == SYNCER:
            later = [back_s for back_s in run.syncer_back_s if back_s > fault.at_s]
            if later:
                yield fault, min(later)
