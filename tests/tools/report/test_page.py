"""The report must tell the run's story correctly, stand alone, stay small, and never lie about an unfinished run."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_jax.drawing import charts
from diloco_jax.tools.report import plots
from diloco_jax.tools.report.page import write_report
from diloco_jax.tools.report.plots import CELLS_MAX, POINTS_MAX, DrawnRound, LearnerMark, smooth
from diloco_jax.tools.report.story import Story, read_story

Records = list[dict[str, Any]]


def step(name: str, t: float, n: int, **fields: Any) -> dict[str, Any]:
    record = {"kind": "step", "t": t, "learner": name, "incarnation": 0, "local_step": n, "global_step": n}
    return record | {"tokens": 100 * n, "loss": 2.0, "step_s": 0.5} | fields


def note(kind: str, t: float, global_step: int, *members: str, reason: str = "") -> dict[str, Any]:
    record = {"kind": kind, "t": t, "global_step": global_step, "fragment_id": 0}
    return record | {"members": list(members), "reason": reason}


def wire(t: float, n: int, up_bytes: int, down_bytes: int) -> dict[str, Any]:
    return {"kind": "wire", "t": t, "global_step": n, "up_bytes": up_bytes, "down_bytes": down_bytes}


def evaluated(t: float, n: int, tokens: int, loss: float) -> dict[str, Any]:
    return {"kind": "eval", "t": t, "global_step": n, "tokens": tokens, "loss": loss, "bits_per_byte": None}


def small_run(count: int = 20) -> Records:
    """Two islands, a step per second; island-1 is merged in every second round."""
    records: Records = [note("joined", 0.1, 0, "island-0"), note("joined", 0.2, 0, "island-1")]
    for n in range(1, count + 1):
        records += [step("island-0", n, n, loss=4 / n), step("island-1", n + 0.1, n, loss=4 / n)]
        merged = note("merged", n + 0.3, n, "island-0", *["island-1"][: n % 2])
        records += [note("closed", n + 0.2, n, "island-0"), merged, wire(n + 0.4, n, 1000 * n, 2000 * n)]
    return [*records, evaluated(count + 1, count, 4000, 1.5)]


RESULT = {"eval_loss": 1.4321, "eval_bits_per_byte": 2.0663, "tokens": 4000, "wall_s": 125.0, "global_steps": 20}
RATES = {
    "goodput": 0.951,
    "waiting_for_data": 0.486,
    "uptime": 1.0,
    "contributors_per_round": 1.5,
    "steps_per_round": 1.25,
}
SUMMARY = {
    **RESULT,
    **RATES,
    "alarms": ["islands outran rounds: 64 steps each while 0 rounds closed, from global step 0"],
    "wire": {"up_bytes": 20000, "down_bytes": 40000, "data_parallel_bytes": 1_800_000},
    "learners": {
        name: {"local_steps": 20, "tokens": 2000, "participation": 0.777, "restarts": 3, "step_overhead": 0.123}
        for name in ("island-1", "island-0")
    },
    "complete": True,
}


def write_run(folder: Path, records: Records, summary: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def page_of(folder: Path) -> str:
    path = write_report(folder)
    assert path == folder / "report.html"
    return path.read_text(encoding="utf-8")


def story_of(folder: Path) -> Story:
    return read_story(folder / "metrics.jsonl")


class Outline(HTMLParser):
    """Text of a page, and a check that its tags close in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data + "\n"


def test_a_complete_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "quick & <run>", small_run(), SUMMARY)
    (folder / "config.yaml").write_text("name: <b>quick</b>\n")
    page = page_of(folder)
    text = Outline(page).text
    numbers = ("1.4321", "2.0663", "95.1%", "48.6%", "2 min 05 s", "1.8 MB", "77.7%", "12.3%", "1.25")
    alarm = "islands outran rounds: 64 steps each while 0 rounds closed"
    for part in ("quick & <run>", *numbers, alarm, "name: <b>quick</b>"):
        assert part in text
    assert "Not complete" not in text
    assert "30 times as much" in text  # 1.8 MB against 60 kB
    titles = ("Loss over tokens", "Loss over time", "Rounds and their members", "Bytes on the wire", "Participation")
    for title in titles:
        assert f"<h2>{title}</h2>" in page
    found = re.findall(r'<div class="scroll">(<svg.*?)</div>', page)
    assert len(found) == 6
    for chart in found:
        ElementTree.fromstring(chart)


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path, small_run(), SUMMARY))
    assert not re.search(r"https?:|//[a-z]|@import|url\(|<link|<img|<iframe|src=|fetch\(|XMLHttpRequest", page)


