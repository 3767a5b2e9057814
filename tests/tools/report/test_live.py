"""The live view says what matters and disturbs nothing; the timeline for viewers holds what the tapes hold, once."""

import gzip
import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from diloco_jax.drawing.charts import format_bytes, format_count
from diloco_jax.protocol.syncer.progress import NO_BUDGET
from diloco_jax.protocol.watch.alarms import Alarm
from diloco_jax.runtime.records.telemetry import write_json
from diloco_jax.tools.report.live import LiveView, describe, format_duration, line, render
from diloco_jax.tools.report.perfetto import Trace, write_perfetto
from tests.tools.replay.test_replay import STEPS, eventful

REASONS = {
    "training": "last heard 0.1 s ago",
    "silent": "connected, but not heard for 7.0 s: stopped, or cut off",
    "joining": "alive, last heard 0.2 s ago; loads, compiles or downloads",
    "gone": "no connection; its data goes to others after release_s",
}


def learner(name: str, condition: str = "training", **fields: Any) -> dict[str, Any]:
    state = "active" if condition == "training" else condition
    row = {"learner": name, "state": state, "condition": condition, "reason": REASONS[condition], "since_s": 92.0}
    row |= {"local_step": 410, "tokens": 419_840, "tokens_per_s": 13250.0, "loss": 1.9, "step_s": 0.3}
    return row | {"last_merged_round": 409, "participation": 0.98, "restarts": 0} | fields


def status(**fields: Any) -> dict[str, Any]:
    whole = {"run": "quickstart", "state": "running", "global_step": 400, "total_steps": 1600, "wall_s": 100.0}
    whole |= {"waiting_for": "round 401: quorum 0 of 1", "tokens": 1_638_400, "tokens_per_s": 26500.0}
    whole |= {"wire": {"up_bytes": 123_456_789, "down_bytes": 987}, "eval_loss": 1.85, "contributors_per_round": 1.97}
    return whole | {"epoch": 1, "alarms": []} | {"learners": [learner("island-0"), learner("island-1")]} | fields


NOTHING = {"tokens": 0, "tokens_per_s": 0.0, "eval_loss": None, "contributors_per_round": 0.0, "learners": []}
NOTHING["wire"] = {"up_bytes": 0, "down_bytes": 0}
STARTING = status(state="starting", global_step=0, wall_s=0.2, waiting_for="the first learner", **NOTHING)
FRESH = learner("island-2", "joining", local_step=0, tokens_per_s=0.0, loss=None, step_s=None, last_merged_round=0)


def drawn(picture: Any, width: int = 120) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(picture)
    return out.getvalue()


def words(text: str) -> str:
    return " ".join(text.split())


COUNTS = {0: "0", 950: "950", 999.6: "1k", 1234: "1.23k", 45.6e6: "45.6M", 999_499: "999k", 3e15: "3000T"}
BYTES = {0: "0 B", 999: "999 B", 123_456_789: "123 MB", 1.5e9: "1.5 GB"}
DURATIONS = {-1: "0 s", 59.4: "59 s", 59.6: "1 min 00 s", 125: "2 min 05 s", 3599.7: "1 h 00 min", 187_200: "2 d 04 h"}


@pytest.mark.parametrize(
    ("form", "texts"), [(format_count, COUNTS), (format_bytes, BYTES), (format_duration, DURATIONS)]
)
def test_numbers_in_words(form: Callable[[float], str], texts: dict[float, str]) -> None:
    assert {value: form(value) for value in texts} == texts


@given(st.floats(min_value=0, max_value=1e14))
def test_a_count_stays_near_its_value(value: float) -> None:
    text = format_count(value)
    scale = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(text[-1], 1)
    number = float(text.rstrip("kMGT")) * scale
    assert abs(number - value) <= max(0.5, 0.0051 * value)


def test_the_picture_shows_run_and_islands() -> None:
    island = learner("island-1", "silent", restarts=2, participation=0.5, last_merged_round=321)
    text = drawn(render(status(learners=[learner("island-0"), island, FRESH])))
    for part in (
        "quickstart running",
        "25%, step 400 of 1600",
        "1 min 40 s, about 5 min 00 s left",
        "waiting for: round 401: quorum 0 of 1",
        "1.64M tokens, 26.5k/s · eval loss 1.8500 · 1.97 contributors per round · up 123 MB, down 987 B",
    ):
        assert part in words(text)
    rows = [words(row) for row in text.splitlines() if row.startswith("island-")]
    assert rows == [
        "island-0 training 410 13.2k 1.900 409 98% 0",
        "island-1 silent 1m 410 13.2k 1.900 321 50% 2",
        "island-2 joining 1m 0 0 – – 98% 0",
    ]


def test_the_table_fits_into_80_columns() -> None:
    gone = learner("island-3", "gone", since_s=3599, local_step=123_456) | {"condition": "recovering"}
    text = drawn(render(status(learners=[learner("island-0"), gone])), width=80)
    assert "…" not in text
    assert "takes" in text and "FLOP/s" not in text
    slow = drawn(render(status(learners=[gone | {"metrics": {"model_flops_per_s": 7.2e14}}])), width=80)
    assert "…" not in slow and "FLOP/s" in slow and "720T" in slow
    fast = [learner("a", metrics={"mfu": 0.413, "model_flops_per_s": 1.0}), gone]
    assert "FLOP/s" not in (text := drawn(render(status(learners=fast)), width=80)) and " 41% " in text


def test_the_recent_rate_decides_the_time_left() -> None:
    assert "about 2 min 00 s left" in drawn(render(status(), steps_per_s=10.0))
    assert "no round lately" in drawn(render(status(), steps_per_s=0.0))
    assert "left" not in drawn(render(status(state="complete", global_step=1600)))


