"""The learner alone: what each input leads to, in each state, in time and out of turn."""

from typing import Any

import pytest

from diloco_jax.protocol.effects import Adopt, Drop, Effect, Finish, Send, Stage, Unstage
from diloco_jax.protocol.learner.machine import JOINING, STOPPED, TRAINING, WAITING, Learner
from diloco_jax.protocol.leases import Batch
from diloco_jax.protocol.messages import (
    SYNCER,
    Adopted,
    Advance,
    FragmentValue,
    GlobalFragment,
    Heartbeat,
    Hello,
    Lease,
    Leave,
    Message,
    PullRequest,
    Refuse,
    StatePull,
    StepReport,
    Stop,
    Welcome,
)
from diloco_jax.protocol.pacing import ProtocolConfig

FINGERPRINT = (("model", "abc"),)


def new(
    overlap_steps: int = 2,
    sync_every: int = 4,
    num_fragments: int = 4,
    *,
    recover_from_peers: bool = False,  # test_recovery.py
    **options: Any,
) -> Learner:
    config = ProtocolConfig(
        sync_every=sync_every,
        num_fragments=num_fragments,
        overlap_steps=overlap_steps,
        heartbeat_s=2.0,
        silence_s=10.0,
        resend_s=3.0,
        recover_from_peers=recover_from_peers,
    )
    return Learner("a", 1, config, FINGERPRINT, step_samples=2, **options)


def fragment(global_step: int, fragment_id: int, version: int, epoch: int = 1) -> GlobalFragment:
    return GlobalFragment(global_step, fragment_id, version, epoch, digest(fragment_id, version), 0)


def digest(fragment_id: int, version: int) -> int:
    return 0 if version < 0 else 1000 + 10 * fragment_id + version


def greeting(versions: tuple[int, ...], epoch: int = 0, granted: int = 0) -> Hello:
    digests = tuple(digest(p, version) for p, version in enumerate(versions))
    return Hello("a", 1, FINGERPRINT, versions, digests, epoch, 2, granted)


def step(learner: Learner, now_s: float, tokens: int = 10, step_s: float = 1.0, loss: float = 2.5) -> list[Effect]:
    return learner.on_step(tokens, step_s, loss, now_s, samples_end=learner.take_batch().end)


def trained(
    steps: int = 0, overlap_steps: int = 2, sync_every: int = 4, num_fragments: int = 4, **options: Any
) -> Learner:
    """A connected learner that holds version 0 of everything and has made some steps."""
    learner = new(overlap_steps, sync_every, num_fragments, **options)
    learner.on_connected(0.0)
    learner.on_message(Welcome(0, (0,) * num_fragments, 1), 0.0)
    learner.on_message(Lease(0, 0, 1000), 0.0)
    for fragment_id in range(num_fragments):
        learner.on_message(fragment(0, fragment_id, 0), 0.0)
    for _ in range(steps):
        step(learner, 1.0)
    return learner


def sent(effects: list[Effect]) -> list[Message]:
    assert all(effect.peer == SYNCER for effect in effects if isinstance(effect, Send))
    return [effect.message for effect in effects if isinstance(effect, Send)]


def test_greets_with_what_it_holds() -> None:
    learner = new(num_fragments=2)
    assert learner.on_connected(0.0) == [Send(SYNCER, greeting((-1, -1)))]
    assert learner.state == JOINING and not learner.may_step()


def test_may_not_step_before_it_holds_every_fragment() -> None:
    learner = new(num_fragments=2)
    learner.on_connected(0.0)
    learner.on_message(Welcome(7, (5, 7), 1), 0.0)
    learner.on_message(Lease(0, 0, 10), 0.0)
    assert not learner.may_step()
    assert learner.on_message(fragment(7, 1, 7), 0.0) == [Adopt(1, 7)]
    assert not learner.may_step()
    with pytest.raises(AssertionError, match="step in state joining"):
        step(learner, 0.0)
    assert learner.on_message(fragment(7, 0, 5), 0.0) == [Adopt(0, 5)]
    assert learner.may_step() and learner.global_step == 7


