"""The story of a run, counted from its records: what the report and the page of a run tell."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco_jax.drawing.charts import Point
from diloco_jax.protocol.messages import SYNCER
from diloco_jax.protocol.watch.stats import participation, step_overhead
from diloco_jax.runtime.records.telemetry import read_metrics, read_object
from diloco_jax.tools.report.plots import MARKS, POINTS_MAX, DrawnRound, LearnerMark

WARM_UP = 0.08  # share of a run that may lie outside the axes, so that the rest can be told apart
STEPS_KEPT = 50_000  # points of a curve that is smoothed, in a run of any length


def keep(points: list[Any], point: Any, most: int) -> None:
    """Append a point to a curve; of one that is too long every second point goes, but for the first and the last."""
    points.append(point)
    if len(points) > most:
        del points[1:-1:2]


@dataclass(slots=True)
class Track:
    """One learner's steps: when, tokens of all learners by then, loss."""

    steps: list[tuple[float, float, float]] = field(default_factory=list)
    tokens: int = 0
    local_steps: int = 0
    restarts: int = 0
    busy_s: float = 0.0
    span_s: float = 0.0
    merged: int = 0
    _last: tuple[int, int, float] | None = None  # incarnation, local step, time

    def add(self, record: Mapping[str, Any], all_tokens: int) -> None:
        """Count one step record; records of some steps may be missing."""
        now = (record["incarnation"], record["local_step"], record["t"])
        step_s = record["step_s"] or 0.0
        if self._last is not None and self._last[0] == now[0]:
            steps, passed_s = now[1] - self._last[1], now[2] - self._last[2]
        else:
            # nothing is known of the time before an incarnation's first record
            steps, passed_s = now[1], now[1] * step_s
            self.restarts += self._last is not None
        self.local_steps += steps
        self.busy_s += min(steps * step_s, passed_s)
        self.span_s += passed_s
        self.tokens = record["tokens"]
        if record["loss"] is not None:
            keep(self.steps, (record["t"], all_tokens, record["loss"]), STEPS_KEPT)
        self._last = now


@dataclass(slots=True)
class Story:
    """Figures and events that the records of a run tell."""

    tracks: dict[str, Track] = field(default_factory=dict)
    rounds: list[DrawnRound] = field(default_factory=list)
    marks: list[LearnerMark] = field(default_factory=list)
    wire: list[tuple[float, int, int]] = field(default_factory=list)  # time, up, down
    evals: list[tuple[float, float, float]] = field(default_factory=list)  # time, tokens, loss
    metrics: dict[str, dict[str, list[Point]]] = field(default_factory=dict)  # name -> island -> time, value
    progress: list[tuple[float, int]] = field(default_factory=list)  # time, tokens of all learners
    bits_per_byte: float | None = None
    scores: dict[str, float | None] = field(default_factory=dict)  # of the newest evaluation
    abandoned: int = 0
    global_step: int = 0
    end_s: float = 0.0
    finished: bool = False  # all rounds are done
    _lives: dict[str, str] = field(default_factory=dict)  # of learners: their newest incarnation, as the records say it
    _back: set[str] = field(default_factory=set)  # who has connected to the newest life of the syncer

    @property
    def tokens(self) -> int:
        return sum(track.tokens for track in self.tracks.values())

    @property
    def begin_s(self) -> float:
        """Return the time at which the first inner step was reported."""
        return self.progress[0][0] if self.progress else 0.0

    @property
    def settled_s(self) -> float:
        """Return the time at which the part of the run begins that the axes are made for."""
        return self.begin_s + WARM_UP * (self.end_s - self.begin_s)

    def take(self, record: Mapping[str, Any]) -> None:
        """Count the next record."""
        kind, t = record["kind"], record["t"]
        self.end_s = max(self.end_s, t)
        self.global_step = max(self.global_step, record["global_step"])
        if kind == "step":
            track = self.tracks.setdefault(record["learner"], Track())
            all_tokens = self.tokens - track.tokens + record["tokens"]
            track.add(record, all_tokens)
            keep(self.progress, (t, all_tokens), STEPS_KEPT)
        elif kind == "metrics":
            self._measured(record)
        elif kind == "merged":
            self.rounds.append(DrawnRound(t, record["global_step"], frozenset(record["members"])))
            for name in record["members"]:
                self.tracks.setdefault(name, Track()).merged += 1
        elif kind == "wire":
            keep(self.wire, (t, record["up_bytes"], record["down_bytes"]), STEPS_KEPT)
        elif kind == "eval" and record["loss"] is not None:
            self.evals.append((t, record["tokens"], record["loss"]))
            self.bits_per_byte, self.scores = record["bits_per_byte"], record.get("scores", {})
        elif kind == "restarted":
            self.marks.append(LearnerMark(t, kind, SYNCER, record["reason"]))
            self._back.clear()
        elif kind in MARKS and not self.finished:  # that everybody leaves when the run is complete is no news
            self._mark(record)
        self.abandoned += kind == "abandoned"
        self.finished = self.finished or kind == "finished"

    def _mark(self, record: Mapping[str, Any]) -> None:
        kind, reason = record["kind"], record["reason"]
        for name in record["members"]:
            self.tracks.setdefault(name, Track())
            again = kind == "joined" and self._lives.get(name) == reason  # the same process, another connection
            if not (again and name not in self._back):
                self.marks.append(LearnerMark(record["t"], "back" if again else kind, name, reason))
            if kind == "joined":
                self._lives[name] = reason
                self._back.add(name)

    def _measured(self, record: Mapping[str, Any]) -> None:
        for name, value in record["values"].items():
            points = self.metrics.setdefault(name, {}).setdefault(record["learner"], [])
            if value is not None:
                keep(points, (record["t"], value), 2 * POINTS_MAX)

    def counted(self) -> dict[str, Any]:
        """Return the keys of summary.json as far as the records tell them."""
        rounds = len(self.rounds)
        learners = {
            name: {
                "local_steps": track.local_steps,
                "tokens": track.tokens,
                "participation": participation(track.merged, rounds) if rounds else None,
                "restarts": track.restarts,
                "step_overhead": step_overhead(track.busy_s, track.span_s),
            }
            for name, track in self.tracks.items()
        }
        return {
            "eval_loss": self.evals[-1][2] if self.evals else None,
            "eval_bits_per_byte": self.bits_per_byte,
            "eval_scores": self.scores,
            "tokens": self.tokens,
            "wall_s": self.end_s,
            "global_steps": self.global_step,
            "contributors_per_round": sum(len(r.members) for r in self.rounds) / rounds if rounds else None,
            "wire": {"up_bytes": self.wire[-1][1], "down_bytes": self.wire[-1][2]} if self.wire else {},
            "learners": learners,
        }


def read_story(path: Path) -> Story:
    """Go through the records once."""
    story = Story()
    for record in read_metrics(path):
        story.take(record)
    story.tracks = dict(sorted(story.tracks.items(), key=lambda item: (len(item[0]), item[0])))
    return story


def read_summary(story: Story, path: Path) -> dict[str, Any]:
    """Read summary.json, if there is one, over what was counted here; learners stay in the order of the charts."""
    counted = story.counted()
    if not path.is_file():
        return {**counted, "complete": False}
    written = read_object(path, "learners", "wire")
    learners = counted["learners"]
    for name, row in written["learners"].items():
        learners[name] = learners.get(name, {}) | row
    summary = {**counted, **written, "learners": learners, "wire": counted["wire"] | written["wire"]}
    if not story.rounds:  # data parallel: nothing to take part in
        summary["contributors_per_round"] = None
        for row in learners.values():
            row["participation"] = None
    return summary
