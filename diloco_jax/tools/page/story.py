"""The story of a run, counted from its records one after the other, in memory that does not grow with the run."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from typing import Any

from diloco_jax.protocol.messages import SYNCER_STOPPED
from diloco_jax.protocol.watch.sites import LOSS
from diloco_jax.protocol.watch.stats import participation, step_overhead
from diloco_jax.runtime.figures.facts import RunFacts
from diloco_jax.runtime.figures.forms import COUNT, DURATION, SHARE
from diloco_jax.runtime.figures.forms import LOSS as LOSS_FORM
from diloco_jax.runtime.records.liveness import ENDED
from diloco_jax.runtime.records.telemetry import went_back
from diloco_jax.runtime.records.thinning import merged_counts, stands_for
from diloco_jax.tools.page.curve import POINTS_KEPT, Curve

# Points that are kept of a curve that is shown as means.
STEPS_KEPT = 20_000
# Newest records of bytes moved, two per second, that give the present rate.
RATE_WORDS = 150
# The metric whose lines are the losses on the corpora of a run, at most so many. The package's own metrics have no
# spaces in their names. A metric of a user's loop with this name would be drawn among these lines.
LOSSES, PARTS_MAX = "evaluation loss", 64
# Groups of rounds, and the longest pauses between them.
STRETCHES_MAX, PAUSES_MAX = 120, 30


@dataclass(slots=True)
class Track:
    """One learner's steps: each with its time, the tokens of all learners at that time, and its loss."""

    steps: Curve = field(default_factory=lambda: Curve(STEPS_KEPT))
    tokens: int = 0
    local_steps: int = 0
    restarts: int = 0
    # Whether its next incarnation starts with a resume of the run.
    resumed: bool = False
    busy_s: float = 0.0
    span_s: float = 0.0
    merged: int = 0
    # Incarnation, local step and time of the newest step.
    _last: tuple[int, int, float] | None = None

    @property
    def incarnation(self) -> int | None:
        return self._last[0] if self._last is not None else None

    def add(self, record: Mapping[str, Any], all_tokens: int, *, drawn: bool = True) -> None:
        """Count one step record, and add it to the curve if it is `drawn`; records of some steps may be missing."""
        now = (record["incarnation"], record["local_step"], record["t"])
        step_s = record["step_s"] or 0.0
        if self._last is not None and self._last[0] == now[0]:
            steps, passed_s = now[1] - self._last[1], now[2] - self._last[2]
        else:
            # The records have no time before the first one of an incarnation.
            steps, passed_s = now[1], now[1] * step_s
            self.restarts += self._last is not None and not self.resumed
            self.resumed = False
            # Nothing connects the losses of two incarnations: between them the learner trained nothing.
            self.steps.cut()
        self.local_steps += steps
        self.busy_s += min(steps * step_s, passed_s)
        self.span_s += passed_s
        self.tokens = record["tokens"]
        if drawn and record["loss"] is not None:
            self.steps.add(record["t"], all_tokens, record["loss"], count=stands_for(record))
        self._last = now


@dataclass(slots=True)
class Stretch:
    """Successive merged rounds: their time, their number, and the rounds of each learner.

    A stretch begins where the one before it ends, unless no round could be merged between them.
    """

    begin_s: float
    end_s: float
    rounds: int
    members: dict[str, int]

    def join(self, later: "Stretch") -> None:
        """Take the rounds that follow into this stretch."""
        self.end_s, self.rounds = later.end_s, self.rounds + later.rounds
        for name, count in later.members.items():
            self.members[name] = self.members.get(name, 0) + count


def _pause_s(earlier: Stretch, later: Stretch) -> float:
    """Return the time between two stretches when no round could be merged."""
    return later.begin_s - earlier.end_s


