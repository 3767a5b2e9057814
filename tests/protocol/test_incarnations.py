"""Learners and the syncer that die and come back, in stories that are too small for a transcript."""

import pytest

from diloco_jax.protocol.effects import Adopt, AdoptState, Drop, Send
from diloco_jax.protocol.learner.machine import JOINING, RECOVERING, TRAINING, Learner
from diloco_jax.protocol.learner.recovery import Saved
from diloco_jax.protocol.messages import (
    SYNCER,
    Advance,
    AnchorRequest,
    AnchorValue,
    Expel,
    GlobalFragment,
    Hello,
    Lease,
    StateEnd,
    StateRequest,
    StateUnavailable,
    StepReport,
    Welcome,
)
from diloco_jax.protocol.pacing import ProtocolConfig
from tests.protocol.pair import FINGERPRINT, Pair


def under_way() -> Pair:
    """a gives its state to c; one of three parts has arrived."""
    pair = Pair(recover_from_peers=True, state_parts=3, release_s=30.0, sync_every=4, num_fragments=2)
    pair.join("a", "b")
    pair.rounds(2, "a", "b")
    pair.held = {"a:StateChunk"}
    pair.join("c")
    pair.let_pass("a:StateChunk")
    assert len(pair.drivers["a"].states) == 1
    return pair


def test_a_receiver_that_leaves_frees_its_donor_at_once() -> None:
    pair = under_way()
    pair.leave("c")
    assert pair.drivers["a"].states == set() and pair.messages(StateEnd, "a")


def test_a_receiver_that_dies_frees_its_donor_after_release_s() -> None:
    pair = under_way()
    pair.crash("c")
    pair.wait(20.0)
    assert len(pair.drivers["a"].states) == 1, "it may come back and continue"
    pair.wait(20.0)
    assert pair.drivers["a"].states == set()


def test_the_next_incarnation_of_a_receiver_gets_another_state() -> None:
    pair = under_way()
    pair.crash("c")
    pair.rounds(1, "a", "b")
    pair.held = set()
    pair.join("c", incarnation=2)
    assert pair.learners["c"].state == TRAINING and pair.drivers["a"].states == set()
    assert [note.members for note in pair.notes("recovered")] == [("c", "a")]


@pytest.mark.parametrize("usable", [True, False])
def test_a_value_of_an_incarnation_that_is_over_speaks_for_it_only(usable: bool) -> None:
    pair = Pair(quorum=2, strikes_max=1)
    pair.join("a", "b")
    pair.rounds(1, "a", "b")
    pair.holds_merges = True
    pair.rounds(1, "a", "b")
    pair.join("b", incarnation=2)
    pair.poisoned = set() if usable else {"b"}
    pair.merge()
    member = pair.syncer.membership.members["b"]
    assert (member.credit.strikes, member.credit.expelled, member.state) == (0, False, JOINING)
    assert pair.messages(Expel) == []
    assert pair.notes("merged")[-1].members == (("a", "b") if usable else ("a",))
    assert member.rounds == (2 if usable else 1), "its name's work, whichever incarnation did it"
    assert pair.syncer.leases.of("").holdings["b"].pending == [], "the new incarnation has not read those samples"


def learner(
    *, overlap_steps: int = 2, saved: Saved | None = None, recovers: bool = True, snapshot_every: int = 0
) -> Learner:
    config = ProtocolConfig(
        sync_every=4,
        num_fragments=1,
        overlap_steps=overlap_steps,
        heartbeat_s=2.0,
        silence_s=10.0,
        resend_s=3.0,
        recover_from_peers=recovers,
        snapshot_every=snapshot_every,
    )
    return Learner("c", 1, config, FINGERPRINT, step_samples=2, saved=saved)


def greeted(made: Learner, global_step: int = 8, version: int = 8) -> list[object]:
    """It is welcomed and holds everything; what it asks for on the way."""
    effects: list[object] = [*made.on_connected(0.0)]
    for message in (
        Welcome(global_step, (version,), 1),
        Lease(0, 0, 100),
        GlobalFragment(global_step, 0, version, 1, 70 + version, 0),
    ):
        effects += made.on_message(message, 1.0)
    return effects


def test_it_waits_for_a_state_and_asks_the_syncer_for_one() -> None:
    made = learner()
    effects = greeted(made)
    assert Send(SYNCER, StateRequest("c", 1, 8, "", 0, 0)) in effects
    assert made.state == RECOVERING and not made.may_step()
    made.on_message(StateUnavailable("", "nobody"), 2.0)
    assert made.state == TRAINING


@pytest.mark.parametrize("how", ["beginning", "off"])
def test_at_the_beginning_of_a_run_or_when_told_so_it_waits_for_none(how: str) -> None:
    made = learner(recovers=how != "off")
    effects = greeted(made, 0, 0) if how == "beginning" else greeted(made)
    assert not any(isinstance(e, Send) and isinstance(e.message, StateRequest) for e in effects)
    assert made.state == TRAINING


@pytest.mark.parametrize(
    ("saved", "fragments"), [(Saved(8, (78,)), (0,)), (Saved(4, (74,)), ()), (Saved(12, (74,)), ())]
)
def test_its_own_saved_state_comes_first(saved: Saved, fragments: tuple[int, ...]) -> None:
    made = learner(saved=saved)
    assert AdoptState("", saved.global_step, fragments) in greeted(made), (
        "parameters only where the values are the same"
    )
    assert made.state == RECOVERING
    made.on_state_adopted(True, 2.0)
    assert made.state == TRAINING


