"""A run's folder for the page: read as it grows, told whole to whoever comes and in news after that."""

import json
import math
from collections import deque
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from diloco_jax.drawing.charts import Point
from diloco_jax.runtime.records.files import CONFIG_FILE, LOGS, METRICS_FILE, STATUS_FILE, SUMMARY_FILE
from diloco_jax.runtime.records.line_file import Tail
from diloco_jax.runtime.records.status import read_status
from diloco_jax.runtime.records.telemetry import finite, read_object
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import flat, load, read_values
from diloco_jax.tools.budget.needs import kinds_of, outline
from diloco_jax.tools.report.story import Story
from diloco_jax.tools.view.alarms import alarms
from diloco_jax.tools.view.times import IslandTimes

LINES_MAX = 50_000  # records that are read between two news
ROUNDS_KEPT, EVENTS_KEPT = 240, 300
POINTS_SENT = 240  # of a curve
CURVES_EVERY = 5  # news with curves, one in so many
JUDGED_EVERY = 5  # looks after which a status that has not changed is held against the run's processes again
ROUNDS = ("closed", "merged", "abandoned", "round")
SILENT_KINDS = {"step", "metrics", "merged_metrics", "wire", "eval", *ROUNDS}


class RunFeed:
    """One run for the page. Used by one thread at a time.

    Args:
        folder: of the run, finished, under way, or about to begin.

    Raises:
        ValueError: it is not the folder of a run.
    """

    def __init__(self, folder: Path) -> None:
        if not any((folder / name).is_file() for name in (CONFIG_FILE, STATUS_FILE, METRICS_FILE)):
            raise ValueError(
                f"{folder} is not the folder of a run: it has no {CONFIG_FILE}; give one, such as runs/NAME"
            )
        self.folder = folder
        self.name = folder.resolve().name
        self.config: RunConfig | None = None
        with suppress(ValueError):  # none, or of another version
            self.config = load(folder / CONFIG_FILE)
        self._plan: dict[str, Any] | None = None
        self._looks = 0
        self._status: dict[str, Any] = {}
        self._stamps: dict[str, int] = {}  # of files: when they changed
        self._summary: dict[str, Any] = {}
        self._begin()

    def _begin(self) -> None:
        """Start with the first record."""
        self._tail, self._size = Tail(self.folder / METRICS_FILE), 0
        self._story, self._times = Story(), IslandTimes(self.config.islands.names if self.config else ())
        self._rounds: dict[int, dict[str, Any]] = {}  # by global step
        self._waiting: dict[str, dict[int, float]] = {}  # island -> rounds that closed without its report, and when
        self._there: set[str] = set()  # who is connected and has made a step since
        self._events: deque[dict[str, Any]] = deque(maxlen=EVENTS_KEPT)
        self._told = 0  # events
        self._drawn_s = -1.0  # end of the curves that were told last
        self._new_rounds: set[int] = set()
        self._new_events: list[dict[str, Any]] = []
        self.fresh = True  # everybody needs the whole again

    def look(self) -> bool:
        """Read what is new in the folder; returns whether there is more to read."""
        self._looks += 1
        with suppress(OSError):
            self._size = (self.folder / METRICS_FILE).stat().st_size
        if self._size < self._tail.position:  # a new run in the same place
            self._begin()
        lines = list(islice(self._tail.lines(), LINES_MAX))
        for line in lines:
            with suppress(ValueError, KeyError, TypeError):  # of another program: the rest may be of use
                self._take(json.loads(line))
        if len(lines) == LINES_MAX:
            return True
        self._read_status()
        return False

    def _changed(self, name: str) -> bool:
        try:
            stamp = (self.folder / name).stat().st_mtime_ns
        except OSError:
            stamp = 0
        before, self._stamps[name] = self._stamps.get(name), stamp
        return stamp != before

    def _read_status(self) -> None:
        if self._changed(SUMMARY_FILE):
            self._summary = {}
            with suppress(OSError, ValueError):
                self._summary = read_object(self.folder / SUMMARY_FILE, "learners", "wire")
        if self._changed(STATUS_FILE) or self._looks % JUDGED_EVERY == 0:
            transport = self.config.transport if self.config else None
            try:
                self._status = read_status(str(self.folder), transport=transport)
            except (ValueError, OSError) as error:
                self._status = self._status or {"state": "starting", "waiting_for": str(error), "learners": []}

    def _take(self, record: dict[str, Any]) -> None:
        kind, t, step = record["kind"], record["t"], record["global_step"]
        self._story.take(record)
        self._times.take(record)
        if kind == "step":
            name = record["learner"]
            self._there.add(name)
            for late, closed_s in self._waiting.pop(name, {}).items():
                self._of(late)["late"][name] = round(t - closed_s, 4)
            for version, took_s in record.get("arrived", ()):
                if version in self._rounds:
                    self._of(version)["arrived"][name] = took_s
        elif kind in ROUNDS and record["fragment_id"] >= 0:
            self._take_round(record, self._of(step))
        elif kind not in SILENT_KINDS:
            members = record.get("members", [])
            if kind in ("joined", "left", "silent"):
                self._there -= set(members)
            self._told += 1
            event = {
                "n": self._told,
                "t": t,
                "kind": kind,
                "who": members,
                "reason": record.get("reason", ""),
                "step": step,
            }
            self._events.append(event)
            self._new_events.append(event)
            del self._new_events[:-EVENTS_KEPT]

    def _of(self, step: int) -> dict[str, Any]:
        """Return a round that is about to change."""
        self._new_rounds.add(step)
        if step not in self._rounds:
            self._rounds[step] = {"step": step, "late": {}, "arrived": {}, "members": []}
            if len(self._rounds) > ROUNDS_KEPT:
                del self._rounds[min(self._rounds)]
        return self._rounds.get(step, {"late": {}, "arrived": {}})

    def _take_round(self, record: dict[str, Any], this: dict[str, Any]) -> None:
        kind, t, step = record["kind"], record["t"], record["global_step"]
        this["fragment"] = record["fragment_id"]
        if kind == "round":
            this |= {key: record[key] for key in ("opened_s", "met_s", "closed_s", "pulled_s", "values")}
            return
        this["state"] = kind
        if kind == "closed":
            this |= {"closed_s": t, "members": record["members"], "reason": record["reason"]}
            for name in self._there - set(record["members"]):
                rounds = self._waiting.setdefault(name, {})
                rounds[step] = t
                if len(rounds) > ROUNDS_KEPT:
                    del rounds[min(rounds)]
            return
        this |= {"merged_s": t, "merged": record["members"]}
        if kind == "abandoned":
            this["reason"] = record["reason"]

    def whole(self) -> dict[str, Any]:
        """Return all that the page shows of this run."""
        rounds = [self._rounds[step] for step in sorted(self._rounds)]
        facts = {"name": self.name, "rounds": rounds, "events": [*self._events], "plan": self._links()}
        return finite({**self._now(), **facts, "curves": self._curves(), "logs": self.logs(), **self._about()})

    def news(self) -> dict[str, Any]:
        """Return what has changed since the news before."""
        rounds = [self._rounds[step] for step in sorted(self._new_rounds & self._rounds.keys())]
        told = {**self._now(), "rounds": rounds, "events": self._new_events}
        self._new_rounds, self._new_events, self.fresh = set(), [], False
        if self._looks % CURVES_EVERY == 0 and self._story.end_s != self._drawn_s:
            self._drawn_s = self._story.end_s
            told |= {"curves": self._curves(), "logs": self.logs()}
        return finite(told)

    def _now(self) -> dict[str, Any]:
        story, status = self._story, self._status
        summary = {**story.counted(), **self._summary}
        summary["samples"] = self._summary.get("samples") or status.get("samples")
        read = self._tail.position / self._size if self._size else 1.0
        found = [alarm._asdict() for alarm in alarms(status, self._summary)]
        window = [(t, up, down) for t, up, down in story.wire[-600:] if t >= story.end_s - 60]
        rate = None
        if window and (span_s := window[-1][0] - window[0][0]) > 0:
            rate = {
                "up_per_s": (window[-1][1] - window[0][1]) / span_s,
                "down_per_s": (window[-1][2] - window[0][2]) / span_s,
            }
        now = {"status": status, "summary": summary, "alarms": found, "times": self._times.told()}
        return {**now, "end_s": story.end_s, "read": round(read, 3), "rate": rate}

    def _curves(self) -> dict[str, Any]:
        def few(points: list[Any]) -> list[Any]:
            size = max(1, math.ceil(len(points) / POINTS_SENT))  # means, so that what jumps stays readable
            groups = [points[start : start + size] for start in range(0, len(points), size)]
            return [[round(sum(column) / len(group), 4) for column in zip(*group, strict=True)] for group in groups]

        tracks = sorted(self._story.tracks.items(), key=lambda item: (len(item[0]), item[0]))
        loss: dict[str, list[Point]] = {name: few(track.steps) for name, track in tracks if track.steps}
        return {"loss": loss, "evals": [list(each) for each in self._story.evals[-POINTS_SENT:]]}

    def _about(self) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        with suppress(ValueError):
            settings = dict(flat(read_values(self.folder / CONFIG_FILE)))
        tau = self.config.protocol.overlap_steps if self.config is not None else None
        return {"config": {"overlap_steps": tau}, "settings": settings}

    def _links(self) -> dict[str, Any]:
        """Return the bytes that an island should move per inner step, by its config; nothing if that is not known."""
        if self._plan is None:
            self._plan = {}
            if self.config is not None and not self.config.model.own:
                with suppress(ValueError, OSError):
                    self._plan = outline(self.config, kinds_of(self.config)[0]).links.per_step
        return self._plan

    def logs(self) -> list[str]:
        """List the names of the logs in the folder."""
        folder = self.folder / LOGS
        return (
            sorted((p.stem for p in folder.glob("*.log")), key=lambda name: (len(name), name))
            if folder.is_dir()
            else []
        )
