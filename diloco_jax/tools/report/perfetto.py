"""A run on one timeline, for ui.perfetto.dev or chrome://tracing: what the syncer's tape says of everybody.

The syncer's machine takes its decisions again, so rounds, pulls, merges and broadcasts are exact, on the run's clock.
Steps and arrivals are as learners reported them, late by the way of a report; an adoption stands at the begin of the
step that it precedes.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any, TextIO

from diloco_jax.protocol.effects import Effect, Merge, Note, Send
from diloco_jax.protocol.messages import SYNCER, FragmentValue, GlobalFragment, PullRequest, StepReport
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.runtime.records.files import METRICS_FILE, TAPE_FILE
from diloco_jax.runtime.records.telemetry import finite, read_metrics
from diloco_jax.tools.replay.script import fingerprint_of, inputs

TRACE_FILE = "perfetto.json.gz"
STEP_REPORT, FRAGMENT_VALUE = StepReport.__name__, FragmentValue.__name__


def write_perfetto(run_dir: Path, protocol: ProtocolConfig, total_steps: int, path: Path | None = None) -> Path:
    """Write the trace of a run, under way or not, and return its path.

    Args:
        run_dir: folder of the run.
        protocol: of the run.
        total_steps: global steps of the run.
        path: of the gzipped trace; default: perfetto.json.gz in the folder.

    Raises:
        ValueError: the folder has no tape, or one that cannot be replayed; names it.
    """
    tape, target = run_dir / TAPE_FILE, path or run_dir / TRACE_FILE
    machine = Syncer(protocol, total_steps, fingerprint_of(tape))
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with gzip.open(draft, "wt", encoding="utf-8") as file:
            trace = _Trace(file)
            timeline = _Timeline(trace)
            for (kind, now_s, *fields), effects in inputs(tape, machine):
                timeline.take(kind, now_s, fields)
                for effect in effects:
                    timeline.execute(effect, now_s)
            if (run_dir / METRICS_FILE).exists():
                for record in read_metrics(run_dir / METRICS_FILE):
                    if record["kind"] == "eval":
                        trace.moment(SYNCER, "evaluations", f"loss {record['loss']}", record["t"], **record)
            trace.close()
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
    return target


class _Trace:
    """The file: events of the Chrome trace format, with times in microseconds."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        self._separator = ""
        self._processes: dict[str, int] = {}
        self._threads: dict[tuple[str, str], int] = {}
        self._lanes: dict[tuple[str, str], list[float]] = {}  # of each track: where the last span of a lane ends

    def close(self) -> None:
        """Write the end of the file."""
        self._file.write("\n]}\n")

    def span(self, who: str, track: str, name: str, begin_s: float, end_s: float, **facts: Any) -> None:
        """Draw something that took time; spans come as they end, and those that overlap lie in several lanes."""
        lanes = self._lanes.setdefault((who, track), [])
        lane = next((number for number, free_s in enumerate(lanes) if free_s <= begin_s), len(lanes))
        lanes[lane:] = [end_s, *lanes[lane + 1 :]]
        begin_us = round(begin_s * 1e6)
        timed = {"ts": begin_us, "dur": max(0, round(end_s * 1e6) - begin_us)}
        self._put("X", who, track if not lane else f"{track} {lane + 1}", name, args=facts, **timed)

    def moment(self, who: str, track: str, name: str, at_s: float, **facts: Any) -> None:
        """Draw something that took no time."""
        self._put("i", who, track, name, ts=round(at_s * 1e6), s="t", args=facts)

    def _put(self, phase: str, who: str, track: str, name: str, **more: Any) -> None:
        if who not in self._processes:
            self._processes[who] = len(self._processes) + 1
            self._write(ph="M", name="process_name", pid=self._processes[who], args={"name": who})
        pid, key = self._processes[who], (who, track)
        if key not in self._threads:
            self._threads[key] = len(self._threads) + 1
            self._write(ph="M", name="thread_name", pid=pid, tid=self._threads[key], args={"name": track})
        self._write(ph=phase, name=name, pid=pid, tid=self._threads[key], **more)

    def _write(self, **event: Any) -> None:
        self._file.write(self._separator + json.dumps(finite(event), separators=(",", ":")))
        self._separator = ",\n"


