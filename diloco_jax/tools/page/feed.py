"""A run's folder for the page, read as it grows: the whole state for a new viewer, and news after that."""

import json
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from diloco_jax.runtime.figures import table
from diloco_jax.runtime.figures.facts import RunFacts
from diloco_jax.runtime.figures.table import Facts, Figure
from diloco_jax.runtime.records.files import (
    CLOCK_FILE,
    CONFIG_FILE,
    LOGS,
    METRICS_FILE,
    SAMPLE_FILE,
    STATUS_FILE,
    SUMMARY_FILE,
)
from diloco_jax.runtime.records.liveness import AWAY, DEAD
from diloco_jax.runtime.records.status import EVALUATING, read_status
from diloco_jax.runtime.records.telemetry import finite, read_object, went_back
from diloco_jax.runtime.records.thinning import THINNED, RecordTail
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import flat, load, read_settings
from diloco_jax.tools.page.faults import read_faults
from diloco_jax.tools.page.story import LOSSES, Story, progress, verdict
from diloco_jax.tools.page.times import KINDS, IslandTimes, RoundTimes
from diloco_jax.tools.terminal.words import or_none, stands
from diloco_jax.transport.link import TransportConfig
from diloco_jax.transport.session.calls import ask_status

# Records that are read between two news.
LINES_MAX = 50_000
EVENTS_KEPT = 300
# Characters of the sample of text that are shown.
SAMPLE_MAX = 4000
# Points of a curve that are sent: of losses, and of other metrics.
POINTS_SENT, METRIC_POINTS = 240, 120
METRICS_FIRST = (
    LOSSES,
    "drift_cosine",
    "drift_norm_ratio",
    "grad_norm",
    "learning_rate",
    "mfu",
    "model_flops_per_s",
    "step_s",
    "tokens_per_s",
    "waiting_for_data",
)
# States of a run whose processes work.
LIVE = ("starting", "running", EVALUATING)
# Metrics that the page shows.
METRICS_MAX = 24
# One in so many news has curves.
CURVES_EVERY = 5
# Looks until an unchanged status is compared with the run's processes again.
JUDGED_EVERY = 5
SILENT_KINDS = {"step", "metrics", "drift", "merged_metrics", "wire", "eval", THINNED, *KINDS}


