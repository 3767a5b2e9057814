"""The syncer alone: what each input leads to, in each phase, in time, late, twice, out of turn and from strangers."""

from typing import Any

import pytest

from diloco_jax.protocol.effects import Contribution, Discard, Drop, Merge, Note, Send
from diloco_jax.protocol.member import ACTIVE, JOINING
from diloco_jax.protocol.messages import Adopted, FragmentValue, Heartbeat, PullRequest, Refuse, Welcome
from diloco_jax.protocol.syncer.machine import Syncer
from tests.protocol.syncer_inputs import fragment, hello, merged, new, only, report, running, sent, value


def test_a_newcomer_is_welcomed_and_gets_every_fragment() -> None:
    syncer = new(sizes=[{0: 11, 1: 22, 2: 33, 3: 44}])
    effects = syncer.on_message(hello("a", versions=(-1,) * 4), 0.0)
    assert effects[0] == Note("joined", 0, -1, ("a",), "incarnation 1")
    assert sent(effects, "a") == [
        Welcome(0, (0, 0, 0, 0), 1),
        *(fragment(0, fragment_id, 0, 11 * (fragment_id + 1)) for fragment_id in range(4)),
    ]
    assert syncer.membership.members["a"].state == JOINING


def test_a_learner_that_holds_everything_gets_only_what_is_missing() -> None:
    syncer = running("a")
    syncer.on_message(value("a", 1, 1, 1), 1.0)
    merged(syncer, 1, 1.0)
    assert sent(syncer.on_message(hello("b"), 2.0), "b") == [Welcome(1, (0, 1, 0, 0), 1), fragment(1, 1, 1)]
    assert sent(syncer.on_message(hello("b", versions=(0, 1, 0, 0)), 2.0), "b") == [Welcome(1, (0, 1, 0, 0), 1)]


def test_a_repeated_greeting_joins_once() -> None:
    syncer = new()
    syncer.on_message(hello("a"), 0.0)
    effects = syncer.on_message(hello("a"), 1.0)
    assert sent(effects) == [Welcome(0, (0,) * 4, 1)] and not only(effects, Note)


def test_a_stranger_is_refused_and_not_remembered() -> None:
    syncer = new()
    effects = syncer.on_message(hello("a")._replace(fingerprint=(("model", "xyz"),)), 0.0)
    (refusal,) = sent(effects, "a")
    assert isinstance(refusal, Refuse) and "model differs: the syncer has abc, a has xyz" in refusal.reason
    assert only(effects, Drop) == [Drop("a", refusal.reason)]
    assert syncer.membership.members == {}


def test_a_newer_incarnation_takes_the_place_of_the_older() -> None:
    syncer = running("a", "b")
    effects = syncer.on_message(hello("a", 2, (-1,) * 4), 2.0)
    assert only(effects, Note)[0] == Note("disconnected", 1, -1, ("a",), "replaced by a newer incarnation")
    assert syncer.membership.members["a"].restarts == 1
    (drop,) = syncer.on_message(value("a", 1, 1, 1), 2.0)
    assert isinstance(drop, Drop) and "old incarnation" in drop.reason
    (merge,) = only(syncer.on_message(value("b", 1, 1, 1), 2.0), Merge)
    assert [each.learner_id for each in merge.contributions] == ["b"], "the round does not wait for the dead one"


@pytest.mark.parametrize("message", [report("a", 1), value("a", 1, 1, 1), Heartbeat("a", 1)])
def test_who_did_not_greet_is_not_heard(message: Any) -> None:
    (drop,) = new().on_message(message, 0.0)
    assert isinstance(drop, Drop) and drop.peer == "a" and "before hello" in drop.reason


def test_the_first_full_report_makes_a_member_live() -> None:
    syncer = new(quorum=2)
    syncer.on_message(hello("a"), 0.0)
    assert syncer.membership.live == 0
    assert syncer.on_message(report("a", 1), 1.0) == []
    assert syncer.membership.live == 1 and syncer.membership.members["a"].state == ACTIVE


def test_a_report_that_lacks_a_fragment_does_not_count() -> None:
    syncer = new(quorum=1)
    syncer.on_message(hello("a", versions=(-1,) * 4), 0.0)
    effects = syncer.on_message(report("a", 1, (Adopted(0), Adopted(0), Adopted(0), Adopted(-1))), 1.0)
    assert sent(effects) == [], "nothing of a learner that is still joining may be pulled"
    assert syncer.membership.live == 0