def test_may_not_step_before_it_has_data() -> None:
    learner = new(num_fragments=1, sync_every=1)
    learner.on_connected(0.0)
    learner.on_message(Welcome(0, (0,), 1), 0.0)
    learner.on_message(fragment(0, 0, 0), 0.0)
    assert learner.state == JOINING
    learner.on_message(Lease(0, 0, 1), 0.0)
    assert learner.state == JOINING, "half a batch"
    learner.on_message(Lease(1, 7, 8), 0.0)
    assert learner.state == TRAINING and learner.take_batch() == Batch(((0, 1), (7, 8)), 2)


def test_fragments_may_overtake_the_welcome() -> None:
    learner = new(num_fragments=1, sync_every=1)
    learner.on_connected(0.0)
    learner.on_message(fragment(3, 0, 3), 0.0)
    learner.on_message(Lease(0, 0, 10), 0.0)
    assert learner.state == JOINING, "only the welcome tells whether others have a state to give"
    assert learner.on_message(Welcome(3, (3,), 1), 0.0) == []
    assert learner.state == TRAINING


def test_repeats_the_greeting_until_it_is_answered_in_full() -> None:
    learner = new(num_fragments=2)
    learner.on_connected(0.0)
    assert learner.next_deadline_s() == 2.0
    assert sent(learner.on_tick(2.0)) == [Heartbeat("a", 1)]
    assert sent(learner.on_tick(3.0)) == [greeting((-1, -1))]
    learner.on_message(fragment(0, 1, 0), 3.5)
    later = {now_s: sent(learner.on_tick(float(now_s))) for now_s in range(4, 20)}
    greeted = {now_s: m for now_s, messages in later.items() for m in messages if isinstance(m, Hello)}
    assert min(greeted) >= 7, "a fragment came, so the others are on their way"
    assert set(greeted.values()) == {greeting((-1, 0), 1)}, "then it asks for what is missing"
    learner.on_message(fragment(0, 0, 0), 20.0)
    learner.on_message(Welcome(0, (0, 0), 1), 20.0)
    learner.on_message(Lease(0, 0, 10), 20.0)
    assert sent(learner.on_tick(24.0)) == [Heartbeat("a", 1)]


def test_waits_longer_before_each_repetition_of_a_greeting() -> None:
    learner = new()
    learner.on_connected(0.0)
    greeted = []
    for now_s in range(1, 60):
        greeted += [now_s for message in sent(learner.on_tick(float(now_s))) if isinstance(message, Hello)]
    # It waits 3 s, 6 s, and then 10 s, the time of silence, after each greeting.
    assert greeted == [3, 9, 19, 29, 39, 49, 59]


def test_refused() -> None:
    learner = new()
    learner.on_connected(0.0)
    assert learner.on_message(Refuse("model differs"), 0.0) == [Finish("refused: model differs")]
    assert learner.state == STOPPED and learner.next_deadline_s() is None


def test_reports_every_step_and_stages_what_the_next_tau_rounds_ask_for() -> None:
    learner = trained()
    effects = step(learner, 1.0, step_s=1.5)
    held = (Adopted(0, 0, 0),) * 4
    assert effects == [Stage(1, 1), Stage(2, 1), Send(SYNCER, StepReport("a", 1, 1, 10, 0, held, 1.5, 2.5, 2, 1000))]
    assert step(learner, 2.0, loss=2.0)[:2] == [Stage(1, 2), Stage(2, 2)]


def test_keeps_at_most_three_copies_of_a_fragment() -> None:
    learner = trained(3)
    effects = step(learner, 2.0)
    assert effects[:4] == [Stage(1, 4), Unstage(1, 1), Stage(2, 4), Unstage(2, 1)]


def test_lets_go_of_copies_that_no_round_will_ask_for() -> None:
    learner = trained(1)
    learner.on_message(Advance(1), 1.0)
    assert step(learner, 2.0)[:3] == [Unstage(1, 1), Stage(2, 2), Stage(3, 2)]


