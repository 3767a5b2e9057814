"""The timeline for viewers holds what the tapes hold, once."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

from diloco_jax.protocol.syncer.progress import NO_BUDGET
from diloco_jax.tools.replay.perfetto import Trace, write_perfetto
from tests.tools.replay.test_replay import STEPS, eventful


def tracks_of(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Track -> its spans and moments; every event is one that a viewer knows."""
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
    again = max(index for index, line in enumerate(pair.tape) if line.startswith('["StepReport"'))
    # A learner that waits repeats its report.
    twice = [*pair.tape[: again + 1], *pair.tape[again:]]
    (tmp_path / "tape.jsonl").write_text("".join(f"{line}\n" for line in twice))
    record = {"kind": "eval", "t": 2.5, "global_step": 4, "tokens": 40, "loss": float("nan")}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    trace = write_perfetto(tmp_path, pair.config, STEPS, NO_BUDGET)
    tracks = tracks_of(json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"])
    lines = [json.loads(line) for line in pair.tape]

    def facts(track: str, fact: str, phase: str = "X") -> list[Any]:
        found = [each for name, each in tracks.items() if name.partition(": ")[2].rstrip(" 23456") == track]
        return [event["args"].get(fact, event["name"]) for events in found for event in events if event["ph"] == phase]

    merged = Counter(line[2] for line in lines if line[0] == "merged")
    assert Counter(facts("rounds", "global_step")) == merged == Counter(facts("merges", "global_step"))
    told = {(line[2], line[3], f"step {line[4]}") for line in lines if line[0] == "StepReport"}
    assert sorted(facts("steps", "name")) == sorted(name for *_, name in told)
    taped = [json.loads(line) for path in (tmp_path / "tapes").iterdir() for line in path.read_text().splitlines()]
    adopted = {f"adopts fragment {line[1]}" for line in taped if line[0] == "adopt"}
    assert set(facts("steps", "name", "i")) == adopted and len(facts("steps", "name", "i")) > 20
    values = {line[4] for line in lines if line[0] == "FragmentValue"}
    assert set(facts("pulls", "global_step")) == values and len(facts("broadcasts", "name")) > 20
    assert {"begin", "restart", "rewind", "joined", "recovering"} <= set(facts("events", "name", "i"))
    assert [event["ts"] for event in tracks["syncer: evaluations"]] == [2_500_000]


def test_spans_that_overlap_lie_in_several_lanes() -> None:
    trace = Trace()
    for begin_s, end_s in ((0, 2), (1, 3), (2, 4), (0, 5), (5, 6)):
        trace.draw("a", "pulls", "p", begin_s, end_s)
    lanes = {name: [event["ts"] for event in spans] for name, spans in tracks_of(trace.events).items()}
    assert lanes == {"a: pulls": [0, 2_000_000, 5_000_000], "a: pulls 2": [1_000_000], "a: pulls 3": [0]}
