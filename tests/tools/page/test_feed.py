"""The page of a run is told what its records say: exact numbers of a fabricated run, as it grows."""

import json
from pathlib import Path
from typing import Any

import pytest

from diloco_jax.protocol.messages import DRAINED, SYNCER_STOPPED
from diloco_jax.protocol.watch.alarms import Alarm, Standing
from diloco_jax.runtime.records.telemetry import Telemetry
from diloco_jax.tools.page.board import Board
from diloco_jax.tools.page.compare import compare, describe
from diloco_jax.tools.page.feed import RunFeed, alarms_now
from diloco_jax.tools.page.times import ROUNDS_KEPT, IslandTimes
from tests.runtime.helpers import call
from tests.tools.page.made import (
    FATES,
    MADE,
    append,
    drift,
    evaluation,
    joined,
    lost,
    made_run,
    note,
    one_round,
    status,
    step,
    wire,
)


def test_the_whole_says_what_the_records_say(tmp_path: Path) -> None:
    feed = RunFeed(made_run(tmp_path))
    assert not feed.look()
    told = feed.whole()
    assert RunFeed(tmp_path).whole()["read"] == 0.0, "nothing has been read yet"
    assert told["name"] == tmp_path.name and told["read"] == 1.0 and told["end_s"] == 4.6
    assert told["rounds"] == [MADE]
    assert [(event["kind"], event["who"]) for event in told["events"]] == [("joined", ["a"]), ("joined", ["b"])]
    loss = {"a": [[2.0, 10, 3.0], [4.5, 30, 2.5]], "b": [[3.0, 20, 3.5]]}
    rounds = {"cells": [[4.5, 4.5, 1]], "members": {"a": [1], "b": [0]}}
    # Tokens and bytes; seconds of training and of both islands since the first step began.
    growth = {"totals": [[1.6, 0, 0, 0], [4.6, 30, 300, 600]], "trained": [[4.6, 3.0, 7.2]]}
    islands = {"connected": [], "merged per round": [[4.5, 1.0]]}
    assert told["curves"] == {"loss": loss, "evals": [], **rounds, **growth, "islands": islands}
    assert told["status"]["state"] == "running" and told["summary"]["samples"] == FATES
    assert told["summary"]["wire"] == {"up_bytes": 300, "down_bytes": 600} and told["logs"] == ["a", "syncer"]
    assert told["rate"] == pytest.approx({"up_per_s": 100.0, "down_per_s": 200.0}) and told["alarms"] == []
    json.dumps(told, allow_nan=False)


def test_news_have_only_what_is_new(tmp_path: Path) -> None:
    feed = RunFeed(made_run(tmp_path))
    feed.look()
    feed.whole()
    assert len(feed.news()["rounds"]) == 1
    feed.look()
    assert feed.news()["rounds"] == feed.news()["events"] == []
    append(tmp_path, step("b", 5.25, 2, 40, arrived=[[1, 0.75]]))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind":"disconnected","t":6.0,"glob')  # not whole yet
    feed.look()
    news = feed.news()
    assert news["rounds"] == [{**MADE, "arrived": {"a": 0.25, "b": 0.75}, "late": {"b": 1.75}}] and not news["events"]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('al_step":1,"fragment_id":-1,"members":["b"],"reason":"lost"}\nno record\n{"kind":"left"}\n')
    feed.look()
    assert [event["n"] for event in feed.news()["events"]] == [3]
    assert feed.whole()["events"][-1] == {"n": 3, "t": 6.0, "kind": "disconnected", "who": ["b"], "reason": "lost"}


def test_the_drift_of_each_island_is_a_curve_and_no_event(tmp_path: Path) -> None:
    folder = made_run(tmp_path)
    for n, cosine in enumerate((0.5, None, 0.25)):
        for name in "ab":
            append(folder, drift(name, 5.0 + n, 2 + n, 1.0 + n, cosine))
    feed = RunFeed(folder)
    feed.look()
    told = feed.whole()
    curves = told["metrics"]
    assert curves["drift_norm_ratio"]["b"] == [[5.0, 1.0], [6.0, 2.0], [7.0, 3.0]]
    assert [curves["drift_cosine"][name] for name in "ab"] == [[[5.0, 0.5], [7.0, 0.25]]] * 2
    assert "drift" not in {event["kind"] for event in told["events"]}