@dataclass(slots=True)
class Story:
    """The figures and curves that the records of a run give.

    Attributes:
        rounds: merged rounds.
        wire: times with bytes moved up and down.
        totals: times with tokens, and bytes moved up and down, until the run is complete.
        connected: times with the number of connected islands, until the run is complete.
        evals: times with tokens and loss.
        metrics: curves of time and value, by metric and island; those of LOSSES by corpus.
        scores: numbers of the newest evaluation.
        made: versions and machine that made the run.
    """

    tracks: dict[str, Track] = field(default_factory=dict)
    stretches: list[Stretch] = field(default_factory=list)
    rounds: int = 0
    wire: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=RATE_WORDS))
    totals: Curve = field(default_factory=lambda: Curve(POINTS_KEPT))
    connected: Curve = field(default_factory=lambda: Curve(POINTS_KEPT))
    evals: Curve = field(default_factory=lambda: Curve(POINTS_KEPT))
    metrics: dict[str, dict[str, Curve]] = field(default_factory=dict)
    bits_per_byte: float | None = None
    scores: dict[str, float | None] = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)
    global_step: int = 0
    end_s: float = 0.0
    # Rounds of each stretch.
    _size: int = 1
    # Islands that are connected and have made a step since.
    _training: set[str] = field(default_factory=set)
    # Whether since the newest merged round there was no syncer, or no island that trains.
    _paused: bool = False
    _finished: bool = False

    @property
    def tokens(self) -> int:
        return sum(track.tokens for track in self.tracks.values())

    def take(self, record: Mapping[str, Any]) -> None:
        """Count the next record."""
        kind, t = record["kind"], record["t"]
        self.end_s = max(self.end_s, t)
        self.global_step = max(self.global_step, record["global_step"])
        if kind == "step":
            self._step(record)
        elif kind in ("metrics", "drift"):
            for name, value in record["values"].items():
                if value is not None:
                    curve = self.metrics.setdefault(name, {}).setdefault(record["learner"], Curve(POINTS_KEPT))
                    curve.add(t, value, count=stands_for(record))
        elif kind == "merged":
            self._merged(Stretch(t, t, stands_for(record), merged_counts(record)))
        elif kind == "life":
            self.made = {"versions": record["versions"], "host": record["host"]}
            self._paused = True
            if went_back(record):
                self._resume()
        elif kind in ("left", "disconnected", "silent"):
            self._training -= set(record["members"])
            self._paused = self._paused or not self._training
            if record["reason"] == SYNCER_STOPPED:
                self._await(record["members"])
                self._cut()
        elif kind == "wire":
            self.wire.append((t, record["up_bytes"], record["down_bytes"]))
            # What is counted after the end of the run is not part of its training.
            if self._finished:
                return
            self.totals.add(t, self.tokens, record["up_bytes"], record["down_bytes"], count=stands_for(record))
            # Records of earlier releases do not have the number.
            if "connected_islands" in record:
                self.connected.add(t, record["connected_islands"], count=stands_for(record))
        elif kind == "finished":
            self._finished = True
        elif kind == "eval" and record["loss"] is not None:
            self.evals.add(t, record["tokens"], record["loss"])
            self.bits_per_byte, self.scores = record["bits_per_byte"], record.get("scores", {})
            for name, value in self.scores.items():
                if value is not None and name.endswith(LOSS):
                    self._part(name.removesuffix(LOSS), t, value)

    def _step(self, record: Mapping[str, Any]) -> None:
        name = record["learner"]
        track = self.tracks.setdefault(name, Track())
        before = track.incarnation
        # Steps after the end of the run arrive all at once, and no round takes them.
        track.add(record, self.tokens - track.tokens + record["tokens"], drawn=not self._finished)
        self._training.add(name)
        if track.incarnation != before:
            for curves in self.metrics.values():
                if name in curves:
                    curves[name].cut()

    def _resume(self) -> None:
        """Break the curves of the run, and await new incarnations of all learners."""
        self._training.clear()
        self._finished = False
        self._await(self.tracks.keys())
        self._cut()

    def _cut(self) -> None:
        """Break the curves of the run, because nothing is trained until it resumes."""
        for curve in (self.totals, self.connected, self.evals):
            curve.cut()

    def _await(self, names: Iterable[str]) -> None:
        """Count the next incarnations of these learners as no restarts, because the whole run was stopped."""
        for name in names:
            if name in self.tracks:
                self.tracks[name].resumed = True

    def _part(self, name: str, t: float, loss: float) -> None:
        """Add the loss on one corpus or source, which is a line with its name."""
        lines = self.metrics.setdefault(LOSSES, {})
        if name in lines or len(lines) < PARTS_MAX:
            lines.setdefault(name, Curve(POINTS_KEPT)).add(t, loss)

    def _merged(self, one: Stretch) -> None:
        self.rounds += one.rounds
        for name, rounds in one.members.items():
            self.tracks.setdefault(name, Track()).merged += rounds
        self._size = max(self._size, one.rounds)
        if self.stretches and not self._paused:
            one.begin_s = self.stretches[-1].end_s
            if self.stretches[-1].rounds < self._size:
                self.stretches[-1].join(one)
                return
        self._paused = False
        self.stretches.append(one)
        pauses = [each for each in pairwise(self.stretches) if _pause_s(*each)]
        if len(pauses) > PAUSES_MAX:
            earlier, later = min(pauses, key=lambda each: _pause_s(*each))
            later.begin_s = earlier.end_s
        if len(self.stretches) > STRETCHES_MAX:
            self._halve()

    def _halve(self) -> None:
        """Join stretches in twos, but never over a pause."""
        self._size *= 2
        found, alone = [self.stretches[0]], True
        for later in self.stretches[1:]:
            if alone and not _pause_s(found[-1], later):
                found[-1].join(later)
                alone = False
            else:
                found.append(later)
                alone = True
        self.stretches = found

    def counted(self) -> dict[str, Any]:
        """Return the keys of summary.json that the records give."""
        rounds = self.rounds
        learners = {
            name: {
                "local_steps": track.local_steps,
                "tokens": track.tokens,
                "participation": participation(track.merged, rounds) if rounds else None,
                "restarts": track.restarts,
                "step_overhead": step_overhead(track.busy_s, track.span_s),
            }
            for name, track in sorted(self.tracks.items(), key=lambda item: (len(item[0]), item[0]))
        }
        return {
            "eval_loss": self.evals.last[2] if self.evals.last else None,
            "eval_bits_per_byte": self.bits_per_byte,
            "eval_scores": self.scores,
            "tokens": self.tokens,
            "wall_s": self.end_s,
            "global_steps": self.global_step,
            "contributors_per_round": sum(t.merged for t in self.tracks.values()) / rounds if rounds else None,
            "wire": {"up_bytes": self.wire[-1][1], "down_bytes": self.wire[-1][2]} if self.wire else {},
            "learners": learners,
        }

    def summary(self, written: Mapping[str, Any]) -> dict[str, Any]:
        """Return the counted keys of summary.json, replaced by the values that were `written` there."""
        counted = self.counted()
        learners = counted["learners"]
        for name, row in written.get("learners", {}).items():
            learners[name] = learners.get(name, {}) | row
        summary = {"complete": False, **counted, **written, "learners": learners}
        summary["wire"] = counted["wire"] | written.get("wire", {})
        # A data-parallel run has no rounds.
        if not self.rounds:
            summary["contributors_per_round"] = None
            for row in learners.values():
                row["participation"] = None
        return summary

    def curves(self, most: int) -> dict[str, Any]:
        """Return losses (time, tokens of all learners, loss), evaluations, totals, islands, and the rounds of each."""
        names = list(self.counted()["learners"])
        cells = [[each.begin_s, each.end_s, each.rounds] for each in self.stretches]
        merged: list[list[float | None]] = []
        for at, each in enumerate(self.stretches):
            if at and _pause_s(self.stretches[at - 1], each):
                merged.append([None, None])
            merged.append([(each.begin_s + each.end_s) / 2, sum(each.members.values()) / each.rounds])
        members = {name: [each.members.get(name, 0) for each in self.stretches] for name in names} if cells else {}
        return {
            "loss": {name: self.tracks[name].steps.few(most) for name in names if self.tracks[name].steps.last},
            "evals": self.evals.few(most),
            "totals": self.totals.few(most),
            "islands": {"connected": self.connected.few(most), "merged per round": merged},
            "cells": cells,
            "members": members,
        }


