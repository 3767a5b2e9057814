"""A run's folder that no run has made."""

import json
import time
from pathlib import Path
from typing import Any

from diloco_jax.runtime.records.telemetry import WENT_BACK

Record = dict[str, Any]


def note(kind: str, t: float, global_step: int, *members: str, fragment_id: int = -1, reason: str = "") -> Record:
    found = {"kind": kind, "t": t, "global_step": global_step, "fragment_id": fragment_id}
    return found | {"members": list(members), "reason": reason}


def joined(name: str, t: float, incarnation: int = 1) -> Record:
    return note("joined", t, 0, name, reason=f"incarnation {incarnation}")


def lost(name: str, t: float) -> Record:
    return note("disconnected", t, 1, name, reason="lost")


def resumed(t: float) -> Record:
    """The start of a syncer that continues a stopped run from a snapshot."""
    start = note("life", t, 1, reason=f"process 2 of the syncer: {WENT_BACK}")
    return start | {"versions": {"jax": "1"}, "host": "x"}


def step(name: str, t: float, n: int, tokens: int, step_s: float = 1.0, **more: Any) -> Record:
    found = {"kind": "step", "t": t, "learner": name, "incarnation": 1, "local_step": n, "tokens": tokens}
    return found | {"global_step": 0, "loss": 3.0, "step_s": step_s} | more


def wire(t: float, n: int, up_bytes: int, down_bytes: int) -> Record:
    return {"kind": "wire", "t": t, "global_step": n, "up_bytes": up_bytes, "down_bytes": down_bytes}


def drift(name: str, t: float, n: int, norm_ratio: float, cosine: float | None) -> Record:
    """The drift of one contribution to round `n`."""
    values = {"drift_norm_ratio": norm_ratio, "drift_cosine": cosine}
    return {"kind": "drift", "t": t, "learner": name, "global_step": n, "fragment_id": 2, "values": values}


def evaluation(t: float, n: int, tokens: int, loss: float | None, **scores: float | None) -> Record:
    """An evaluation; `scores` are those of corpora by name."""
    found = {"kind": "eval", "t": t, "global_step": n, "tokens": tokens, "loss": loss, "bits_per_byte": None}
    return found | {"scores": {f"{name} loss": value for name, value in scores.items()}}


def one_round(n: int, t: float) -> list[Record]:
    """A round that closes at `t` with island a alone."""
    record = {"kind": "round", "t": t + 0.75, "global_step": n, "fragment_id": 2, "opened_s": t - 2, "met_s": t - 1}
    record |= {"closed_s": t, "pulled_s": t + 0.5, "values": {"a": 0.5}}
    closed = note("closed", t, n, "a", fragment_id=2, reason="grace is over")
    return [closed, record, note("merged", t + 1, n, "a", fragment_id=2)]


# The one round of the made run, as the page is told of it; b did not report in time, nor when it had the result.
MADE = {"step": 1, "fragment": 2, "state": "merged", "reason": "grace is over", "members": ["a"], "merged": ["a"]}
MADE |= {"opened_s": 1.5, "met_s": 2.5, "closed_s": 3.5, "pulled_s": 4.0, "merged_s": 4.5, "values": {"a": 0.5}}
MADE |= {"late": {}, "arrived": {"a": 0.25}}


def row(name: str, **changes: Any) -> Record:
    found = {"learner": name, "state": "active", "condition": "training", "reason": "heard", "since_s": 1.0}
    found |= {"local_step": 2, "tokens": 20, "tokens_per_s": 10.0, "loss": 2.5, "step_s": 1.0, "last_merged_round": 1}
    return found | {"participation": 1.0, "restarts": 0, "broadcast_s": 0.25, "metrics": {}} | changes


def status(**changes: Any) -> Record:
    found = {"run": "made", "state": "running", "global_step": 1, "total_steps": 10, "waiting_for": "round 2"}
    found |= {"wall_s": 4.6, "tokens": 40, "tokens_per_s": 20.0, "eval_loss": None, "contributors_per_round": 1.0}
    found |= {"alarms": [], "wire": {"up_bytes": 300, "down_bytes": 600}, "samples": FATES}
    # somebody else's machine, so that nobody looks for its processes here
    said = {"machine": "elsewhere", "process": [1, 1], "supervisor": None, "unix_s": time.time() + 3600}
    return found | {"learners": [row("a"), row("b")], "said": said} | changes


FATES = {"leased": 8, "merged": 4, "overwritten": 1, "released": 1, "out": 2}


def append(folder: Path, *records: Record) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def made_run(folder: Path, **changes: Any) -> Path:
    """Two islands and one round."""
    (folder / "logs").mkdir(parents=True)
    (folder / "logs/a.log").write_text("first line\n<b>last line</b>\n")
    (folder / "logs/syncer.log").write_text("hello\n")
    append(folder, joined("a", 0.5), joined("b", 0.75), wire(1.6, 0, 0, 0), step("a", 2.0, 1, 10))
    append(
        folder,
        step("b", 3.0, 1, 10, loss=3.5),
        *one_round(1, 3.5),
        step("a", 4.5, 2, 20, loss=2.5, arrived=[[1, 0.25]]),
    )
    append(folder, wire(4.6, 1, 300, 600))
    (folder / "status.json").write_text(json.dumps(status(**changes)))
    return folder
