"""The use of every island-second of a run, from its records, and the newest rounds with the times of their parts.

The time of all islands starts with the first inner step of the run, as in `protocol/watch/stats.py`. Each second of
each island has one use. A step settles the time before it; the time since the newest step is provisional.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco_jax.protocol.messages import SYNCER_STOPPED
from diloco_jax.protocol.watch.stats import goodput_of
from diloco_jax.protocol.watch.terms import WAITING
from diloco_jax.runtime.figures.forms import SHARE
from diloco_jax.runtime.records.telemetry import went_back
from diloco_jax.runtime.records.thinning import stands_for
from diloco_jax.tools.page.curve import POINTS_KEPT, Curve

ROUNDS_KEPT = 240
# Number of newest rounds that give the time per round.
PACE_ROUNDS = 40
KINDS = ("closed", "merged", "abandoned", "round")
USES = TRAINING, DATA, BETWEEN, JOINING, AWAY, STOPPED = "training", "data", "between", "joining", "away", "stopped"


@dataclass(slots=True)
class _Island:
    """One island.

    Attributes:
        at_s: time until which its uses are settled.
        since: start of each use after the newest step.
        progress: incarnation and local step.
        told_s: time in steps that its reports of waiting for data cover.
    """

    at_s: float
    used: dict[str, float] = field(default_factory=lambda: dict.fromkeys(USES, 0.0))
    since: list[tuple[float, str]] = field(default_factory=list)
    progress: tuple[int, int] = (-1, 0)
    told_s: float = 0.0

    def split(self, until_s: float) -> dict[str, float]:
        """Return the time since the newest step by use; without other records the island was between steps."""
        found, ends = dict.fromkeys(USES, 0.0), [*(t for t, _ in self.since), until_s]
        pieces = [(self.at_s, ends[0], BETWEEN if self.progress[1] else AWAY)]
        pieces += [(begin, end, use) for (begin, use), end in zip(self.since, ends[1:], strict=True)]
        for begin, end, use in pieces:
            found[use] += max(0.0, min(end, until_s) - max(begin, self.at_s))
        return found


class IslandTimes:
    """The time of all islands of the config, by use; an unlisted island counts from its first record."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = set(names)
        self._islands: dict[str, _Island] = {}
        self._began_s: float | None = None
        self._end_s = 0.0
        self._finished = False
        # Times with the seconds of training, and of all islands, since the first step.
        self._trained = Curve(POINTS_KEPT)

    def take(self, record: Mapping[str, Any]) -> None:
        """Count the next record of the run."""
        kind, t = record["kind"], record["t"]
        # Islands leave a finished run, which does not lower its goodput; it may be trained longer.
        self._finished = self._finished and not went_back(record)
        if self._finished:
            return
        before_s, self._end_s = self._end_s, max(self._end_s, t)
        if went_back(record):
            self._resume(before_s, t)
        elif kind == "step":
            self._step(record)
        elif kind == "metrics":
            self._waited(self._island(record["learner"]), record["values"].get(WAITING) or 0.0)
        elif kind == "wire" and self._began_s is not None:
            trained_s = sum(island.used[TRAINING] for island in self._islands.values())
            all_s = len(self._names | self._islands.keys()) * (t - self._began_s)
            self._trained.add(t, trained_s, all_s, count=stands_for(record))
        elif kind in ("joined", "back", "left", "disconnected", "silent"):
            for name in record["members"]:
                island = self._island(name)
                if kind == "joined":
                    use = BETWEEN if record["reason"] == f"incarnation {island.progress[0]}" else JOINING
                elif record["reason"] == SYNCER_STOPPED:
                    use = STOPPED
                else:
                    use = BETWEEN if kind == "back" else AWAY
                # A silent island has been away since its last step.
                if kind == "silent":
                    island.since.clear()
                island.since.append((island.at_s if kind == "silent" else t, use))
        self._finished = kind == "finished"

    def _resume(self, stopped_s: float, t: float) -> None:
        """Settle the time of all islands until the run is resumed at `t`; no process ran since `stopped_s`."""
        for name in self._names | self._islands.keys():
            island = self._island(name)
            if self._began_s is not None:
                island.since.append((stopped_s, STOPPED))
                for use, seconds in island.split(t).items():
                    island.used[use] += seconds
                island.at_s = max(t, island.at_s)
            island.since[:] = [(t, AWAY)]
        self._trained.cut()

    def _island(self, name: str) -> _Island:
        return self._islands.setdefault(name, _Island(self._began_s or 0.0))

    def _step(self, record: Mapping[str, Any]) -> None:
        t, step_s, progress = record["t"], record["step_s"] or 0.0, (record["incarnation"], record["local_step"])
        if self._began_s is None:
            self._began_s = max(0.0, t - step_s)
            for each in self._islands.values():
                each.at_s = self._began_s
        island = self._island(record["learner"])
        steps = progress[1] - island.progress[1] if progress[0] == island.progress[0] else 1
        made_s = max(0, steps) * step_s
        busy_s = min(made_s, max(0.0, t - island.at_s))
        for use, seconds in island.split(t - busy_s).items():
            island.used[use] += seconds
        # The report before this one was late by this time.
        early_s = min(made_s - busy_s, island.used[BETWEEN])
        island.used[BETWEEN] -= early_s
        island.used[TRAINING] += busy_s + early_s
        island.at_s, island.progress = max(t, island.at_s), progress
        island.since.clear()

    def _waited(self, island: _Island, share: float) -> None:
        """Count the share of the time in steps since its last report that an island waited for data."""
        busy_s = island.used[TRAINING] + island.used[DATA]
        moved_s = min(1.0, max(0.0, share)) * (busy_s - island.told_s)
        island.used[TRAINING] -= moved_s
        island.used[DATA] += moved_s
        island.told_s = busy_s

    def trained(self, most: int) -> list[list[float | None]]:
        """Return the seconds of training and of all islands over time, in about `most` points."""
        return self._trained.few(most)

    def as_dict(self, wall_s: float | None = None, goodput: float | None = None) -> dict[str, Any]:
        """Return the seconds from the first step to the end of the run, if it is known, and their uses by island.

        The syncer counts the `goodput` of a run that ended more exactly than its records do. The difference is moved to
        or from the training time, so that every figure on a page agrees.
        """
        began_s, rows, end_s = self._began_s, {}, self._end_s if wall_s is None else min(wall_s, self._end_s)
        if began_s is not None:
            for name in sorted(self._names | self._islands.keys(), key=lambda name: (len(name), name)):
                island = self._islands.get(name) or _Island(began_s)
                rest = island.split(end_s)
                rows[name] = {use: round(island.used[use] + rest[use], 3) for use in USES}
        all_s = sum(sum(row.values()) for row in rows.values())
        if goodput is not None and all_s:
            _move(rows, goodput * all_s - sum(row[TRAINING] for row in rows.values()))
        parts = {use: goodput_of(sum(row[use] for row in rows.values()), all_s) for use in USES} if all_s else {}
        goodput = round(parts[TRAINING], 4) if parts else None
        return {
            "span_s": round(end_s - (began_s or 0.0), 3) if rows else 0.0,
            "goodput": goodput,
            # The goodput is rounded once, so that every place shows the same number.
            "shares": {use: SHARE.text(goodput if use == TRAINING else part) for use, part in parts.items()},
            "islands": rows,
        }