def progress(facts: RunFacts) -> tuple[str, str]:
    """Return texts about the global steps of a run, and about its time."""
    total = f" of {facts.total_steps:,}" if facts.total_steps else ""
    return f"{facts.global_step or 0:,}{total}", DURATION.text(facts.wall_s)


def verdict(facts: RunFacts, state: str, alarms: tuple[int, int], restarts: int) -> str:
    """Return a sentence about a run; `alarms` are the numbers of those that stand and of those that ended."""
    (steps, spent), loss = progress(facts), facts.eval_loss
    said = [
        f"{state}: {steps} global steps",
        f"evaluation loss {LOSS_FORM.text(loss)}" if loss is not None else "not evaluated" if state in ENDED else "",
        f"{COUNT.text(facts.tokens)} tokens",
        spent,
        f"goodput {SHARE.text(facts.goodput)}" if facts.goodput is not None else "",
        _count(alarms[0], "alarm") if alarms[0] or not alarms[1] else f"{_count(alarms[1], 'alarm')} that ended",
        _count(restarts, "restart") if restarts else "",
    ]
    return ", ".join(filter(None, said))


def against(loss: float | None, baseline: float | None, name: str) -> str:
    """Return a text on how far an evaluation loss is from a baseline's; "" if one of them is not known."""
    if loss is None or baseline is None or not (isfinite(loss) and isfinite(baseline) and baseline > 0):
        return ""
    share = loss / baseline - 1
    way = "above" if share > 0 else "below"
    return f", {abs(share):.2%} {way} the baseline {name} ({baseline:.4f})"


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'s' if number > 1 else ''}"