class _Timeline:
    """Everything that has begun and not ended, by who and what."""

    def __init__(self, trace: _Trace) -> None:
        self._trace = trace
        self._closed: dict[int, float] = {}  # rounds, and when they closed
        self._merges: dict[int, float] = {}
        self._pulls: dict[tuple[str, int], float] = {}  # learner, round
        self._sent: dict[tuple[str, int], tuple[int, float]] = {}  # learner, fragment -> version, time
        self._last: dict[str, tuple[int, int, float, list[Any]]] = {}  # incarnation, step, its end, adopted

    def take(self, kind: str, now_s: float, fields: list[Any]) -> None:
        """Draw what an input of the syncer ends."""
        if kind == STEP_REPORT:
            self._step(StepReport(*fields), now_s)
        elif kind == FRAGMENT_VALUE:
            value = FragmentValue(*fields)
            asked_s = self._pulls.pop((value.learner_id, value.global_step), None)
            if asked_s is not None:
                name, facts = f"pull of fragment {value.fragment_id}", value._asdict()
                self._trace.span(value.learner_id, "pulls", name, asked_s, now_s, **facts)
        elif kind in ("begin", "restart", "rewind"):
            for begun in (self._closed, self._merges, self._pulls, self._sent):
                begun.clear()
            self._trace.moment(SYNCER, "events", kind, now_s)

    def execute(self, effect: Effect, now_s: float) -> None:
        """Draw what the syncer decided, or remember when it began."""
        match effect:
            case Send(peer, PullRequest() as pull):
                self._pulls[peer, pull.global_step] = now_s
            case Send(peer, GlobalFragment() as value):
                self._sent[peer, value.fragment_id] = value.version, now_s
            case Merge():
                self._merges[effect.global_step] = now_s
            case Note("closed"):
                self._closed[effect.global_step] = now_s
            case Note("merged" | "abandoned"):
                self._round(effect, now_s)
            case Note():
                for who in effect.members or (SYNCER,):
                    self._trace.moment(who, "events", effect.kind, now_s, reason=effect.reason)

    def _round(self, note: Note, now_s: float) -> None:
        step, facts = note.global_step, note._asdict()
        name = f"{'' if note.kind == 'merged' else 'abandoned '}round {step}"
        self._trace.span(SYNCER, "rounds", name, self._closed.pop(step, now_s), now_s, **facts)
        merge_s = self._merges.pop(step, None)
        if merge_s is not None:
            self._trace.span(SYNCER, "merges", f"merge of fragment {note.fragment_id}", merge_s, now_s, round=step)

    def _step(self, report: StepReport, now_s: float) -> None:
        name, trace = report.learner_id, self._trace
        incarnation, step, end_s, adopted = self._last.get(name, (-1, 0, 0.0, []))
        if incarnation != report.incarnation:
            step, adopted = 0, []
        elif step >= report.local_step:  # told again
            return
        begin_s = min(now_s, max(end_s, now_s - report.step_s))
        for fragment_id, held in enumerate(report.adopted):
            if fragment_id >= len(adopted) or held != adopted[fragment_id]:
                trace.moment(name, "steps", f"adopts fragment {fragment_id}", begin_s, version=held[0])
        for fragment_id, version, ago_s in report.arrived:
            sent = self._sent.get((name, fragment_id), (None, 0.0))
            if sent[0] == version:
                told = f"fragment {fragment_id} comes"
                trace.span(name, "broadcasts", told, sent[1], max(sent[1], now_s - ago_s), version=version)
        facts = {key: getattr(report, key) for key in ("loss", "tokens", "global_step", "incarnation")}
        trace.span(name, "steps", f"step {report.local_step}", begin_s, now_s, **facts)
        self._last[name] = (report.incarnation, report.local_step, now_s, list(report.adopted))