def test_the_number_of_islands_is_a_curve_until_the_run_is_complete(tmp_path: Path) -> None:
    folder = made_run(tmp_path)
    counts = ((5.0, 2), (6.0, 6), (7.0, 3))
    append(folder, *(wire(t, 1, 300, 600) | {"connected_islands": count} for t, count in counts))
    # The rounds of the made run have one member; two more have two and six.
    append(folder, note("merged", 6.5, 2, "a", "b"), note("merged", 6.75, 3, *"abcdef"))
    append(folder, note("finished", 8.0, 3), wire(9.0, 3, 300, 600) | {"connected_islands": 0})
    feed = RunFeed(folder)
    feed.look()
    islands = feed.whole()["curves"]["islands"]
    assert islands["connected"] == [[t, count] for t, count in counts]
    # A stretch is drawn in its middle, and begins where the one before it ends.
    assert islands["merged per round"] == [[4.5, 1], [5.5, 2], [6.625, 6]]


def test_the_loss_on_each_corpus_is_a_curve(tmp_path: Path) -> None:
    folder = made_run(tmp_path)
    append(
        folder, evaluation(5.0, 1, 30, 2.0, french=3.0, dutch=1.0), evaluation(6.0, 2, 40, 1.5, french=2.0, dutch=None)
    )
    feed = RunFeed(folder)
    feed.look()
    assert feed.whole()["metrics"]["evaluation loss"] == {"french": [[5.0, 3.0], [6.0, 2.0]], "dutch": [[5.0, 1.0]]}


def test_leaving_a_complete_run_is_not_news(tmp_path: Path) -> None:
    folder = made_run(tmp_path)
    append(folder, {**lost("a", 4.7), "kind": "left", "reason": DRAINED}, lost("a", 5.0))
    append(folder, {**lost("", 6.0), "kind": "finished"}, lost("b", 7.0), lost("a", 8.0))
    feed = RunFeed(folder)
    feed.look()
    kinds = ["joined", "joined", "left", "disconnected", "finished"]
    assert [event["kind"] for event in feed.whole()["events"]] == kinds == [e["kind"] for e in feed.news()["events"]]


def test_another_run_in_the_same_folder_starts_again(tmp_path: Path) -> None:
    feed = RunFeed(made_run(tmp_path))
    feed.look()
    feed.news()
    assert not feed.fresh
    (tmp_path / "metrics.jsonl").write_text("")
    append(tmp_path, joined("c", 0.5))
    feed.look()
    assert feed.fresh and [event["who"] for event in feed.whole()["events"]] == [["c"]] and not feed.whole()["rounds"]


def test_a_long_run_takes_no_more_room(tmp_path: Path) -> None:
    folder = made_run(tmp_path)
    append(folder, *(record for number in range(2, 3 * ROUNDS_KEPT) for record in one_round(number, float(number))))
    feed = RunFeed(folder)
    feed.look()
    rounds = feed.whole()["rounds"]
    assert [this["step"] for this in rounds] == [*range(2 * ROUNDS_KEPT, 3 * ROUNDS_KEPT)]


