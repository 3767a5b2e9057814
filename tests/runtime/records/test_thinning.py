"""Records of a long run are bounded, their sums stay exact, and a reader that follows them gets each one once."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from diloco_jax.runtime.records import thinning
from diloco_jax.runtime.records.telemetry import Telemetry, read_metrics
from diloco_jax.runtime.records.thinning import Combiner, RecordTail, ThinnedFile, combine, stands_for
from diloco_jax.tools.page.story import Story
from tests.tools.page.made import drift, joined, lost, note, step, wire

BOUND = 40_000
Record = dict[str, Any]


def a_run(rounds: int) -> list[Record]:
    """Return records of two islands; b leaves, returns, and is in two of three rounds."""
    found = [joined("a", 0.1), joined("b", 0.2)]
    for n in range(1, rounds + 1):
        members = ["a", "b"] if n % 3 else ["a"]
        found += [step("a", float(n), n, 10 * n, 0.5), note("closed", n + 0.1, n, *members, fragment_id=0)]
        if n == rounds // 2:
            found += [lost("b", n + 0.2), joined("b", n + 0.3, 2)]
        incarnation, local = (1, n) if n <= rounds // 2 else (2, n - rounds // 2)
        found.append(step("b", n + 0.4, local, 20 * n, 0.25, incarnation=incarnation))
        found += [note("merged", n + 0.5, n, *members, fragment_id=0), wire(n + 0.6, n, 100 * n, 200 * n)]
        if n % 100 == 0:
            found.append(
                {"kind": "eval", "t": n + 0.7, "global_step": n, "tokens": n, "loss": 1 / n, "bits_per_byte": 1}
            )
    return found


def written(folder: Path, records: list[Record], bound: int = BOUND) -> Path:
    """Write records as the syncer does; each thinning ends before more is written."""
    telemetry = Telemetry(folder, bytes_max=bound)
    for number, record in enumerate(records):
        telemetry.write(record)
        if number % 20 == 0:
            telemetry.flush()
            telemetry._file.settle()
    telemetry.close()
    return folder / "metrics.jsonl"


def story(records: list[Record]) -> Record:
    told = Story()
    for record in records:
        told.take(record)
    return told.counted()


@pytest.mark.parametrize("rounds", [50, 200, 1000])
def test_the_file_has_a_bound_and_every_total_stays(tmp_path: Path, rounds: int) -> None:
    records = a_run(rounds)
    path = written(tmp_path, records)
    kept = list(read_metrics(path))
    assert path.stat().st_size < 1.25 * BOUND
    assert (kept[0]["kind"] == "thinned") == (rounds > 50)
    exact, thinned = story(records), story(kept)
    for name in ("a", "b"):
        assert thinned["learners"][name].pop("step_overhead") == pytest.approx(
            exact["learners"][name].pop("step_overhead"), abs=0.01
        )
    assert thinned == exact
    counts: Counter[str] = Counter()
    for record in kept:
        counts[record["kind"]] += stands_for(record)
    counts.pop("thinned", None)
    assert counts == Counter(record["kind"] for record in records)
    rare = [record for record in records if record["kind"] in ("joined", "disconnected", "eval")]
    assert [record for record in kept if record["kind"] in ("joined", "disconnected", "eval")] == rare
    assert kept[-40:] == records[-40:], "the newest are exact"


def test_two_records_become_one() -> None:
    one, later = step("a", 1.0, 1, 10, 0.5, loss=4.0, arrived=[[1, 0.25]]), step("a", 2.0, 2, 20, 1.0, loss=1.0)
    later["n"] = 2
    assert combine(one, later) == step("a", 2.0, 2, 20, 0.833333, loss=2.0) | {"n": 3}
    merged = [note("merged", float(n), n, *who, fragment_id=n) for n, who in enumerate((["a"], ["a", "b"], ["c"]), 1)]
    both = combine(combine(merged[0], merged[1]), merged[2])
    assert both == merged[2] | {"n": 3, "counts": {"a": 2, "b": 1, "c": 1}}
    unknown = step("a", 1.0, 1, 10, 0.5, loss=None)
    assert combine(unknown, later)["loss"] == 1.0 and combine(later, unknown)["loss"] == 1.0


def test_the_drift_of_several_rounds_is_their_mean() -> None:
    one, two, three = drift("a", 1.0, 1, 2.0, 0.5), drift("a", 2.0, 2, 4.0, None), drift("a", 3.0, 3, 3.0, 0.25)
    assert combine(combine(one, two), three) == drift("a", 3.0, 3, 3.0, 0.416667) | {"n": 3}
    lines = [json.dumps(each).encode() for each in (one, drift("b", 1.0, 1, 1.0, 0.5), two)]
    combiner = Combiner(2)
    told = [json.loads(line) for each in lines for line, _ in combiner.take(each)]
    assert told == [drift("a", 2.0, 2, 3.0, 0.5) | {"n": 2}], "each island has its own mean"


def test_an_incarnation_and_a_note_end_a_group() -> None:
    records = [step("a", 1.0, 1, 1), step("b", 1.0, 1, 1), step("a", 2.0, 2, 2), lost("a", 2.5), step("a", 3.0, 3, 3)]
    records += [step("a", 3.0 + n, n, 4, incarnation=2) for n in (1, 2, 3)]
    combiner, lines = Combiner(8), []
    for record in records:
        lines += [line for line, _ in combiner.take(json.dumps(record).encode() + b"\n")]
    lines += [line for line, _ in combiner.rest()]
    found = [json.loads(line) for line in lines]
    told = [(each["kind"], each.get("learner"), each.get("local_step"), stands_for(each)) for each in found]
    steps = [("step", "a", 1, 1), ("step", "b", 1, 1), ("step", "a", 2, 1), ("disconnected", None, None, 1)]
    assert told == [*steps, ("step", "a", 3, 1), ("step", "a", 1, 1), ("step", "a", 3, 2)]


def test_rare_records_have_a_separate_bound(tmp_path: Path) -> None:
    records = [note("silent", float(n), n, "a", reason="x" * 50) for n in range(3000)]
    path = written(tmp_path, records)
    kept = list(read_metrics(path))[1:]
    assert path.stat().st_size < 1.25 * BOUND and kept == records[-len(kept) :] and len(kept) > 100


def test_learners_without_end_have_a_bound(tmp_path: Path) -> None:
    records = [step(f"island-{n}", float(n), 1, 1) for n in range(3000)]
    path = written(tmp_path, records)
    assert path.stat().st_size < 1.25 * BOUND and list(read_metrics(path))[-100:] == records[-100:]


def test_another_programs_line_stays(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    strange = ["no json", "[1]", '{"kind":"merged"}', '{"kind":"merged","n":"x"}', '{"kind":"step","values":{"x":"y"}}']
    path.write_text("".join(f"{line}\n" for line in strange))
    written(tmp_path, a_run(1000))
    lines = path.read_text().splitlines()
    assert lines[0].startswith('{"kind":"thinned"') and lines[1:3] == strange[:2]


@pytest.mark.parametrize("every", [1, 3, 50, 700])
def test_a_reader_that_follows_misses_and_doubles_nothing(tmp_path: Path, every: int) -> None:
    records, found = a_run(1500), []
    telemetry, tail, settled = Telemetry(tmp_path, bytes_max=BOUND), RecordTail(tmp_path / "metrics.jsonl"), 0
    for number, record in enumerate(records):
        telemetry.write(record)
        telemetry.flush()
        if number % every == 0:
            found += [json.loads(line) for line in tail.lines()]
        if number % 7 == 0:
            telemetry._file.settle()
        settled += number % every == 0
    telemetry.close()
    found += [json.loads(line) for line in tail.lines()]
    told = [record for record in found if record["kind"] != "thinned"]
    if every < 700:
        assert told == records and not tail.lost
    else:
        assert tail.lost, "more was summed up than the exact part holds"
        assert [record for record in told if record in records] == told[: len(told)]
        assert len(told) < len(records) and told[-100:] == records[-100:]


def test_another_run_in_the_same_place_is_told(tmp_path: Path) -> None:
    path = written(tmp_path, a_run(20))
    tail = RecordTail(path)
    assert len(list(tail.lines())) == len(a_run(20)) and not tail.lost
    path.write_text("")
    assert list(tail.lines()) == [] and tail.lost


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("at", ["write", "replace"])
def test_a_kill_while_it_is_thinned_loses_nothing(tmp_path: Path, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, before = tmp_path / "metrics.jsonl", b"".join(json.dumps(each).encode() + b"\n" for each in a_run(60))
    path.write_bytes(before)
    file = ThinnedFile(path, bound=len(before) // 2)

    def die(*args: object) -> None:
        raise Killed

    if at == "write":
        monkeypatch.setattr(thinning._Thinning, "_run", lambda job: job.draft.write_bytes(b'{"kind":"thin'))
    monkeypatch.setattr(os, "replace", die)
    file.append(b'{"kind":"last"}\n')
    with pytest.raises(Killed):
        file.settle()
    monkeypatch.undo()
    assert path.read_bytes() == before + b'{"kind":"last"}\n'
    again = ThinnedFile(path, bound=1 << 30)
    assert [each.name for each in tmp_path.iterdir()] == ["metrics.jsonl"]
    again.close()


def test_a_disk_that_refuses_the_draft_costs_no_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    file = ThinnedFile(path, bound=1000)
    (tmp_path / ".metrics.jsonl.thinned").mkdir()
    lines = [json.dumps(record).encode() + b"\n" for record in a_run(30)]
    for line in lines:
        file.append(line)
    file.settle()
    assert "cannot be thinned" in caplog.text and path.read_bytes() == b"".join(lines)
    (tmp_path / ".metrics.jsonl.thinned").rmdir()
    file.append(b'{"kind":"wire","t":1,"global_step":1,"up_bytes":1,"down_bytes":1}\n' * 10)
    file.settle()
    assert path.read_bytes().startswith(b'{"kind":"thinned"')
    file.close()