def test_names_and_reasons_are_escaped(tmp_path: Path) -> None:
    bad = '<script>alert("1")</script>'
    records = [*small_run(), step(bad, 21, 1), note("silent", 22, 20, bad, reason=bad)]
    page = page_of(write_run(tmp_path, records))
    assert "<script>alert" not in page
    assert page.count("<script>") == 1
    Outline(page)


def test_a_run_that_was_stopped_is_counted_from_its_records(tmp_path: Path) -> None:
    folder = write_run(tmp_path, small_run())
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"kind":"step","t":99')  # torn
    text = Outline(page_of(folder)).text
    numbers = ("1.5000", "20 global steps", "4k tokens", "100.0%", "50.0%", "1.50")
    for part in ("Not complete", "needs summary.json", *numbers):
        assert part in text, part
    assert "goodput" not in text
    assert "Not complete" in page_of(write_run(tmp_path, small_run(), SUMMARY | {"complete": False}))


def test_a_data_parallel_run_has_no_rounds(tmp_path: Path) -> None:
    records = [step("data-parallel", n, n) for n in range(1, 30)]
    row = {"local_steps": 29, "tokens": 2900, "participation": 1.0, "restarts": 0, "step_overhead": 0.02}
    nothing = {"up_bytes": 0, "down_bytes": 0, "data_parallel_bytes": 0}
    summary = SUMMARY | {"wire": nothing, "learners": {"data-parallel": row}, "contributors_per_round": 1.0}
    text = Outline(page_of(write_run(tmp_path, records, summary))).text
    assert "Loss over tokens" in text
    for absent in ("Rounds", "wire", "Participation", "participation", "contributors"):
        assert absent not in text
    assert "2.0%" in text


def test_a_run_that_only_evaluated(tmp_path: Path) -> None:
    assert "5.5000" in Outline(page_of(write_run(tmp_path, [evaluated(1.0, 0, 0, 5.5)]))).text


def test_losses_that_are_not_numbers_leave_a_report(tmp_path: Path) -> None:
    records = [step("island-0", n, n, loss=None) for n in range(1, 5)]
    page = page_of(write_run(tmp_path, records))
    assert "Loss over tokens" not in page
    assert "nan" not in page.lower()


def test_a_folder_without_metrics_names_path_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"metrics\.jsonl does not exist; give the folder of a run"):
        write_report(tmp_path)
    write_run(tmp_path, [])
    with pytest.raises(ValueError, match=r"metrics\.jsonl has no step .*wait until"):
        write_report(tmp_path)


def test_a_long_run_is_small(tmp_path: Path) -> None:
    names = [f"island-{index}" for index in range(8)]
    records: Records = []
    for n in range(1, 2001):
        records += [step(name, n * 0.3, n, loss=2 + 1 / n) for name in names]
        records.append(note("merged", n * 0.3, n, *(name for i, name in enumerate(names) if n % (i + 2))))
        records.append(wire(n * 0.3, n, n * 1000, n * 3000))
    folder = write_run(tmp_path, records)
    assert len(page_of(folder)) < 1_500_000


def test_the_token_axis_counts_all_islands(tmp_path: Path) -> None:
    records = [step("a", 1, 1), step("b", 2, 1), step("a", 3, 2), step("b", 4, 4)]
    story = story_of(write_run(tmp_path, records))
    assert [at for _, at, _ in story.tracks["a"].steps] == [100, 300]
    assert [at for _, at, _ in story.tracks["b"].steps] == [200, 600]
    assert story.tokens == 600


