"""The result of a chaos run: numbers for machines, a table for people."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco_jax.protocol.messages import SYNCER
from diloco_jax.tools.chaos.actions import CHAOS
from diloco_jax.tools.chaos.ledger import Ledger, Recovery
from diloco_jax.tools.chaos.schedule import KINDS

WAITS_FILE = "{name}.{incarnation}.waits.jsonl"  # in the chaos folder: what a chaos learner measured
SAMPLES = ("leased", "merged", "overwritten", "released", "out", "repeated", "undone", "void", "violations")


def spread(values: Iterable[float]) -> dict[str, float | None]:
    """Return median and maximum, in the unit of the values; None for both when there are none."""
    known = list(values)
    if not known:
        return {"median": None, "max": None}
    return {"median": round(statistics.median(known), 3), "max": round(max(known), 3)}


def judge(
    ledger: Ledger, run_dir: Path, inflicted: int, skipped: int, summary: Mapping[str, Any], samples: Mapping[str, Any]
) -> dict[str, Any]:
    """Make everything that `diloco chaos --json` prints.

    Args:
        summary: the run's summary; empty when it did not come to its end.
        samples: what the audit found; empty when it could not be made.
    """
    recoveries = ledger.recoveries
    deaths = [r for r in recoveries if r.killed and r.target != SYNCER]
    recovered = sum(r.settled for r in recoveries)
    problems = [f"#{r.fault.number} {r.fault.kind}: {r.target} did not come back" for r in recoveries if not r.settled]
    if not summary.get("complete"):
        problems.append("the run did not come to its end")
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
    """Count faults, recoveries and their times of each kind that happened."""
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
    """Find the longest time between two inner steps of every life of an island, in seconds, while the island was well.

    The chaos learners measured it themselves: reports tell when they arrived, not when a step began.
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
    lines = [f"{'kind':<12} {'faults':>6} {'recovered':>10} {'median s':>9} {'max s':>8}"]
    for kind, row in result["by_kind"].items():
        times = row["recovery_s"]
        lines.append(
            f"{kind:<12} {row['faults']:>6} {row['recovered']:>5} of {row['recoveries']:<2}"
            f" {_number(times['median']):>8} {_number(times['max']):>8}"
        )
    gap, rejoin, wait = result["survivor_gap_s"], result["rejoin_s"], result["step_wait_s"]
    participation = ", ".join(f"{name} {share:.2f}" for name, share in result["participation"].items())
    samples = ", ".join(f"{key} {value}" for key, value in result["samples"].items())
    lines += [
        "",
        f"faults                {result['faults']}, {result['recovered']} of {result['recoveries']} recovered",
        f"goodput, uptime       {_number(result['goodput'])}, {_number(result['uptime'])}",
        f"after a death, gap between merged rounds   median {_number(gap['median'])} s, max {_number(gap['max'])} s",
        f"killed island merged again after           median {_number(rejoin['median'])} s,"
        f" max {_number(rejoin['max'])} s",
        f"longest pause of rounds, syncer being well {_number(result['longest_pause_s'])} s",
        f"longest time between two steps of an island median {_number(wait['median'])} s, max {_number(wait['max'])} s",
        f"participation         {participation or 'unknown'}",
        f"samples               {samples or 'unknown'}",
        f"evaluation loss       {_number(result['eval_loss'])} after {result['global_steps']} global steps,"
        f" {result['rounds']} rounds",
    ]
    if result["skipped"]:
        lines.append(f"{result['skipped']} more faults did not fit: raise train.steps, or lower --faults")
    lines += [f"PROBLEM  {problem}" for problem in result["problems"]]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