TIMES = [
    # a steps at 0..1 and 1.5..2.5 and is killed; it is back at 6 and steps at 7..8
    ([joined("a", 0.0), step("a", 1.0, 1, 10, 1.0), step("a", 2.5, 2, 20, 1.0), lost("a", 2.5), joined("a", 6.0, 2),
      step("a", 8.0, 1, 30, 1.0, incarnation=2)], {"training": 3.0, "between": 0.5, "away": 3.5, "joining": 1.0}),
    # its link breaks, it trains on, and tells it when it is back
    ([joined("a", 0.0), step("a", 1.0, 1, 10, 1.0), lost("a", 1.0), joined("a", 4.0), step("a", 5.0, 5, 50, 1.0)],
     {"training": 5.0}),
    # The same, with an idle second.
    ([joined("a", 0.0), step("a", 1.0, 1, 10, 1.0), lost("a", 1.0), joined("a", 4.0), step("a", 5.0, 4, 40, 1.0)],
     {"training": 4.0, "away": 1.0}),
    # it is back sooner, and begins its next step late
    (
        [joined("a", 0.0), step("a", 1.0, 1, 10, 1.0), lost("a", 1.0), joined("a", 2.0), step("a", 5.0, 2, 20, 1.0)],
        {"training": 2.0, "away": 1.0, "between": 2.0},
    ),
    # a report is late and the next in time: the steps were as long as they were
    (
        [joined("a", 0.0), step("a", 1.0, 1, 10, 1.0), step("a", 2.5, 2, 20, 1.0), step("a", 3.0, 3, 30, 1.0)],
        {"training": 3.0},
    ),
    # silent since its last word, and heard again
    ([joined("a", 0.0), step("a", 1.0, 1, 10, 1.0), {**lost("a", 4.0), "kind": "silent"}, wire(5.0, 1, 0, 0)],
     {"training": 1.0, "away": 4.0}),
    # data: half of the time in steps
    ([joined("a", 0.0), step("a", 2.0, 1, 10, 2.0), {"kind": "metrics", "t": 2.0, "global_step": 0, "learner": "a"}
      | {"values": {"waiting_for_data": 0.5}}, step("a", 4.0, 2, 20, 2.0)], {"training": 3.0, "data": 1.0}),
    # Islands that leave a complete run do not lower its goodput.
    ([joined("a", 0.0), step("a", 1.0, 1, 10, 1.0), {**lost("a", 1.5), "kind": "finished", "members": []},
      lost("a", 1.5), wire(9.0, 1, 0, 0)], {"training": 1.0, "between": 0.5}),
    # The syncer was stopped, and resumed from its tape.
    ([joined("a", 0.0), step("a", 1.0, 1, 10, 1.0), note("left", 2.0, 1, "a", reason=SYNCER_STOPPED),
      joined("a", 8.0, 2), step("a", 10.0, 1, 20, 1.0, incarnation=2)],
     {"training": 2.0, "between": 1.0, "stopped": 6.0, "joining": 1.0}),
]  # fmt: skip


@pytest.mark.parametrize(("records", "uses"), TIMES)
def test_every_island_second_has_one_use(records: list[dict[str, Any]], uses: dict[str, float]) -> None:
    times = IslandTimes(["a", "never"])
    for record in records:
        times.take(record)
    told = times.as_dict()
    nothing = dict.fromkeys(("training", "data", "between", "joining", "away", "stopped"), 0.0)
    assert told["islands"]["a"] == {**nothing, **uses}
    assert told["islands"]["never"] == {**nothing, "away": told["span_s"]}
    assert told["goodput"] == pytest.approx(uses["training"] / (2 * told["span_s"]), abs=1e-4)


def test_an_alarm_that_ended_is_neither_current_nor_told_twice(tmp_path: Path) -> None:
    """A red block over a complete run would tell of a fault that ended long before."""
    gone = Alarm("gone", "b", "b is disconnected: no connection")
    over = Standing(gone, 138.0, 154.0, stands=False).as_dict()
    folder = made_run(tmp_path, state="complete", episodes=[over])
    for t, state in ((138.0, "begins"), (154.0, "ends")):
        record = {"kind": "alarm", "t": t, "global_step": 1, "alarm": "gone", "state": state}
        append(folder, record | {"members": ["b"], "reason": gone.text})
    for summary in ({}, {"learners": {}, "wire": {}, "alarms": [over]}):
        (folder / "summary.json").write_text(json.dumps(summary))
        feed = RunFeed(folder)
        feed.look()
        told = feed.whole()
        assert told["alarms"] == [] and told["ended"] == [over] and "1 alarm that ended" in told["verdict"]
        assert [event["kind"] for event in told["events"]][-2:] == ["alarm", "alarm ended"]
    assert compare([folder])["rows"][0]["alarms"] == 1


def test_a_page_follows_a_file_that_is_thinned(tmp_path: Path) -> None:
    """What it shows is what a page shows that comes later, and what one shows of all records."""
    exact, folder = made_run(tmp_path / "exact"), made_run(tmp_path / "thinned")
    feed, telemetry = RunFeed(folder), Telemetry(folder, bytes_max=30_000)
    for n in range(2, 400):
        records = [step("a", n + 0.1, n + 1, 10 * n), step("b", n + 0.2, n, 10 * n), *one_round(n, n + 0.3)]
        append(exact, *records)
        for record in records:
            telemetry.write(record)
        telemetry.flush()
        if n % 10 == 0:
            telemetry._file.settle()
        while feed.look():
            pass
    telemetry.close()
    feed.look()
    later, whole = RunFeed(folder), RunFeed(exact)
    assert not later.look() and not whole.look()
    told = [each.whole() for each in (feed, later, whole)]
    assert (folder / "metrics.jsonl").stat().st_size < 40_000 < (exact / "metrics.jsonl").stat().st_size
    rounds = [each["rounds"] for each in told]
    assert rounds[0] == rounds[2] and len(rounds[1]) > 20
    assert rounds[1][1:] == rounds[2][1 - len(rounds[1]) :], "some records of its first one may be summed up"
    totals = [each["summary"]["learners"] for each in told]
    for key in ("local_steps", "tokens", "participation", "restarts"):
        assert [totals[0][name][key] for name in "ab"] == [totals[2][name][key] for name in "ab"]
        assert [totals[1][name][key] for name in "ab"] == [totals[2][name][key] for name in "ab"], key
    assert sum(cell[2] for cell in told[1]["curves"]["cells"]) == sum(cell[2] for cell in told[2]["curves"]["cells"])
    assert told[1]["times"]["goodput"] == pytest.approx(told[2]["times"]["goodput"], abs=0.01)