def test_steps_without_a_link_but_tells_nobody() -> None:
    learner = trained(1)
    assert learner.on_disconnected(1.0) == [Unstage(1, 1), Unstage(2, 1)]
    assert learner.may_step() and learner.next_deadline_s() is None and learner.on_tick(99.0) == []
    assert step(learner, 2.0) == []
    assert (learner.local_step, learner.tokens) == (2, 20)
    assert learner.on_connected(3.0) == [Send(SYNCER, greeting((0, 0, 0, 0), 1, 1000))]
    assert isinstance(sent(step(learner, 4.0))[-1], StepReport)


def value(global_step: int, fragment_id: int, local_step: int, steps: int, tokens: int, base: int) -> FragmentValue:
    since = 2 * (local_step - steps)
    return FragmentValue("a", 1, global_step, fragment_id, local_step, steps, tokens, base, 2 * local_step, 0, since)


def test_answers_with_the_copy_of_the_asked_step() -> None:
    learner = trained(3)
    assert sent(learner.on_message(PullRequest(1, 1, 2), 1.0)) == [value(1, 1, 2, 2, 20, 0)]
    assert sent(learner.on_message(PullRequest(1, 1, 2), 1.0)) == [value(1, 1, 2, 2, 20, 0)], "asked twice, said twice"


def test_answers_with_the_next_newer_copy_when_the_asked_one_is_gone() -> None:
    learner = trained(5)
    assert sent(learner.on_message(PullRequest(1, 1, 1), 1.0)) == [value(1, 1, 3, 3, 30, 0)]


def test_answers_after_the_next_step_when_there_is_no_copy() -> None:
    learner = trained(1)
    assert learner.on_message(PullRequest(3, 3, 1), 1.0) == []
    effects = step(learner, 2.0)
    assert sent(effects)[1:] == [value(3, 3, 2, 2, 20, 0)]
    assert effects.index(Stage(3, 2)) < len(effects) - 1, "the copy is asked for before it is sent"
    assert sent(step(learner, 3.0))[1:] == [], "answered once"


def test_a_pull_during_a_step_changes_nothing_that_the_step_depends_on() -> None:
    learner = trained(1)
    before = (learner.state, learner.local_step, learner.tokens, learner.adopted, learner.global_step)
    learner.answer(PullRequest(1, 1, 1), 1.0)
    assert before == (learner.state, learner.local_step, learner.tokens, learner.adopted, learner.global_step)


def test_a_value_counts_from_the_adoption_that_its_copy_was_made_after() -> None:
    learner = trained(2)
    learner.on_message(fragment(1, 1, 1), 1.0)
    step(learner, 2.0, tokens=7)
    assert learner.on_message(PullRequest(5, 1, 2), 2.0) == []
    assert sent(step(learner, 3.0, tokens=7))[1:] == [value(5, 1, 4, 2, 14, 1)]


def test_a_pull_that_an_adoption_overtook_never_yields_zero_steps() -> None:
    learner = trained(1)
    learner.on_message(fragment(1, 1, 1), 1.0)
    assert learner.on_message(PullRequest(5, 1, 1), 1.0) == [], "the copy is gone, the new one has no step yet"
    assert sent(step(learner, 2.0))[1:] == [value(5, 1, 2, 1, 10, 1)]


@pytest.mark.parametrize(
    ("asked", "expected"),
    # A broadcast voids a pull of the same round, not a pull of a newer round.
    [(3, []), (7, [value(7, 3, 2, 1, 10, 3)])],
)
def test_a_broadcast_voids_the_pull_that_waits_for_a_step(asked: int, expected: list[FragmentValue]) -> None:
    learner = trained(1)
    learner.on_message(PullRequest(asked, 3, 1), 1.0)
    learner.on_message(fragment(3, 3, 3), 1.0)
    assert sent(step(learner, 2.0))[1:] == expected


def test_a_lost_link_voids_the_pull_that_waits_for_a_step() -> None:
    learner = trained(1)
    learner.on_message(PullRequest(3, 3, 1), 1.0)
    learner.on_disconnected(1.0)
    learner.on_connected(1.5)
    assert len(sent(step(learner, 2.0))) == 1


