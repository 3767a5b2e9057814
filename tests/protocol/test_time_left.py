"""The time that is left of a run is right although it takes long to start, and follows a rate that changes."""

import pytest

from diloco_jax.protocol.watch.time_left import POINTS, STEPS_LEAST, WINDOW_S, TimeLeft


def fed(times_s: list[float]) -> TimeLeft:
    """Return a pace that got the n-th time as the time of global step n + 1."""
    pace = TimeLeft()
    for step, now_s in enumerate(times_s, 1):
        pace.step(now_s, step)
    return pace


def test_the_start_does_not_count() -> None:
    """60 s of start-up, then 2 steps per second: 400 steps take 200 s from there."""
    pace = TimeLeft()
    assert pace.left_s(0.0, 400) is None
    for step in range(1, 401):
        now_s = 60 + 0.5 * step
        pace.step(now_s, step)
        left_s = pace.left_s(now_s, 400)
        assert left_s == (None if step <= STEPS_LEAST else pytest.approx(260 - now_s))
    assert pace.left_s(260.0, 400) == 0.0


def test_the_start_of_a_resumed_run_does_not_count() -> None:
    """45 s of start-up, then 2 steps per second; the second snapshot is older than expected."""
    for earlier in (24, 20):
        pace = TimeLeft(24)
        for now_s in (0.0, 45.0):
            pace.step(now_s, earlier)
        for number in range(STEPS_LEAST + 1):
            pace.step(50.0 + 0.5 * number, earlier + 1 + number)
        assert pace.left_s(54.0, earlier + 109) == pytest.approx(50.0)


@pytest.mark.parametrize("step_s", [0.02, 0.5, 10.0, 90.0])
def test_an_estimate_that_was_given_stays(step_s: float) -> None:
    pace, given = TimeLeft(), False
    for step in range(1, 200):
        pace.step(step_s * step, step)
        left_s = pace.left_s(step_s * step, 300)
        assert left_s is not None or not given, step
        given = left_s is not None
    assert given


def test_slow_first_steps_give_no_estimate_and_are_forgotten() -> None:
    """Islands still join in the first eight steps, of 3 s each; the others take 0.5 s."""
    pace, now_s = TimeLeft(), 10.0
    pace.step(now_s, 1)
    for step in range(2, 101):
        now_s += 3.0 if step <= STEPS_LEAST else 0.5
        pace.step(now_s, step)
        left_s, truth_s = pace.left_s(now_s, 400), 0.5 * (400 - step)
        if step <= STEPS_LEAST:
            assert left_s is None
        elif step > 2 * STEPS_LEAST:
            assert left_s == pytest.approx(truth_s, rel=0.02)
    # Steps of minutes need not wait for eight of them.
    assert fed([0.0, 100.0]).left_s(100.0, 10) == pytest.approx(800.0)


def test_a_rate_that_halves_is_followed_within_the_window() -> None:
    """1 step per second until 100 s, then one in 2 s: of 300 steps 200 are left, which take 400 s."""
    pace = fed([float(second) for second in range(1, 101)])
    assert pace.left_s(100.0, 300) == pytest.approx(200.0), "nobody can know it yet"
    errors = {}
    for number in range(1, 101):
        now_s = 100.0 + 2 * number
        pace.step(now_s, 100 + number)
        truth_s = 2.0 * (200 - number)
        errors[now_s] = (pace.left_s(now_s, 300) or 0.0) / truth_s - 1
    # half of the window is old: 30 steps in 30 s and 15 in 30 s are 4 / 3 s each
    assert errors[130.0] == pytest.approx(4 / 3 / 2 - 1)
    assert errors[142.0] == pytest.approx(60 / 39 / 2 - 1)
    assert all(abs(error) < 0.2 for now_s, error in errors.items() if now_s >= 148)
    assert all(abs(error) < 1e-9 for now_s, error in errors.items() if now_s >= 100 + WINDOW_S)


def test_time_passes_between_two_slow_steps() -> None:
    """100 s a step: 8 steps are looked at, however long they take, and the time left falls second by second."""
    pace = fed([100.0 * number for number in range(1, 21)])
    assert pace.left_s(2000.0, 30) == pytest.approx(1000.0)
    assert pace.left_s(2040.0, 30) == pytest.approx(960.0)
    assert pace.left_s(2300.0, 30) == pytest.approx(900.0), "the step that is late cannot take less than nothing"
    assert pace.left_s(2000.0 + 100 * STEPS_LEAST + 1, 30) is None, "no round for long"


def test_a_run_that_goes_back_or_is_resumed_starts_again() -> None:
    pace = fed([float(second) for second in range(1, 101)])
    pace.step(101.0, 50)
    assert pace.left_s(101.0, 100) is None
    for number in range(1, STEPS_LEAST + 1):
        pace.step(101.0 + 2.0 * number, 50 + number)
    assert pace.left_s(117.0, 100) == pytest.approx(84.0)
    resumed = TimeLeft()
    for step in range(500, 510):
        resumed.step(1000.0 + 3 * step, step)
    assert resumed.left_s(1000.0 + 3 * 509, 600) == pytest.approx(3 * 91)


def test_many_steps_take_little_room_and_stay_exact() -> None:
    pace = fed([number / 1000 for number in range(1, 200_001)])
    assert len(pace._points) <= POINTS + 3
    assert pace.left_s(200.0, 400_000) == pytest.approx(200.0, rel=0.01)