def alarms_now(status: Mapping[str, Any], summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the alarms that stand, or stood when the run ended; a dead run is an alarm too."""
    state = status.get("state", "")
    dead = [{"text": f"the run is {state}", "remedy": status["remedy"]}] if state in (*DEAD, AWAY) else []
    return [*dead, *(each for each in (summary if "alarms" in summary else status).get("alarms", ()) if stands(each))]


def alarms_ended(status: Mapping[str, Any], summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the alarms of a run that have ended, the newest last."""
    known = summary["alarms"] if "alarms" in summary else status.get("episodes", ())
    return sorted((each for each in known if not stands(each)), key=lambda each: each["until_s"])


def _shown(figure: Figure[Facts], facts: Facts) -> dict[str, Any]:
    """Return a figure for the page, which does not write it in another form."""
    value = figure.value(facts)
    return {"name": figure.name, "words": figure.words, "value": value, "text": figure.form.text(value)}


class RunFeed:
    """One run for the page, finished, under way or about to start; ValueError if the folder has no run.

    Only one thread at a time may use it.

    Args:
        events_kept: most events that are shown, the newest.
    """

    def __init__(self, folder: Path, *, events_kept: int = EVENTS_KEPT) -> None:
        if not any((folder / name).is_file() for name in (CONFIG_FILE, STATUS_FILE, METRICS_FILE)):
            raise ValueError(
                f"{folder} is not the folder of a run: it has no {CONFIG_FILE}; give one, such as runs/NAME"
            )
        self.folder = folder
        self.name = folder.resolve().name
        self.config: RunConfig | None = None
        # The config may be missing, or of another version.
        with suppress(ValueError):
            self.config = load(folder / CONFIG_FILE)
        self._looks, self._events_kept = 0, events_kept
        self._status: dict[str, Any] = {}
        # Times of the last change of files, in nanoseconds.
        self._stamps: dict[str, int] = {}
        self._size = 0
        self._summary: dict[str, Any] = {}
        # Text that the final model wrote.
        self._sample = ""
        self._begin()

    def _begin(self) -> None:
        """Start with the first record."""
        self._tail = RecordTail(self.folder / METRICS_FILE)
        self.story, self._times = Story(), IslandTimes(self.config.islands.names if self.config else ())
        self._rounds = RoundTimes()
        self._events: deque[dict[str, Any]] = deque(maxlen=self._events_kept)
        # Number of events so far.
        self._event_count, self._finished = 0, False
        # Newest incarnation of each island, as the records write it.
        self._incarnations: dict[str, str] = {}
        # End of the curves that were sent last.
        self._drawn_s = -1.0
        self._new_events: list[dict[str, Any]] = []
        # All viewers need the whole state again, and there is more to read.
        self.fresh, self._behind = True, True

    def look(self) -> bool:
        """Read new records of the folder; return whether there are more."""
        self._looks += 1
        with suppress(OSError):
            self._size = (self.folder / METRICS_FILE).stat().st_size
        lines = list(islice(self._tail.lines(), LINES_MAX))
        # There is a new run in the folder, or its records were thinned before they were read.
        if self._tail.lost:
            self._begin()
            lines = list(islice(self._tail.lines(), LINES_MAX))
        for line in lines:
            # A line of another program is left out.
            with suppress(ValueError, KeyError, TypeError):
                self._take(json.loads(line))
        self._behind = len(lines) == LINES_MAX
        if not self._behind:
            self._read_status()
        return self._behind

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
        if self._changed(SAMPLE_FILE):
            self._sample = ""
            with suppress(OSError):
                self._sample = (self.folder / SAMPLE_FILE).read_text(encoding="utf-8", errors="replace")[:SAMPLE_MAX]
        if self._changed(STATUS_FILE) or self._looks % JUDGED_EVERY == 0:
            transport = self.config.transport if self.config else TransportConfig()
            try:
                self._status = read_status(str(self.folder), ask_status, transport=lambda: transport)
            except (ValueError, OSError) as error:
                self._status = self._status or {"state": "starting", "waiting_for": str(error), "learners": []}

    def _take(self, record: dict[str, Any]) -> None:
        for part in (self.story, self._times, self._rounds):
            part.take(record)
        if record["kind"] not in SILENT_KINDS:
            self._event(record)

    def _event(self, record: dict[str, Any]) -> None:
        kind, who, reason = record["kind"], record.get("members", []), record.get("reason", "")
        self._finished = self._finished and not went_back(record)
        if kind == "joined":
            # An island of the same incarnation only has another connection.
            kind = "back" if all(self._incarnations.get(name) == reason for name in who) else kind
            self._incarnations |= dict.fromkeys(who, reason)
        if kind == "life":
            kind, who = "started", ["syncer"]
        if kind == "alarm" and record.get("state") == "ends":
            kind = "alarm ended"
        self._event_count += 1
        event = {"n": self._event_count, "t": record["t"], "kind": kind, "who": who, "reason": reason}
        # All islands leave a run that is finished, which is not worth an event.
        if not self._finished:
            self._events.append(event)
            self._new_events.append(event)
            del self._new_events[: -self._events_kept]
        self._finished = self._finished or kind == "finished"

    def whole(self, *, still: bool = False) -> dict[str, Any]:
        """Return everything that the page shows of this run; `still` for a report, which stays as it is."""
        names = sorted(self.story.metrics, key=lambda name: (name not in METRICS_FIRST, name))[:METRICS_MAX]
        known = ((name, self.story.metrics[name]) for name in names)
        metrics = {name: {who: curve.few(METRIC_POINTS) for who, curve in each.items()} for name, each in known}
        columns = [{"name": each.name, "words": each.words} for each in table.on_page(table.ISLAND_FIGURES)]
        facts = {
            "name": self.name,
            "columns": columns,
            "rounds": self._rounds.whole(),
            "events": [*self._events],
            "metrics": metrics,
            "faults": read_faults(self.folder),
        }
        return finite(
            {**self._now(still=still), **facts, "curves": self._curves(), "logs": self.logs(), **self._about()}
        )

    def news(self) -> dict[str, Any]:
        """Return the changes since the last news."""
        news = {**self._now(), "rounds": self._rounds.news(), "events": self._new_events}
        self._new_events, self.fresh = [], self.fresh and self._behind
        if self._looks % CURVES_EVERY == 0 and self.story.end_s != self._drawn_s:
            self._drawn_s = self.story.end_s
            news |= {"curves": self._curves(), "faults": read_faults(self.folder), "logs": self.logs()}
        return finite(news)

    def _curves(self) -> dict[str, Any]:
        return {**self.story.curves(POINTS_SENT), "trained": self._times.trained(METRIC_POINTS)}

    def _now(self, *, still: bool = False) -> dict[str, Any]:
        story, status = self.story, self._status
        summary = story.summary(self._summary)
        summary["samples"] = self._summary.get("samples") or status.get("samples")
        read = self._tail.position / self._size if self._size else float(self._looks > 0)
        rate, lately = None, [each for each in story.wire if each[0] >= story.end_s - 60]
        if lately and (span_s := lately[-1][0] - lately[0][0]) > 0:
            rate = {f"{way}_per_s": (lately[-1][n] - lately[0][n]) / span_s for n, way in ((1, "up"), (2, "down"))}
        alarms, ended = alarms_now(status, self._summary), alarms_ended(status, self._summary)
        times = self._times.as_dict(self._summary.get("wall_s"), self._summary.get("goodput"))
        now = {"status": status, "summary": summary, "alarms": alarms, "ended": ended, "times": times}
        now |= self._figures(now, live=not still and status.get("state") in LIVE)
        return {**now, "end_s": story.end_s, "read": round(read, 3), "rate": rate, "sample": self._sample}

    def _figures(self, now: Mapping[str, Any], *, live: bool) -> dict[str, Any]:
        """Return the texts of the head, figures of the run and for a comparison of runs, and those of each island."""
        status, summary, times = now["status"], now["summary"], now["times"]
        more = {"eval_loss": summary.get("eval_loss"), "goodput": times["goodput"], "round_s": self._rounds.pace_s()}
        more["wall_s"] = self._summary.get("wall_s")
        facts = RunFacts.of(summary, status, more, {} if live else {"span_s": times["span_s"]})
        alarms = len(now["alarms"]), len(now["ended"])
        restarts = sum(row["restarts"] for row in summary["learners"].values())
        said = verdict(facts, status.get("state", "unknown"), alarms, restarts)
        head = {"verdict": said, "progress": list(progress(facts))}
        shown: list[dict[str, Any]] = []
        for figure in table.on_page(table.RUN_FIGURES):
            if live or not figure.momentary:
                shown.append(_shown(figure, facts))
            if figure.name == "eval_bits_per_byte":
                scores = summary.get("eval_scores") or {}
                shown += [
                    {"name": name, "words": name, "value": each, "text": or_none(each, ".4g")}
                    for name, each in scores.items()
                ]
        ended = RunFacts.of(summary, {"goodput": summary.get("goodput", times["goodput"])})
        compared = [_shown(figure, ended) for figure in table.compared()]
        columns = table.on_page(table.ISLAND_FIGURES)
        islands = {
            each.learner: {column.name: column.form.text(column.value(each)) for column in columns}
            for each in facts.islands
        }
        return {**head, "figures": shown, "compared": compared, "islands": islands, "round_s": facts.round_s}

    def _about(self) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        with suppress(ValueError):
            settings = dict(flat(read_settings(self.folder / CONFIG_FILE)))
        tau = self.config.protocol.overlap_steps if self.config is not None else None
        again = f"diloco train {self.folder / CONFIG_FILE} --run-dir NEW"
        made = {**self.story.made, "config": settings.get("name"), "began_unix_s": self._began_unix_s(), "again": again}
        return {"config": {"overlap_steps": tau}, "settings": settings, "made": made}

    def _began_unix_s(self) -> float | None:
        """Return the start of the run in seconds since 1970; None if its folder does not have it."""
        with suppress(OSError, ValueError, TypeError):
            return float(read_object(self.folder / CLOCK_FILE, "began_unix_s")["began_unix_s"])
        with suppress(KeyError, TypeError):
            return float(self._status["said"]["unix_s"] - self._status["wall_s"])
        return None

    def logs(self) -> list[str]:
        """Return the names of the logs in the folder."""
        names = (path.stem for path in (self.folder / LOGS).glob("*.log"))
        return sorted(names, key=lambda name: (len(name), name))