@pytest.mark.parametrize("fragment_id", [-1, 4])
def test_unknown_fragments_are_dropped(fragment_id: int) -> None:
    learner = trained(1)
    for message in (PullRequest(1, fragment_id, 1), fragment(1, fragment_id, 1)):
        (drop,) = learner.on_message(message, 1.0)
        assert isinstance(drop, Drop) and f"fragment {fragment_id}, there are 4" in drop.reason


def test_the_value_names_the_size_that_the_driver_told() -> None:
    learner = trained(1, payload_bytes={1: 4096})
    (message,) = sent(learner.on_message(PullRequest(1, 1, 1), 1.0))
    assert isinstance(message, FragmentValue) and message.payload_bytes == 4096


def test_adopts_newer_and_ignores_older_and_equal() -> None:
    learner = trained(2)
    assert learner.on_message(fragment(5, 1, 5), 1.0) == [Adopt(1, 5), Unstage(1, 1), Unstage(1, 2)]
    assert learner.adopted[1] == Adopted(5, 2, 20) and learner.global_step == 5
    assert learner.on_message(fragment(5, 1, 5), 1.0) == [], "a duplicate"
    assert learner.on_message(fragment(6, 1, 1), 1.0) == [], "overtaken"
    assert learner.adopted[1] == Adopted(5, 2, 20) and learner.global_step == 6


def test_an_old_clock_does_not_turn_the_schedule_back() -> None:
    learner = trained(1)
    learner.on_message(Advance(6), 1.0)
    learner.on_message(Advance(2), 1.0)
    learner.on_message(fragment(1, 1, 1), 1.0)
    assert learner.global_step == 6


def test_a_donor_that_is_asked_again_for_what_it_has_not_seen_greets() -> None:
    """The broadcast that its receiver waits for may have been lost; the syncer answers a greeting with it."""
    learner = trained(1, recover_from_peers=True)
    asked = StatePull("r", learner.global_step + 5, 0, 0)
    assert sent(learner.on_message(asked, 1.0)) == []
    assert [type(message) for message in sent(learner.on_message(asked, 2.0))] == [Hello]
    learner.on_disconnected(3.0)
    assert sent(learner.on_message(asked, 4.0)) == [], "it is not connected"


def test_stop_frees_every_copy_and_ends() -> None:
    learner = trained(1)
    goodbye = Send(SYNCER, Leave("a", 1, "run complete"))
    assert learner.on_message(Stop(9, "run complete"), 1.0) == [
        goodbye,
        Unstage(1, 1),
        Unstage(2, 1),
        Finish("run complete"),
    ]
    assert learner.state == STOPPED and learner.global_step == 9 and not learner.may_step()


def test_after_the_end_nothing_happens() -> None:
    learner = trained(1)
    learner.on_message(Stop(9, "run complete"), 1.0)
    for message in (Stop(9, "again"), fragment(9, 1, 9), PullRequest(9, 1, 1), Advance(10), Welcome(9, (), 1)):
        assert learner.on_message(message, 2.0) == []
    assert learner.on_connected(3.0) == [] and learner.on_tick(99.0) == [] and learner.next_deadline_s() is None


def test_a_joining_learner_does_not_greet_again_while_payloads_arrive() -> None:
    learner = new(2, 4, 4)
    learner.on_connected(0.0)
    learner.on_message(Welcome(0, (0,) * 4, 1), 0.0)
    # resend_s is 3.
    for now_s in (3.0, 9.0, 15.0):
        assert learner.on_receiving(now_s) == []
        assert Hello not in map(type, sent(learner.on_tick(now_s)))
    learner.on_message(fragment(0, 0, 0), 20.0)
    assert learner.on_receiving(26.0) == [] and Hello not in map(type, sent(learner.on_tick(26.0)))
    assert [type(m) for m in sent(learner.on_tick(99.0))] == [Hello, Heartbeat], "nothing arrives any more"


