"""One row of the table of figures is enough for every outlet."""

import json
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.watch.stats import RunStats
from diloco_jax.runtime.figures import table
from diloco_jax.runtime.figures.facts import IslandFacts, RunFacts
from diloco_jax.runtime.figures.forms import COUNT, MEAN
from diloco_jax.runtime.figures.table import Figure, Series, Words
from diloco_jax.runtime.trackers.outlets import Outlets
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import parse
from diloco_jax.tools.page.compare import compare
from diloco_jax.tools.page.compare import describe as describe_comparison
from diloco_jax.tools.page.page import write_report
from diloco_jax.tools.terminal.changes import Changes
from diloco_jax.tools.terminal.picture import render
from diloco_jax.tools.terminal.words import describe
from tests.protocol.syncer_inputs import hello, new, report
from tests.runtime.syncer.scraped import Scraped, get, one_round, served
from tests.tools.page.made import made_run
from tests.tools.terminal.made import drawn, learner
from tests.tools.terminal.made import status as live_status

OF_RUN = Figure[RunFacts](
    "tokens_per_round",
    "tokens per round",
    COUNT,
    lambda run: (run.tokens or 0) / max(1, run.global_step or 0),
    files=("status", "summary"),
    live=Words("{} tokens per round"),
    status=Words("tokens per round: {}"),
    change=Words("{} tokens per round"),
    page=99,
    compare=99,
    series=Series("diloco_tokens_per_round", "gauge", "tokens", "tokens over rounds"),
    tracked=True,
)
OF_ISLAND = Figure[IslandFacts](
    "tokens_per_step",
    "tokens per step",
    MEAN,
    lambda island: (island.tokens or 0) / max(1, island.local_step or 0),
    files=("status", "summary"),
    column="tokens\nper step",
    status=Words("{} tokens per step"),
    page=99,
    series=Series("diloco_island_tokens_per_step", "gauge", "tokens", "tokens over steps"),
)


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table with two more rows, and no other change."""
    monkeypatch.setattr(table, "RUN_FIGURES", (*table.RUN_FIGURES, OF_RUN))
    monkeypatch.setattr(table, "ISLAND_FIGURES", (*table.ISLAND_FIGURES, OF_ISLAND))


def config() -> RunConfig:
    return parse({"islands": {"count": 2}, "syncer": {"metrics": "127.0.0.1:0"}, "trackers": []}, "a test")


@pytest.mark.net
def test_json_and_prometheus_have_the_rows(tmp_path: Path) -> None:
    scraped = Scraped(tmp_path, config(), new(quorum=2))
    one_round(scraped)
    with served(scraped.exposed) as url:
        status = scraped.tell(9.0)
        text = get(url)
    assert status["tokens_per_round"] == 30 and status["learners"][0]["tokens_per_step"] == 10
    assert "diloco_tokens_per_round 30.0" in text
    assert 'diloco_island_tokens_per_step{island="island-0"} 10.0' in text
    summary = table.with_figures("summary", scraped.stats.summary(status["wire"], 9.0))
    assert summary["tokens_per_round"] == 30 and summary["learners"]["island-0"]["tokens_per_step"] == 10


def test_status_and_live_view_have_the_rows() -> None:
    status = live_status(learners=[learner("island-0")])
    text = describe(status)
    assert "tokens per round: 4.1k" in text and "1024.00 tokens per step" in text
    picture = drawn(render(status, 120), 120)
    assert "4.1k tokens per round" in picture and "per step" in picture and "1024.00" in picture
    lines = [Changes(0.0).look(status | {"learners": []}, (), 0.0)]
    changes = Changes(0.0)
    lines = [changes.look(status, (), float(second)) for second in range(9)]
    assert any("4.1k tokens per round" in line for line in lines)


def test_page_report_and_comparison_have_the_rows(tmp_path: Path) -> None:
    folder = made_run(tmp_path)
    page = write_report(folder).read_text(encoding="utf-8")
    (data,) = re.findall(r'<script type="application/json" id="data">(.*)</script>', page)
    run = json.loads(data)["runs"][0]
    assert run["figures"][-1] == {"name": "tokens_per_round", "words": "tokens per round", "value": 40, "text": "40"}
    assert run["columns"][-1] == {"name": "tokens_per_step", "words": "tokens per step"}
    assert run["islands"]["a"]["tokens_per_step"] == "10.00"
    found = compare([folder])
    assert found["rows"][0]["tokens_per_round"] == 30
    assert re.search(r"tokens per round +30", describe_comparison(found, 100))


def test_trackers_get_the_row() -> None:
    outlets, calls = Outlets(config(), Path()), list[Any]()
    outlets._trackers = [SimpleNamespace(call=lambda *arguments: calls.append(arguments))]  # type: ignore[list-item]
    record = {"kind": "wire", "t": 1.0, "global_step": 4, "up_bytes": 1, "down_bytes": 2, "tokens_per_round": 30.0}
    outlets.write(record)
    values = {"up_bytes": 1, "down_bytes": 2, "tokens_per_round": 30.0}
    assert calls == [("log", 4, values, "merged")]


def test_the_facts_of_an_island_are_those_that_the_syncer_counts() -> None:
    syncer: Syncer = new(quorum=1)
    stats = RunStats(("a",), 100, syncer)
    syncer.on_message(hello("a"), 0.0)
    stats.on_report(report("a", 1), 1.0)
    (row,) = stats.status(1.0)
    moved = {"up_bytes", "down_bytes", "up_bytes_per_s", "down_bytes_per_s"}
    assert {each.name for each in fields(IslandFacts)} == {*row, "metrics", *moved}, "its link is counted elsewhere"


def test_the_bytes_of_islands_are_among_those_of_the_wire() -> None:
    wire = {"up_bytes": 9, "down_bytes": 5, "by_island": {"a": {"up_bytes": 7, "down_bytes": 4}}}
    for learners in ([{"learner": "a"}, {"learner": "b"}], {"a": {}, "b": {}}):
        facts = RunFacts.of({"wire": wire, "learners": learners})
        assert [(each.up_bytes, each.down_bytes) for each in facts.islands] == [(7, 4), (None, None)]
        assert (facts.up_bytes, facts.down_bytes) == (9, 5)


def test_names_and_series_are_unique() -> None:
    for rows in (table.RUN_FIGURES, table.ISLAND_FIGURES):
        names = [row.name for row in rows]
        assert len(set(names)) == len(names)
    series = [row.series.name for row in table.RUN_FIGURES if row.series]
    series += [row.series.name for row in table.ISLAND_FIGURES if row.series]
    assert len(set(series)) == len(series)
