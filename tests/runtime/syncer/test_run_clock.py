"""The run's clock over restarts, with clocks of the machine that are set as a test needs them."""

import json
from pathlib import Path

import pytest

from diloco_jax.runtime.syncer import run_clock
from diloco_jax.runtime.syncer.run_clock import PAUSE_MAX_S, RunClock

YEAR_S = 31_536_000.0


class Machine:
    """The clocks of a syncer's machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall_s, self.boot, self.boot_s = 1000.0, "first", 50.0
        monkeypatch.setattr("diloco_jax.runtime.syncer.run_clock.time.time", lambda: self.wall_s)
        monkeypatch.setattr("diloco_jax.runtime.syncer.run_clock.time.monotonic", lambda: 77.0)
        monkeypatch.setattr(run_clock, "_boot", lambda: self.boot)
        monkeypatch.setattr(run_clock, "_since_boot_s", lambda: self.boot_s)

    def passes(self, seconds: float) -> None:
        self.wall_s += seconds
        self.boot_s += seconds

    def boots(self) -> None:
        """Boot again: the clock since boot has another name and another start."""
        self.boot, self.boot_s = self.boot + "'", 3.0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_the_time_without_a_process_counts(tmp_path: Path, machine: Machine) -> None:
    assert RunClock(tmp_path, 0.0).now_s() == 0.0
    machine.passes(30.0)
    assert RunClock(tmp_path, 12.0).now_s() == 30.0
    machine.boots()
    machine.passes(5.0)
    assert RunClock(tmp_path, 31.0).now_s() == 35.0
    machine.passes(5.0)
    assert RunClock(tmp_path, 36.0).now_s() == 40.0


@pytest.mark.parametrize("jump_s", [-YEAR_S, 86_400.0, 100 * YEAR_S])
def test_a_wrong_time_of_day_at_one_restart_has_no_effect(tmp_path: Path, machine: Machine, jump_s: float) -> None:
    began = RunClock(tmp_path, 0.0).began_unix_s
    machine.passes(30.0)
    machine.wall_s += jump_s
    assert RunClock(tmp_path, 12.0).now_s() == 30.0
    machine.wall_s -= jump_s
    machine.passes(10.0)
    clock = RunClock(tmp_path, 35.0)
    assert (clock.now_s(), clock.began_unix_s) == (40.0, began)


def test_after_a_boot_a_wrong_time_of_day_adds_a_day_at_most_and_once(
    tmp_path: Path, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    RunClock(tmp_path, 0.0)
    machine.boots()
    machine.wall_s += 100 * YEAR_S
    assert RunClock(tmp_path, 12.0).now_s() == 12.0 + PAUSE_MAX_S
    assert "no syncer for 36499 d 23 h; at most 1 d 00 h of it count" in caplog.text
    machine.boots()
    machine.wall_s -= 100 * YEAR_S - 20.0
    assert RunClock(tmp_path, 20.0 + PAUSE_MAX_S).now_s() == 20.0 + PAUSE_MAX_S, "set back: time does not turn round"
    machine.boots()
    machine.wall_s += 10.0
    assert RunClock(tmp_path, 20.0 + PAUSE_MAX_S).now_s() == 30.0 + PAUSE_MAX_S, "and it continues from there"


def test_a_record_that_is_missing_damaged_or_old(tmp_path: Path, machine: Machine) -> None:
    path = tmp_path / "clock.json"
    path.write_text("{broken")
    machine.wall_s = 2000.0
    assert RunClock(tmp_path, 12.0).now_s() == 12.0, "without a record it continues from the tape"
    machine.passes(1.0)
    assert RunClock(tmp_path, 12.5).now_s() == 13.0, "and that is recorded"
    # The form of runs that started before there was a clock since boot.
    path.write_text(json.dumps({"began_unix_s": 1900.0}))
    clock = RunClock(tmp_path, 12.5)
    assert (clock.now_s(), clock.began_unix_s) == (101.0, 1900.0)
    path.write_text(json.dumps({"began_unix_s": 1900.0, "boot": "first", "zero_boot_s": "soon"}))
    assert RunClock(tmp_path, 12.5).now_s() == 12.5
    for number in ("NaN", "-Infinity", "-1e308", "1" + 400 * "0", 100_000 * "["):
        path.write_text(f'{{"began_unix_s": 1900.0, "boot": "first", "zero_boot_s": {number}}}')
        assert RunClock(tmp_path, 12.5).now_s() == 12.5, number[:10]


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, machine: Machine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_clock, "write_json", full)
    assert RunClock(tmp_path, 12.0).now_s() == 12.0
    assert "clock.json cannot be written" in caplog.text


def test_this_system_has_a_clock_since_boot() -> None:
    assert run_clock._since_boot_s() > 0