def test_steps_and_overhead_are_counted_over_incarnations(tmp_path: Path) -> None:
    # first incarnation: 3 steps of 0.5 s, seen at 1.0, 2.0 and 3.0 s: 1.5 s busy in 2.5 s; then a restart 97 s later
    records = [step("a", 1.0, 1), step("a", 2.0, 2), step("a", 3.0, 3)]
    records += [step("a", 100.0, 1, incarnation=1, tokens=400), step("a", 100.5, 2, incarnation=1, tokens=500)]
    row = story_of(write_run(tmp_path, records)).counted()["learners"]["a"]
    overhead = pytest.approx(1 - 2.5 / 3.5)
    counts = {"local_steps": 5, "tokens": 500, "restarts": 1}
    assert row == counts | {"participation": None, "step_overhead": overhead}


def test_leaving_after_the_end_is_no_event(tmp_path: Path) -> None:
    records = [*small_run(), note("left", 22, 20, "island-1", reason="lost")]
    records += [note("finished", 23, 20), note("left", 24, 20, "island-0", reason="run complete")]
    marks = [(mark.kind, mark.learner) for mark in story_of(write_run(tmp_path, records)).marks]
    assert marks == [("joined", "island-0"), ("joined", "island-1"), ("left", "island-1")]


def test_the_death_of_the_syncer_is_one_event(tmp_path: Path) -> None:
    """Islands connect to its next life: they did not join anew."""
    records = [note("joined", 0.1 * n, 0, f"island-{n}", reason="incarnation 7") for n in range(1, 4)]
    records += [step(f"island-{n}", 1.0 + t, t + 1) for t in range(9) for n in range(1, 4)]
    records += [note("left", 3.0, 2, "island-3", reason="the link broke")]
    records += [note("joined", 3.5, 2, "island-3", reason="incarnation 7")]
    records += [note("restarted", 5.0, 3, reason="life 2 of the syncer")]
    records += [note("joined", 5.0 + 0.1 * n, 3, f"island-{n}", reason="incarnation 7") for n in range(1, 3)]
    records += [note("joined", 5.9, 3, "island-3", reason="incarnation 8")]
    folder = write_run(tmp_path, sorted(records, key=lambda record: record["t"]))
    story = story_of(folder)
    joined = [("joined", f"island-{n}") for n in (1, 2, 3)]
    later = [("left", "island-3"), ("back", "island-3"), ("restarted", "syncer"), ("joined", "island-3")]
    assert [(mark.kind, mark.learner) for mark in story.marks] == joined + later
    assert list(story.tracks) == ["island-1", "island-2", "island-3"]
    page = page_of(folder)
    assert "syncer starts again at 5.0 s: life 2 of the syncer" in page
    assert "starts again" not in page_of(write_run(tmp_path / "other", small_run()))


def test_islands_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    records = [step(f"island-{n}", n, 1) for n in (10, 2, 1)]
    assert list(story_of(write_run(tmp_path, records)).tracks) == ["island-1", "island-2", "island-10"]


@given(st.lists(st.floats(min_value=-10, max_value=10), max_size=900))
def test_smoothing_stays_inside_and_keeps_the_ends(values: list[float]) -> None:
    points = [(float(x), y) for x, y in enumerate(values)]
    smoothed = smooth(points)
    assert len(smoothed) <= min(len(points), POINTS_MAX + 1)
    if points:
        assert (smoothed[0], smoothed[-1][0]) == (points[0], points[-1][0])
        assert all(min(values) - 1e-9 <= y <= max(values) + 1e-9 for _, y in smoothed)


def test_smoothing_is_a_centred_mean() -> None:
    points = [(float(x), float(x)) for x in range(240)]  # window: 2 to each side
    assert smooth(points)[100] == (100.0, pytest.approx(100.0))
    spike = [(float(x), 5.0 * (x == 100)) for x in range(240)]
    assert [y for _, y in smooth(spike)[97:104]] == pytest.approx([0, 1, 1, 1, 1, 1, 0])


@given(st.floats(min_value=1e-6, max_value=1e12), st.integers(min_value=2, max_value=12))
def test_a_nice_step_is_nice(span: float, pieces: int) -> None:
    step_size = charts.nice_step(span, pieces)
    assert span / step_size <= pieces * (1 + 1e-6)
    mantissa = float(f"{step_size:e}".split("e")[0])
    assert any(mantissa == pytest.approx(nice) for nice in (1, 2, 2.5, 5))


