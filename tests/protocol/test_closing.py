"""When a round closes: windows by hand, and the rule against its definition in a few lines."""

from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_jax.protocol.closing import (
    ALL,
    BELOW_QUORUM,
    COLLECTING,
    FIRST_TURN_S,
    GAMMA,
    GRACE,
    LEAST,
    LEAST_STEP_S,
    NOBODY,
    WAITING,
    Closing,
    Facts,
    GraceWindow,
    closing,
    grace_window_s,
    least_wait_s,
)
from diloco_jax.protocol.pacing import ProtocolConfig
from tests.protocol.steady import STEADY

# The quorum was met after 5 s; Eq. 3 waits until 6 s, and the least wait lasts until 8 s.
WINDOW = GraceWindow(5.0, 5.0, 6.0, 8.0)
FACTS = Facts(quorum=2, live=3, fresh=2, counted=2, window=WINDOW, few=False, starting=False)


@pytest.mark.parametrize(
    ("settings", "step_s", "quorum_s", "sync_s", "expected_s"),
    [
        # slack = 2 * 1 - (0.5 + 1) = 0.5; a tenth of it is left over.
        pytest.param({}, 1.0, 0.5, 1.0, 0.45, id="most-of-the-slack"),
        # slack = 4 * 2 - (1 + 1) = 6. The cap is 1.5 steps of 2 s.
        pytest.param({"overlap_steps": 4, "grace_steps_max": 1.5}, 2.0, 1.0, 1.0, 3.0, id="capped"),
        # slack = 2 * 1 - (1.5 + 1) is negative.
        pytest.param({}, 1.0, 1.5, 1.0, 0.0, id="late-already"),
        # slack = 2 * 0.5, and the cap is one step.
        pytest.param({}, 0.5, None, None, 0.5, id="nothing-measured-of-the-round"),
        pytest.param({}, None, 0.1, 0.1, 0.0, id="no-step-measured"),
        pytest.param({"grace_steps_max": 0.0}, 1.0, 0.0, 0.0, 0.0, id="window-off"),
        # Without overlap there is no slack.
        pytest.param({"overlap_steps": 0}, 1.0, 0.0, 0.0, 0.0, id="lockstep"),
    ],
)
def test_grace_window_by_hand(
    settings: dict[str, Any], step_s: float | None, quorum_s: float | None, sync_s: float | None, expected_s: float
) -> None:
    assert grace_window_s(ProtocolConfig(**settings), step_s, quorum_s, sync_s) == pytest.approx(expected_s)


seconds = st.floats(0.0, 1e4)


@STEADY
@given(seconds, seconds, seconds, st.integers(0, 10), st.floats(0.0, 5.0))
def test_quorum_grace_and_sync_fit_into_tau_steps(
    step_s: float, quorum_s: float, sync_s: float, tau: int, cap: float
) -> None:
    grace_s = grace_window_s(ProtocolConfig(overlap_steps=tau, grace_steps_max=cap), step_s, quorum_s, sync_s)
    assert 0.0 <= grace_s <= cap * step_s + 1e-9
    assert grace_s == 0.0 or quorum_s + grace_s / GAMMA + sync_s <= tau * step_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("settings", "step_s", "least_s"),
    [
        ({}, None, LEAST_STEP_S),
        ({}, 0.004, LEAST_STEP_S),
        ({}, 0.2, 0.2),
        ({"grace_steps_max": 0.5}, 0.2, 0.1),
        ({"grace_steps_max": 3.0}, 0.2, 0.2),
        ({"grace_steps_max": 0.0}, 0.2, 0.0),
    ],
)
def test_the_least_wait_is_one_step(settings: dict[str, Any], step_s: float | None, least_s: float) -> None:
    assert least_wait_s(ProtocolConfig(**settings), step_s) == pytest.approx(least_s)


@pytest.mark.parametrize(
    ("changes", "now_s", "at_s", "why", "reason"),
    [
        ({"live": 0, "fresh": 0, "counted": 0}, 5.5, inf, NOBODY, "no learner is live, the quorum is 2"),
        (
            {"live": 1, "fresh": 1, "counted": 1},
            5.5,
            inf,
            BELOW_QUORUM,
            "1 live learners are fewer than the quorum of 2: training continues, merging is paused",
        ),
        ({"counted": 1}, 5.5, inf, COLLECTING, "2 of 3 live learners reported a step, the quorum is 2"),
        ({"window": None}, 5.5, inf, COLLECTING, "2 of 3 live learners reported a step, the quorum is 2"),
        ({}, 5.5, 6.0, WAITING, "quorum met, 2 of 3 live learners reported, at most 0.500 s left"),
        ({}, 6.0, 6.0, GRACE, "2 of 3 live learners reported, grace window over"),
        ({"few": True}, 6.0, 8.0, WAITING, "quorum met, 2 of 3 live learners reported, at most 2.000 s left"),
        ({"few": True}, 8.0, 8.0, LEAST, "2 of 3 live learners reported, least wait over"),
        ({"starting": True, "window": WINDOW._replace(grace_s=5.0)}, 6.0, 6.0, LEAST, "2 of 3 live"),
        ({"fresh": 3}, 5.5, 5.0, ALL, "all 3 live learners reported"),
        ({"fresh": 3, "starting": True}, 5.5, 6.0, WAITING, "quorum met, 3 of 3 live"),
        ({"fresh": 3, "window": WINDOW._replace(links_s=7.0)}, 5.5, 7.0, WAITING, "quorum met, 3 of 3 live"),
        ({"fresh": 3, "window": WINDOW._replace(links_s=7.0)}, 7.0, 7.0, ALL, "all 3 live learners reported"),
    ],
)
def test_closing_by_hand(changes: dict[str, Any], now_s: float, at_s: float, why: str, reason: str) -> None:
    decision = closing(FACTS._replace(**changes), now_s)
    assert decision[:2] == (at_s, why) and decision.reason.startswith(reason)


def closes(facts: Facts, now_s: float) -> bool:
    """Return whether a round closes at a time, by the words of the rule."""
    window = facts.window
    if window is None or facts.counted < facts.quorum or now_s < window.links_s:
        return False
    if facts.starting and now_s < window.met_s + FIRST_TURN_S:
        return False
    everyone = facts.fresh >= facts.live and not facts.starting
    return everyone or (now_s >= window.grace_s and not (facts.few and now_s < window.least_s))


numbers = st.integers(0, 4)
# The quorum was met before now. Quarters of seconds are exact.
windows = st.none() | st.builds(
    lambda met, links, grace, least: GraceWindow(met / 4, (met + links) / 4, (met + grace) / 4, (met + least) / 4),
    numbers,
    numbers,
    st.integers(0, 12),
    st.integers(0, 12),
)
facts = st.builds(Facts, st.integers(1, 3), numbers, numbers, numbers, windows, st.booleans(), st.booleans())


@STEADY
@given(facts, st.integers(4, 20))
def test_a_round_closes_at_the_first_moment_that_the_rule_allows(given: Facts, quarters: int) -> None:
    now_s = quarters / 4
    decision = closing(given, now_s)
    assert (decision.at_s <= now_s) == closes(given, now_s) == (decision.why in (ALL, GRACE, LEAST))
    if now_s < decision.at_s < inf:
        assert closes(given, decision.at_s) and not closes(given, decision.at_s - 0.25)
        assert closing(given, decision.at_s) == Closing(decision.at_s, *closing(given, decision.at_s)[1:])