def test_a_run_that_starts_has_a_sensible_picture() -> None:
    text = drawn(render(STARTING))
    assert "no island has connected yet" in text
    assert "waiting for: the first learner" in text
    assert "takes" not in text
    assert "left" not in text


def test_words_from_outside_are_no_markup() -> None:
    odd = status(run="[bold]x[/bold]", waiting_for="[red]y", learners=[learner("[link=z]a")])
    text = drawn(render(odd))
    for part in ("[bold]x[/bold]", "[red]y", "[link=z]a"):
        assert part in text


def test_describe_says_which_island_which_condition_since_when() -> None:
    rows = [learner("island-0"), learner("island-1", "silent", since_s=7), FRESH]
    rows.append(learner("island-10", "gone", restarts=1, last_merged_round=5))
    lines = describe(status(learners=rows)).splitlines()
    assert lines[0].startswith("quickstart is running: global step 400 of 1600 (25%) after 1 min 40 s, about")
    assert lines[1] == "waiting for: round 401: quorum 0 of 1"
    islands = [words(text) for text in lines[4:]]
    training = "training for 1 min 32 s: step 410, loss 1.900, 13.2k tokens/s; last heard 0.1 s ago; last merged in"
    assert islands[0].startswith(f"island-0 {training}")
    assert islands[1].startswith(f"island-1 silent for 7 s after step 410; {REASONS['silent']}; last merged in")
    assert islands[2].startswith(f"island-2 joining for 1 min 32 s after step 0; {REASONS['joining']}; never merged")
    assert islands[3].startswith("island-10 gone for 1 min 32 s")
    assert islands[3].endswith("last merged in round 5, participation 98%, 1 restart")
    assert describe(STARTING).splitlines()[-1] == "no island has connected yet"


def test_what_is_wrong_with_the_syncer_is_told() -> None:
    alarm = Alarm("tape", "", "the tape cannot be written: No space left on device").told()
    for tell in (describe, line, lambda state: drawn(render(state))):
        assert f"alarm: {alarm['text']}" in tell(status(alarms=[alarm]))
        assert "alarm" not in tell(status())


def test_a_line_for_logs() -> None:
    text = line(status(learners=[learner("island-0"), learner("island-1", "gone")]))
    assert "\n" not in text
    assert "quickstart: running, step 400 of 1600, 1 of 2 islands active" in text
    assert text.endswith("waiting for: round 401: quorum 0 of 1")
    assert "eval loss" not in line(STARTING)


def plain_console() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=80, force_terminal=False), out


@pytest.mark.parametrize("content", [None, "", '{"run": "quick', "[1, 2]", "{}", "\x00\xff"])
def test_a_missing_or_torn_file_is_survived(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "status.json"
    if content is not None:
        path.write_text(content, encoding="latin-1")
    console, out = plain_console()
    view = LiveView(path, console)
    view.print_line()
    assert out.getvalue() == ""
    assert "waiting for the syncer" in drawn(view.picture())

    write_json(path, status())
    assert "step 400" in drawn(view.picture())
    path.write_text(json.dumps(status(global_step=401))[:40])
    assert "step 400" in drawn(view.picture()), "the last good picture stays"
    path.unlink()
    assert "step 400" in drawn(view.picture())


def test_without_a_terminal_it_prints_plain_lines(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_json(path, status())
    console, out = plain_console()
    with LiveView(path, console):
        pass
    (text,) = out.getvalue().splitlines()
    assert text == line(status())
    assert "\x1b" not in text


def test_on_a_terminal_it_leaves_the_last_picture(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    out = io.StringIO()
    with LiveView(path, Console(file=out, width=100, force_terminal=True, color_system=None)):
        write_json(path, status(state="complete", global_step=1600))
    assert "step 1600 of 1600" in out.getvalue()


def test_the_rate_is_that_of_the_last_minute(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    view = LiveView(path, plain_console()[0])

    def rate(wall_s: float, global_step: int) -> float | None:
        write_json(path, status(wall_s=wall_s, global_step=global_step))
        view.poll()
        return view.steps_per_s()

    assert view.steps_per_s() is None
    for wall_s in range(0, 201, 10):  # 1 step/s for 100 s, then 5 steps/s
        found = rate(wall_s, wall_s if wall_s <= 100 else 100 + 5 * (wall_s - 100))
        view.poll()
    assert found == pytest.approx(5.0)
    assert rate(1.0, 0) is None, "a new run in the same folder"
    assert rate(2.0, 4) == pytest.approx(4.0)
    assert rate(3.0, 1) is None, "back to a snapshot"


def test_an_old_status_is_not_shown_as_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = 0.0
    monkeypatch.setattr("diloco_jax.tools.report.live.time.monotonic", lambda: clock_s)
    path = tmp_path / "status.json"
    write_json(path, status())
    console, out = plain_console()
    view = LiveView(path, console)
    assert "running" in drawn(view.picture())
    clock_s = 12.0
    text = words(drawn(view.picture()))
    assert "quickstart silent" in text and " left" not in text
    assert "waiting for: the syncer, which has said nothing for 12 s" in text
    view.print_line()
    assert "quickstart: silent" in out.getvalue() and " left" not in out.getvalue()
    write_json(path, status(wall_s=101.0))
    assert "running" in drawn(view.picture())
    write_json(path, status(state="complete"))
    view.poll()
    clock_s = 1000.0
    assert "complete" in drawn(view.picture()), "the last evaluation may take long"


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
    twice = [*pair.tape[: again + 1], *pair.tape[again:]]  # a learner that waits tells its report again
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
