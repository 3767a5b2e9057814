"""The timeline of a run from its tape, for ui.perfetto.dev or chrome://tracing.

The syncer's machine repeats its decisions, so rounds, pulls, merges and broadcasts are exact on the run's clock. Steps
and arrivals are as late as the reports of them. An adoption is drawn at the start of the step after it.
"""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diloco_jax.protocol.effects import Effect, Merge, Note, Send
from diloco_jax.protocol.messages import SYNCER, FragmentValue, GlobalFragment, PullRequest, StepReport
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.progress import Budget
from diloco_jax.runtime.records.files import METRICS_FILE, TAPE_FILE
from diloco_jax.runtime.records.telemetry import finite, read_metrics
from diloco_jax.tools.replay.script import fingerprint_of, inputs, machine_of

TRACE_FILE = "perfetto.json.gz"


def write_perfetto(
    run_dir: Path, protocol: ProtocolConfig, total_steps: int, budget: Budget, path: Path | None = None
) -> Path:
    """Write the trace of a run, by default to perfetto.json.gz in its folder; ValueError if the tape is unreadable."""
    tape, trace = run_dir / TAPE_FILE, Trace()
    timeline = _Timeline(trace)
    machine = machine_of(fingerprint_of(tape), protocol, total_steps, budget)
    for (kind, now_s, *fields), effects in inputs(tape, machine):
        timeline.take(kind, now_s, fields)
        for effect in effects:
            timeline.execute(effect, now_s)
    for record in read_metrics(run_dir / METRICS_FILE) if (run_dir / METRICS_FILE).exists() else ():
        if record["kind"] == "eval":
            trace.draw(SYNCER, "evaluations", f"loss {record['loss']}", record["t"], facts=record)
    target = path or run_dir / TRACE_FILE
    with gzip.open(target, "wt", encoding="utf-8") as file:
        json.dump({"displayTimeUnit": "ms", "traceEvents": finite(trace.events)}, file, separators=(",", ":"))
    return target


class Trace:
    """Events in the Chrome trace format, with times in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        # Ids of processes (who) and of their threads (who, track).
        self._ids: dict[tuple[str, ...], int] = {}
        # End of the last span in each lane of a track, in seconds.
        self._lanes: dict[tuple[str, str], list[float]] = {}

    def draw(
        self, who: str, track: str, name: str, at_s: float, end_s: float | None = None, facts: object = None
    ) -> None:
        """Draw a moment, or a span if it has an end; overlapping spans of a track get separate lanes."""
        more: dict[str, Any] = {"ph": "i", "s": "t"}
        if end_s is not None:
            lanes = self._lanes.setdefault((who, track), [])
            lane = next((number for number, free_s in enumerate(lanes) if free_s <= at_s), len(lanes))
            lanes[lane : lane + 1] = [end_s]
            track += f" {lane + 1}" if lane else ""
            more = {"ph": "X", "dur": round(end_s * 1e6) - round(at_s * 1e6)}
        pid, tid = self._named("process_name", who), self._named("thread_name", who, track)
        self.events.append({**more, "name": name, "pid": pid, "tid": tid, "ts": round(at_s * 1e6), "args": facts or {}})

    def _named(self, what: str, *names: str) -> int:
        if names not in self._ids:
            self._ids[names] = len(self._ids) + 1
            ids = {"pid": self._ids[names[:1]], "tid": self._ids[names]}
            self.events.append({"ph": "M", "name": what, **ids, "args": {"name": names[-1]}})
        return self._ids[names]


class _Timeline:
    """The trace of a run, with everything that has started and not ended."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        # Start of each round, merge, pull and broadcast that has not ended.
        self._begun: dict[tuple[object, ...], float] = {}
        # Newest step of each learner: incarnation, step, end in seconds, adopted versions.
        self._last: dict[str, tuple[int, int, float, Sequence[Any]]] = {}

    def take(self, kind: str, now_s: float, fields: list[Any]) -> None:
        """Draw the span that an input of the syncer ends."""
        if kind == "StepReport":
            self._step(StepReport(*fields), now_s)
        elif kind == "FragmentValue":
            value = FragmentValue(*fields)
            asked_s = self._begun.pop(("pull", value.learner_id, value.global_step), None)
            if asked_s is not None:
                name = f"pull of fragment {value.fragment_id}"
                self._trace.draw(value.learner_id, "pulls", name, asked_s, now_s, value._asdict())
        elif kind in ("begin", "restart", "rewind"):
            self._begun.clear()
            self._trace.draw(SYNCER, "events", kind, now_s)

    def execute(self, effect: Effect, now_s: float) -> None:
        """Draw a decision of the syncer, or remember its start."""
        match effect:
            case Send(peer, PullRequest() as pull):
                self._begun["pull", peer, pull.global_step] = now_s
            case Send(peer, GlobalFragment() as value):
                self._begun["sent", peer, value.fragment_id, value.version] = now_s
            case Merge():
                self._begun["merge", effect.global_step] = now_s
            case Note("closed"):
                self._begun["round", effect.global_step] = now_s
            case Note("merged" | "abandoned"):
                for track in ("round", "merge") if effect.kind == "merged" else ("round",):
                    name, begun_s = f"{track} {effect.global_step}", self._begun.pop((track, effect.global_step), now_s)
                    self._trace.draw(SYNCER, f"{track}s", name, begun_s, now_s, effect._asdict())
            case Note():
                for who in effect.members or (SYNCER,):
                    self._trace.draw(who, "events", effect.kind, now_s, facts=effect._asdict())

    def _step(self, report: StepReport, now_s: float) -> None:
        name, draw = report.learner_id, self._trace.draw
        incarnation, step, end_s, adopted = self._last.get(name, (-1, 0, 0.0, ()))
        # A learner may repeat a report after a lost connection.
        if incarnation == report.incarnation and step >= report.local_step:
            return
        if incarnation != report.incarnation:
            adopted = ()
        begin_s = min(now_s, max(end_s, now_s - report.step_s))
        for fragment_id, held in enumerate(report.adopted):
            if [held] != [*adopted[fragment_id : fragment_id + 1]]:
                draw(name, "steps", f"adopts fragment {fragment_id}", begin_s, facts={"version": held[0]})
        for fragment_id, version, ago_s in report.arrived:
            sent_s = self._begun.pop(("sent", name, fragment_id, version), None)
            if sent_s is not None:
                draw(name, "broadcasts", f"fragment {fragment_id} comes", sent_s, max(sent_s, now_s - ago_s))
        facts = {key: getattr(report, key) for key in ("loss", "tokens", "global_step", "incarnation")}
        draw(name, "steps", f"step {report.local_step}", begin_s, now_s, facts)
        self._last[name] = (report.incarnation, report.local_step, now_s, report.adopted)
