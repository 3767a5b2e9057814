"""The report is the page in one file: it must tell the run's story correctly, stand alone, stay small, and not lie."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_jax.protocol.messages import SYNCER_STOPPED
from diloco_jax.tools.page.curve import BREAKS_MAX, Curve, few
from diloco_jax.tools.page.feed import RunFeed
from diloco_jax.tools.page.page import write_report
from diloco_jax.tools.page.story import PAUSES_MAX, STRETCHES_MAX, Story, against
from tests.tools.page.browser import CHROMIUM, Browser
from tests.tools.page.made import append, joined, lost, made_run, note, one_round, resumed, step, wire

Records = list[dict[str, Any]]


def told(*records: dict[str, Any]) -> Story:
    story = Story()
    for record in records:
        story.take(record)
    return story


def page_of(folder: Path) -> str:
    path = write_report(folder)
    assert path == folder / "report.html"
    return path.read_text(encoding="utf-8")


def data_of(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*)</script>', page)
    return dict(json.loads(text)["runs"][0])


def test_nothing_is_loaded_from_elsewhere_and_names_cannot_become_a_script(tmp_path: Path) -> None:
    folder, bad = made_run(tmp_path / "a & <b>"), '</script><script>alert("1")</script>'
    append(folder, step(bad, 21.0, 1, 10), note("silent", 22.0, 20, bad, reason=bad))
    page = page_of(folder)
    assert "alert(" not in page.replace("\\u003cscript>alert", "") and page.count("</script>") == 2
    outside = re.sub(r"http://www\.w3\.org/2000/svg", "", page)
    assert not re.search(r"https?:|@import|url\(|<img|<iframe|src=|XMLHttpRequest", outside)
    assert bad in data_of(page)["summary"]["learners"]


def test_a_run_that_was_stopped_is_counted_from_its_records(tmp_path: Path) -> None:
    folder = made_run(tmp_path)
    summary = data_of(page_of(folder))["summary"]
    assert not summary["complete"] and (summary["tokens"], summary["global_steps"]) == (30, 1)
    assert summary["contributors_per_round"] == 1.0 and "goodput" not in summary
    row = {"local_steps": 1, "tokens": 10, "participation": 0.0, "restarts": 0, "step_overhead": 0.0}
    assert summary["learners"]["b"] == row
    written = {"complete": True, "eval_loss": 1.5, "goodput": 0.9, "wire": {"data_parallel_bytes": 9}}
    (folder / "summary.json").write_text(json.dumps({**written, "learners": {"b": {"restarts": 3}}}))
    summary = data_of(page_of(folder))["summary"]
    assert summary["complete"] and summary["eval_loss"] == 1.5 and summary["learners"]["b"] == {**row, "restarts": 3}
    assert summary["wire"] == {"up_bytes": 300, "down_bytes": 600, "data_parallel_bytes": 9}


def test_a_data_parallel_run_has_no_rounds() -> None:
    summary = told(step("data-parallel", 1.0, 1, 10)).summary({"contributors_per_round": 1.0, "learners": {}})
    assert summary["contributors_per_round"] is None
    assert summary["learners"]["data-parallel"]["participation"] is None


def test_the_report_begins_with_a_verdict(tmp_path: Path) -> None:
    folder, base = made_run(tmp_path / "run"), made_run(tmp_path / "base")
    learners = {"a": {"restarts": 1}}
    for each, loss in ((folder, 1.515), (base, 1.5)):
        done = {"complete": True, "eval_loss": loss, "goodput": 0.9, "wire": {}, "learners": learners, "alarms": []}
        (each / "summary.json").write_text(json.dumps(done))
    said = data_of(page_of(folder))["verdict"]
    assert re.fullmatch(
        r"\w+: \d+ of \d+ global steps, evaluation loss 1\.5150, .* tokens, .* s, goodput 90\.0%, no alarm, 1 restart",
        said,
    )
    uses = data_of(page_of(folder))["times"]["islands"].values()
    trained_s, all_s = sum(row["training"] for row in uses), sum(sum(row.values()) for row in uses)
    assert trained_s / all_s == pytest.approx(0.9, abs=1e-3), "the table agrees with the tile"
    page = write_report(folder, base).read_text()
    assert data_of(page)["verdict"] == said + ", 1.00% above the baseline base (1.5000)"
    assert against(1.485, 1.5, "b") == ", 1.00% below the baseline b (1.5000)"
    assert against(None, 1.5, "b") == against(1.5, None, "b") == against(1.5, 0.0, "b") == ""
    with pytest.raises(ValueError, match=r"nowhere/metrics\.jsonl does not exist"):
        write_report(folder, tmp_path / "nowhere")


def test_starts_of_the_syncer_are_events_and_say_what_made_the_run(tmp_path: Path) -> None:
    folder = made_run(tmp_path)
    start = note("life", 0.0, 0, reason="process 1 of the syncer: the run starts")
    append(folder, {**start, "versions": {"jax": "1"}, "host": "x"})
    told = data_of(page_of(folder))
    assert told["events"][-1]["kind"] == "started" and told["events"][-1]["reason"].endswith("the run starts")
    again = f"diloco train {folder / 'config.yaml'} --run-dir NEW"
    began = told["made"].pop("began_unix_s")
    assert began == pytest.approx(told["status"]["said"]["unix_s"] - 4.6), "without a clock.json"
    assert told["made"] == {"versions": {"jax": "1"}, "host": "x", "config": None, "again": again}
    (folder / "clock.json").write_text('{"began_unix_s": 1764000000.0}')
    (folder / "config.yaml").write_text("name: quick\n")
    made = data_of(page_of(folder))["made"]
    assert (made["began_unix_s"], made["config"]) == (1764000000.0, "quick")


def test_a_report_has_the_sample_of_text_and_all_events(tmp_path: Path) -> None:
    folder = made_run(tmp_path)
    assert data_of(page_of(folder))["sample"] == ""
    append(folder, *(joined("b", 5.0, n) for n in range(2, 1000)))
    (folder / "sample.txt").write_text("once</script> upon a time")
    made = data_of(page_of(folder))
    assert made["sample"] == "once</script> upon a time"
    assert [event["n"] for event in made["events"]] == [*range(1, 1001)]
    # The page of a running run has only the newest.
    feed = RunFeed(folder)
    feed.look()
    assert [event["n"] for event in feed.whole()["events"]] == [*range(701, 1001)]


def test_a_folder_without_metrics_names_path_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"metrics\.jsonl does not exist; give the folder of a run"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"metrics\.jsonl has no step .*wait until"):
        write_report(tmp_path)


def test_a_long_run_is_small(tmp_path: Path) -> None:
    folder, names = made_run(tmp_path), [f"island-{index}" for index in range(8)]
    for n in range(1, 2001):
        append(folder, *(step(name, 10 + n * 0.3, n, n, loss=2 + 1 / n) for name in names))
        append(folder, note("merged", 10 + n * 0.3, n, *names[n % 3 :], fragment_id=0), wire(n * 0.3, n, n * 1000, n))
    assert len(page_of(folder)) < 300_000


def test_steps_and_overhead_are_counted_over_incarnations() -> None:
    # first incarnation: 3 steps of 0.5 s, seen at 1.0, 2.0 and 3.0 s: 1.5 s busy in 2.5 s; then a restart 97 s later
    first = [step("a", t, n, 100 * n, 0.5) for n, t in enumerate((1.0, 2.0, 3.0), 1)]
    later = [step("a", 99.5 + 0.5 * n, n, 300 + 100 * n, 0.5, incarnation=2) for n in (1, 2)]
    story = told(*first, *later, step("b", 101.0, 1, 1000))
    overhead = pytest.approx(1 - 2.5 / 3.5)
    row = {"local_steps": 5, "tokens": 500, "restarts": 1, "participation": None, "step_overhead": overhead}
    assert story.counted()["learners"]["a"] == row
    assert [tokens for _, tokens, _ in story.tracks["a"].steps.points] == [100, 200, 300, 400, 500]
    assert [tokens for _, tokens, _ in story.tracks["b"].steps.points] == [1500] and story.tokens == 1500


def test_many_rounds_are_grouped_and_none_is_lost() -> None:
    count = 5 * STRETCHES_MAX + 7
    story = told(*(note("merged", float(n), n, "a", *["b"][: n % 4 == 0]) for n in range(1, count + 1)))
    curves = story.curves(10)
    cells = curves["cells"]
    assert len(cells) <= STRETCHES_MAX and sum(rounds for _, _, rounds in cells) == sum(curves["members"]["a"]) == count
    assert cells[0] == [1.0, 8.0, 8] and curves["members"]["b"][:2] == [2, 2]
    assert sum(curves["members"]["b"]) == count // 4
    assert story.counted()["learners"]["b"]["participation"] == (count // 4) / count


@given(st.lists(st.floats(min_value=-10, max_value=10), max_size=300), st.integers(min_value=1, max_value=50))
def test_few_points_are_means_of_all(values: list[float], most: int) -> None:
    found = few([(float(x), y) for x, y in enumerate(values)], most)
    assert len(found) <= most
    assert all(min(values) - 1e-3 <= y <= max(values) + 1e-3 for _, y in found)
    assert few([(1.0, 2.0), (3.0, 6.0), (5.0, 1.0)], 2) == [[2.0, 4.0], [5.0, 1.0]]


def test_no_mean_and_no_thinning_crosses_a_break() -> None:
    assert few([(1.0, 2.0), (2.0, 4.0), (9.0, 8.0), (10.0, 6.0)], 1, [2]) == [[1.5, 3.0], [None, None], [9.5, 7.0]]
    # Of too many breaks the longest are left.
    times = [float(n + 100 * (n >= 500)) for n in range(1000)]
    points = few([(t, 0.0) for t in times], 1000, range(1, 1000))
    assert sum(point[0] is None for point in points) == BREAKS_MAX
    assert points[points.index([600.0, 0.0]) - 1] == [None, None]
    curve = Curve(4)
    for n in range(20):
        curve.cut() if n in (7, 8) else None
        curve.add(float(n), 1.0)
    assert curve.few(100) == [[0.0, 1.0], [None, None], [8.0, 1.0], [16.0, 1.0], [19.0, 1.0]]


def stopped_run() -> Records:
    """Islands a and b train until 10 s, are stopped, and train again from 40 s to 50 s; b was killed at 5 s."""
    found = [joined("a", 0.0), joined("b", 0.0)]
    for n in range(1, 11):
        found += [
            step("a", n, n, 10 * n, loss=4.0),
            step("b", n + 0.1, n, 10 * n, 1.0, loss=4.0, incarnation=1 + n // 6),
        ]
        found += [note("merged", n + 0.2, n, "a", "b"), wire(n + 0.3, n, 100 * n, 0) | {"connected_islands": 2}]
    found += [note("left", 10.4, 10, "a", reason="x"), note("left", 10.4, 10, "b", reason="x"), wire(10.5, 10, 1000, 0)]
    found.append(resumed(40.0))
    for n in range(1, 11):
        found += [step(name, 40 + n, n, 100 + 10 * n, loss=2.0, incarnation=3) for name in "ab"]
        found += [note("merged", 40.2 + n, 10 + n, "a"), wire(40.3 + n, 10 + n, 1000 + 100 * n, 0)]
    return found


def test_a_stop_breaks_curves_and_rounds_and_is_a_use_of_its_own(tmp_path: Path) -> None:
    folder = made_run(tmp_path)
    (folder / "metrics.jsonl").write_text("")
    append(folder, *stopped_run())
    made = data_of(page_of(folder))
    curves, learners = made["curves"], made["summary"]["learners"]
    breaks = {
        name: [at for at, point in enumerate(points) if point[2] is None] for name, points in curves["loss"].items()
    }
    assert breaks == {"a": [10], "b": [5, 11]}
    assert [point[0] for point in curves["totals"] if point[0] is not None][9:12] == [10.3, 10.5, 41.3]
    assert sum(point[1] is None for point in curves["totals"]) == 1
    begins = [begin for begin, _, _ in curves["cells"]]
    assert begins[9:12] == [9.2, 41.2, 41.2] and [end for _, end, _ in curves["cells"]][9] == 10.2
    assert curves["islands"]["merged per round"][9:12] == [[9.7, 2.0], [None, None], [41.2, 1.0]]
    assert {name: row["restarts"] for name, row in learners.items()} == {"a": 0, "b": 1}, "a resume is not a restart"
    assert [row["stopped"] for row in made["times"]["islands"].values()] == [29.5, 29.5]
    assert made["times"]["shares"]["stopped"] == f"{29.5 / 50.3:.1%}"
    # A kill of the syncer is not a stop: islands trained on, and their rate counts.
    failover = [
        record | {"reason": "it came back from its tape"} if record["kind"] == "life" else record
        for record in stopped_run()
    ]
    story = told(*failover)
    assert not any(None in point for point in story.curves(100)["totals"]) and story.stretches[10].begin_s == 41.2


@pytest.mark.parametrize("stop", [resumed(40.0), note("left", 3.0, 1, "a", "b", reason=SYNCER_STOPPED)])
def test_no_line_of_connected_islands_crosses_a_stop(stop: dict[str, Any]) -> None:
    wires = [wire(t, 1, 0, 0) | {"connected_islands": 2} for t in (1.0, 2.0, 41.0)]
    story = told(*wires[:2], stop, wires[2])
    assert story.curves(100)["islands"]["connected"] == [[1.0, 2.0], [2.0, 2.0], [None, None], [41.0, 2.0]]


@pytest.mark.parametrize(("reason", "restarts"), [(SYNCER_STOPPED, 0), ("killed", 1)])
def test_an_island_that_was_stopped_with_its_syncer_does_not_restart(reason: str, restarts: int) -> None:
    """As in `protocol/member.py`, also if the syncer continues from its tape."""
    back = resumed(3.0) | {"reason": "process 2 of the syncer: it came back from its tape"}
    story = told(
        step("a", 1.0, 1, 10), note("left", 2.0, 1, "a", "b", reason=reason), back, step("a", 4.0, 1, 20, incarnation=2)
    )
    assert {name: track.restarts for name, track in story.tracks.items()} == {"a": restarts}


def test_a_complete_run_ends_where_it_was_complete() -> None:
    story = told(
        *stopped_run(),
        note("finished", 51.0, 20),
        step("a", 60.0, 11, 999, loss=9.0, incarnation=3),
        wire(60.0, 20, 9999, 0),
    )
    curves = story.curves(100)
    assert curves["totals"][-1][0] == 50.3 and curves["loss"]["a"][-1][0] == 50.0
    assert story.tokens == 999 + 200, "the step counts"
    # The run is trained longer.
    for record in (resumed(90.0), step("a", 91.0, 1, 1000, incarnation=4), wire(92.0, 21, 10000, 0)):
        story.take(record)
    assert story.curves(100)["totals"][-1][0] == 92.0


def test_many_pauses_leave_the_longest() -> None:
    story, t = Story(), 0.0
    for n in range(1, 4 * PAUSES_MAX):
        t += 1 + 100 * (n == 50)
        story.take(resumed(t))
        story.take(note("merged", t, n, "a"))
    pauses = [later.begin_s - earlier.end_s for earlier, later in pairwise(story.stretches)]
    assert sum(pause > 0 for pause in pauses) == PAUSES_MAX and max(pauses) == 101
    assert sum(each.rounds for each in story.stretches) == 4 * PAUSES_MAX - 1 and len(story.stretches) <= STRETCHES_MAX


def test_a_curve_keeps_its_ends_and_is_even() -> None:
    curve = Curve(10)
    for n in range(100):
        curve.add(float(n))
    assert curve.points == [(0.0,), (16.0,), (32.0,), (48.0,), (64.0,), (80.0,), (96.0,), (99.0,)]


@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium here: install Debian's package chromium")
def test_growth_is_even_after_a_gap_and_means_are_of_all_islands(tmp_path: Path) -> None:
    """Without a syncer nobody counts, and what islands did meanwhile arrives when it is back."""
    browser = Browser(tmp_path / "profile")
    try:
        browser.open(write_report(made_run(tmp_path / "run")).as_uri())
        browser.until("document.querySelector('#link').innerText.startsWith('a report')")
        points = [[t, 100 * (t if t <= 30 or t > 41 else 30)] for t in (*range(31), *range(40, 121))]
        rates = [rate for _, rate in browser.run(f"growth({points}, 1)")]
        assert max(rates) < 101 and min(rates) > 80, rates
        lines = [{"points": [[t, value] for t in range(100)]} for value in (1, 3)]
        means = browser.run(f"smoothed({json.dumps(lines)})")
        assert {mean for _, mean in means} == {2} and (means[0][0], means[-1][0]) == (0, 99)
        # A stop from 30 to 60: nothing is drawn there, and nothing falls to a burst of 0.1 s at the end.
        points = [[t, 100 * (t - 30 * (t > 59))] for t in (*range(31), *range(60, 91))]
        points = [*points[:31], [None, None], *points[31:], [90.1, 6200]]
        rates = browser.run(f"growth({json.dumps(points)}, 1)")
        assert [rate for _, rate in rates].count(None) == 1
        assert all(90 < rate < 200 for _, rate in rates if rate is not None), rates
        assert not [t for t, rate in rates if rate is not None and 30 < t < 60]
        lines = [
            {"points": [*([t, 1] for t in range(31)), [None, None], *([t, 3] for t in range(60, 91))]},
            {"points": [[0, 1], [20, 1]]},
        ]
        means = browser.run(f"smoothed({json.dumps(lines)})")
        assert {mean for t, mean in means if 30 < t < 60} == {None} and {mean for _, mean in means} == {1, 3, None}
        assert browser.run(f"pointAt({json.dumps(lines[0]['points'])}, 40)") is None
        assert browser.run(f"pointAt({json.dumps(lines[0]['points'])}, 29.6)") == [30, 1]
        # Lines of few points have a mean between them, too.
        few_points = [[0, 1], [50, 2], [100, 3]]
        assert [mean for _, mean in browser.run(f"smoothed([{{points: {few_points}}}])") if mean is None] == []
        assert browser.run("[30, 60, 90, 3600, 5400].map(tick)") == ["30 s", "1 min", "1 min 30 s", "1 h", "1 h 30 min"]
        assert browser.run("[5e4, 6e6, 1.5e6, 20].map(short)") == ["50k", "6M", "1.5M", "20"]
    finally:
        browser.close()


@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium here: install Debian's package chromium")
def test_a_browser_shows_it_without_a_server(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run")
    metrics = {"kind": "metrics", "t": 4.0, "global_step": 1, "learner": "a", "values": {"grad_norm": 0.5}}
    append(folder, metrics, lost("b", 6.0), joined("b", 7.0), joined("b", 7.5, 2))
    browser = Browser(tmp_path / "profile")
    try:
        browser.size(360, 800)
        browser.open(write_report(folder).as_uri())
        browser.until("document.querySelector('#link').innerText.startsWith('a report, written 2')")
        text = browser.run("document.body.innerText")
        parts = ("Not complete", "b back: incarnation 1", "b joined: incarnation 2", "waiting for data", "step 1 of 10")
        assert [part for part in parts if part not in text] == []
        assert browser.run("document.querySelectorAll('#strip .cell').length") == 1
        metrics = browser.run("[...document.querySelectorAll('#metric option')].map(o => o.value)")
        assert metrics == ["loss", "grad_norm"]
        assert browser.run("document.querySelectorAll('.drain').length") == 0
        titles = browser.run("[...document.querySelectorAll('#loss .axis-title')].map(e => e.textContent)")
        assert titles[:2] == ["time since the start of the run", "loss"]
        # The loss comes before the tables, and shows when island b was lost and came back.
        heads = browser.run("[...document.querySelectorAll('main > section:not([hidden]) h2')].map(e => e.textContent)")
        pace = "Goodput, speed, traffic and islands over time"
        assert heads[:4] == ["Alarms", "Loss and other metrics", pace, "Islands"]
        append(folder, step("a", 9.0, 3, 30), wire(9.5, 1, 900, 600) | {"connected_islands": 1})
        browser.open(write_report(folder).as_uri())
        marked = "[...document.querySelectorAll('#loss .mark title')].map(e => e.textContent)"
        assert browser.until(f"({marked}).length && {marked}") == [
            "b disconnected after 6.00 s",
            "b joined after 7.50 s",
        ]
        names = browser.run("[...document.querySelectorAll('#loss-legend li')].map(e => e.textContent)")
        assert names == ["a", "b", "mean of the islands, smoothed"]
        shown = "document.querySelectorAll('#trained polyline, #speed polyline, #traffic polyline').length"
        assert browser.run(shown) == 4, "goodput, tokens/s, bytes up and down"
        present = "document.querySelector('#present svg').getAttribute('aria-label')"
        assert browser.run(present) == "Islands: connected 1.000, merged per round 1.000"
        assert browser.run("document.documentElement.scrollWidth") <= 360
        assert browser.problems == []
    finally:
        browser.close()


@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium here: install Debian's package chromium")
def test_axes_show_the_end_of_a_run_and_printing_shows_all_events(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", state="complete")
    # The loss falls from 8 to 2 within a tenth of the run, and to 1.9 until its end.
    losses = [8 - 0.6 * n if n < 10 else 2 - (n - 10) / 900 for n in range(100)]
    append(folder, *(step("a", 10.0 + n, n + 3, 30, loss=loss) for n, loss in enumerate(losses)))
    append(folder, *(joined("b", 110.0, n) for n in range(2, 400)))
    # Island b has the last version only after the final evaluation.
    append(folder, *one_round(2, 111.0), note("finished", 112.5, 2), step("b", 190.0, 2, 20, arrived=[[2, 78.0]]))
    (folder / "sample.txt").write_text("once <b>upon</b> a time")
    browser = Browser(tmp_path / "profile")
    try:
        browser.size(1280, 800)
        browser.open(write_report(folder).as_uri())
        browser.until("document.querySelector('#sample-text').innerText === 'once <b>upon</b> a time'")
        low, high = browser.run("rangeOf(runs[0].curves.loss.a.map(point => [point[0], point[2]]), true)")
        late = [loss for loss in losses if loss < 1.96]
        assert low <= min(late) and max(late) < high and max(late) - min(late) > 0.45 * (high - low)
        assert "values up to 8 are above the axis" in browser.run("document.querySelector('#loss').textContent")
        browser.run("document.querySelector('#loss-range input[value=\"1\"]').click()")
        assert "above the axis" not in browser.run("document.querySelector('#loss').textContent")
        texts = browser.run("[...document.querySelectorAll('#loss svg > text')].map(e => e.textContent)")
        assert {"30 s", "1 min", "1 min 30 s"} <= {*texts}, "round times"
        assert "2 min" not in texts, "the step of island b is later than the end of the run"
        # The window of rounds ends soon after the last merge, and the last broadcast is cut there.
        ends = browser.run("[...document.querySelectorAll('#timeline .ph4')].map(e => +e.getAttribute('x'))")
        width = browser.run("document.querySelector('#timeline').clientWidth")
        assert 0.9 * width < ends[-1] < width
        assert browser.run("document.querySelectorAll('#events li').length") > 400
        browser.ask("Emulation.setEmulatedMedia", media="print")
        hidden = "(e => e.scrollHeight - e.clientHeight)(document.querySelector('#events'))"
        assert browser.run(hidden) == 0
        assert browser.problems == []
    finally:
        browser.close()
