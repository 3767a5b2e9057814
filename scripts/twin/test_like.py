"""Tests of reading real runs, of their comparison with simulated runs, and of refused runs."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco_jax.settings.islands import IslandsConfig
from diloco_jax.settings.run import RunConfig, SyncerConfig, TrainConfig
from diloco_jax.settings.text import dump
from diloco_jax.transport.link import TransportConfig
from twin.__main__ import main
from twin.calibration import calibrate
from twin.like import compare, describe
from twin.local_runs import BEGAN_UNIX_S, CALIBRATION, PROTOCOL, SETTINGS, fault, simulate_run, write_run
from twin.real_run import RealRun, read_run, restarts, syncer_restarts

FAULTS = (
    fault("kill", "island-1", 20.0, number=1, at_step=20),
    fault("stop", "island-2", 32.0, number=2, at_step=44, duration_s=4.0),
    fault("kill-syncer", "syncer", 45.0, number=3, at_step=70),
    fault("kill", "island-0", 56.0, number=4, at_step=88),
)


def folders(tmp_path: Path) -> tuple[RealRun, list[RealRun]]:
    """Return a chaos run, and two runs with other seeds and other faults for its calibration."""
    kills = (fault("kill", "island-2", 25.0, number=1, at_step=25), fault("kill-syncer", "syncer", 40.0, number=2))
    made = [
        simulate_run(tmp_path / "run", FAULTS, seed=1),
        simulate_run(tmp_path / "calm", (), seed=2),
        simulate_run(tmp_path / "kills", kills, seed=3),
    ]
    run, *others = (read_run(folder, SETTINGS) for folder in made)
    return run, others


def test_calibration_finds_what_the_runs_were_made_with(tmp_path: Path) -> None:
    _, others = folders(tmp_path)
    found = calibrate(others)
    for name, step_s in CALIBRATION.step_s.items():
        assert found.step_s[name] == pytest.approx(step_s, rel=0.01)
        assert found.first_step_s[name] == pytest.approx(CALIBRATION.first_step_s[name], abs=0.02)
    for name, slack in {"notice_s": 0.02, "boot_s": 0.02, "ready_s": 0.02, "merge_s": 0.005, "gap_s": 0.002}.items():
        assert getattr(found, name) == pytest.approx(getattr(CALIBRATION, name), abs=slack), name
    assert found.syncer_boot_s == pytest.approx(CALIBRATION.syncer_boot_s, abs=0.05)
    assert found.value_bytes == CALIBRATION.value_bytes


def test_a_simulated_run_is_predicted_both_ways(tmp_path: Path) -> None:
    run, others = folders(tmp_path)
    result = compare(run, others, 3)
    assert [row["faults"] for row in result["rows"]] == ["given", "schedule", "none"]
    assert result["real"]["goodput"] < 0.94 and result["faults"] == 4 and not result["note"]
    for way, points, percent in (("given", 0.7, 2.0), ("schedule", 1.5, 4.0)):
        difference = result["difference"][way]
        assert abs(difference["goodput_points"]) < points, way
        assert abs(difference["rounds_per_s_percent"]) < percent, way
    assert result["difference"]["none"]["goodput_points"] > 5.0, (
        "faults that cost nothing could not be told from others"
    )
    for row in result["rows"]:
        assert row["goodput_low"] <= row["goodput"] <= row["goodput_high"]
    json.dumps(result, allow_nan=False)
    assert [line.split()[0] for line in describe(result).splitlines()] == [
        *["goodput", "real", "given", "schedule", "none", "4"]
    ]


def test_other_restarts_would_be_seen(tmp_path: Path) -> None:
    """A calibration with slower restarts of islands changes the prediction."""
    run, others = folders(tmp_path)
    slower = read_run(simulate_run(tmp_path / "slower", FAULTS, seed=4), replace(SETTINGS, restart_delay_s=0.0))
    assert calibrate([others[0], slower]).notice_s == pytest.approx(CALIBRATION.notice_s + 4.0, abs=0.02)
    expected, other = (compare(run, [others[0], each], 1)["rows"][0]["goodput"] for each in (others[1], slower))
    assert other < expected - 0.02


def test_kinds_that_only_have_times_are_predicted_one_way(tmp_path: Path) -> None:
    _, others = folders(tmp_path)
    donor = [fault("kill-donor", "island-1", 20.0, at_step=20)]
    run = read_run(simulate_run(tmp_path / "donor", donor, seed=5), SETTINGS)
    result = compare(run, others, 1)
    assert [row["faults"] for row in result["rows"]] == ["given", "none"] and "kill-donor" in result["note"]
    assert result["note"] in describe(result)


def test_runs_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    run, others = folders(tmp_path)
    with pytest.raises(ValueError, match="compared with itself"):
        compare(run, [*others, run], 1)
    with pytest.raises(ValueError, match="no island was killed"):
        compare(run, others[:1], 1)
    with pytest.raises(ValueError, match="--simulations is 0"):
        compare(run, others, 0)
    fewer = replace(SETTINGS, names=SETTINGS.names[:2])
    with pytest.raises(ValueError, match="other islands"):
        compare(run, [read_run(others[0].folder, fewer)], 1)
    book = [{"event": "begin", "t": 20.0, "fault": 1, "kind": "full-disk", "target": "syncer", "at_step": 3}]
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    disk = read_run(write_run(tmp_path / "disk", records, {}, book), SETTINGS)
    with pytest.raises(ValueError, match="full-disk"):
        compare(disk, others, 1)


CONFIG = RunConfig(
    protocol=PROTOCOL,
    islands=IslandsConfig(count=len(SETTINGS.names), restart_delay_s=SETTINGS.restart_delay_s),
    syncer=SyncerConfig(restart_delay_s=SETTINGS.syncer_restart_delay_s),
    train=TrainConfig(steps=SETTINGS.total_steps, batch_size=4 * len(SETTINGS.names)),
    transport=TransportConfig(connect_timeout_s=SETTINGS.connect_timeout_s),
)


def make(folder: Path, *kills: int) -> str:
    """Write a run whose island-1 is killed at these times, and return its folder."""
    deaths = [fault("kill", "island-1", float(at_s), number=n, at_step=at_s) for n, at_s in enumerate(kills, 1)]
    simulate_run(folder, deaths, seed=len(kills))
    (folder / "config.yaml").write_text(dump(CONFIG), encoding="utf-8")
    return str(folder)


def test_real_and_simulated_figures_are_printed_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, calm, kills = make(tmp_path / "run", 20, 40), make(tmp_path / "calm"), make(tmp_path / "kills", 30)
    words = [run, "--calibrate", calm, kills, "--simulations", "2"]
    assert main([*words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["run"] == run and printed["faults"] == 2 and printed["calibration"]["restarts"] == 1
    assert abs(printed["difference"]["given"]["goodput_points"]) < 1.0
    assert printed["calibration"]["notice_s"] < 0.2, "the restart delay of the config is not part of it"
    assert main(words) == 0
    assert "schedule" in capsys.readouterr().out


@pytest.mark.net
@pytest.mark.slow
def test_real_runs_are_made_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = "--seeds 1 --islands 2 --step-s 0.05 --steps 100 --faults 1 --kinds kill --simulations 1 --json"
    assert main([*job.split(), "--folder", str(tmp_path)]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) >= 7
    for row in rows:
        assert row["name"] and row["unit"] and math.isfinite(row["value"]), row


def test_wrong_folders_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(tmp_path / "run", 20)
    cases = (
        ([run], "RUN and --calibrate belong together"),
        ([run, "--calibrate", str(tmp_path)], "has no config.yaml"),
    )
    for words, message in cases:
        with pytest.raises(SystemExit, match="2"):
            main(words)
        assert message in capsys.readouterr().err


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
    """Write a run with steps of half a second, kills of the island (30 s) and the syncer (40 s)."""
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
    ((_, incarnation),) = restarts(run)
    assert (incarnation.started_s, incarnation.joined_s, incarnation.stepped_s) == (34.5, 36.0, 36.5)
    assert [back_s for _, back_s in syncer_restarts(run)] == [42.0]


def test_calibration_splits_a_restart_into_its_parts(tmp_path: Path) -> None:
    measured = calibrate([read_run(killed(tmp_path / "run"), ONE)])
    assert (measured.step_s, measured.gap_s, measured.step_noise) == ({"island-0": 0.5}, 0.125, 0.0)
    assert measured.merge_s == 0.125 - 2 * measured.delay_s, "the median"
    assert measured.notice_s == 0.5, "4.5 s from kill to start; 4 s of them are the supervisor's delay"
    assert (measured.boot_s, measured.ready_s) == (1.5, 0.5)
    assert measured.syncer_boot_s == 2.0 - SETTINGS.syncer_restart_delay_s - measured.notice_s
    assert (measured.restarts, measured.syncer_restarts) == (1, 1)
    assert measured.value_bytes == round(4000 / 3)
    assert measured.first_step_s == {"island-0": 0.0}


def test_a_missing_report_does_not_lengthen_a_step(tmp_path: Path) -> None:
    steps = [step(5.5 + 0.5 * n, n + 1) for n in range(30) if n not in (10, 11)]
    run = read_run(write_run(tmp_path / "run", [*steps, {"kind": "finished", "t": 20.5, "members": []}], {}), ONE)
    assert set(run.periods_s["island-0"]) == {0.5} and len(run.periods_s["island-0"]) == 26


def test_a_process_that_never_greeted_is_not_measured(tmp_path: Path) -> None:
    run = read_run(killed(tmp_path / "run"), ONE)
    run.incarnations["island-0", SECOND].joined_s = run.incarnations["island-0", SECOND].stepped_s = None
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