def test_a_joining_learner_greets_again_if_a_value_was_damaged_or_never_comes() -> None:
    learner = new(2, 4, 4)
    learner.on_connected(0.0)
    learner.on_corrupt(1.0)
    learner.on_receiving(3.0)
    assert Hello in map(type, sent(learner.on_tick(3.0))), "only another greeting brings it"
    patience_s = 3.0 + 4 * learner.contact.config.silence_s
    learner.on_receiving(patience_s - 1.0)
    assert Hello not in map(type, sent(learner.on_tick(patience_s - 1.0)))
    learner.on_receiving(patience_s + 10.0)
    assert Hello in map(type, sent(learner.on_tick(patience_s + 10.0))), "within a limit"


def test_leave_says_goodbye_if_there_is_a_link() -> None:
    learner = trained(1)
    assert sent(learner.leave("asked to", 1.0)) == [Leave("a", 1, "asked to")]
    assert learner.state == STOPPED
    alone = trained(1)
    alone.on_disconnected(1.0)
    assert alone.leave("asked to", 1.0) == [Finish("asked to")]


def test_lockstep_waits_at_a_due_step_until_its_fragment_is_back() -> None:
    learner = trained(1, overlap_steps=0, sync_every=2, num_fragments=1)
    assert learner.state == TRAINING
    effects = step(learner, 1.0)
    assert effects[0] == Stage(0, 2) and learner.state == WAITING and not learner.may_step()
    assert sent(learner.on_message(PullRequest(2, 0, 2), 1.0)) == [value(2, 0, 2, 2, 20, 0)]
    learner.on_message(fragment(2, 0, 2), 1.0)
    assert learner.may_step() and learner.global_step == 2


def test_lockstep_continues_when_the_round_is_given_up() -> None:
    learner = trained(2, overlap_steps=0, sync_every=2, num_fragments=1)
    learner.on_message(Advance(1), 1.0)
    assert learner.state == WAITING, "an older step's end is not this one's"
    learner.on_message(Advance(2), 1.0)
    assert learner.state == TRAINING


def test_lockstep_repeats_greeting_and_report_while_it_waits() -> None:
    learner = trained(2, overlap_steps=0, sync_every=2, num_fragments=1)
    assert learner.next_deadline_s() == 2.0
    # It has waited since 1.0, and resend_s is 3.
    messages = sent(learner.on_tick(4.0))
    assert [type(m) for m in messages] == [Hello, StepReport, Heartbeat]
    assert messages[1].local_step == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("cut_before_the_step", [True, False])
def test_lockstep_can_answer_on_the_next_link(cut_before_the_step: bool) -> None:
    learner = trained(1, overlap_steps=0, sync_every=2, num_fragments=1)
    if cut_before_the_step:
        learner.on_disconnected(1.0)
    step(learner, 1.0)
    learner.on_disconnected(1.5)
    learner.on_connected(2.0)
    assert sent(learner.on_message(PullRequest(2, 0, 2), 2.0)) == [value(2, 0, 2, 2, 20, 0)]


def test_lockstep_counts_its_own_steps() -> None:
    learner = trained(1, overlap_steps=0, sync_every=4, num_fragments=1)
    learner.on_message(Advance(3), 1.0)
    assert learner.global_step == 1, "steps that it has not made do not count"


def test_a_driver_that_reads_a_value_gives_signs_of_life_and_repeats_nothing() -> None:
    learner = new()
    learner.on_connected(0.0)
    assert learner.on_busy(2.9) == [], "a tick may still send it"
    assert learner.on_busy(3.0) == [Send(SYNCER, Heartbeat("a", 1))], "and no greeting, which is due"
    assert learner.on_busy(5.9) == []
    assert learner.on_busy(6.0) == [Send(SYNCER, Heartbeat("a", 1))]
    assert [type(each.message) for each in learner.on_tick(8.0) if isinstance(each, Send)] == [Hello, Heartbeat]
    learner.on_disconnected(9.0)
    assert learner.on_busy(90.0) == []
