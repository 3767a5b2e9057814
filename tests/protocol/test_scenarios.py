"""Whole stories with real machines on both sides. The pair checks the drivers' contract on the way."""

from collections.abc import Iterator
from typing import Any

import pytest

from diloco_jax.protocol.learner.machine import STOPPED, TRAINING, WAITING
from diloco_jax.protocol.member import ACTIVE, GONE, JOINING
from diloco_jax.protocol.messages import Advance, FragmentValue, GlobalFragment, Leave, StepReport, Stop, Welcome
from tests.protocol.pair import Pair

pairs: list[Pair] = []


def pair(*names: str, **settings: Any) -> Pair:
    """A pair whose learners are live: each has made one step."""
    made = Pair(**settings)
    pairs.append(made)
    made.join(*names)
    if names:
        made.rounds(1, *names)
    return made


@pytest.fixture(autouse=True)
def replays() -> Iterator[None]:
    """Whatever happened, a fresh syncer that is fed the tape decides the same."""
    pairs.clear()
    yield
    assert pairs
    for made in pairs:
        made.check_replay()


def test_steady_state_merges_everybody_in_every_round() -> None:
    it = pair("a", "b", "c", quorum=3)
    it.rounds(9, "a", "b", "c")
    assert it.contributors() == [("a", "b", "c")] * 10
    assert it.syncer.global_step == 10 and it.syncer.versions == [10, 9]
    assert [merge.parts[0].steps for merge in it.merges()] == [1, 2, 2, 2, 2, 2, 2, 2, 2, 2], "H = 2 steps per turn"
    assert all(a.version == version for a, version in zip(it.learners["a"].adopted, [10, 9], strict=True))
    assert it.drops() == []


@pytest.mark.parametrize(("sync_every", "num_fragments"), [(1, 1), (4, 1), (4, 4), (6, 3)])
@pytest.mark.parametrize("tau", [1, 2, 4])
def test_each_broadcast_is_sent_once_when_nothing_is_lost(sync_every: int, num_fragments: int, tau: int) -> None:
    it = pair("a", "b", quorum=2, sync_every=sync_every, num_fragments=num_fragments, overlap_steps=tau)
    it.rounds(12, "a", "b")
    versions = [(m.fragment_id, m.version) for m in it.messages(GlobalFragment, "a")]
    assert len(versions) == len(set(versions)) == num_fragments + len(it.merges())


def test_each_broadcast_is_sent_once_in_lockstep() -> None:
    it = pair("a", "b", quorum=2, sync_every=2, num_fragments=1, overlap_steps=0)
    for _ in range(7):
        it.step("a", "b")
    assert [m.version for m in it.messages(GlobalFragment, "a")] == [0, 2, 4, 6, 8]


def test_without_a_grace_window_the_first_to_report_is_merged_alone() -> None:
    merged = {}
    for grace in (0.0, 1.0):
        it = pair("a", "b", "c", sync_every=8, num_fragments=8, grace_steps_max=grace)
        for _ in range(20):
            it.wait(0.8)
            for name in ("a", "b", "c"):
                it.wait(0.05)
                it.step(name)
        late = it.contributors()[8:]
        merged[grace] = sum(len(names) for names in late) / len(late)
    assert merged[0.0] == 1.0 and merged[1.0] == 3.0


def test_a_long_first_step_does_not_close_the_grace_window_for_long() -> None:
    it = Pair(sync_every=8, num_fragments=8, lease_s=20.0)
    pairs.append(it)
    it.join("a", "b", "c")
    it.wait(60.0)  # all three compile
    it.step("a", "b", "c", step_s=60.0)
    for _ in range(20):
        it.wait(0.8)
        for name in ("a", "b", "c"):
            it.wait(0.05)
            it.step(name)
    late = it.contributors()[10:]
    assert sum(len(names) for names in late) / len(late) > 2.5


def test_a_late_joiner_takes_the_global_model_and_never_offers_its_own() -> None:
    it = pair("a")
    it.rounds(3, "a")
    it.join("b")
    assert it.syncer.membership.members["b"].state == JOINING and it.learners["b"].state == TRAINING
    assert [a.version for a in it.learners["b"].adopted] == it.syncer.versions
    assert it.messages(StepReport, "b") == [] and it.messages(FragmentValue, "b") == []
    it.rounds(2, "b", "a")
    assert it.syncer.membership.members["b"].state == ACTIVE
    assert "b" in it.contributors()[-1]
    assert all(value.base_version > 0 for value in it.messages(FragmentValue, "b"))


