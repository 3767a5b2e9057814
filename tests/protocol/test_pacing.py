"""Predicates of pacing against numbers worked out by hand, and the errors of the configuration."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_jax.protocol.pacing import Closing, ProtocolConfig, Turns, closing, ema, grace_window_s
from tests.protocol.steady import STEADY


def test_one_fragment_in_every_step_when_p_equals_h() -> None:
    turns = Turns(4, 4)
    assert [turns.due(step) for step in range(1, 9)] == [1, 2, 3, 0, 1, 2, 3, 0]


def test_offsets_are_spread_evenly() -> None:
    # t_p = floor(p H / P): 0, floor(10 / 3) = 3, floor(20 / 3) = 6
    turns = Turns(10, 3)
    assert {step: turns.due(step) for step in range(1, 11) if turns.due(step) >= 0} == {3: 1, 6: 2, 10: 0}


def test_one_fragment_is_due_at_the_end_of_the_interval() -> None:
    turns = Turns(24, 1)
    assert [turns.due(step) for step in (0, 1, 23, 24, 25, 48)] == [0, -1, -1, 0, -1, 0]
    assert [turns.next_due(step) for step in (0, 1, 23, 24, 47)] == [24, 24, 24, 48, 48]


@STEADY
@given(st.integers(1, 200).flatmap(lambda h: st.tuples(st.just(h), st.integers(1, h), st.integers(0, 1000))))
def test_every_fragment_has_its_turn_once_per_interval(numbers: tuple[int, int, int]) -> None:
    sync_every, num_fragments, start = numbers
    turns = Turns(sync_every, num_fragments)
    due = [turns.due(step) for step in range(start, start + sync_every)]
    assert sorted(turn for turn in due if turn >= 0) == list(range(num_fragments))
    following = turns.next_due(start)
    assert following > start and turns.due(following) >= 0
    assert all(turns.due(step) < 0 for step in range(start + 1, following))


def test_ema_starts_at_its_first_sample() -> None:
    assert ema(None, 3.0, 0.9) == 3.0
    # 0.75 * 1 + 0.25 * 3 = 1.5
    assert ema(1.0, 3.0, 0.75) == 1.5
    assert ema(1.0, 3.0, 0.0) == 3.0


@pytest.mark.parametrize(
    ("settings", "step_s", "quorum_s", "sync_s", "expected_s"),
    [
        # slack = 2 * 1 - (0.25 + 0.75) = 1. Gamma 0.5 gives 0.5, which is below the cap of 1 step.
        pytest.param({"grace_safety": 0.5}, 1.0, 0.25, 0.75, 0.5, id="half-of-the-slack"),
        # slack = 4 * 2 - (1 + 1) = 6, and gamma is 1. The cap is 1.5 steps of 2 s.
        pytest.param(
            {"grace_safety": 1.0, "overlap_steps": 4, "grace_steps_max": 1.5}, 2.0, 1.0, 1.0, 3.0, id="capped"
        ),
        # slack = 2 * 1 - (1.5 + 1) is negative.
        pytest.param({}, 1.0, 1.5, 1.0, 0.0, id="late-already"),
        # slack = 2 * 0.5, and gamma is 0.25.
        pytest.param({"grace_safety": 0.25}, 0.5, None, None, 0.25, id="nothing-measured-of-the-round"),
        pytest.param({}, None, 0.1, 0.1, 0.0, id="no-step-measured"),
        pytest.param({"grace_steps_max": 0.0}, 1.0, 0.0, 0.0, 0.0, id="window-off"),
        # Without overlap there is no slack.
        pytest.param({"overlap_steps": 0}, 1.0, 0.0, 0.0, 0.0, id="lockstep"),
    ],
)
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


@pytest.mark.parametrize(
    ("fresh", "live", "quorum", "closes_s", "now_s", "state", "reason"),
    [
        pytest.param(0, 0, 2, None, 5.0, "below quorum", "no learner is live, the quorum is 2", id="nobody-is-live"),
        pytest.param(
            1, 1, 2, None, 5.0, "below quorum", "1 live learners are fewer than the quorum of 2", id="too-few-learners"
        ),
        pytest.param(
            0, 2, 2, None, 5.0, "collecting", "0 of 2 live learners reported a step, the quorum is 2", id="no-report"
        ),
        pytest.param(
            1, 2, 2, 6.0, 7.0, "collecting", "1 of 2 live learners reported a step, the quorum is 2", id="one-report"
        ),
        pytest.param(
            2,
            3,
            2,
            6.0,
            5.0,
            "grace",
            "quorum met, 2 of 3 live learners reported, grace 1.000 s left",
            id="grace-window",
        ),
        pytest.param(2, 3, 2, 6.0, 6.0, "closed", "2 of 3 live learners reported, grace window over", id="window-over"),
        pytest.param(3, 3, 2, 6.0, 5.0, "closed", "all 3 live learners reported", id="all-reported"),
    ],
)
def test_closing(
    fresh: int, live: int, quorum: int, closes_s: float | None, now_s: float, state: str, reason: str
) -> None:
    decision = closing(fresh, live, quorum, closes_s, now_s)
    assert decision.state == state
    assert decision.reason.startswith(reason)


def test_closing_tells_what_is_left_of_the_window() -> None:
    assert closing(1, 2, 1, 7.5, 5.0) == Closing("grace", 1, 2, 1, 2.5)
    assert closing(1, 2, 1, 7.5, 9.0).waits_s == 0.0


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("sync_every", 0, "at least 1"),
        ("num_fragments", 0, "at least 1"),
        ("num_fragments", 25, "at most sync_every = 24"),
        ("overlap_steps", -1, "0 to 10000"),
        ("overlap_steps", 10_001, "0 to 10000"),
        ("quorum", 0, "1 to learners_max = 64"),
        ("quorum", 65, "1 to learners_max = 64"),
        ("grace_steps_max", -0.5, "at least 0"),
        ("grace_safety", 0.0, "above 0 and at most 1"),
        ("grace_safety", 1.1, "above 0 and at most 1"),
        ("ema_decay", 1.0, "at least 0 and below 1"),
        ("ema_decay", -0.1, "at least 0 and below 1"),
        ("heartbeat_s", 0.0, "above 0"),
        ("silence_s", 3.9, "at least 2 heartbeats, 4.0"),
        ("silence_s", math.nan, "at least 2 heartbeats, 4.0"),
        ("resend_s", 0.0, "above 0"),
        ("pull_timeout_s", 0.0, "above 0"),
        ("anchor_history", 0, "1 to 16"),
        ("anchor_history", 17, "1 to 16"),
        ("tokens_per_step_factor_max", 0.5, "at least 1, or 0 for no limit"),
        ("tokens_per_step_factor_max", math.inf, "at least 1, or 0 for no limit"),
        ("learners_max", 5000, "1 to 4096"),
    ],
)
def test_config_errors_name_value_limit_and_remedy(name: str, value: Any, limit: str) -> None:
    with pytest.raises(ValueError) as caught:
        ProtocolConfig(**{name: value})
    text = str(caught.value)
    assert text.startswith(f"protocol.{name} is {value}, but must be {limit}")
    assert "change it in the config" in text


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"sync_every": 1, "num_fragments": 1}, id="sync_every=1-num_fragments=1"),
        pytest.param({"num_fragments": 24}, id="num_fragments=24"),
        pytest.param({"overlap_steps": 0}, id="overlap_steps=0"),
        pytest.param({"quorum": 64}, id="quorum=64"),
        pytest.param({"grace_safety": 1.0}, id="grace_safety=1.0"),
        pytest.param({"ema_decay": 0.0}, id="ema_decay=0.0"),
        pytest.param({"silence_s": 4.0}, id="silence_s=4.0"),
        pytest.param({"anchor_history": 16}, id="anchor_history=16"),
        pytest.param({"tokens_per_step_factor_max": 0}, id="tokens_per_step_factor_max=0"),
        pytest.param({"learners_max": 4096}, id="learners_max=4096"),
    ],
)
def test_config_limits_themselves_are_allowed(settings: dict[str, Any]) -> None:
    ProtocolConfig(**settings)


def test_lockstep_is_not_an_overlap() -> None:
    assert ProtocolConfig(overlap_steps=0).lockstep
    assert not ProtocolConfig(overlap_steps=1).lockstep