def _move(rows: Mapping[str, dict[str, float]], seconds: float) -> None:
    """Move so many seconds of all islands from the other uses to TRAINING; to BETWEEN if they are negative."""
    sources = [use for use in USES if use not in (TRAINING, STOPPED)] if seconds > 0 else [TRAINING]
    target = TRAINING if seconds > 0 else BETWEEN
    there_s = sum(row[use] for row in rows.values() for use in sources)
    share = min(1.0, abs(seconds) / there_s) if there_s else 0.0
    for row in rows.values():
        for use in sources:
            moved_s = share * row[use]
            row[use] = round(row[use] - moved_s, 3)
            row[target] = round(row[target] + moved_s, 3)


class RoundTimes:
    """The newest rounds as plain values for the page, composed from several records each."""

    def __init__(self) -> None:
        # Rounds by global step.
        self._rounds: dict[int, dict[str, Any]] = {}
        self._changed: set[int] = set()
        # Islands that are connected and have made a step since.
        self._training: set[str] = set()
        # Rounds that closed without an island's report, with their times, by island.
        self._waiting: dict[str, dict[int, float]] = {}

    def take(self, record: Mapping[str, Any]) -> None:
        """Take the next record of the run."""
        kind, t = record["kind"], record["t"]
        # A record that stands for several is too old, and other records of its round are missing.
        if "n" in record:
            if kind == "step":
                self._training.add(record["learner"])
            return
        if kind == "step":
            name = record["learner"]
            self._training.add(name)
            for step, closed_s in self._waiting.pop(name, {}).items():
                self._of(step)["late"][name] = round(t - closed_s, 4)
            for step, took_s in record.get("arrived", ()):
                self._of(step)["arrived"][name] = took_s
        elif kind in ("joined", "left", "disconnected", "silent"):
            self._training -= set(record["members"])
        elif kind in KINDS and record["fragment_id"] >= 0:
            self._take_round(record)

    def _of(self, step: int) -> dict[str, Any]:
        """Return a round that is about to change; a round that is too old is a copy that is dropped."""
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

    def pace_s(self) -> float | None:
        """Return the time from one merge to the next over the newest rounds; None before the second merge."""
        merged = [this for this in self.whole() if this.get("merged_s")][-PACE_ROUNDS:]
        steps = merged[-1]["step"] - merged[0]["step"] if merged else 0
        return (merged[-1]["merged_s"] - merged[0]["merged_s"]) / steps if steps else None

    def news(self) -> list[dict[str, Any]]:
        """Return the rounds that have changed since the last news."""
        changed, self._changed = self._changed, set()
        return [self._rounds[step] for step in sorted(changed & self._rounds.keys())]
