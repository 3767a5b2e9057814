"""Profiles of a learner that trains: made, refused, and never the end of it."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest

from diloco_jax.protocol.messages import StepReport
from diloco_jax.runtime.learner.profiling import Profiling, ask_profile, order_path
from tests.runtime.learner.test_run import NAME, Script

pytestmark = [pytest.mark.net, pytest.mark.timeout(120)]


def steps_in(folder: str | Path) -> list[int]:
    """The steps of a trace, as a viewer finds them."""
    (trace,) = Path(folder).rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(trace)).planes
    events = [event for plane in planes for line in plane.lines for event in line.events if event.name == "step"]
    return sorted(int(dict(event.stats)["step_num"]) for event in events)


def test_a_learner_is_profiled_while_it_trains_and_trains_on_when_it_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(tmp_path)
    script.admit(samples=(0, 1_000_000))
    script.await_message(StepReport)
    result = ask_profile(tmp_path, NAME, 3)
    first = int(result["folder"].rpartition("-")[2]) + 1
    assert steps_in(result["folder"]) == [first, first + 1, first + 2]

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no space left")

    monkeypatch.setattr(jax.profiler, "start_trace", broken)
    with pytest.raises(ValueError, match="island-0 could not be profiled, and trains on: no space left"):
        ask_profile(tmp_path, NAME, 3)
    now = script.tape("step")[-1][1]
    while script.await_message(StepReport).local_step <= now:
        pass
    script.end()
    assert not order_path(tmp_path, NAME).exists() and script.error is None


def test_a_learner_that_leaves_ends_its_profile(tmp_path: Path) -> None:
    profiling, path = Profiling(tmp_path, NAME), order_path(tmp_path, NAME)
    path.parent.mkdir()
    path.write_text(json.dumps({"state": "asked", "steps": 100}))
    for step in (5, 6, 7):
        profiling.step_done(step)
    profiling.close()
    told = json.loads(path.read_text())
    assert (told["state"], told["steps"]) == ("done", 2) and set(steps_in(path.parent / told["folder"])) >= {6, 7}
    assert Profiling(tmp_path, NAME) and not path.exists()  # another life forgets it


@pytest.mark.parametrize(
    ("island", "steps", "words"),
    [
        (NAME, 0, "--steps is 0; use 1 to 1000"),
        (NAME, 1001, "use 1 to 1000"),
        ("island-9", 1, "no island 'island-9'; there are: island-0"),
        (NAME, 1, "is being profiled already"),
    ],
)
def test_an_order_that_cannot_be_obeyed_is_refused(island: str, steps: int, words: str, tmp_path: Path) -> None:
    for path, text in (
        (tmp_path / "tapes" / f"{NAME}.7.jsonl", ""),
        (order_path(tmp_path, NAME), '{"state": "asked"}'),
    ):
        path.parent.mkdir()
        path.write_text(text)
    with pytest.raises(ValueError, match=words):
        ask_profile(tmp_path, island, steps)
