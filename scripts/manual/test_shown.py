"""What the first page shows: the recording of a kill, the demo of a run under faults, and the notebook's outputs."""

import json
import re

import pytest
from manual.demo import SIZE_MAX, TARGET, without_machine
from manual.notebook import run_cell
from manual.recording import DOCS, KILLED, LAST_SHOWN_S, RETURNED, SHOWN_S, WIDTHS, Frame, draw
from rich.segment import Segment

DATA = re.compile(r'<script type="application/json" id="data">(.*)</script>')


def frame(caption: str, *colour: str) -> Frame:
    return Frame(0.0, {name: [[Segment(f"view of {caption}")]] for name in WIDTHS}, caption, *colour)


@pytest.mark.parametrize("name", WIDTHS)
def test_a_recording_shows_each_frame_once_below_its_caption_and_the_last_one_longer(name: str) -> None:
    text = draw([frame("four train"), frame("kill -9", KILLED), frame("killed", KILLED), frame("back", RETURNED)], name)
    groups = re.findall(r'<g class="(.*?)" style="animation-delay: (.*?)s">(.*?)</g>', text, re.DOTALL)
    assert [(kind, float(delay)) for kind, delay, _ in groups] == [
        ("frame", 0.0),
        ("frame still", SHOWN_S),
        ("frame", 2 * SHOWN_S),
        ("frame last", 3 * SHOWN_S),
    ]
    assert all(
        group.index(caption) < group.index("view of")
        for caption, (*_, group) in zip(("four train", "kill -9", "killed", "back"), groups, strict=True)
    )
    total_s = 3 * SHOWN_S + LAST_SHOWN_S
    assert f"animation: show {total_s:g}s step-end infinite" in text
    assert f"@keyframes stay {{ 0% {{ opacity: 1 }} {100 * LAST_SHOWN_S / total_s:.3f}%" in text


@pytest.mark.parametrize("name", WIDTHS)
def test_no_frame_of_the_recordings_contradicts_itself(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    frames = re.findall(r'<g class="frame.*?</g>', text, re.DOTALL)
    shown = [re.sub(r"<[^>]*>", "", each) for each in frames]
    assert [any(words in each for each in shown) for words in ("kill -9 island-2", "was killed", "is back")] == [
        True
    ] * 3
    for each in shown:
        assert not ("alarm: island-2 is disconnected" in each and re.search(r"island-2 (joining|training)", each)), each
    assert "/tmp" not in text and "/home" not in text and "/work" not in text, "a folder of one machine"


def test_the_demo_is_one_small_page_of_a_run_whose_faults_all_recovered() -> None:
    page = TARGET.read_text(encoding="utf-8")
    assert len(page.encode()) < SIZE_MAX
    (run,) = json.loads(DATA.search(page)[1])["runs"]
    assert run["summary"]["complete"] and run["alarms"] == []
    assert len(run["faults"]) > 10 and all(fault["recovered_s"] > fault["t"] for fault in run["faults"])
    assert "said" not in run["status"] and not any("process" in row for row in run["status"]["learners"])
    # The tour describes this run.
    tour = (DOCS / "tour.md").read_text(encoding="utf-8")
    assert (
        f"{100 * run['summary']['goodput']:.1f} %" in tour and f"{run['summary']['samples']['leased']:,} leased" in tour
    )
    options = re.search(r"diloco chaos (.*?) --run-dir runs/demo \\\n +(--kinds \S+)", tour)
    assert set(options[1].split()) | set(options[2].split()) == set(run["made"]["again"].split()) - {"diloco", "chaos"}


def test_identities_of_a_machine_are_left_out() -> None:
    run = {"name": "f", "status": {"said": {"machine": "m"}, "learners": [{"learner": "a", "process": 7}]}}
    run["made"] = {"config": "chaos", "again": "diloco train runs/f"}
    told = without_machine(run, "diloco chaos x")
    assert told["status"] == {"learners": [{"learner": "a"}]}
    assert told["made"]["again"] == "diloco chaos x" and told["name"] == "chaos"


def test_a_cell_keeps_what_it_prints_and_the_picture_of_its_last_line() -> None:
    names = {"__name__": "__main__"}
    assert run_cell("x = 2", names) == []
    (printed,) = run_cell("print(x)\nprint(x + 1)\nx", names)
    assert printed == {"name": "stdout", "output_type": "stream", "text": ["2\n", "3\n"]}
    source = "class P(str):\n    def _repr_svg_(self):\n        return '<svg>\\n</svg>'\n\nP()"
    (picture,) = run_cell(source, names)
    assert picture["data"]["image/svg+xml"] == ["<svg>\n", "</svg>"]