@pytest.mark.parametrize("command", ["status", "report", "view", "compare"])
def test_no_command_that_people_use_often_opens_the_tape(command: str, tmp_path: Path) -> None:
    """A tape of a long run has gigabytes; here it cannot be opened."""
    folder = made_run(tmp_path)
    (folder / "tape.jsonl").mkdir()
    found = call(command, folder, "--json")
    assert found.returncode == 0 and json.loads(found.stdout)


def test_alarms_of_a_run_that_ended_are_those_of_its_summary() -> None:
    stood, stands = Alarm("gone", "a", "a is disconnected").as_dict(), Alarm("slow", "b", "b is slow").as_dict()
    assert alarms_now(status(alarms=[stands]), {}) == [stands]
    assert alarms_now(status(state="stopped", alarms=[stands]), {"alarms": [stood]}) == [stood]
    dead = status(state="not running", remedy="resume", said_s_ago=9.0, learners=[])
    assert alarms_now(dead, {}) == [{"text": "the run is not running", "remedy": "resume"}]


def test_runs_are_compared_by_results_and_settings(tmp_path: Path) -> None:
    for name, steps, summary in (("x", 10, True), ("y", 20, False)):
        folder = made_run(tmp_path / name)
        (folder / "config.yaml").write_text(f"name: {name}\ntrain: {{steps: {steps}}}\nislands: {{count: 2}}\n")
        if summary:
            made = {"eval_loss": 1.25, "goodput": 0.5, "alarms": [{"text": "bad"}], "wire": {}}
            (folder / "summary.json").write_text(json.dumps({**made, "learners": {"a": {"restarts": 2}}}))
    found = compare([tmp_path / "x", tmp_path / "y"])
    x, y = found["rows"]
    assert (x["eval_loss"], x["goodput"], x["restarts"], x["alarms"]) == (1.25, 0.5, 2, 1)
    assert (y["eval_loss"], y["global_steps"], y["up_bytes"], y["restarts"], y["alarms"]) == (None, 1, 300, 0, 0)
    assert found["settings"] == {"name": ["x", "y"], "train.steps": [10, 20]}
    lines = [line.split() for line in describe(found, 100).splitlines()]
    assert ["x", "y"] in lines and ["train.steps", "10", "20"] in lines and ["eval", "loss", "1.2500", "–"] in lines


@pytest.mark.parametrize("command", ["view", "compare"])
def test_a_folder_without_a_run_is_one_clear_error(command: str, tmp_path: Path) -> None:
    found = call(command, tmp_path, "--json")
    assert found.returncode == 2 and f"{tmp_path} is not the folder of a run" in found.stderr


def test_json_is_what_the_page_shows(tmp_path: Path) -> None:
    found = call("view", made_run(tmp_path), "--json")
    told = json.loads(found.stdout)
    assert found.returncode == 0 and told["runs"][0]["rounds"] == [MADE]


def test_a_new_reader_gets_the_whole_and_then_news(tmp_path: Path) -> None:
    board = Board([RunFeed(made_run(tmp_path))])
    try:
        viewer = board.watch()
        assert next(viewer).startswith(b"event: whole\ndata: {")
        rounds = b""
        while b'"arrived":{"a":0.25}' not in rounds:
            rounds = next(viewer)
        append(tmp_path, lost("b", 7.0))
        while b'"kind":"disconnected"' not in rounds:
            rounds = next(viewer)
        assert rounds.startswith(b"event: ")
    finally:
        board.close()
    assert list(viewer) == []
