"""A run with a token budget ends with the merge that reaches it, and its learning-rate schedule follows the merges."""

import json
from typing import Any

import pytest

from diloco_jax.protocol.effects import Finish
from diloco_jax.protocol.learner.machine import ScheduleClock
from diloco_jax.protocol.member import Credit
from diloco_jax.protocol.messages import GlobalFragment, Stop, Welcome
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.progress import Budget
from tests.protocol.syncer_inputs import FINGERPRINT, hello, merged, only, report, sent, value

CONFIG = ProtocolConfig(sync_every=4, num_fragments=4, grace_steps_max=0.0, silence_s=99.0, pull_timeout_s=20.0)


def new(tokens: int, step_tokens: int = 10, total_steps: int = 0) -> Syncer:
    """Return a syncer that "a" has greeted; each step of "a" reports 10 tokens."""
    syncer = Syncer(CONFIG, total_steps, FINGERPRINT, budget=Budget(tokens, step_tokens))
    syncer.on_message(hello("a"), 0.0)
    return syncer


def trained(syncer: Syncer, step: int, **changed: Any) -> list[Any]:
    """A step, and at once the value of its round and the merge."""
    syncer.on_message(report("a", step), step)
    syncer.on_message(value("a", step, step % 4, step, **changed), step)
    return merged(syncer, step, step)


@pytest.mark.parametrize(
    ("values", "news"),
    [
        # The two values are of different fragments; their first ten tokens count once.
        ([(10, 10), (30, 30)], [10, 20]),
        # The rounds end out of turn.
        ([(30, 30), (10, 10)], [30, 0]),
        # A learner trained 35 of the tokens on a value that was replaced later.
        ([(10, 10), (50, 5), (60, 60)], [10, 5, 10]),
    ],
)
def test_each_token_counts_once(values: list[tuple[int, int]], news: list[int]) -> None:
    credit = Credit()
    assert [credit.merge(told, held) for told, held in values] == news


def test_the_merge_that_reaches_the_budget_ends_the_run() -> None:
    syncer = new(35)
    for step in range(1, 4):
        assert not only(trained(syncer, step), Finish)
        assert (syncer.progress.merged_tokens, syncer.progress.expected_steps) == (10 * step, 4)
    effects = trained(syncer, 4)
    assert only(effects, Finish) and Stop(4, "run complete") in sent(effects) and syncer.finished
    assert (syncer.progress.merged_tokens, syncer.progress.expected_steps) == (40, 4)
    assert syncer.waiting_for(5.0) == "nothing: the run is complete"


def test_no_round_opens_while_those_in_flight_may_reach_it() -> None:
    syncer = new(20)
    for step in (1, 2, 3):
        syncer.on_message(report("a", step), step)
    assert syncer.global_step == 2 and not syncer.rounds.collecting
    syncer.on_message(value("a", 1, 1, 1), 3.0)
    assert not only(merged(syncer, 1, 3.0), Finish) and syncer.global_step == 2, "round 2 may bring the rest"
    # The value of round 2 never arrives.
    syncer.on_tick(30.0)
    assert syncer.global_step == 3 and syncer.progress.merged_tokens == 10
    syncer.on_message(value("a", 3, 3, 3), 31.0)
    assert only(merged(syncer, 3, 31.0), Finish) and syncer.progress.merged_tokens == 30


def test_the_steps_end_a_run_that_comes_to_them_first() -> None:
    syncer = new(1000, total_steps=2)
    assert not only(trained(syncer, 1), Finish) and syncer.progress.expected_steps == 2
    assert only(trained(syncer, 2), Finish)
    with pytest.raises(ValueError, match="total_steps is 0"):
        new(0)


def test_a_value_of_a_incarnation_that_was_replaced_does_not_count() -> None:
    syncer = new(1000)
    syncer.on_message(report("a", 1), 1.0)
    syncer.on_message(value("a", 1, 1, 1), 1.0)
    syncer.on_message(hello("a", 2), 1.5)
    merged(syncer, 1, 2.0)
    assert (syncer.merged_rounds, syncer.progress.merged_tokens) == (1, 0)


def test_messages_tell_how_far_the_schedule_is_ahead() -> None:
    syncer = new(1000, step_tokens=5)
    syncer.on_message(report("a", 1), 1.0)
    assert sent(syncer.on_message(hello("b"), 1.0), "b")[0] == Welcome(1, (0,) * 4, 1, 0), "nothing is merged yet"
    syncer.on_message(value("a", 1, 1, 1), 1.0)
    leads = [m.schedule_lead for m in sent(merged(syncer, 1, 1.0), "a") if isinstance(m, GlobalFragment)]
    assert leads == [1] == [m.schedule_lead for m in sent(syncer.on_message(hello("b"), 1.0)) if isinstance(m, Welcome)]
    # The following rounds merge nothing, so the schedule runs ahead for H + tau of them.
    syncer.progress.global_step = 20
    assert 20 + syncer.progress.schedule_lead == 2 + CONFIG.sync_every + CONFIG.overlap_steps
    other = Syncer(CONFIG, 0, FINGERPRINT, budget=Budget(1000, 5))
    other.restore(json.loads(json.dumps(syncer.state())))
    assert other.progress.schedule_lead == syncer.progress.schedule_lead


def test_a_schedule_follows_the_newest_word_and_never_goes_back() -> None:
    clock = ScheduleClock()
    assert [clock.at(step) for step in (0, 3)] == [0, 3], "without a word, and without a budget, the global step"
    clock.hear(4, 6, 3)
    assert [clock.at(step) for step in (4, 5)] == [10, 11]
    # This message is older than the one before it.
    clock.hear(3, 90, 5)
    # Fewer tokens were merged than expected.
    clock.hear(6, -2, 5)
    assert [clock.at(step) for step in (6, 12, 14)] == [11, 11, 12]
