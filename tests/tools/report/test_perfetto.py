"""The timeline holds what the tapes hold, each once, in a form that viewers of Chrome traces read."""

from __future__ import annotations

import gzip
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from diloco_jax.tools.report.perfetto import _Trace, write_perfetto
from tests.tools.replay.test_replay import STEPS, eventful


def read(text: str) -> dict[str, list[dict[str, Any]]]:
    """Track -> its spans and moments; every event is one that a viewer knows."""
    events = json.loads(text)["traceEvents"]
    names = {(e["pid"], e["name"] == "thread_name" and e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    tracks: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] != "M":
            assert event["ph"] in ("X", "i") and isinstance(event["ts"], int) and event.get("dur", 0) >= 0
            track = f"{names[event['pid'], False]}: {names[event['pid'], event['tid']]}"
            tracks.setdefault(track, []).append(event)
    return tracks


def test_an_eventful_run_is_on_one_timeline(tmp_path: Path) -> None:
    pair = eventful(tmp_path)
    pair.finish()
    record = {"kind": "eval", "t": 2.5, "global_step": 4, "tokens": 40, "loss": float("nan")}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    trace = write_perfetto(tmp_path, pair.config, STEPS)
    tracks = read(gzip.decompress(trace.read_bytes()).decode())
    lines = [json.loads(line) for line in pair.tape]

    def on(track: str, phase: str) -> list[dict[str, Any]]:
        found = [each for name, each in tracks.items() if name.partition(": ")[2].startswith(track)]
        return [event for events in found for event in events if event["ph"] == phase]

    merged = Counter(line[2] for line in lines if line[0] == "merged")
    assert Counter(event["args"]["global_step"] for event in on("rounds", "X")) == merged
    assert Counter(event["args"]["round"] for event in on("merges", "X")) == merged
    told = {(line[3], line[4]) for line in lines if line[0] == "StepReport" and line[2] == "a"}
    steps = [event for event in tracks["a: steps"] if event["ph"] == "X"]
    assert sorted((event["args"]["incarnation"], int(event["name"].split()[1])) for event in steps) == sorted(told)
    taped = [json.loads(line) for path in (tmp_path / "tapes").iterdir() for line in path.read_text().splitlines()]
    adopted = {(f"adopts fragment {line[1]}", line[2]) for line in taped if line[0] == "adopt"}
    drawn = {(event["name"], event["args"]["version"]) for event in on("steps", "i")}
    assert len(drawn) > 10 and drawn <= adopted
    values = [line for line in lines if line[0] == "FragmentValue"]
    assert 0 < len(on("pulls", "X")) <= len(values) and on("broadcasts", "X")
    assert {"begin", "restart", "rewind"} <= {event["name"] for event in tracks["syncer: events"]}
    assert {"joined", "left"} & {event["name"] for event in tracks["b: events"]}
    assert [event["ts"] for event in tracks["syncer: evaluations"]] == [2_500_000]


def test_spans_that_overlap_lie_in_several_lanes() -> None:
    trace = _Trace(file := io.StringIO())
    for begin_s, end_s in ((0, 2), (1, 3), (2, 4), (0, 5), (5, 6)):
        trace.span("a", "pulls", "p", begin_s, end_s)
    trace.close()
    lanes = {name: [event["ts"] for event in spans] for name, spans in read(file.getvalue()).items()}
    assert lanes == {"a: pulls": [0, 2_000_000, 5_000_000], "a: pulls 2": [1_000_000], "a: pulls 3": [0]}


def test_a_folder_without_a_tape_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tape\.jsonl does not exist"):
        write_perfetto(tmp_path, None, 1)  # type: ignore[arg-type]
    assert not [*tmp_path.iterdir()]