@pytest.mark.parametrize("global_step", [3, 13])
def test_one_that_is_more_than_h_steps_away_is_not_used_unless_saves_are_as_rare(global_step: int) -> None:
    often = greeted(learner(saved=Saved(global_step, (78,)), snapshot_every=3))
    assert AdoptState("", global_step, (0,)) in often, "the last one may not have been written"
    effects = greeted(learner(saved=Saved(global_step, (78,))))
    assert not any(isinstance(effect, AdoptState) for effect in effects)
    assert Send(SYNCER, StateRequest("c", 1, 8, "", 0, 0)) in effects


def test_one_that_cannot_be_read_sends_it_to_the_others() -> None:
    made = learner(saved=Saved(8, (78,)))
    greeted(made)
    assert Send(SYNCER, StateRequest("c", 1, 8, "", 0, 0)) in made.on_state_adopted(False, 2.0)
    assert made.state == RECOVERING


def test_a_link_that_comes_back_while_it_recovers_is_greeted_once() -> None:
    made = learner()
    greeted(made)
    made.on_disconnected(2.0)
    made.on_connected(3.0)
    made.on_message(Welcome(8, (8,), 1), 3.5)
    later = [effect for now_s in range(4, 12) for effect in made.on_tick(float(now_s))]
    assert not any(isinstance(e, Send) and isinstance(e.message, Hello) for e in later), "it was answered"


def test_in_lockstep_it_follows_the_clock_while_it_recovers() -> None:
    made = learner(overlap_steps=0)
    greeted(made)
    made.on_message(Advance(11), 2.0)
    made.on_message(StateUnavailable("", "nobody"), 3.0)
    made.on_step(10, 1.0, 2.5, 4.0, samples_end=made.take_batch().end)
    assert made.global_step == 12, "its first step is the others' next one"


def test_a_newer_epoch_of_the_syncer_overrules_a_newer_version() -> None:
    made = learner(recovers=False)
    greeted(made, 8, 8)
    assert made.on_message(GlobalFragment(9, 0, 4, 2, 74, 0), 2.0) == [Adopt(0, 4)]
    assert made.on_message(GlobalFragment(9, 0, 8, 1, 78, 0), 2.0) == [], "late, of the epoch before"
    assert made.epoch == 2 and made.global_step == 9


def test_the_same_value_of_a_newer_epoch_is_not_adopted_again() -> None:
    made = learner(recovers=False)
    greeted(made, 8, 8)
    assert made.on_message(GlobalFragment(8, 0, 8, 2, 78, 0), 2.0) == []
    assert made.on_message(GlobalFragment(8, 0, 8, 2, 666, 0), 2.0) == [Adopt(0, 8)], "the same number, other bits"


def test_it_offers_the_global_value_that_it_holds() -> None:
    made = learner(recovers=False)
    for request in (AnchorRequest(0, -1), AnchorRequest(0, 0)):
        assert isinstance(made.answer(request, 0.0)[0], Drop), "it holds nothing yet"
    greeted(made, 8, 8)
    # It greeted with 4, and has adopted since then what was on its way to it.
    for asked in (8, 4):
        told = Send(SYNCER, AnchorValue("c", 1, 0, 8, 78, 0))
        assert made.answer(AnchorRequest(0, asked), 2.0) == [told]
    for request in (AnchorRequest(0, 9), AnchorRequest(1, 8), AnchorRequest(-1, 8)):
        (drop,) = made.answer(request, 2.0)
        assert isinstance(drop, Drop) and "is not held" in drop.reason


def test_damaged_values_make_it_greet_once_a_while_later() -> None:
    """Not once for each, and not at once: the answer is several values again, and all of them may be damaged."""
    made = learner(recovers=False)
    greeted(made, 8, 8)
    made.on_step(10, 1.0, 2.5, 1.9, samples_end=made.take_batch().end)
    for tenth in range(20, 50):
        made.on_corrupt(tenth / 10)
        assert not any(isinstance(getattr(e, "message", None), Hello) for e in made.on_tick(tenth / 10))
    asked = [effect.message for effect in made.on_tick(5.0) if isinstance(effect, Send)]
    assert [message.versions for message in asked if isinstance(message, Hello)] == [(8,)]
    made.on_disconnected(6.0)
    made.on_corrupt(7.0)
    assert made.next_deadline_s() is None


@pytest.mark.parametrize("lost_lines", range(0, 14))
def test_lockstep_continues_when_the_syncer_forgot_what_its_learners_hold(lost_lines: int) -> None:
    pair = Pair(overlap_steps=0, quorum=2, pull_timeout_s=5.0, snapshot_every=4)
    pair.join("a", "b")
    pair.rounds(7, "a", "b")
    # Both learners wait for a round that lacks the report of "a" at the syncer.
    pair.held = {"a:StepReport"}
    pair.step("a", "b")
    pair.lose_wire("a")
    pair.held = set()
    pair.restart_syncer(min(lost_lines, len(pair.tape) - pair.driver.snapshots[-1].tape_lines))
    pair.connect("a", "b")
    pair.wait(60.0)
    before = pair.syncer.merged_rounds
    for _ in range(6):
        pair.wait(10.0)
        pair.step("a", "b")
    assert pair.syncer.merged_rounds >= before + 2, pair.syncer.waiting_for(pair.now_s)
    assert pair.messages(StepReport, "a")
    pair.check_bits()
    pair.check_replay()
