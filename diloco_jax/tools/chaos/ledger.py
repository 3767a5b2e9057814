"""The recovery from every fault of a chaos run, read from the syncer's records, and the verdict on the run.

All times of records and faults are seconds since the start of the run, on the run's clock.
"""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco_jax.protocol.messages import SYNCER
from diloco_jax.runtime.records.files import CHAOS
from diloco_jax.tools.chaos.schedule import KINDS, ChaosFault

# A recovery counts if there was no disruption for this time after it.
SETTLE_S = 1.0
# The run may notice these faults only after the lease, because a stream may just stand still.
NOTICED_LATE = {"corrupt", "duplicate", "black-hole"}
DISRUPTIONS = {"left", "disconnected", "silent", "strike", "expelled"}
# The time span for measuring the pace of the run.
RATE_SPAN_S = 5.0


@dataclass(slots=True)
class Recovery:
    """The recovery of one target from a fault; a fault with two targets has two recoveries."""

    fault: ChaosFault
    target: str
    begun_s: float
    # Whether the target returns as a new incarnation.
    killed: bool
    # The island's incarnation when the fault hit it.
    incarnation: int
    settle_s: float = SETTLE_S
    # The end of the fault; for a momentary fault its start.
    ended_s: float | None = None
    # The island's first step after the end.
    stepped_s: float | None = None
    # The first merged round with the island; after a fault of the syncer, the first merged round.
    merged_s: float | None = None
    settled: bool = False

    @property
    def seconds(self) -> float | None:
        """Return the seconds until the first merged round, None if there is none.

        They count from the start of the fault if it killed the target, otherwise from the end of the fault.
        """
        if not self.settled or self.merged_s is None or self.ended_s is None:
            return None
        return max(0.0, self.merged_s - (self.begun_s if self.killed else self.ended_s))

    def on_step(self, now_s: float, incarnation: int) -> None:
        back = not self.killed or incarnation > self.incarnation
        if self.stepped_s is None and self.ended_s is not None and now_s >= self.ended_s and back:
            self.stepped_s = now_s

    def on_merged(self, now_s: float, members: Sequence[str]) -> None:
        if self.target == SYNCER:
            since_s = self.ended_s
        else:
            since_s = self.stepped_s if self.target in members else None
        if self.merged_s is None and since_s is not None and now_s > since_s:
            self.merged_s = now_s


