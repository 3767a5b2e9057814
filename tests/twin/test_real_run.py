"""Reading a run's folder, and what is measured in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from twin.calibration import calibrate
from twin.real_run import deaths, read_run, syncer_deaths

from tests.twin.local_runs import BEGAN_UNIX_S, SETTINGS, fault, write_run

ONE = replace(SETTINGS, names=("island-0",))
FIRST, SECOND = (round(1000 * (BEGAN_UNIX_S + started_s)) for started_s in (1.0, 34.5))


def step(t: float, number: int, incarnation: int = FIRST, step_s: float = 0.375) -> dict[str, Any]:
    facts = {"learner": "island-0", "incarnation": incarnation, "local_step": number}
    return {"kind": "step", "t": t, "step_s": step_s, **facts}


def joined(t: float, incarnation: int) -> dict[str, Any]:
    return {"kind": "joined", "t": t, "members": ["island-0"], "reason": f"incarnation {incarnation}"}


def round_of(number: int, t: float, sync_s: float) -> list[dict[str, Any]]:
    kinds = (("closed", t), ("merged", t + sync_s))
    return [{"kind": kind, "t": at_s, "global_step": number, "members": ["island-0"]} for kind, at_s in kinds]


def killed(folder: Path) -> Path:
    """21 steps of half a second, a death at 30 s, a new life from 34.5 s on, and the syncer's death at 40 s."""
    records = [joined(4.0, FIRST), *(step(5.5 + 0.5 * n, n + 1) for n in range(22))]
    records += round_of(2, 8.0, 0.0625) + round_of(4, 9.0, 0.125) + round_of(6, 10.0, 0.25)
    records += [joined(36.0, SECOND), step(37.0, 1, SECOND, 0.5), {"kind": "restarted", "t": 42.0, "reason": ""}]
    records += [{"kind": "finished", "t": 45.125, "members": [], "reason": ""}]
    book = [
        {"event": "begin", "t": 30.0, "fault": 1, "kind": "kill", "target": "island-0", "at_step": 7},
        {"event": "recovered", "t": 37.5, "fault": 1, "kind": "kill", "target": "island-0"},
        {"event": "begin", "t": 39.0, "fault": 2, "kind": "stop", "target": "island-0", "at_step": 8},
        {"event": "end", "t": 39.75, "fault": 2, "kind": "stop", "target": "island-0", "at_step": 8},
        {"event": "begin", "t": 40.0, "fault": 3, "kind": "kill-syncer", "target": "syncer", "at_step": 9},
    ]
    return write_run(folder, records, {"goodput": 0.75, "contributors_per_round": 1.0}, book)


def test_times_rounds_and_faults_are_those_of_the_folder(tmp_path: Path) -> None:
    run = read_run(killed(tmp_path / "run"), ONE)
    assert (run.began_s, run.ended_s, run.rounds) == (5.125, 45.125, 3)
    assert run.rounds_per_s == 3 / 40.0
    assert (run.goodput, run.uptime, run.contributors_per_round) == (0.75, 1.0, 1.0)
    assert run.faults == [
        fault("kill", "island-0", 30.0, number=1, at_step=7),
        fault("stop", "island-0", 39.0, number=2, at_step=8, duration_s=0.75),
        fault("kill-syncer", "syncer", 40.0, number=3, at_step=9),
    ]
    ((_, life),) = deaths(run)
    assert (life.started_s, life.joined_s, life.stepped_s) == (34.5, 36.0, 36.5)
    assert [back_s for _, back_s in syncer_deaths(run)] == [42.0]


def test_calibration_splits_a_restart_into_its_parts(tmp_path: Path) -> None:
    measured = calibrate([read_run(killed(tmp_path / "run"), ONE)])
    assert (measured.step_s, measured.gap_s, measured.step_noise) == ({"island-0": 0.5}, 0.125, 0.0)
    assert measured.merge_s == 0.125 - 2 * measured.delay_s, "the median"
    assert measured.notice_s == 0.5, "4.5 s from death to start, of which 4 are the supervisor's delay"
    assert (measured.boot_s, measured.ready_s) == (1.5, 0.5)
    assert measured.syncer_boot_s == 2.0 - SETTINGS.syncer_restart_delay_s - measured.notice_s
    assert (measured.restarts, measured.syncer_restarts) == (1, 1)
    assert measured.value_bytes == round(4000 / 3)
    assert measured.first_step_s == {"island-0": 0.0}


def test_a_step_that_nobody_reported_makes_no_long_one(tmp_path: Path) -> None:
    steps = [step(5.5 + 0.5 * n, n + 1) for n in range(30) if n not in (10, 11)]
    run = read_run(write_run(tmp_path / "run", [*steps, {"kind": "finished", "t": 20.5, "members": []}], {}), ONE)
    assert set(run.periods_s["island-0"]) == {0.5} and len(run.periods_s["island-0"]) == 26


def test_a_life_that_never_greeted_is_not_measured(tmp_path: Path) -> None:
    run = read_run(killed(tmp_path / "run"), ONE)
    run.lives["island-0", SECOND].joined_s = run.lives["island-0", SECOND].stepped_s = None
    measured = calibrate([run])
    assert (measured.boot_s, measured.ready_s, measured.notice_s) == (0.0, 0.0, 0.5)


@pytest.mark.parametrize("missing", ["summary.json", "clock.json", "metrics.jsonl"])
def test_a_folder_without_a_whole_run_is_refused(tmp_path: Path, missing: str) -> None:
    folder = killed(tmp_path / "run")
    (folder / missing).unlink()
    with pytest.raises(ValueError, match=missing):
        read_run(folder, ONE)


def test_a_run_that_was_stopped_or_has_no_steps_is_refused(tmp_path: Path) -> None:
    stopped = write_run(tmp_path / "stopped", [], {"complete": False})
    with pytest.raises(ValueError, match="ended early"):
        read_run(stopped, ONE)
    with pytest.raises(ValueError, match="no steps"):
        read_run(write_run(tmp_path / "empty", [], {}), ONE)


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    folder = killed(tmp_path / "run")
    path = folder / "metrics.jsonl"
    path.write_text("{broken\n" + path.read_text() + '{"kind": "half of a li')
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        read_run(folder, ONE)
    path.write_text(path.read_text().removeprefix("{broken\n"))
    assert read_run(folder, ONE).rounds == 3, "a last line without its end is what a killed writer leaves"


def test_too_short_a_run_calibrates_nothing(tmp_path: Path) -> None:
    records = [step(5.5 + 0.5 * n, n + 1) for n in range(19)] + [{"kind": "finished", "t": 20.0, "members": []}]
    run = read_run(write_run(tmp_path / "run", records, {}), ONE)
    with pytest.raises(ValueError, match="island-0 made fewer than 21 steps"):
        calibrate([run])
