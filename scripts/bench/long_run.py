"""Measure the cost of `report`, `view`, `status` and `compare` on the records of a long run.

The bench passes the records of days of rounds, one per second, through the syncer's writer, so they are thinned as in a
real run. The tape is a folder, so that a command that opens it fails. Each command runs in a separate process. `value`
is the wall time of the slowest command; each row has the processor time and the largest resident size.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jobs import ROOT

from diloco_jax.runtime.records.telemetry import Telemetry, write_json
from diloco_jax.settings.text import load, save

FLUSH_ROUNDS = 200
DAY = 86_400
ISLAND = {"grad_norm": 0.5, "learning_rate": 3e-4, "mfu": 0.41, "step_s": 1.0, "tokens_per_s": 4096.0}
COMMANDS = {"report": [], "view": ["--json"], "status": [], "compare": []}
Record = dict[str, Any]


def records(rounds: int, names: tuple[str, ...]) -> Iterator[Record]:
    """Yield the records of a run with one round per second and one kill of an island per hour."""
    incarnations = dict.fromkeys(names, 1)
    since = dict.fromkeys(names, 0)
    for n in range(1, rounds + 1):
        when = {"t": float(n), "global_step": n}
        if n % 3600 == 0:
            name = names[n // 3600 % len(names)]
            incarnations[name], since[name] = incarnations[name] + 1, n
            for kind, reason in (("disconnected", "no connection"), ("joined", f"incarnation {incarnations[name]}")):
                yield {"kind": kind, **when, "fragment_id": -1, "members": [name], "reason": reason}
            for state in ("begins", "ends"):
                yield {"kind": "alarm", **when, "alarm": "gone", "state": state, "members": [name], "reason": "gone"}
        for name in names:
            progress = {"learner": name, "incarnation": incarnations[name], "local_step": n - since[name]}
            step = {"kind": "step", **when, **progress, "tokens": 4096 * n, "loss": 2 + 100 / (n + 50), "step_s": 0.98}
            yield step | {"arrived": [[n - 1, 0.0812]]}
            if n % 10 == 0:
                yield {"kind": "metrics", **when, **progress, "values": ISLAND}
        note = {**when, "fragment_id": n % 6, "members": list(names[n % 2 :]), "reason": "every learner has reported"}
        yield {"kind": "closed", **note}
        times = {"opened_s": n - 0.9, "met_s": n - 0.5, "closed_s": n - 0.3, "pulled_s": n - 0.1}
        yield {"kind": "round", **when, "fragment_id": n % 6, **times, "values": dict.fromkeys(names, 0.1234)}
        yield {"kind": "merged", **note}
        for _ in range(2):
            yield {"kind": "wire", **when, "up_bytes": 123_456 * n, "down_bytes": 654_321 * n}
        yield {"kind": "merged_metrics", **when, "islands": list(names), "values": ISLAND}
        if n % 1000 == 0:
            yield {"kind": "eval", **when, "tokens": 4096 * n, "loss": 2 + 90 / n, "bits_per_byte": 1.2, "scores": {}}


def write_run(folder: Path, rounds: int, islands: int) -> dict[str, float]:
    """Write the folder of a run, and return the costs of the writer."""
    config = load(ROOT / "configs" / "quickstart.yaml", ["--islands.count", str(islands), "--train.steps", str(rounds)])
    (folder / "tape.jsonl").mkdir(parents=True)
    save(config, folder / "config.yaml")
    names = config.islands.names
    telemetry, began_s, largest, written = Telemetry(folder), time.process_time(), 0, 0
    for record in records(rounds, names):
        telemetry.write(record)
        written += 1
        if record["kind"] == "closed" and record["global_step"] % FLUSH_ROUNDS == 0:
            telemetry.flush()
            # the writer here is some thousand times as fast as a run
            telemetry._file.settle()
            largest = max(largest, (folder / "metrics.jsonl").stat().st_size)
    telemetry.close()
    row = {"state": "gone", "condition": "left", "reason": "", "since_s": 0.0, "local_step": rounds, "loss": 2.0}
    row |= {"tokens": 4096 * rounds, "tokens_per_s": 0.0, "step_s": 0.98, "staleness": 0, "broadcast_s": 0.1}
    row |= {"last_merged_round": rounds, "participation": 1.0, "restarts": 0, "metrics": {}}
    wire = {"up_bytes": 123_456 * rounds, "down_bytes": 654_321 * rounds}
    status = {"run": "long", "state": "complete", "global_step": rounds, "total_steps": rounds, "epoch": 1}
    status |= {"waiting_for": "nothing", "wall_s": float(rounds), "tokens": 4096 * rounds * islands, "wire": wire}
    status |= {"tokens_per_s": 0.0, "contributors_per_round": 1.0, "samples": {}, "alarms": [], "eval_loss": 2.0}
    write_json(folder / "status.json", status | {"learners": [{"learner": name, **row} for name in names]})
    learner = {
        "local_steps": rounds,
        "tokens": 4096 * rounds,
        "participation": 1.0,
        "restarts": 0,
        "step_overhead": 0.0,
    }
    summary = {"complete": True, "eval_loss": 2.0, "goodput": 0.98, "wire": wire, "wall_s": float(rounds), "alarms": []}
    write_json(folder / "summary.json", summary | {"learners": dict.fromkeys(names, learner)})
    return {"records": written, "largest_bytes": largest, "writer_cpu_s": round(time.process_time() - began_s, 2)}


def measure(command: str, words: list[str]) -> Record:
    """Run a command of diloco, and return what it took."""
    began_s = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "diloco_jax", command, *words], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"diloco {command} failed on the records of a long run")
    cpu_s = used.ru_utime + used.ru_stime
    wall_s = time.monotonic() - began_s
    return {"command": command, "wall_s": round(wall_s, 2), "cpu_s": round(cpu_s, 2), "rss_mb": used.ru_maxrss >> 10}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=float, default=10.0, help="days of one round per second")
    parser.add_argument("--islands", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3, help="runs of each command")
    parser.add_argument("--folder", help="folder for the run, which is kept; an existing run is read unchanged")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    made = Path(tempfile.mkdtemp(prefix="long-run-"))
    folder = Path(arguments.folder) if arguments.folder else made / "run"
    try:
        facts: Record = {}
        if not folder.exists():
            facts = write_run(folder, round(arguments.days * DAY), arguments.islands)
        rows = []
        for command, words in COMMANDS.items():
            runs = [str(folder)] * (2 if command == "compare" else 1)
            rows += [measure(command, [*runs, *words]) for _ in range(arguments.runs)]
    finally:
        shutil.rmtree(made)
    slowest = [row["wall_s"] for row in rows]
    found = {"name": "long run", "value": max(slowest), "unit": "s", "low": min(slowest), "high": max(slowest)}
    found |= {"runs": arguments.runs, "days": arguments.days, "rows": rows, **facts}
    if arguments.json:
        print(json.dumps(found))
        return
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    for row in rows:
        print(f"{row['command']:<8} {row['wall_s']:6.2f} s, processor {row['cpu_s']:6.2f} s, {row['rss_mb']} MB")


if __name__ == "__main__":
    main()
