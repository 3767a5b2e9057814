"""Records are strict JSON, and survive a writer that is killed in the middle of a line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_jax.runtime.records.telemetry import Telemetry, finite, read_metrics, write_json

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=10,
)


def step(t: float, learner: str = "island-0", **fields: Any) -> dict[str, Any]:
    record = {"kind": "step", "t": t, "learner": learner, "incarnation": 0, "local_step": 1, "tokens": 100}
    return record | {"global_step": 1, "loss": 2.5, "step_s": 0.25} | fields


def test_records_come_back_in_order(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path / "new" / "run")
    records = [step(0.5), {"kind": "merged", "t": 1.0, "global_step": 2, "fragment_id": 1, "members": ["island-0"]}]
    for record in records:
        telemetry.write(record)
    telemetry.flush()
    assert list(read_metrics(tmp_path / "new" / "run" / "metrics.jsonl")) == records
    telemetry.close()
    telemetry.close()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_json_cannot_say_becomes_null(tmp_path: Path, bad: float) -> None:
    telemetry = Telemetry(tmp_path)
    telemetry.write(step(1.0, loss=bad, nested=[{"x": bad}, 1.5]))
    telemetry.close()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line, parse_constant=refuse)
    assert record["loss"] is None
    assert record["nested"] == [{"x": None}, 1.5]


@given(PLAIN)
def test_finite_changes_only_what_is_not_finite(value: Any) -> None:
    text = json.dumps(finite(value), allow_nan=False)  # raises if anything is left
    expected = json.loads(json.dumps(value), parse_constant=lambda word: None)
    assert json.loads(text) == expected


@given(st.integers(min_value=0, max_value=200))
def test_a_file_cut_anywhere_still_reads(cut: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        lines = [json.dumps({"n": n, "text": "é"}, ensure_ascii=False) + "\n" for n in range(6)]
        whole = "".join(lines).encode()
        path.write_bytes(whole[:cut])
        complete = whole[:cut].count(b"\n")
        assert [record["n"] for record in read_metrics(path)] == list(range(complete))
        # a restarted writer goes on behind the last complete line, so nothing in the middle is ever torn
        telemetry = Telemetry(folder)
        telemetry.write({"n": -1})
        telemetry.close()
        assert [record["n"] for record in read_metrics(path)] == [*range(complete), -1]


def test_a_very_long_torn_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"n":0}\n' + "x" * 200_000)
    Telemetry(tmp_path).close()
    assert path.read_text() == '{"n":0}\n'


@pytest.mark.parametrize("line", ["{broken", "[1]", "", "{}"])
def test_a_bad_line_in_the_middle_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"n":0}}\n{line}\n{{"n":2}}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 .*remove that line"):
        list(read_metrics(path))


def test_write_json_replaces_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_json(path, {"loss": math.nan, "members": ("a", "b")})
    write_json(path, {"loss": 1.0})
    assert json.loads(path.read_text()) == {"loss": 1.0}
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]


def test_write_json_keeps_the_old_file_when_the_new_content_is_bad(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_json(path, {"ok": True})
    with pytest.raises(TypeError):
        write_json(path, {"bad": object()})
    assert json.loads(path.read_text()) == {"ok": True}