def test_leaving_and_coming_back_as_the_same_incarnation() -> None:
    it = pair("a", "b")
    it.leave("b")
    assert it.messages(Leave) and it.syncer.membership.members["b"].state == GONE
    it.rounds(1, "a")
    assert it.contributors()[-1] == ("a",), "nobody waits for who left"


@pytest.mark.parametrize("how", ["crash", "cut"])
def test_death_during_pulling_costs_the_others_nothing(how: str) -> None:
    it = pair("a", "b", quorum=2)
    it.held.add("b:FragmentValue")
    it.rounds(1, "a", "b")
    merged = len(it.merges())
    getattr(it, how)("b")
    assert it.contributors()[merged:] == [("a",)]


def test_death_of_everybody_during_pulling_gives_the_round_up() -> None:
    it = pair("a", "b", quorum=2)
    it.held |= {"a:FragmentValue", "b:FragmentValue"}
    it.rounds(1, "a", "b")
    versions = list(it.syncer.versions)
    it.crash("a", "b")
    assert [note.global_step for note in it.notes("abandoned")] == [2] and it.syncer.versions == versions


@pytest.mark.parametrize("how", ["crash", "cut"])
def test_death_during_merging_changes_nothing_of_the_merge(how: str) -> None:
    it = pair("a", "b", quorum=2)
    it.holds_merges = True
    it.rounds(1, "a", "b")
    merged = len(it.merges())
    getattr(it, how)("b")
    assert len(it.merges()) == merged, "merged once, not twice"
    it.merge()
    assert it.notes("merged")[-1].members == ("a", "b")
    assert it.messages(GlobalFragment, "b")[-1].version < it.syncer.global_step, "nothing is sent to the dead"


def test_a_slow_learner_is_left_out_and_counts_with_all_its_steps_later() -> None:
    it = pair("a", "slow", sync_every=4, num_fragments=4)
    it.rounds(3, "a", "slow")
    for _ in range(3):
        it.wait(1.0)
        it.step("a")  # the window of slow's step has passed each time
    it.wait(1.0)
    assert it.contributors()[-3:] == [("a",)] * 3
    it.step("slow")
    it.step("a")
    merge = it.merges()[-1]
    assert [part.learner_id for part in merge.parts] == ["a", "slow"]


def test_below_the_quorum_merging_rests_and_training_does_not() -> None:
    it = pair("a", "b", quorum=2)
    merged = len(it.merges())
    it.crash("b")
    it.rounds(5, "a")
    assert it.learners["a"].local_step == 6 and len(it.merges()) == merged
    assert "fewer than the quorum of 2: training goes on, merging is paused" in it.syncer.waiting_for(it.now_s)
    it.join("b", incarnation=2)
    it.step("b")
    assert it.contributors()[-1] == ("a", "b")
    assert it.merges()[-1].parts[0].steps == 6, "what was trained meanwhile counts"


def test_reconnection_moves_only_what_is_missing() -> None:
    it = pair("a", "b")
    it.cut("b")
    it.rounds(1, "a", "b")
    assert it.learners["b"].local_step == 2, "no link, but it trains"
    assert it.syncer.versions == [2, 3]
    before = len(it.messages(GlobalFragment, "b"))
    it.connect("b")
    assert [(m.fragment_id, m.version) for m in it.messages(GlobalFragment, "b")[before:]] == [(1, 3)]
    assert it.syncer.membership.members["b"].restarts == 0
    it.rounds(1, "b", "a")
    assert it.contributors()[-1] == ("a", "b")


def test_a_restart_is_a_new_incarnation_even_before_the_old_link_is_known_to_be_dead() -> None:
    it = pair("a", "b", quorum=2)
    old = it.learners["b"].incarnation
    it.join("b", incarnation=2)  # no disconnect was seen
    member = it.syncer.membership.members["b"]
    assert (member.incarnation, member.restarts, member.total_steps) == (2, 1, 1)
    it.arrive("b", "syncer", StepReport("b", old, 50, 500, 0, (), 1.0, 2.5, 100, 128))
    assert "StepReport before hello, or of an old incarnation" in it.drops() and member.local_step == 0
    it.rounds(1, "a", "b")
    assert it.contributors()[-1] == ("a", "b") and member.total_steps == 2


