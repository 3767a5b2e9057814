"""`diloco status` reports a run as running only if one of its processes confirms the file."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from diloco_jax.protocol.watch.stats import RunStats
from diloco_jax.runtime.records.earlier import read_earlier
from diloco_jax.runtime.records.liveness import judge, signature, tell_phase
from diloco_jax.runtime.records.status import compose_status, is_banned, read_status, start_again, upcoming
from diloco_jax.tools.terminal.changes import Changes
from diloco_jax.tools.terminal.words import describe
from diloco_jax.transport.session.calls import ask_status
from tests.protocol.syncer_inputs import hello, report, running


def folder(tmp_path: Path, *files: str) -> Path:
    """The folder of a run with these files."""
    for name in ("tape.jsonl", *files):
        (tmp_path / name).write_text("{}")
    return tmp_path


def word(state: str = "running", age_s: float = 0.0, **said: Any) -> dict[str, Any]:
    """A status that this process wrote, some time ago."""
    own = signature()
    own |= {"unix_s": time.time() - age_s, "supervisor": own["process"]} | said
    return {"run": "small", "state": state, "global_step": 3, "total_steps": 80, "wall_s": 9.0, "said": own}


def nobody() -> None:
    return None


# No system numbers so many processes.
GONE = [2**22 + 1, 0]
ELSEWHERE = {"age_s": 1e6, "process": GONE, "machine": "elsewhere"}


@pytest.mark.parametrize(
    ("state", "said", "files"),
    [
        ("running", {}, ()),
        ("complete", ELSEWHERE, ("summary.json",)),
        ("stopped", ELSEWHERE, ("summary.json",)),
        # The last evaluation may take long without any sign.
        ("complete", {"age_s": 3600}, ()),
    ],
)
def test_a_process_that_speaks_or_has_ended_well_is_believed(
    tmp_path: Path, state: str, said: dict[str, Any], files: tuple[str, ...]
) -> None:
    status = word(state, **said)
    assert judge(folder(tmp_path, *files), status, nobody) == status


@pytest.mark.parametrize("state", ["starting", "running", "complete", "stopped"])
def test_who_ended_without_a_summary_does_not_run(tmp_path: Path, state: str) -> None:
    pid, began = signature()["process"]
    # Another process got the number, or no process has it.
    for name in ([pid, began + 1], [2**22 + 1, began]):
        found = judge(folder(tmp_path), word(state, age_s=40, process=name, supervisor=name), nobody)
        assert found["state"] == "not running" and found["said_s_ago"] == pytest.approx(40, abs=5)
        assert "--resume" in found["remedy"] and str(tmp_path) in found["remedy"]


@pytest.mark.parametrize(
    ("said", "state", "words"),
    [
        ({}, "without a syncer", ["starts it again"]),
        ({"supervisor": None}, "not running", ["diloco syncer", "--rewind", "--resume"]),
    ],
)
def test_a_dead_syncer_comes_back_or_its_user_is_told_how(
    tmp_path: Path, said: dict[str, Any], state: str, words: list[str]
) -> None:
    found = judge(folder(tmp_path), word(process=GONE, **said), nobody)
    assert found["state"] == state and all(each in found["remedy"] for each in words)


def test_a_full_disk_keeps_an_old_file_while_the_syncer_is_well(tmp_path: Path) -> None:
    old, new = word(age_s=100), word()
    assert judge(folder(tmp_path), old, lambda: new) == new
    # Another run listens at this address now.
    other = word(process=[1, 1])
    assert judge(folder(tmp_path), old, lambda: other)["state"] == "silent"
    assert judge(folder(tmp_path), old, lambda: word(age_s=90))["state"] == "silent", "its loop hangs"


def test_on_another_machine_the_age_of_the_last_word_decides(tmp_path: Path) -> None:
    near, far = word(age_s=20, machine="host-7"), word(age_s=100, machine="host-7")
    assert judge(folder(tmp_path), near, nobody)["state"] == "running"
    found = judge(folder(tmp_path), far, nobody)
    assert found["state"] == "not running" and "it ran on host-7" in found["remedy"]
    assert judge(folder(tmp_path), far, lambda: word(machine="host-7"))["state"] == "running"


def test_a_data_parallel_run_cannot_be_resumed(tmp_path: Path) -> None:
    found = judge(tmp_path, word(age_s=40, process=GONE, supervisor=GONE), nobody)
    assert "data-parallel" in found["remedy"] and "--resume" not in found["remedy"]


def test_a_run_without_a_status_names_what_it_waits_for_or_where_to_look(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ValueError, match=r"see the output of its syncer$"):
        read_status(str(tmp_path), ask_status)
    (tmp_path / "logs").mkdir()
    with pytest.raises(ValueError, match=rf"see {tmp_path}/logs$"):
        read_status(str(tmp_path), ask_status)
    tell_phase(tmp_path, "syncer", "waiting for the first island, which sends the model")
    with pytest.raises(
        ValueError, match="it is starting; syncer: waiting for the first island, which sends the model, for 0 s"
    ):
        read_status(str(tmp_path), ask_status)


def test_a_run_that_starts_again_says_so(tmp_path: Path) -> None:
    earlier = word(age_s=1e5, process=GONE) | {
        "wire": {"up_bytes": 5, "down_bytes": 7, "by_island": {"a": {"up_bytes": 3, "down_bytes": 6}}},
        "eval_loss": 1.5,
        "eval_step": 3,
        "eval_scores": {"accuracy": 0.5},
        "requests": {"puts": 4},
    }
    (tmp_path / "status.json").write_text(json.dumps(earlier))
    start_again(tmp_path)
    told = read_status(str(tmp_path), ask_status)
    assert told["state"] == "starting" and told["learners"] == [] and told["global_step"] == 3
    of_a = {"a": {"up_bytes": 3, "down_bytes": 6}}
    wire = {"up_bytes": 5, "down_bytes": 7}
    stays = (wire, 1.5, [], 3, {"puts": 4}, of_a, {"accuracy": 0.5})
    assert read_earlier(tmp_path) == stays, "what only it tells stays"
    del earlier["wire"]["by_island"]
    (tmp_path / "status.json").write_text(json.dumps(earlier))
    assert read_earlier(tmp_path).by_island == {}, "an older version wrote it"
    start_again(tmp_path)
    (tmp_path / "status.json").unlink()
    start_again(tmp_path)
    assert not (tmp_path / "status.json").exists()


def test_a_resumed_run_says_that_its_islands_start() -> None:
    syncer = running("a", "b")
    stats = RunStats(("a", "b"), 10, syncer)
    for name in ("a", "b"):
        stats.on_report(report(name, 2), 2.0)
        syncer.on_disconnect(name, 1, "killed", 3.0)
    told: dict[str, Any] = {"stopped": False, "blocked": "", "alarms": [], "metrics": {}, "processes": {}}
    told |= {"left_s": None, "episodes": [], "eval_loss": None, "wire": {}, "num_parameters": 10}

    def look(awaited: str) -> dict[str, Any]:
        return compose_status("r", syncer, stats, 4.0, awaited=set(awaited), **told)

    assert [row["condition"] for row in look("")["learners"]] == ["gone", "gone"]
    status = look("ab")
    assert status["state"] == "starting"
    assert status["waiting_for"] == "islands, which are starting: 0 of 2 connected"
    assert {row["condition"] for row in status["learners"]} == {"joining"}
    line = "r is starting, waiting for: islands, which are starting: 0 of 2 connected"
    changes = Changes(0.0)
    assert [changes.look(status, (), float(second)) for second in range(3)] == [f"[start 0 s] {line}", "", ""]

    syncer.on_message(hello("a", incarnation=2, versions=tuple(syncer.versions)), 4.0)
    assert look("b")["waiting_for"] == "islands, which are starting: 1 of 2 connected"
    syncer.on_message(report("a", 1, incarnation=2), 4.0)
    assert look("b")["state"] == "running"


def test_banned_names_are_in_the_status_with_their_reasons(tmp_path: Path) -> None:
    syncer = running("a", "b")
    stats = RunStats(("a", "b"), 10, syncer)
    syncer.on_ban("b", "bad data", 3.0)
    syncer.on_ban("never-seen", "left the company", 3.0)
    told: dict[str, Any] = {"stopped": False, "blocked": "", "alarms": [], "metrics": {}, "processes": {}}
    told |= {"left_s": None, "episodes": [], "eval_loss": None, "wire": {}, "num_parameters": 10, "awaited": set()}
    status = compose_status("r", syncer, stats, 4.0, **told)
    assert status["bans"] == [
        {"learner": "b", "reason": "bad data"},
        {"learner": "never-seen", "reason": "left the company"},
    ]
    text = describe(status)
    assert text.endswith("\nbanned: b (bad data); never-seen (left the company)")
    assert "  b  banned for 1 s after inner step" in text and "; bad data;" in text
    (tmp_path / "status.json").write_text(json.dumps(status))
    assert is_banned(tmp_path, "b") and not is_banned(tmp_path, "a") and not is_banned(tmp_path / "none", "b")
    syncer.on_admit("b", 5.0)
    syncer.on_admit("never-seen", 5.0)
    assert "banned" not in describe(compose_status("r", syncer, stats, 6.0, **told))


def test_a_refused_island_is_shown_with_the_reason_until_it_connects() -> None:
    syncer = running("a", "b")
    stats = RunStats(("a", "b", "c"), 10, syncer)
    syncer.on_disconnect("b", 1, "killed", 3.0)
    told: dict[str, Any] = {"stopped": False, "blocked": "", "alarms": [], "metrics": {}, "processes": {}}
    told |= {"left_s": None, "episodes": [], "eval_loss": None, "wire": {}, "num_parameters": 10, "awaited": set()}
    told |= {"refused": {"a": "an old process", "b": "global steps differs", "c": "corpus differs"}}
    status = compose_status("r", syncer, stats, 4.0, **told)
    assert [row["learner"] for row in status["refused"]] == ["b", "c"]
    text = describe(status)
    assert "  b  disconnected for 1 s" in text and "; refused: global steps differs;" in text
    assert text.endswith("\nrefused: c: corpus differs") and "an old process" not in text
    syncer.on_message(hello("b", incarnation=2, versions=tuple(syncer.versions)), 5.0)
    assert "global steps differs" not in describe(compose_status("r", syncer, stats, 6.0, **told))


def test_an_old_status_describes_islands_in_the_past() -> None:
    syncer = running("a", "b")
    told: dict[str, Any] = {"stopped": False, "blocked": "", "alarms": [], "metrics": {}, "processes": {}}
    status = compose_status("r", syncer, RunStats(("a", "b"), 10, syncer), 4.0, left_s=None, **told)
    assert describe(status).count("  training for ") == 2
    old = describe(status | {"state": "not running", "remedy": "start it", "said_s_ago": 9.0})
    assert "training for" not in old and "  a  was training: inner step 1," in old


def test_status_and_summary_have_the_same_mean_of_contributors() -> None:
    syncer = running("a", "b")
    stats = RunStats(("a", "b"), 10, syncer)
    # 8673 / 4999 = 1.734947
    syncer.progress.merged_parts, syncer.progress.merged_rounds = 8673, 4999
    told: dict[str, Any] = {"stopped": False, "blocked": "", "alarms": [], "metrics": {}, "processes": {}}
    status = compose_status("r", syncer, stats, 4.0, left_s=None, **told)
    assert status["contributors_per_round"] == stats.summary({}, 4.0)["contributors_per_round"] == 1.7349


@pytest.mark.parametrize("content", ["{}", "[]", "5", "null", '{"name": 1}', "{"])
def test_a_file_of_something_else_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "status.json").write_text(content)
    with pytest.raises(ValueError, match=r"status\.json is (damaged or of another program|not readable)"):
        read_status(str(tmp_path), ask_status)


@pytest.mark.parametrize(
    ("step", "total", "due"),
    [
        (0, 30, {"evaluation": 10, "snapshot": 15}),
        (10, 30, {"evaluation": 20, "snapshot": 15}),
        (29, 30, {"evaluation": 30, "snapshot": 30}),
        (29, 29, {}),
    ],
)
def test_the_next_evaluation_and_snapshot(step: int, total: int, due: dict[str, int]) -> None:
    assert upcoming(step, total, {"evaluation": 10, "snapshot": 15, "never": 0}) == due
