"""Rounds of the syncer alone: learners that leave, timeouts, the number of rounds, and requests after a restart."""

from typing import Any

import pytest

from diloco_jax.protocol.closing import GAMMA, grace_window_s
from diloco_jax.protocol.effects import Contribution, Discard, Drop, Effect, Merge, Note, Restore, Send
from diloco_jax.protocol.member import ACTIVE, DISCONNECTED, SILENT
from diloco_jax.protocol.messages import Adopted, Advance, AnchorRequest, Heartbeat, Leave, PullRequest, Stop
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.owed import Owed
from diloco_jax.protocol.syncer.round import MERGING, PULLING, Pace, Round
from tests.protocol.syncer_inputs import LEASED, fragment, hello, merged, new, only, report, running, sent, value
from tests.protocol.test_snapshot import HELD_NONE, anchor, restarted


@pytest.mark.parametrize("goes", ["disconnect", "leave"])
def test_a_learner_that_leaves_while_a_round_is_pulled_is_not_waited_for(goes: str) -> None:
    syncer = running("a", "b")
    syncer.on_message(value("b", 1, 1, 1), 2.0)
    if goes == "leave":
        effects = syncer.on_message(Leave("a", 1, "broke"), 2.0)
    else:
        effects = syncer.on_disconnect("a", 1, "broke", 2.0)
    released = [Note("released", 1, -1, ("a",), f"its {LEASED} leased samples go to others")] if goes == "leave" else []
    assert effects == [
        Note("disconnected", 1, -1, ("a",), "broke"),
        Merge(1, 1, (Contribution("b", 1, 1, 10, 0, 1),)),
        *released,
    ]
    assert syncer.membership.members["a"].state == DISCONNECTED
    assert syncer.on_disconnect("a", 1, "again", 3.0) == []


def test_a_learner_that_leaves_while_a_round_collects_loses_its_report() -> None:
    syncer = running("a", "b", "c", quorum=3)
    for name in ("a", "b"):
        syncer.on_message(report(name, 2), 2.0)
    syncer.on_disconnect("a", 1, "broke", 2.0)
    syncer.on_message(report("c", 2), 2.0)
    assert syncer.global_step == 1, "b and c are two, K is three"


def test_a_disconnect_of_an_older_incarnation_is_history() -> None:
    syncer = running("a")
    syncer.on_message(hello("a", 2), 2.0)
    assert syncer.on_disconnect("a", 1, "late news", 3.0) == []
    assert syncer.membership.get("a", 2) is not None


def test_a_disconnect_while_the_round_merges_does_not_merge_it_twice() -> None:
    syncer = running("a")
    syncer.on_message(value("a", 1, 1, 1), 2.0)
    assert only(syncer.on_disconnect("a", 1, "broke", 2.0), Merge) == []
    assert only(merged(syncer, 1, 3.0), Note)[0] == Note("merged", 1, 1, ("a",), "")
    assert syncer.membership.members["a"].rounds == 1, "what was delivered counts"


def test_silence_beyond_the_lease_takes_a_member_out_and_any_sign_brings_it_back() -> None:
    syncer = running("a", "b")
    syncer.on_message(Heartbeat("b", 1), 7.0)
    syncer.on_tick(8.9)
    assert syncer.membership.members["a"].state == ACTIVE
    now_s = 9.0
    # The syncer checks the time of silence every quarter of it.
    while syncer.membership.members["a"].state == ACTIVE:
        now_s = syncer.next_deadline_s() or 0.0
        syncer.on_tick(now_s)
    assert 9.0 <= now_s <= 9.0 + 8.0 / 4
    assert syncer.membership.members["a"].state == SILENT and syncer.membership.live == 1
    (note,) = only(syncer.on_message(Heartbeat("a", 1), now_s), Note)
    assert note.kind == "back" and syncer.membership.live == 2


@pytest.mark.parametrize("message", [report("a", 2), Heartbeat("a", 1), hello("a")])
def test_every_sign_of_life_ends_silence(message: Any) -> None:
    syncer = running("a", quorum=2)
    syncer.on_tick(20.0)
    assert syncer.membership.members["a"].state == SILENT
    syncer.on_message(message, 21.0)
    assert syncer.membership.members["a"].state == ACTIVE


