"""The moving averages of a round's durations, and what a round says that it waits for."""

from __future__ import annotations

from diloco_jax.protocol.pacing import ProtocolConfig, grace_window_s
from diloco_jax.protocol.syncer.rounds import MERGING, PULLING, Pace, Round

CONFIG = ProtocolConfig(overlap_steps=2, ema_decay=0.75)


def test_averages_start_at_their_first_sample() -> None:
    pace = Pace().after_quorum(0.5, 1.0, CONFIG).after_merge(0.25, 1.0, CONFIG)
    assert pace == Pace(0.5, 0.25)
    assert pace.after_quorum(1.5, 1.0, CONFIG) == Pace(0.75, 0.25)  # 0.75 * 0.5 + 0.25 * 1.5
    assert pace.after_merge(1.25, 1.0, CONFIG) == Pace(0.5, 0.5)


def test_a_wait_for_compilers_is_no_sample() -> None:
    assert Pace().after_quorum(60.0, None, CONFIG).after_merge(60.0, None, CONFIG) == Pace()


def test_one_long_wait_closes_the_window_but_not_for_long() -> None:
    pace = Pace(0.0, 0.0).after_quorum(600.0, 1.0, CONFIG)
    assert pace.quorum_s == 0.5  # a quarter of the slack of 2 steps, not of 600 s
    windows = []
    for _ in range(3):
        windows.append(grace_window_s(ProtocolConfig(grace_safety=0.5), 1.0, pace.quorum_s, pace.merge_s))
        pace = pace.after_quorum(0.0, 1.0, CONFIG)
    assert windows == [0.75, 0.8125, 0.859375]  # 0.5 * (2 - 0.5), 0.5 * (2 - 0.375), 0.5 * (2 - 0.28125)


def test_a_round_names_whom_it_waits_for() -> None:
    this = Round(7, 3, 0.0)
    this.phase = PULLING
    this.asked = {"b": 4, "a": 5}
    assert this.waits_for == "round 7, pulling: a, b"
    this.asked = {}
    this.phase = MERGING
    assert this.waits_for == "round 7, merging: the merge"