class Ledger:
    """The recoveries of a run; call `feed` with every record in order, and `begin` and `end` for every fault."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self.recoveries: list[Recovery] = []
        # The times between the merged rounds before and after an island was killed.
        self.survivor_gaps_s: list[float] = []
        # The longest time between two merged rounds while the syncer was well.
        self.longest_pause_s = 0.0
        self.rounds = 0
        self.global_step = 0
        self.finished = False
        self.merged_once: set[str] = set()
        # The time of the newest record.
        self.now_s = 0.0
        self._incarnations: dict[str, int] = {}
        # The time of the last merged round.
        self._merged_s: float | None = None
        # The times of kills of islands since the last merged round.
        self._deaths_s: list[float] = []
        self._pace: list[tuple[float, int]] = []

    def begin(self, fault: ChaosFault, target: str, now_s: float, *, killed: bool) -> None:
        """Record a fault that hit `target` at `now_s`."""
        ended_s = None if fault.duration_s and not killed else now_s
        settle_s = SETTLE_S + (self._silence_s if fault.kind in NOTICED_LATE else 0.0)
        recovery = Recovery(fault, target, now_s, killed, self._incarnations.get(target, -1), settle_s, ended_s)
        self.recoveries.append(recovery)
        if killed and target != SYNCER:
            self._deaths_s.append(now_s)

    def end(self, fault: ChaosFault, now_s: float) -> None:
        """Record the end of a lasting fault."""
        for recovery in self.recoveries:
            if recovery.fault is fault and recovery.ended_s is None:
                recovery.ended_s = now_s

    @property
    def unwell(self) -> set[str]:
        """Return the names of targets that have not recovered."""
        return {recovery.target for recovery in self.recoveries if not recovery.settled}

    def allows(self, fault: ChaosFault, islands: Sequence[str]) -> bool:
        """Return whether a fault is due, its target is well, and one of `islands` stays well during the fault."""
        unwell = self.unwell
        if not self.merged_once.issuperset(islands) or self.global_step < fault.at_step or fault.target in unwell:
            return False
        hit = 2 if fault.kind == "kill-donor" else 1
        return fault.target == SYNCER or len(unwell - {SYNCER}) + hit < len(islands)

    def close(self) -> None:
        """Settle the recoveries at the end of the run, because no disruption can follow."""
        for recovery in self.recoveries:
            recovery.settled = recovery.merged_s is not None

    def steps_per_s(self) -> float:
        """Return the recent global steps per second; 0 if unknown."""
        if not self._pace:
            return 0.0
        (then_s, then), (now_s, now) = self._pace[0], self._pace[-1]
        return (now - then) / (now_s - then_s) if now_s > then_s else 0.0

    def feed(self, record: Mapping[str, Any]) -> None:
        """Process the next record of metrics.jsonl."""
        kind, now_s = record["kind"], float(record["t"])
        self.now_s = max(self.now_s, now_s)
        self.finished = self.finished or kind == "finished"
        if kind == "step":
            self._incarnations[record["learner"]] = record["incarnation"]
            for recovery in self._open(record["learner"]):
                recovery.on_step(now_s, record["incarnation"])
        elif kind == "merged":
            self._on_merged(now_s, record["global_step"], record["members"])
        elif kind in DISRUPTIONS:
            for name in record["members"]:
                for recovery in self._open(name):
                    # A disruption after the fault means that the target has not recovered yet.
                    if now_s >= recovery.begun_s:
                        recovery.stepped_s = recovery.merged_s = None
        for recovery in self._open():
            recovery.settled = recovery.merged_s is not None and now_s >= recovery.merged_s + recovery.settle_s

    def _open(self, target: str = "") -> list[Recovery]:
        return [r for r in self.recoveries if not r.settled and (not target or r.target == target)]

    def _on_merged(self, now_s: float, global_step: int, members: Sequence[str]) -> None:
        self.rounds += 1
        self.global_step = max(self.global_step, global_step)
        self.merged_once.update(members)
        if self._merged_s is not None and not self._syncer_was_unwell(self._merged_s, now_s):
            gap_s = now_s - self._merged_s
            self.longest_pause_s = max(self.longest_pause_s, gap_s)
            self.survivor_gaps_s += [gap_s for death_s in self._deaths_s if death_s < now_s]
        self._deaths_s = [death_s for death_s in self._deaths_s if death_s >= now_s]
        for recovery in self._open():
            recovery.on_merged(now_s, members)
        self._merged_s = now_s
        self._pace = [*(p for p in self._pace if p[0] > now_s - RATE_SPAN_S), (now_s, self.global_step)]

    def _syncer_was_unwell(self, from_s: float, to_s: float) -> bool:
        faults = [r for r in self.recoveries if r.target == SYNCER and r.begun_s <= to_s]
        return any(r.merged_s is None or r.merged_s > from_s for r in faults)


# A file in the chaos folder with a chaos learner's waits between steps.
WAITS_FILE = "{name}.{incarnation}.waits.jsonl"
SAMPLES = ("leased", "merged", "overwritten", "released", "out", "repeated", "undone", "void", "violations")


def spread(values: Iterable[float]) -> dict[str, float | None]:
    """Return median and maximum of values, rounded; None for both if there are no values."""
    known = list(values)
    if not known:
        return {"median": None, "max": None}
    return {"median": round(statistics.median(known), 3), "max": round(max(known), 3)}


def judge(
    ledger: Ledger, run_dir: Path, inflicted: int, skipped: int, summary: Mapping[str, Any], samples: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the verdict that `diloco chaos --json` prints; summary and samples are empty if run or audit failed."""
    recoveries = ledger.recoveries
    deaths = [r for r in recoveries if r.killed and r.target != SYNCER]
    recovered = sum(r.settled for r in recoveries)
    problems = [f"#{r.fault.number} {r.fault.kind}: {r.target} did not come back" for r in recoveries if not r.settled]
    if not summary.get("complete"):
        problems.append("the run did not finish")
    problems += [f"data: {text}" for text in samples.get("first_violations", ())]
    if samples.get("undone"):
        problems.append(f"data: {samples['undone']} samples were merged into versions that were lost")
    learners = summary.get("learners", {})
    return {
        "faults": inflicted,
        "skipped": skipped,
        "recoveries": len(recoveries),
        "recovered": recovered,
        "goodput": summary.get("goodput"),
        "uptime": summary.get("uptime"),
        "survivor_gap_s": spread(ledger.survivor_gaps_s),
        "rejoin_s": spread(r.seconds for r in deaths if r.seconds is not None),
        "longest_pause_s": round(ledger.longest_pause_s, 3),
        "step_wait_s": longest_waits(run_dir, recoveries),
        "participation": {name: row["participation"] for name, row in learners.items()},
        "samples": {key: value for key, value in samples.items() if key in SAMPLES},
        "rounds": ledger.rounds,
        "global_steps": summary.get("global_steps", ledger.global_step),
        "eval_loss": summary.get("eval_loss"),
        "by_kind": by_kind(recoveries),
        "problems": problems,
    }


