"""Islands that make many steps per round are noticed; a healthy run is not."""

from __future__ import annotations

import json
import random

import pytest

from diloco_jax.protocol.watch.outrun import EPISODES_MAX, FACTOR, STEPS_MIN, Episode, Outrun

NAMES = ["a", "b", "c", "d"]


def walk(outrun: Outrun, steps: int, per_round: float, begin: float = 0.0) -> float:
    """So many steps of everybody, with a round after so many of them; returns the clock of rounds."""
    clock = begin
    for _ in range(steps):
        clock += 1 / per_round
        for name in NAMES:
            outrun.on_steps(name, 1, int(clock))
    return clock


def test_a_healthy_run_has_none() -> None:
    outrun = Outrun()
    walk(outrun, 1000, 1.0)
    assert not outrun.current and not outrun.episodes


def test_a_first_round_that_takes_long_is_an_episode_with_its_figures() -> None:
    outrun = Outrun()
    for _ in range(64):
        for name in NAMES:
            outrun.on_steps(name, 1, 0)
    assert outrun.current, "while it goes on"
    clock = walk(outrun, 200, 1.0)
    assert not outrun.current and len(outrun.episodes) == 1 and clock == 200
    assert str(outrun.episodes[0]) == "islands outran rounds: 64 steps each while 0 rounds closed, from global step 0"


@pytest.mark.parametrize(("per_round", "expected"), [(1.5, False), (FACTOR, True), (5.0, True)])
def test_twofold_is_the_limit(per_round: float, expected: bool) -> None:
    outrun = Outrun()
    walk(outrun, 40 * STEPS_MIN, per_round)
    assert outrun.current == expected and bool(outrun.episodes) == expected
    if expected:
        [episode] = outrun.episodes
        assert episode.steps / (episode.to_step - episode.from_step) == pytest.approx(per_round, rel=0.05)


def test_islands_of_very_different_speed_count_as_their_mean() -> None:
    outrun = Outrun()
    for clock in range(1, 501):  # it follows the fastest
        outrun.on_steps("fast", 1, clock)
        if clock % 10 == 0:
            outrun.on_steps("slow", 1, clock)
    assert not outrun.episodes


def test_steps_that_nobody_reported_count_when_they_are_heard_of() -> None:
    outrun = Outrun()
    walk(outrun, 100, 1.0)
    outrun.on_steps("a", 4 * STEPS_MIN * len(NAMES), 100)
    assert outrun.current


def test_a_run_that_went_back_begins_a_new_window() -> None:
    outrun = Outrun()
    walk(outrun, 100, 1.0)
    walk(outrun, 100, 1.0, begin=50.0)
    assert not outrun.episodes


def test_it_goes_on_from_its_state() -> None:
    numbers = random.Random(3)
    events = [(numbers.choice(NAMES), numbers.randint(1, 3), step // 9) for step in range(2000)]
    whole, first = Outrun(), Outrun()
    for event in events:
        whole.on_steps(*event)
    for event in events[:1001]:
        first.on_steps(*event)
    second = Outrun()
    second.restore(json.loads(json.dumps(first.state())))
    for event in events[1001:]:
        second.on_steps(*event)
    assert second.state() == whole.state() and whole.episodes


def test_many_episodes_stay_few_records() -> None:
    outrun, clock = Outrun(), 0.0
    for _ in range(3 * EPISODES_MAX):
        clock = walk(outrun, 3 * STEPS_MIN, 4.0, clock)
        clock = walk(outrun, 3 * STEPS_MIN, 1.0, clock)
    assert len(outrun.episodes) == EPISODES_MAX
    assert "1 round closed" in str(Episode(3, 4, 16.0))