def test_unanswered_pulls_are_repeated_ever_more_seldom_and_then_given_up() -> None:
    syncer = running("a", "b", silence_s=100.0, pull_timeout_s=12.0)
    syncer.on_message(value("b", 1, 1, 1), 1.5)
    again = [Send("a", PullRequest(1, 1, 1))]
    assert syncer.next_deadline_s() is not None
    # The first request was at 1.0, and resend_s is 3.
    asked = {now_s: syncer.on_tick(float(now_s)) for now_s in range(2, 13)}
    assert {now_s for now_s, effects in asked.items() if effects == again} == {4, 10}
    assert syncer.next_deadline_s() == 13.0
    assert syncer.on_tick(13.0) == [
        Drop("a", "no value within 12.0 s", 1),
        Merge(1, 1, (Contribution("b", 1, 1, 10, 0, 1),)),
    ]
    (drop,) = syncer.on_message(value("a", 1, 1, 1), 14.0)
    assert isinstance(drop, Drop), "too late"


def test_a_round_that_nobody_answers_is_given_up() -> None:
    syncer = running("a", silence_s=100.0, pull_timeout_s=7.0)
    effects = syncer.on_tick(8.0)
    assert [type(e) for e in effects] == [Drop, Note, Discard, Send]
    assert effects[1:3] == [Note("abandoned", 1, 1, (), "no value arrived"), Discard(1)]
    assert sent(effects) == [Advance(1)]
    assert syncer.versions == [0] * 4


@pytest.mark.parametrize("ends", ["owed", "expired"])
def test_rounds_that_end_together_are_given_up_once_each(ends: str) -> None:
    """The end of the first one lets a third open and close, and that one gives up the second."""
    expires_s = 3.0 if ends == "expired" else 600.0
    syncer = new(quorum=1, overlap_steps=2, num_fragments=2, sync_every=2, pull_timeout_s=expires_s, silence_s=100.0)
    two = (Adopted(0),) * 2
    for name in "ab":
        syncer.on_message(hello(name, versions=(0, 0)), 0.0)
    syncer.rounds.owing["a"] = Owed(1, 0)
    for name, step in (("a", 1), ("a", 2), ("b", 1)):
        syncer.on_message(report(name, step, two), 1.0 + step)
    assert {number: [*round_.asked] for number, round_ in syncer.rounds.flying.items()} == {1: ["a"], 2: ["a"]}
    effects = syncer.on_tick(10.0)
    assert sorted(only(effects, Discard)) == [Discard(1), Discard(2)]
    assert [(e.peer, e.global_step) for e in only(effects, Drop)] == [("a", 1), ("a", 2)]
    assert syncer.rounds.owing["a"].pulls == 3 and 3 in syncer.rounds.flying


def test_the_deadline_names_only_what_time_alone_can_resolve() -> None:
    syncer = new()
    assert syncer.next_deadline_s() is None
    syncer.on_message(hello("a"), 0.0)
    syncer.on_tick(0.0)
    assert syncer.next_deadline_s() == 2.0, "the next check of silent learners, though nobody is connected yet"
    syncer.on_message(report("a", 1), 1.0)
    syncer.on_tick(2.0)
    # The pull is due again, and so is the check after a quarter of the time of silence.
    assert syncer.next_deadline_s() == 4.0
    syncer.on_message(value("a", 1, 1, 1), 2.5)
    syncer.on_tick(4.0)
    assert syncer.next_deadline_s() == 6.0, "the merge ends by itself; only the lease is left"


def test_rounds_in_flight_are_bounded_by_tau() -> None:
    syncer = running("a", overlap_steps=2)
    for step in range(2, 6):
        syncer.on_message(report("a", step), float(step))
    assert syncer.global_step == 2, "rounds 1 and 2 are being pulled; round 3 has no place"
    assert syncer.waiting_for(6.0) == "round 1, pulling: a"


def test_two_rounds_of_one_fragment_are_never_in_flight() -> None:
    syncer = new(overlap_steps=4, sync_every=1, num_fragments=1)
    syncer.on_message(hello("a", versions=(0,)), 0.0)
    for step in range(1, 4):
        syncer.on_message(report("a", step, (Adopted(0),)), float(step))
    assert syncer.global_step == 1


def test_a_broadcast_that_is_under_way_is_not_sent_again() -> None:
    # P = H = 2 and tau = 2: the next round of fragment 1 opens in the very input that sends its broadcast
    syncer = new(sync_every=2, num_fragments=2)
    syncer.on_message(hello("a", versions=(0, 0)), 0.0)
    syncer.on_message(report("a", 1, (Adopted(0),) * 2), 1.0)
    syncer.on_message(report("a", 2, (Adopted(0),) * 2), 2.0)
    assert syncer.global_step == 2
    syncer.on_message(value("a", 1, 1, 1), 2.0)
    assert len(sent(merged(syncer, 1, 2.0), "a")) == 1


