"""The faults of a chaos run on its page: read from the run's folder, marked in the charts, reached by the slider."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from diloco_jax.tools.page import faults
from diloco_jax.tools.page.faults import SHOWN_MAX, read_faults
from diloco_jax.tools.page.feed import CURVES_EVERY, RunFeed
from diloco_jax.tools.page.page import write_report
from tests.limits import HANGS_S
from tests.tools.page.browser import CHROMIUM, Browser
from tests.tools.page.made import append, made_run, note, one_round, step

NODE = shutil.which("node")


def fault(event: str, number: int, t: float, **changes: Any) -> str:
    what = f"#{number} step 3: kill island-1"
    return json.dumps({"event": event, "t": t, "fault": number, "kind": "kill", "what": what, **changes}) + "\n"


def written(folder: Path, *lines: str) -> Path:
    (folder / "chaos").mkdir(parents=True, exist_ok=True)
    (folder / "chaos" / "faults.jsonl").write_text("".join(lines))
    return folder


def test_a_fault_has_its_start_and_its_recovery(tmp_path: Path) -> None:
    assert read_faults(tmp_path) == [], "a run without chaos"
    lines = (fault("begin", 2, 9.0), fault("begin", 1, 4.0), fault("end", 1, 5.0), fault("recovered", 1, 6.5))
    assert read_faults(written(tmp_path, *lines)) == [
        {"n": 1, "t": 4.0, "what": "kill island-1", "recovered_s": 6.5},
        {"n": 2, "t": 9.0, "what": "kill island-1", "recovered_s": None},
    ]


def test_damaged_lines_and_too_many_faults_are_left_out(tmp_path: Path) -> None:
    damaged = ("garbage\n", "[]\n", fault("begin", 1, 1.0, fault="x"), fault("recovered", 7, 2.0), '{"fault": 3')
    assert read_faults(written(tmp_path, *damaged)) == []
    many = read_faults(written(tmp_path, *(fault("begin", n, n) for n in range(SHOWN_MAX + 5))))
    assert [each["n"] for each in many] == [*range(SHOWN_MAX)]


def test_news_with_curves_have_the_faults_since_the_page_was_opened(tmp_path: Path) -> None:
    feed = RunFeed(made_run(tmp_path))
    feed.look()
    assert feed.whole()["faults"] == []
    written(tmp_path, fault("begin", 1, 4.0))
    found = []
    for _ in range(CURVES_EVERY):
        feed.look()
        found += feed.news().get("faults", [])
    assert [each["n"] for each in found] == [1]


def event(number: int, kind: str, name: str, reason: str = "") -> dict[str, Any]:
    return {"n": number, "t": number, "kind": kind, "who": [name], "reason": reason}


BEGAN = [event(1, "joined", "a"), event(2, "joined", "b")]


@pytest.mark.skipif(NODE is None, reason="there is no node here: install Debian's package nodejs")
@pytest.mark.parametrize(
    ("events", "says"),
    [
        (BEGAN, "all islands are connected"),
        ([*BEGAN, event(3, "disconnected", "b", "lost")], "b is disconnected"),
        ([*BEGAN, event(3, "expelled", "b", "NaN"), event(4, "disconnected", "b", "expelled")], "b is expelled"),
        ([*BEGAN, event(3, "banned", "b", "bad data"), event(4, "disconnected", "b", "banned")], "b is banned"),
        ([*BEGAN, event(3, "banned", "b", "x"), event(4, "admitted", "b"), event(5, "joined", "b")], "all islands are"),
        # The page keeps the newest events only, and the island that an older one names may be disconnected.
        ([event(7, "joined", "b")], ""),
        ([event(12, "disconnected", "b")], ""),
    ],
)
def test_a_moment_tells_what_the_events_up_to_then_show(events: list[dict[str, Any]], says: str) -> None:
    script = Path(faults.__file__).with_name("page.js").read_text(encoding="utf-8")
    function = re.search(r"const CONNECTION = .*?(?=function drawMoment)", script, re.DOTALL)
    assert function is not None and NODE is not None
    around = "const smoothed = x => [], pointAt = x => null, known = x => x != null, time = x => `${x} s`;"
    run = json.dumps({"events": events, "faults": [], "curves": {"loss": {}}})
    code = f"{around}{function[0]}console.log(describeMoment({run}, 10))"
    told = subprocess.run([NODE, "-e", code], capture_output=True, text=True, timeout=HANGS_S, check=True).stdout
    assert told.startswith("10 s: " + says) if says else told.strip() == "10 s:"


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium here: install Debian's package chromium")
def test_the_slider_and_the_faults_show_a_moment(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run")
    append(folder, *(step("a", 10.0 + n, n, 10 * n) for n in range(2, 30)), note("disconnected", 15.0, 12, "b"))
    append(folder, *one_round(20, 30.0))
    report = write_report(written(folder, fault("begin", 1, 15.0), fault("recovered", 1, 20.0)))
    browser = Browser(tmp_path / "profile")
    try:
        browser.size(1280, 900)
        browser.open(report.as_uri())
        browser.until("document.getElementById('fault-table').rows.length === 2")
        assert browser.run("document.getElementById('moment-what').textContent") == ""
        assert browser.run("document.querySelectorAll('#loss .cross').length") == 0
        browser.run("document.querySelector('#fault-table button').click()")
        said = browser.run("document.getElementById('moment-what').textContent")
        assert "b is disconnected" in said and "fault 1 (kill island-1) for 500 ms" in said
        assert browser.run("document.querySelectorAll('#loss .cross').length") == 1
        assert browser.run("document.querySelectorAll('#loss .mark.fault').length") == 1
        lines = "document.querySelectorAll('#loss .line').length"
        assert browser.run(lines) == 3, "a, b and their mean"
        browser.run("document.querySelector('#loss-legend button').click()")
        assert browser.run(lines) == 2 and browser.run("document.activeElement.textContent") == "a"
        browser.run("document.querySelector('#loss-legend button').click()")
        assert browser.run(lines) == 3
        browser.run("const m = document.getElementById('moment'); m.value = 1000; m.dispatchEvent(new Event('input'))")
        assert "fault 1" not in browser.run("document.getElementById('moment-what').textContent")
        assert not browser.problems
    finally:
        browser.close()