@given(st.lists(st.floats(min_value=-1e6, max_value=1e6), min_size=1, max_size=20))
def test_a_number_axis_holds_its_values_and_tells_ticks_apart(values: list[float]) -> None:
    axis = charts.number_axis(values, "loss")
    assert all(0 <= axis.place(value) <= 1 for value in values)
    assert all(-1e-9 <= axis.place(value) <= 1 + 1e-9 for value, _ in axis.ticks)
    texts = [text for _, text in axis.ticks]
    assert 2 <= len(texts) == len(set(texts))


@given(st.floats(min_value=0, max_value=1e7))
def test_a_time_axis_has_few_ticks(end_s: float) -> None:
    axis = charts.time_axis(end_s, "time")
    assert 1 <= len(axis.ticks) <= 11
    assert axis.ticks[0] == (0.0, "0")
    assert len({text for _, text in axis.ticks}) == len(axis.ticks)


@given(st.lists(st.floats(min_value=0, max_value=1e15), max_size=10))
def test_a_bytes_axis_spans_at_most_four_decades(values: list[float]) -> None:
    axis = charts.bytes_axis(values, "bytes")
    assert 10 <= axis.high / axis.low <= 1.0001e4
    assert axis.place(max([*values, axis.low])) <= 1
    assert len(axis.ticks) >= 1


def rects(root: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    return [rect for rect in root.iter("rect") if kind in (rect.get("class") or "").split()]


def width_of(rect: ElementTree.Element) -> float:
    return float(rect.get("width") or 0)


def cells(root: ElementTree.Element) -> list[tuple[str, float]]:
    return [(cell.findtext("title") or "", float(cell.get("opacity") or "nan")) for cell in rects(root, "cell")]


def test_the_timeline_shows_members_and_joins_equal_neighbours() -> None:
    rounds = [DrawnRound(1.0 + n, n, frozenset({"a", "b"} if 3 <= n <= 5 else {"a"})) for n in range(1, 11)]
    root = ElementTree.fromstring(plots.timeline("t", ["a", "b"], rounds, [], (1.0, 12.0)))
    assert cells(root) == [("a, rounds 1 to 10: merged in 10 of 10", 1.0), ("b, rounds 3 to 5: merged in 3 of 3", 1.0)]
    first, second = rects(root, "cell")  # seconds 1 to 11, and 3 to 6, of 12
    assert width_of(second) / width_of(first) == pytest.approx(0.3, abs=0.001)


def test_many_rounds_are_grouped() -> None:
    rounds = [DrawnRound(n / 10, n, frozenset({"a"} if n % 4 == 0 or n > 1500 else {})) for n in range(1, 2001)]
    found = cells(ElementTree.fromstring(plots.timeline("t", ["a"], rounds, [], (0.0, 200.0))))
    assert len(found) <= CELLS_MAX
    hits = [re.search(r"merged in (\d+) of (\d+)", words) for words, _ in found]
    assert sum(int(hit[1]) for hit in hits if hit) == 875
    assert found[0][1] == pytest.approx(0.12 + 0.88 * 0.25)
    assert found[-1][1] == 1.0


def test_marks_carry_their_words() -> None:
    marks = [LearnerMark(2.0, kind, "a", "because <x>") for kind in plots.MARKS]
    marks.append(LearnerMark(1.0, "left", "unknown", ""))
    root = ElementTree.fromstring(plots.timeline("t", ["a"], [], marks, (0.0, 4.0)))
    texts = [group.findtext("title") for group in root.iter("g")]
    assert texts == [f"a {words} at 2.0 s: because <x>" for words in plots.MARKS.values()]


def test_bars_are_as_long_as_their_values() -> None:
    values = [("a", 0.25, "k0"), ("b", 0.5, "k1"), ("c", 2.0, "k2")]
    root = ElementTree.fromstring(plots.bars("t", values, high=1.0, width=504))
    full = width_of(rects(root, "track")[0])
    assert [width_of(rect) / full for rect in rects(root, "fill")] == pytest.approx([0.25, 0.5, 1.0], abs=0.001)
