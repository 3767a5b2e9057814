"""The newest rounds of a run with the times of their parts, and who was late for them, from the run's records."""

from collections.abc import Mapping
from typing import Any

ROUNDS_KEPT = 240
KINDS = ("closed", "merged", "abandoned", "round")


class RoundTimes:
    """Puts together what the records say of each round, as plain values for the page."""

    def __init__(self) -> None:
        self._rounds: dict[int, dict[str, Any]] = {}  # by global step
        self._changed: set[int] = set()
        self._training: set[str] = set()  # who is connected and has made a step since
        self._waiting: dict[str, dict[int, float]] = {}  # island -> rounds that closed without its report, and when

    def take(self, record: Mapping[str, Any]) -> None:
        """Take the next record of the run."""
        kind, t = record["kind"], record["t"]
        if kind == "step":
            name = record["learner"]
            self._training.add(name)
            for step, closed_s in self._waiting.pop(name, {}).items():
                self._of(step)["late"][name] = round(t - closed_s, 4)
            for step, took_s in record.get("arrived", ()):
                self._of(step)["arrived"][name] = took_s
        elif kind in ("joined", "left", "silent"):
            self._training -= set(record["members"])
        elif kind in KINDS and record["fragment_id"] >= 0:
            self._take_round(record)

    def _of(self, step: int) -> dict[str, Any]:
        """Return a round that is about to change; nothing that stays, if it is too old."""
        self._changed.add(step)
        return self._rounds.get(step, {"late": {}, "arrived": {}})

    def _take_round(self, record: Mapping[str, Any]) -> None:
        kind, t, step, members = record["kind"], record["t"], record["global_step"], record.get("members", [])
        if step not in self._rounds:
            self._rounds[step] = {"step": step, "late": {}, "arrived": {}, "members": []}
            if len(self._rounds) > ROUNDS_KEPT:
                del self._rounds[min(self._rounds)]
        this = self._of(step)
        this["fragment"] = record["fragment_id"]
        if kind == "round":
            this |= {key: record[key] for key in ("opened_s", "met_s", "closed_s", "pulled_s", "values")}
            return
        this["state"] = kind
        if kind == "closed":
            this |= {"closed_s": t, "members": members, "reason": record["reason"]}
            for name in self._training - set(members):
                waiting = self._waiting.setdefault(name, {})
                waiting[step] = t
                if len(waiting) > ROUNDS_KEPT:
                    del waiting[min(waiting)]
            return
        this |= {"merged_s": t, "merged": members}
        if kind == "abandoned":
            this["reason"] = record["reason"]

    def whole(self) -> list[dict[str, Any]]:
        """Return all rounds that are kept, the oldest first."""
        return [self._rounds[step] for step in sorted(self._rounds)]

    def news(self) -> list[dict[str, Any]]:
        """Return those that have changed since the news before."""
        changed, self._changed = self._changed, set()
        return [self._rounds[step] for step in sorted(changed & self._rounds.keys())]
