"""A run that the simulator wrote itself is what it predicts, and what it cannot predict it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from twin.calibration import calibrate
from twin.like import compare, describe
from twin.real_run import RealRun, read_run

from tests.twin.local_runs import CALIBRATION, SETTINGS, fault, simulate_run, write_run

FAULTS = (
    fault("kill", "island-1", 20.0, number=1, at_step=20),
    fault("stop", "island-2", 32.0, number=2, at_step=44, duration_s=4.0),
    fault("kill-syncer", "syncer", 45.0, number=3, at_step=70),
    fault("kill", "island-0", 56.0, number=4, at_step=88),
)


def folders(tmp_path: Path) -> tuple[RealRun, list[RealRun]]:
    """A chaos run, and two for its calibration, with other seeds and other faults."""
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
    """The prediction rests on the calibration: with a slower start of Python it is another one."""
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


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    run, others = folders(tmp_path)
    with pytest.raises(ValueError, match="compared with itself"):
        compare(run, [*others, run], 1)
    with pytest.raises(ValueError, match="no island was killed"):
        compare(run, others[:1], 1)
    with pytest.raises(ValueError, match="--seeds is 0"):
        compare(run, others, 0)
    fewer = replace(SETTINGS, names=SETTINGS.names[:2])
    with pytest.raises(ValueError, match="other islands"):
        compare(run, [read_run(others[0].folder, fewer)], 1)
    book = [{"event": "begin", "t": 20.0, "fault": 1, "kind": "full-disk", "target": "syncer", "at_step": 3}]
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    disk = read_run(write_run(tmp_path / "disk", records, {}, book), SETTINGS)
    with pytest.raises(ValueError, match="full-disk"):
        compare(disk, others, 1)