def test_the_quorum_closes_the_round_and_pulls_from_its_members() -> None:
    syncer = new(quorum=2)
    for name in ("b", "a", "c"):
        syncer.on_message(hello(name), 0.0)
    syncer.on_message(report("b", 3), 1.0)
    effects = syncer.on_message(report("a", 1), 1.5)
    assert effects == [
        Note("closed", 1, 1, ("a", "b"), "all 2 live learners reported"),
        Send("a", PullRequest(1, 1, 1)),
        Send("b", PullRequest(1, 1, 3)),
    ]
    assert syncer.global_step == 1


def test_duplicate_and_overtaken_reports_change_nothing() -> None:
    syncer = new(quorum=2)
    syncer.on_message(hello("a"), 0.0)
    syncer.on_message(report("a", 5), 1.0)
    assert syncer.on_message(report("a", 5), 2.0) == [] and syncer.on_message(report("a", 4), 2.0) == []
    member = syncer.membership.members["a"]
    assert (member.local_step, member.tokens, member.heard_s) == (5, 50, 2.0)


def test_a_step_counts_for_one_round_only() -> None:
    syncer = running("a")
    assert syncer.global_step == 1
    syncer.on_tick(2.0)
    assert syncer.global_step == 1, "round 2 wants a newer step than the one that round 1 used"
    syncer.on_message(report("a", 2), 2.0)
    assert syncer.global_step == 2


def test_a_fragment_without_a_step_since_its_adoption_does_not_count() -> None:
    syncer = new()
    syncer.on_message(hello("a"), 0.0)
    just_adopted = (Adopted(0), Adopted(0, 5, 50), Adopted(0), Adopted(0))
    syncer.on_message(report("a", 5, just_adopted), 1.0)
    assert syncer.global_step == 0
    syncer.on_message(report("a", 6, just_adopted), 2.0)
    assert syncer.global_step == 1


def test_a_report_of_another_number_of_fragments_is_dropped() -> None:
    syncer = new()
    syncer.on_message(hello("a"), 0.0)
    (drop,) = syncer.on_message(report("a", 1, (Adopted(0),)), 1.0)
    assert isinstance(drop, Drop) and "1 fragments reported, 4 exist" in drop.reason
    assert syncer.membership.members["a"].local_step == 0


def test_the_first_step_is_not_a_sample_of_the_speed() -> None:
    syncer = new(quorum=2, ema_decay=0.5)
    syncer.on_message(hello("a"), 0.0)
    member = syncer.membership.members["a"]
    for local_step, step_s, expected_s in [(1, 60.0, None), (2, 1.0, 1.0), (3, 2.0, 1.5)]:
        syncer.on_message(report("a", local_step, step_s=step_s), 1.0)
        assert member.step_s == expected_s


def test_merges_when_everybody_answered_in_the_order_of_names() -> None:
    syncer = running("b", "a")
    assert syncer.on_message(value("b", 1, 1, 1), 2.0) == []
    effects = syncer.on_message(value("a", 1, 1, 1, steps=1, tokens=7), 2.0)
    assert effects == [Merge(1, 1, (Contribution("a", 1, 1, 7, 0, 1), Contribution("b", 1, 1, 10, 0, 1)))]
    assert merged(syncer, 1, 3.0) == [
        Note("merged", 1, 1, ("a", "b"), ""),
        Send("a", fragment(1, 1, 1, merged_round=1)),
        Send("b", fragment(1, 1, 1, merged_round=1)),
    ]
    assert syncer.versions == [0, 1, 0, 0] and (syncer.merged_rounds, syncer.progress.merged_parts) == (1, 2)
    assert syncer.membership.members["a"].rounds == 1


def test_a_second_or_late_value_is_dropped() -> None:
    syncer = running("a", "b")
    syncer.on_message(value("a", 1, 1, 1), 2.0)
    for now_s in (2.0, 3.0):
        (drop,) = syncer.on_message(value("a", 1, 1, 1), now_s)
        assert isinstance(drop, Drop) and "came late or was not asked for" in drop.reason
    syncer.on_message(value("b", 1, 1, 1), 2.0)
    (drop,) = syncer.on_message(value("b", 1, 1, 1), 3.0)
    assert isinstance(drop, Drop), "while the merge runs"
    merged(syncer, 1, 4.0)
    (drop,) = syncer.on_message(value("b", 1, 1, 1), 5.0)
    assert isinstance(drop, Drop), "after the merge"
    assert syncer.progress.merged_parts == 2


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (value("a", 9, 1, 1), "value for round 9 came late or was not asked for"),
        (value("a", 1, 2, 1), "value of fragment 2 where 1 was asked for"),
    ],
)
def test_a_value_that_does_not_fit_is_dropped_and_the_round_waits_on(message: FragmentValue, words: str) -> None:
    syncer = running("a")
    assert syncer.on_message(message, 2.0) == [Drop("a", words)]
    assert only(syncer.on_message(value("a", 1, 1, 1), 2.0), Merge)