def test_a_lost_broadcast_is_repaired_when_the_fragment_has_its_next_turn() -> None:
    syncer = new(overlap_steps=1)
    syncer.on_message(hello("a"), 0.0)
    held = [Adopted(0)] * 4
    # The syncer never learns that "a" has version 1 of fragment 1.
    for step in range(1, 5):
        fragment_id = step % 4
        syncer.on_message(report("a", step, tuple(held)), float(step))
        syncer.on_message(value("a", step, fragment_id, step), float(step))
        merged(syncer, step, float(step))
        if fragment_id != 1:
            held[fragment_id] = Adopted(step, step, 10 * step)
    assert syncer.versions == [4, 1, 2, 3]
    repaired = {step: sent(syncer.on_message(report("a", step, tuple(held)), float(step))) for step in range(5, 12)}
    again = [fragment(4, 1, 1, merged_round=1)]
    assert [step for step, messages in repaired.items() if messages == again] == [5, 10], "ever more seldom"
    held[1] = Adopted(1, 11, 110)
    assert sent(syncer.on_message(report("a", 12, tuple(held)), 12.0)) == [PullRequest(5, 1, 12)]


def test_a_lost_broadcast_is_repaired_also_for_who_counts_with_an_older_version() -> None:
    syncer = new(overlap_steps=1)
    syncer.on_message(hello("a"), 0.0)
    syncer.on_message(hello("b"), 0.0)
    for step in range(1, 5):
        syncer.on_message(report("a", step), float(step))
        syncer.on_message(value("a", step, step % 4, step), float(step))
        merged(syncer, step, float(step))
    # "b" has missed all of them; round 5 is for fragment 1.
    effects = syncer.on_message(report("b", 4), 4.5)
    assert sent(effects, "b") == [PullRequest(5, 1, 4), fragment(5, 1, 1)]


def test_stop_goes_to_everybody_and_to_learners_that_missed_it() -> None:
    syncer = running("a", total_steps=1)
    syncer.on_message(hello("b"), 1.0)
    syncer.on_message(value("a", 1, 1, 1), 2.0)
    effects = merged(syncer, 1, 3.0)
    assert {e.peer for e in effects if isinstance(e, Send) and isinstance(e.message, Stop)} == {"a", "b"}
    assert syncer.finished and syncer.waiting_for(3.0) == "nothing: the run is complete"
    assert sent(syncer.on_message(report("a", 2), 4.0), "a") == [Stop(1, "run complete")]
    assert sent(syncer.on_message(hello("c"), 5.0), "c")[-1] == Stop(1, "run complete")


def test_a_run_needs_a_step() -> None:
    with pytest.raises(ValueError, match="total_steps is 0"):
        Syncer(ProtocolConfig(), 0)


CONFIG = ProtocolConfig(overlap_steps=2, ema_decay=0.75)


def test_averages_start_at_their_first_sample() -> None:
    pace = Pace().after_quorum(0.5, 1.0, CONFIG).after_merge(0.25, 1.0, CONFIG)
    assert pace == Pace(0.5, 0.25)
    # The expected mean is 0.75 * 0.5 + 0.25 * 1.5.
    assert pace.after_quorum(1.5, 1.0, CONFIG) == Pace(0.75, 0.25)
    assert pace.after_merge(1.25, 1.0, CONFIG) == Pace(0.5, 0.5)


def test_a_wait_for_compilers_is_not_a_sample() -> None:
    assert Pace().after_quorum(60.0, None, CONFIG).after_merge(60.0, None, CONFIG) == Pace()


def test_one_long_wait_closes_the_window_but_not_for_long() -> None:
    pace = Pace(0.0, 0.0).after_quorum(600.0, 1.0, CONFIG)
    # The pace takes a quarter of the slack of 2 steps, not of 600 s.
    assert pace.quorum_s == 0.5
    windows = []
    for _ in range(3):
        windows.append(grace_window_s(ProtocolConfig(grace_steps_max=9.0), 1.0, pace.quorum_s, pace.merge_s) / GAMMA)
        pace = pace.after_quorum(0.0, 1.0, CONFIG)
    # The slack is 2 - 0.5, 2 - 0.375 and 2 - 0.28125.
    assert windows == pytest.approx([1.5, 1.625, 1.71875])


def test_a_round_names_whom_it_waits_for() -> None:
    this = Round(7, 3, 0.0)
    this.phase = PULLING
    this.asked = {"b": 4, "a": 5}
    assert this.waits_for == "round 7, pulling: a, b"
    this.asked = {}
    this.phase = MERGING
    assert this.waits_for == "round 7, merging: the merge"


