"""Predicates of pacing against numbers worked out by hand, and the errors of the configuration."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_jax.protocol.pacing import Closing, ProtocolConfig, Schedule, closing, ema, grace_window_s
from tests.protocol.steady import STEADY
from tests.tables import rows


def test_one_fragment_in_every_step_when_p_equals_h() -> None:
    schedule = Schedule(4, 4)
    assert [schedule.due(step) for step in range(1, 9)] == [1, 2, 3, 0, 1, 2, 3, 0]


def test_offsets_are_spread_evenly() -> None:
    # t_p = floor(p H / P): 0, floor(10 / 3) = 3, floor(20 / 3) = 6
    schedule = Schedule(10, 3)
    assert {step: schedule.due(step) for step in range(1, 11) if schedule.due(step) >= 0} == {3: 1, 6: 2, 10: 0}


def test_one_fragment_is_due_at_the_end_of_the_interval() -> None:
    schedule = Schedule(24, 1)
    assert [schedule.due(step) for step in (0, 1, 23, 24, 25, 48)] == [0, -1, -1, 0, -1, 0]
    assert [schedule.next_due(step) for step in (0, 1, 23, 24, 47)] == [24, 24, 24, 48, 48]


@STEADY
@given(st.integers(1, 200).flatmap(lambda h: st.tuples(st.just(h), st.integers(1, h), st.integers(0, 1000))))
def test_every_fragment_has_its_turn_once_per_interval(numbers: tuple[int, int, int]) -> None:
    sync_every, num_fragments, start = numbers
    schedule = Schedule(sync_every, num_fragments)
    turns = [schedule.due(step) for step in range(start, start + sync_every)]
    assert sorted(turn for turn in turns if turn >= 0) == list(range(num_fragments))
    following = schedule.next_due(start)
    assert following > start and schedule.due(following) >= 0
    assert all(schedule.due(step) < 0 for step in range(start + 1, following))


def test_ema_starts_at_its_first_sample() -> None:
    assert ema(None, 3.0, 0.9) == 3.0
    assert ema(1.0, 3.0, 0.75) == 1.5  # 0.75 * 1 + 0.25 * 3
    assert ema(1.0, 3.0, 0.0) == 3.0


@pytest.mark.parametrize(("settings", "step_s", "quorum_s", "sync_s", "expected_s"), rows("pacing.grace"))
def test_grace_window_by_hand(
    settings: dict[str, Any], step_s: float | None, quorum_s: float | None, sync_s: float | None, expected_s: float
) -> None:
    assert grace_window_s(ProtocolConfig(**settings), step_s, quorum_s, sync_s) == expected_s


seconds = st.floats(0.0, 1e4)


@STEADY
@given(seconds, seconds, seconds, st.integers(0, 10), st.floats(0.01, 1.0), st.floats(0.0, 5.0))
def test_quorum_grace_and_sync_fit_into_tau_steps(
    step_s: float, quorum_s: float, sync_s: float, tau: int, gamma: float, cap: float
) -> None:
    config = ProtocolConfig(overlap_steps=tau, grace_safety=gamma, grace_steps_max=cap)
    grace_s = grace_window_s(config, step_s, quorum_s, sync_s)
    assert 0.0 <= grace_s <= cap * step_s + 1e-9
    assert grace_s == 0.0 or quorum_s + grace_s + sync_s <= tau * step_s * (1 + 1e-9)


@pytest.mark.parametrize(("fresh", "live", "quorum", "closes_s", "now_s", "state", "reason"), rows("pacing.closing"))
def test_closing(
    fresh: int, live: int, quorum: int, closes_s: float | None, now_s: float, state: str, reason: str
) -> None:
    decision = closing(fresh, live, quorum, closes_s, now_s)
    assert decision.state == state
    assert decision.reason.startswith(reason)


def test_closing_tells_what_is_left_of_the_window() -> None:
    assert closing(1, 2, 1, 7.5, 5.0) == Closing("grace", 1, 2, 1, 2.5)
    assert closing(1, 2, 1, 7.5, 9.0).waits_s == 0.0


@pytest.mark.parametrize(("settings", "name", "value", "limit"), rows("pacing.limits"))
def test_config_errors_name_value_limit_and_remedy(settings: dict[str, Any], name: str, value: str, limit: str) -> None:
    with pytest.raises(ValueError) as caught:
        ProtocolConfig(**settings)
    text = str(caught.value)
    assert text.startswith(f"protocol.{name} is {value}, but must be {limit}")
    assert "change it in the config" in text


@pytest.mark.parametrize("settings", rows("pacing.allowed"))
def test_config_limits_themselves_are_allowed(settings: dict[str, Any]) -> None:
    ProtocolConfig(**settings)


def test_lockstep_is_no_overlap() -> None:
    assert ProtocolConfig(overlap_steps=0).lockstep
    assert not ProtocolConfig(overlap_steps=1).lockstep