@pytest.mark.parametrize("changed", [{"steps": 0}, {"tokens": 0}])
def test_a_value_without_a_step_is_never_merged(changed: dict[str, int]) -> None:
    syncer = running("a", "b")
    syncer.on_message(value("b", 1, 1, 1), 2.0)
    effects = syncer.on_message(value("a", 1, 1, 1, **changed), 2.0)
    assert only(effects, Drop) == [Drop("a", "value without a step since the last adoption")]
    (merge,) = only(effects, Merge)
    assert [each.learner_id for each in merge.contributions] == ["b"]


def behind(versions: int) -> Syncer:
    """Return a syncer of one fragment with some versions by b alone; a has neither adopted one nor contributed."""
    syncer = new(sync_every=1, num_fragments=1, overlap_steps=1, anchor_history=2)
    for name in ("a", "b"):
        syncer.on_message(hello(name, versions=(0,)), 0.0)
    for step in range(1, versions + 1):
        syncer.on_message(report("b", step, (Adopted(step - 1, step - 1),)), float(step))
        syncer.on_message(value("b", step, 0, step, steps=1, tokens=10, base_version=step - 1), float(step))
        merged(syncer, step, float(step))
    assert syncer.versions == [versions]
    return syncer


def test_a_value_against_a_forgotten_version_is_dropped_and_its_sender_refreshed() -> None:
    # Versions 1 and 2 are kept.
    syncer = behind(2)
    syncer.on_message(report("a", 3, (Adopted(0),)), 3.0)
    effects = syncer.on_message(value("a", 3, 0, 3, base_version=0), 3.0)
    assert only(effects, Drop) == [Drop("a", "value against version 0, kept are [1, 2]")]
    assert fragment(3, 0, 2) in sent(effects, "a")
    assert only(effects, Note)[0].kind == "abandoned" and only(effects, Discard) == [Discard(3)]


def test_a_value_against_the_version_before_is_merged() -> None:
    # Versions 0 and 1 are kept.
    syncer = behind(1)
    syncer.on_message(report("a", 2, (Adopted(0),)), 2.0)
    (merge,) = only(syncer.on_message(value("a", 2, 0, 2), 2.0), Merge)
    assert merge.contributions == (Contribution("a", 2, 2, 20, 0, 2),)


def test_steps_since_one_adoption_count_once() -> None:
    syncer = behind(1)
    syncer.on_message(report("a", 2, (Adopted(0),)), 2.0)
    syncer.on_message(value("a", 2, 0, 2), 2.0)
    merged(syncer, 2, 2.0)
    syncer.on_message(report("a", 3, (Adopted(0),)), 3.0)
    assert syncer.global_step == 2, "the third step builds on two that were merged already"
    syncer.on_message(report("a", 4, (Adopted(2, 3, 30),)), 4.0)
    assert syncer.global_step == 3


def test_a_driver_that_merges_what_it_was_not_asked_to_is_wrong() -> None:
    syncer = running("a")
    with pytest.raises(AssertionError, match="merged in phase pulling"):
        merged(syncer, 1, 1.0)
    with pytest.raises(KeyError):
        syncer.on_merged(77, 0, (), 1.0)


@pytest.mark.parametrize(
    "changed", [{"step_s": float("inf")}, {"step_s": float("nan")}, {"step_s": -1.0}, {"tokens": -1}]
)
def test_a_report_with_impossible_numbers_moves_nothing(changed: dict[str, float]) -> None:
    syncer = new(quorum=1)
    syncer.on_message(hello("a"), 0.0)
    [drop] = syncer.on_message(report("a", 1, **changed), 1.0)
    assert drop.peer == "a" and "impossible" in drop.reason
    assert syncer.membership.members["a"].local_step == 0 and syncer.global_step == 0
