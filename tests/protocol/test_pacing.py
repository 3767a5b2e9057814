"""The table of turns and the moving average by hand, and the errors of the configuration."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_jax.protocol.pacing import ProtocolConfig, Turns, ema
from tests.protocol.steady import STEADY


def test_one_fragment_in_every_step_when_p_equals_h() -> None:
    turns = Turns(4, 4)
    assert [turns.due(step) for step in range(1, 9)] == [1, 2, 3, 0, 1, 2, 3, 0]


def test_a_snapshot_is_due_when_a_multiple_of_the_interval_was_passed() -> None:
    three, none = ProtocolConfig(snapshot_every=3), ProtocolConfig(snapshot_every=0)
    steps = ((0, 2), (0, 3), (2, 4), (3, 4), (3, 5), (3, 9))
    assert [three.snapshot_due(*each) for each in steps] == [False, True, True, False, False, True]
    assert not any(none.snapshot_due(*each) for each in steps)


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
