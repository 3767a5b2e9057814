"""Times and faults of a real local run, read from its folder.

All times are seconds on the run's clock. This module reads only JSON; its caller reads the settings in config.yaml.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from diloco_jax.protocol.messages import SYNCER
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.tools.chaos.relay import Direction
from diloco_jax.tools.chaos.schedule import ChaosFault


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Settings of a run's config that a simulation needs."""

    protocol: ProtocolConfig
    # The names of the islands.
    names: tuple[str, ...]
    # The number of global steps of the run.
    total_steps: int
    # The times from the end of a process, of an island and of the syncer, to its next start.
    restart_delay_s: float
    syncer_restart_delay_s: float
    # The time that a starting learner waits for the syncer. Afterwards it ends, and the supervisor restarts it.
    connect_timeout_s: float


class RealFault(NamedTuple):
    """A fault that hit a target; a fault with two targets has two entries."""

    number: int
    kind: str
    target: str
    at_s: float
    # The time until the fault was undone; 0 for a momentary fault.
    duration_s: float
    # The global step when the fault was due; -1 if unknown.
    at_step: int
    direction: Direction
    how: str
    amount: int

    def scheduled(self) -> ChaosFault:
        """Return the fault as the schedule of a chaos run has it, without its time."""
        fields = self._asdict()
        del fields["at_s"]
        return ChaosFault(**fields)


@dataclass(slots=True)
class Incarnation:
    """One process of an island, from its start to its end."""

    name: str
    started_s: float
    # The time when the syncer received its greeting.
    joined_s: float | None = None
    # The start of its first step.
    stepped_s: float | None = None
    steps: int = 0
    # The end of its newest step.
    ended_s: float = 0.0


@dataclass(slots=True)
class RealRun:
    """A complete run."""

    folder: Path
    settings: RunSettings
    # The start of the first inner step.
    began_s: float = 0.0
    ended_s: float = 0.0
    goodput: float = 0.0
    uptime: float = 0.0
    contributors_per_round: float = 0.0
    # The number of merged rounds.
    rounds: int = 0
    faults: list[RealFault] = field(default_factory=list)
    # The processes of islands, by name and incarnation.
    incarnations: dict[tuple[str, int], Incarnation] = field(default_factory=dict)
    # By island: the times between the ends of two steps, and the reported times of steps.
    periods_s: dict[str, list[float]] = field(default_factory=dict)
    steps_s: dict[str, list[float]] = field(default_factory=dict)
    # The times from the end of a round to the new version.
    syncs_s: list[float] = field(default_factory=list)
    # The times when the syncer's machine restarted.
    syncer_back_s: list[float] = field(default_factory=list)
    # The size of one encoded fragment on its way to the syncer.
    value_bytes: float = 0.0

    @property
    def rounds_per_s(self) -> float:
        """Return the merged rounds per second since the start of the first inner step."""
        return self.rounds / (self.ended_s - self.began_s)


def read_run(folder: Path, settings: RunSettings) -> RealRun:
    """Read clock.json, metrics.jsonl and summary.json of a run, and chaos/faults.jsonl of a chaos run.

    Args:
        folder: folder of the run.
        settings: settings of the run's config.

    Raises:
        ValueError: `folder` is not the folder of a complete run.
    """
    for name in ("summary.json", "clock.json", "metrics.jsonl"):
        if not (folder / name).exists():
            raise ValueError(f"{folder} has no {name}; name the folder of a run that has ended")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    if not summary["complete"]:
        raise ValueError(f"{folder} holds a run that ended early; use a run that made all of its global steps")
    run = RealRun(folder, settings)
    run.goodput, run.uptime = summary["goodput"], summary["uptime"]
    run.contributors_per_round = summary["contributors_per_round"]
    began_unix_s = json.loads((folder / "clock.json").read_text(encoding="utf-8"))["began_unix_s"]
    _read_metrics(run, began_unix_s)
    contributions = run.contributors_per_round * run.rounds
    run.value_bytes = summary["wire"]["up_bytes"] / contributions if contributions else 0.0
    run.faults = list(_read_faults(folder / "chaos" / "faults.jsonl"))
    return run


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file; an incomplete last line is ignored."""
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
            incarnation = _incarnation_of(run, record["learner"], record["incarnation"], began_unix_s)
            _on_step(run, incarnation, record)
            began_s.append(now_s - record["step_s"])
        elif kind == "joined":
            incarnation = int(record["reason"].rpartition(" ")[2])
            incarnation = _incarnation_of(run, record["members"][0], incarnation, began_unix_s)
            incarnation.joined_s = now_s if incarnation.joined_s is None else incarnation.joined_s
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


def _incarnation_of(run: RealRun, name: str, incarnation: int, began_unix_s: float) -> Incarnation:
    """Return the process of this incarnation, which the supervisor numbers by its start in milliseconds."""
    return run.incarnations.setdefault((name, incarnation), Incarnation(name, incarnation / 1000 - began_unix_s))


def _on_step(run: RealRun, incarnation: Incarnation, record: Mapping[str, Any]) -> None:
    now_s, step = record["t"], record["local_step"]
    if incarnation.stepped_s is None:
        incarnation.stepped_s = now_s - record["step_s"]
    elif step == incarnation.steps + 1:
        run.periods_s.setdefault(incarnation.name, []).append(now_s - incarnation.ended_s)
        run.steps_s.setdefault(incarnation.name, []).append(record["step_s"])
    incarnation.steps, incarnation.ended_s = step, now_s


def _read_faults(path: Path) -> Iterator[RealFault]:
    """Yield the faults in the order of their starts."""
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


def restarts(run: RealRun) -> Iterator[tuple[RealFault, Incarnation]]:
    """Yield the kills of islands, each with the process that replaced the killed one."""
    for fault in run.faults:
        if fault.kind in ("kill", "kill-donor"):
            later = [
                incarnation
                for incarnation in run.incarnations.values()
                if incarnation.name == fault.target and incarnation.started_s > fault.at_s
            ]
            if later:
                yield fault, min(later, key=lambda incarnation: incarnation.started_s)


def syncer_restarts(run: RealRun) -> Iterator[tuple[RealFault, float]]:
    """Yield the kills of the syncer, each with the time when its machine resumed."""
    for fault in run.faults:
        if fault.kind == "kill-syncer" and fault.target == SYNCER:
            later = [back_s for back_s in run.syncer_back_s if back_s > fault.at_s]
            if later:
                yield fault, min(later)
