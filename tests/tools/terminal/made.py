"""Statuses of a run as its syncer writes them, and pictures as text."""

import io
from typing import Any

from rich.console import Console

REASONS = {
    "training": "last heard 0.1 s ago",
    "silent": "connected, but not heard for 7.0 s: stopped, or cut off",
    "joining": "alive, last heard 0.2 s ago; loads, compiles or downloads",
    "gone": "no connection; its data goes to others in 60 s",
}


def learner(name: str, condition: str = "training", **fields: Any) -> dict[str, Any]:
    state = "active" if condition == "training" else condition
    row = {"learner": name, "state": state, "condition": condition, "reason": REASONS[condition], "since_s": 92.0}
    row |= {"local_step": 410, "tokens": 419_840, "tokens_per_s": 13250.0, "loss": 1.9, "step_s": 0.3, "staleness": 1}
    row |= {"mean_tokens_per_s": 12000.0, "finished": False}
    return row | {"last_merged_round": 409, "participation": 0.98, "restarts": 0} | fields


def status(**fields: Any) -> dict[str, Any]:
    whole = {"run": "quickstart", "state": "running", "global_step": 400, "total_steps": 1600, "wall_s": 100.0}
    whole |= {"left_s": 300.0}
    whole |= {"waiting_for": "round 401: quorum 0 of 1", "tokens": 1_638_400, "tokens_per_s": 26500.0}
    whole |= {"wire": {"up_bytes": 123_456_789, "down_bytes": 987}, "eval_loss": 1.85, "contributors_per_round": 1.97}
    return whole | {"epoch": 1, "alarms": []} | {"learners": [learner("island-0"), learner("island-1")]} | fields


NOTHING = {
    "left_s": None,
    "tokens": 0,
    "tokens_per_s": 0.0,
    "eval_loss": None,
    "contributors_per_round": 0.0,
    "learners": [],
}
NOTHING["wire"] = {"up_bytes": 0, "down_bytes": 0}
STARTING = status(state="starting", global_step=0, wall_s=0.2, waiting_for="the first learner", **NOTHING)
FRESH = learner("island-2", "joining", local_step=0, tokens_per_s=0.0, loss=None, step_s=None, last_merged_round=0)


def drawn(picture: Any, width: int = 120) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(picture)
    return out.getvalue()


def words(text: str) -> str:
    return " ".join(text.split())