def test_the_end_reaches_everybody_and_whoever_missed_it() -> None:
    it = pair("a", "b", "c", quorum=3, total_steps=3)
    it.held.add("c:Stop")
    it.rounds(2, "a", "b", "c")
    assert it.syncer.finished and it.learners["a"].state == it.learners["b"].state == STOPPED
    it.lose_wire("c")
    it.held.clear()
    it.step("c")  # it reports, and is told
    assert it.learners["c"].state == STOPPED
    it.join("d")
    assert it.learners["d"].state == STOPPED and [type(m) for m in it.messages(Welcome, "d")] == [Welcome]
    assert len(it.messages(Stop, "c")) == 2


def test_a_lost_pull_is_repeated() -> None:
    it = pair("a", quorum=1, sync_every=4, num_fragments=4)
    it.held.add("a:PullRequest")
    it.rounds(1, "a")
    merged = len(it.merges())
    it.lose_wire("a")
    it.held.clear()
    it.wait(10.0)  # resend_s
    assert len(it.merges()) == merged + 1


def test_a_lost_broadcast_is_made_good() -> None:
    it = pair("a", "b", quorum=2, sync_every=4, num_fragments=4)
    it.held.add("b:GlobalFragment")
    it.rounds(1, "a", "b")
    it.lose_wire("b")
    it.held.clear()
    it.rounds(8, "a", "b")
    assert [a.version for a in it.learners["b"].adopted] == it.syncer.versions


def test_everything_twice_and_in_the_wrong_order_decides_the_same() -> None:
    plain, twisted = (pair("a", "b", quorum=2, sync_every=4, num_fragments=4) for _ in range(2))
    for it in (plain, twisted):
        it.wire.clear()
        for _ in range(8):
            it.wait(1.0)
            it.held |= {"a", "b"} if it is twisted else set()
            it.step("a", "b")
            while it.wire:
                under_way = list(it.wire)
                it.wire.clear()
                for item in [*reversed(under_way), *under_way] if it is twisted else under_way:
                    it.arrive(*item)
    assert twisted.merges() == plain.merges()
    assert twisted.syncer.versions == plain.syncer.versions


def lockstep(**settings: Any) -> Pair:
    """Both learners stand before their second step, at which the only fragment is due."""
    return pair("a", "b", **{"quorum": 2, "sync_every": 2, "num_fragments": 1, "overlap_steps": 0} | settings)


def test_lockstep_runs_rounds_with_everybody() -> None:
    it = lockstep()
    for _ in range(7):
        it.step("a", "b")
    assert it.contributors() == [("a", "b")] * 4
    assert [part.steps for merge in it.merges() for part in merge.parts] == [2] * 8


def test_lockstep_abandoned_round_lets_everybody_go_on() -> None:
    it = lockstep(pull_timeout_s=8.0)
    it.held |= {"a:FragmentValue", "b:FragmentValue"}
    it.step("a", "b")
    assert it.learners["a"].state == it.learners["b"].state == WAITING
    it.lose_wire("a")
    it.lose_wire("b")
    it.wait(8.0)
    assert it.notes("abandoned") and it.messages(Advance, "a")[-1].global_step == 2
    it.held.clear()
    it.step("a", "b")
    it.step("a", "b")
    assert it.contributors() == [("a", "b")] and it.merges()[0].parts[0].steps == 4


@pytest.mark.parametrize("lost", ["a:GlobalFragment", "a:StepReport", "a:PullRequest", "a:FragmentValue"])
def test_lockstep_survives_the_loss_of_any_message(lost: str) -> None:
    it = lockstep()
    it.held.add(lost)
    it.step("a", "b")
    it.lose_wire("a")
    it.held.clear()
    it.wait(25.0)
    assert it.learners["a"].state == it.learners["b"].state == TRAINING
    assert it.contributors() == [("a", "b")]


def test_lockstep_goes_on_after_a_reconnection_while_it_waits() -> None:
    it = lockstep()
    it.step("a")  # reported, waits for b
    it.cut("a")
    it.connect("a")
    it.step("b")
    it.wait(10.0)
    assert it.contributors() == [("a", "b")]
    assert it.learners["a"].may_step() and it.learners["b"].may_step()


def test_lockstep_goes_on_after_silence_while_it_waits() -> None:
    it = lockstep()
    it.step("a")
    it.held.add("a")
    it.wait(30.0)
    assert it.notes("silent")
    it.lose_wire("a")
    it.held.clear()
    it.wait(10.0)
    it.step("b")
    it.wait(10.0)
    assert it.contributors() == [("a", "b")]
