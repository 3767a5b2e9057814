"""Profiles of a learner that trains: made, refused, and never the end of it."""

import json
from pathlib import Path

import jax
import pytest

from diloco_jax.protocol.messages import StepReport
from diloco_jax.runtime.learner.profiling import Profiling, ask_profile
from diloco_jax.settings.islands import IslandsConfig
from diloco_jax.settings.run import RunConfig
from tests.runtime.learner.test_run import NAME, Script

pytestmark = pytest.mark.net


def steps_in(folder: Path) -> list[int]:
    """The steps of a trace, as a viewer finds them."""
    (trace,) = folder.rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(trace)).planes
    events = [event for plane in planes for line in plane.lines for event in line.events if event.name == "step"]
    return sorted(int(dict(event.stats)["step_num"]) for event in events)


def test_a_learner_is_profiled_and_trains_on_when_it_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(tmp_path)
    script.admit(samples=(0, 1_000_000))
    script.await_message(StepReport)
    folder = Path(ask_profile(tmp_path, NAME, 3))
    first = int(folder.name.removeprefix(f"{NAME}-")) + 1
    assert steps_in(folder) == [first, first + 1, first + 2]
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: 1 / 0)
    with pytest.raises(ValueError, match="could not be profiled, and trains on: division by zero"):
        ask_profile(tmp_path, NAME, 3)
    now = script.tape("step")[-1][1]
    while script.await_message(StepReport).local_step <= now:
        pass
    script.end()
    assert [path.name for path in (tmp_path / "profiles").iterdir()] == [folder.name] and script.error is None
    with pytest.raises(ValueError, match="island-0 makes no steps"):
        ask_profile(tmp_path, NAME, 3)


def test_a_learner_that_leaves_ends_its_profile(tmp_path: Path) -> None:
    profiling, path = Profiling(tmp_path, NAME, RunConfig()), tmp_path / "profiles" / f"{NAME}.json"
    path.parent.mkdir()
    path.write_text('{"steps": 100}')
    for step in (5, 6, 7):
        profiling.step_done(step)
    profiling.close()
    assert steps_in(path.parent / json.loads(path.read_text())["folder"]) == [6, 7, 8]
    # A restarted process forgets it.
    assert Profiling(tmp_path, NAME, RunConfig()) and not path.exists()


@pytest.mark.parametrize(
    ("island", "steps", "words"),
    [
        (NAME, 1001, "use 1 to 1000"),
        ("island-9", 1, "no island 'island-9'; there are: island-0"),
        (NAME, 1, "is being profiled already"),
    ],
)
def test_an_order_that_cannot_be_obeyed_is_refused(island: str, steps: int, words: str, tmp_path: Path) -> None:
    for name in (f"tapes/{NAME}.7.jsonl", f"profiles/{NAME}.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=words):
        ask_profile(tmp_path, island, steps)


def pathways_trace(log_dir: str, **_: object) -> None:
    """What pathwaysutils puts in the place of jax.profiler.start_trace takes no other folder."""
    if not log_dir.startswith("gs://"):
        raise ValueError(f"Path must be a GCS path, got {log_dir}")


@pytest.mark.parametrize(
    ("folder", "answer"),
    [
        ("gs://mine/profiles/", {"steps": 0, "folder": f"gs://mine/profiles/small/{NAME}-1"}),
        (
            "",
            {
                "steps": 0,
                "failed": "Pathways writes profiles to Cloud Storage only; set islands.profiles to a gs:// folder",
            },
        ),
    ],
)
def test_on_pathways_profiles_go_to_cloud_storage(
    folder: str, answer: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax.profiler, "start_trace", pathways_trace)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    islands = IslandsConfig(controller="single", pathways=True, profiles=folder)
    profiling, path = Profiling(tmp_path, NAME, RunConfig(name="small", islands=islands)), tmp_path / "profiles"
    path.mkdir()
    path = path / f"{NAME}.json"
    path.write_text(json.dumps({"steps": 1}), encoding="utf-8")
    for step in (1, 2):
        profiling.step_done(step)
    assert json.loads(path.read_text(encoding="utf-8")) == answer


def test_profiles_elsewhere_are_refused() -> None:
    with pytest.raises(ValueError, match=r"islands\.profiles is 's3://mine'; write a folder of Cloud Storage, gs://"):
        IslandsConfig(profiles="s3://mine")