def by_kind(recoveries: Sequence[Recovery]) -> dict[str, Any]:
    """Return counts of faults and recoveries, and times of recovery, for each kind of fault that happened."""
    table = {}
    for kind in dict.fromkeys([*KINDS, *(r.fault.kind for r in recoveries)]):
        rows = [r for r in recoveries if r.fault.kind == kind]
        if rows:
            table[kind] = {
                "faults": len({r.fault.number for r in rows}),
                "recoveries": len(rows),
                "recovered": sum(r.settled for r in rows),
                "recovery_s": spread(r.seconds for r in rows if r.seconds is not None),
            }
    return table


def longest_waits(run_dir: Path, recoveries: Sequence[Recovery]) -> dict[str, float | None]:
    """Return median and maximum of the longest waits between two inner steps, over all incarnations of islands.

    Waits while an island had not recovered from a fault do not count. The chaos learners measure the waits, because
    the syncer knows only when reports arrive.
    """
    longest = []
    for path in sorted((run_dir / CHAOS).glob(WAITS_FILE.format(name="*", incarnation="*"))):
        name = path.name.split(".")[0]
        hit = [(r.begun_s, r.merged_s) for r in recoveries if r.target == name]
        waits = [0.0]
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                ended_s, wait_s = json.loads(line)
                if not any(b_s <= ended_s and (m_s is None or ended_s - wait_s <= m_s) for b_s, m_s in hit):
                    waits.append(wait_s)
        longest.append(max(waits))
    return spread(longest)


def table(result: Mapping[str, Any]) -> str:
    """Format the verdict as text."""
    shown = _formatted(result)
    lines = [f"{'kind':<12} {'faults':>6} {'recovered':>10} {'median s':>9} {'max s':>8}"]
    for kind, row in shown["by_kind"].items():
        recovered, times = f"{row['recovered']:>5} of {row['recoveries']:<2}", row["recovery_s"]
        lines.append(f"{kind:<12} {row['faults']:>6} {recovered} {times['median']:>8} {times['max']:>8}")
    shares = ", ".join(f"{name} {share:.2f}" for name, share in result["participation"].items())
    samples = ", ".join(f"{key} {value}" for key, value in result["samples"].items())
    gap, rejoin, wait = shown["survivor_gap_s"], shown["rejoin_s"], shown["step_wait_s"]
    lines += [
        "",
        f"faults                {shown['faults']}, {shown['recovered']} of {shown['recoveries']} recovered",
        f"goodput, uptime       {shown['goodput']}, {shown['uptime']}",
        f"after a kill, gap between merged rounds    median {gap['median']} s, max {gap['max']} s",
        f"killed island merged again after           median {rejoin['median']} s, max {rejoin['max']} s",
        f"longest pause of rounds, syncer well       {shown['longest_pause_s']} s",
        f"longest time between two steps of an island median {wait['median']} s, max {wait['max']} s",
        f"participation         {shares or 'unknown'}",
        f"samples               {samples or 'unknown'}",
        f"evaluation loss       {shown['eval_loss']} after {shown['global_steps']} global steps, "
        f"{shown['rounds']} rounds",
    ]
    if result["skipped"]:
        lines.append(f"{result['skipped']} more faults did not fit: raise train.steps, or lower --faults")
    lines += [f"PROBLEM  {problem}" for problem in result["problems"]]
    return "\n".join(lines)


def _formatted(value: Any) -> Any:
    """Format numbers for people; an unknown number becomes a dash."""
    if isinstance(value, dict):
        return {key: _formatted(one) for key, one in value.items()}
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else value
