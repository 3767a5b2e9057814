"""Whole stories with real machines on both sides. The pair checks the drivers' contract on the way."""

from collections.abc import Iterator
from typing import Any

import pytest

from diloco_jax.protocol.learner.machine import TRAINING
from diloco_jax.protocol.messages import GlobalFragment
from tests.limits import HANGS_S
from tests.protocol.pair import Pair

pairs: list[Pair] = []


def pair(*names: str, **settings: Any) -> Pair:
    """Return a pair of learners that have made one step each."""
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
    it = Pair(sync_every=8, num_fragments=8, silence_s=20.0)
    pairs.append(it)
    it.join("a", "b", "c")
    it.wait(HANGS_S)  # all three compile
    it.step("a", "b", "c", step_s=60.0)
    for _ in range(20):
        it.wait(0.8)
        for name in ("a", "b", "c"):
            it.wait(0.05)
            it.step(name)
    late = it.contributors()[10:]
    assert sum(len(names) for names in late) / len(late) > 2.5


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
    """Return two learners before their second step; the only fragment is due at that step."""
    return pair("a", "b", **{"quorum": 2, "sync_every": 2, "num_fragments": 1, "overlap_steps": 0} | settings)


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


def test_lockstep_continues_after_a_reconnection_while_it_waits() -> None:
    it = lockstep()
    # It has reported and waits for b.
    it.step("a")
    it.cut("a")
    it.connect("a")
    it.step("b")
    it.wait(10.0)
    assert it.contributors() == [("a", "b")]
    assert it.learners["a"].may_step() and it.learners["b"].may_step()


def test_lockstep_continues_after_silence_while_it_waits() -> None:
    it = lockstep()
    it.step("a")
    it.held.add("a")
    it.wait(HANGS_S)
    assert it.notes("silent")
    it.lose_wire("a")
    it.held.clear()
    it.wait(10.0)
    it.step("b")
    it.wait(10.0)
    assert it.contributors() == [("a", "b")]