def beat(syncer: Syncer, now_s: float, *names: str) -> list[Effect]:
    """Send heartbeats of learners."""
    return [effect for name in names for effect in syncer.on_message(Heartbeat(name, 1), now_s)]


def test_an_unanswered_request_is_repeated_to_another_holder() -> None:
    syncer = restarted()
    for name in ("a", "b"):
        syncer.on_message(hello(name, versions=(0, 1, 0, 0), epoch=1), 6.0)
    asked = {}
    for tenth in range(60, 160):
        effects = beat(syncer, tenth / 10, "a", "b") + syncer.on_tick(tenth / 10)
        asked |= {e.peer: tenth / 10 for e in effects if isinstance(e, Send) and isinstance(e.message, AnchorRequest)}
    assert asked == {"b": 9.0, "a": 15.0}, "a was asked at 6.0; b after resend_s, then a after twice as long"


def test_the_wait_ends_restore_s_after_the_first_is_back() -> None:
    syncer = restarted()
    for now_s in range(6, 60):
        syncer.on_tick(float(now_s))
    assert syncer.restoring, "nobody is back, so the syncer has nothing to continue with"
    syncer.on_message(hello("a", epoch=1), 60.0)
    beat(syncer, 65.0, "a")
    syncer.on_tick(69.9)
    assert syncer.restoring
    effects = syncer.on_tick(70.0)
    assert not syncer.restoring and only(effects, Note)[-1].kind == "lost"


def test_a_returned_learner_is_asked_after_the_deadline_but_not_forever() -> None:
    syncer = restarted()
    syncer.on_message(hello("a", versions=(0, 1, 0, 0), epoch=1), 6.0)
    asked = []
    for tenth in range(60, 270):
        effects = beat(syncer, tenth / 10, "a") + syncer.on_tick(tenth / 10)
        asked += [tenth / 10 for e in effects if isinstance(e, Send) and isinstance(e.message, AnchorRequest)]
        deadline_s = syncer.next_deadline_s()
        assert deadline_s is not None and deadline_s > tenth / 10 and syncer.restoring
    assert asked == [9.0, 15.0], "b, who is not back, was waited for until 16.0"
    assert only(syncer.on_tick(27.0), Note)[-1].kind == "lost" and not syncer.restoring


@pytest.mark.parametrize("silence_s", [4.0, 30.0], ids=["it becomes silent", "its lease is long"])
def test_what_a_learner_holds_that_greeted_and_is_not_heard_then_is_not_given_up(silence_s: float) -> None:
    syncer = running("a", restore_s=5.0, silence_s=silence_s, heartbeat_s=1.0, resend_s=0.5)
    syncer.on_message(value("a", 1, 1, 1), 1.0)
    merged(syncer, 1, 1.0)
    syncer.on_restart(**HELD_NONE, now_s=5.0)
    syncer.on_message(hello("a", versions=(0, 1, 0, 0), epoch=1), 6.0)
    for tenth in range(61, 300):
        syncer.on_tick(tenth / 10)
    assert syncer.restoring, "the learner was cut off before it was asked, and nobody else is there"
    asked = []
    for tenth in range(300, 500):
        effects = beat(syncer, tenth / 10, "a") + syncer.on_tick(tenth / 10)
        asked += [tenth / 10 for e in effects if isinstance(e, Send) and isinstance(e.message, AnchorRequest)]
        # The first answer is lost.
        if len(asked) == 2:
            break
    assert asked, "it is heard again"
    assert only(syncer.on_message(anchor("a", 1, 1), asked[-1] + 1.0), Restore) == [Restore(1, 1)]
    assert syncer.versions[1] == 1 and not syncer.restoring


@pytest.mark.parametrize("silent", [False, True])
def test_who_is_back_and_lost_again_is_waited_for_as_the_others_are(silent: bool) -> None:
    syncer = restarted()
    syncer.on_message(hello("a", versions=(0, 1, 0, 0), epoch=1), 6.0)
    if silent:
        syncer.on_tick(14.0)
    else:
        syncer.on_disconnect("a", 1, "broke", 6.5)
    effects = syncer.on_message(hello("b", epoch=1), 14.0)
    assert syncer.restoring and not only(effects, Note)[1:], "a holds it, and has until restore_s after b is back"
    assert AnchorRequest(1, 1) in sent(syncer.on_message(hello("a", versions=(0, 1, 0, 0), epoch=1), 15.0), "a")
    syncer.on_message(anchor("a", 1, 1), 16.0)
    assert syncer.versions == [0, 1, 0, 0] and not syncer.restoring
