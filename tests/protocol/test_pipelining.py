"""Rounds overlap: while one waits for a late value, the next closes, is merged and broadcast, and nobody waits."""

from typing import Any

import pytest

from diloco_jax.protocol.messages import GlobalFragment
from tests.protocol.pair import Pair


def pair(*names: str, late: set[str], quorum: int = 2, **settings: Any) -> Pair:
    """Merge all learners in rounds 1 to 8; then round 9, of fragment 1, waits for the values of the late learners."""
    it = Pair(quorum=quorum, overlap_steps=2, sync_every=4, num_fragments=4, steps=True, **settings)
    it.join(*names)
    while it.syncer.global_step < 9:
        if it.syncer.global_step == 8:
            it.held = {f"{name}:FragmentValue" for name in late}
        it.rounds(1, *names)
    assert it.contributors()[-1] == names and len(it.merges()) == 8
    return it


def merged(it: Pair) -> dict[int, str]:
    """Round -> who was merged, of those from round 9 on."""
    return {
        m.global_step: "".join(part.learner_id for part in m.contributions) for m in it.merges() if m.global_step > 8
    }


@pytest.mark.parametrize("stepping", ["ab", "abc"])
def test_the_next_rounds_pass_one_that_waits(stepping: str) -> None:
    it = pair("a", "b", "c", late={"c"})
    for _ in range(5):
        it.wait(1.5)
        it.step(*stepping)
    assert merged(it) == {10: "ab", 11: "ab", 12: "ab"}, "not 13: it is of the same fragment as 9"
    versions = {name: [a.version for a in it.learners[name].adopted] for name in it.learners}
    assert versions == {name: [12, 5, 10, 11] for name in "abc"}, "everybody has what was made, c too"
    it.held = set()
    it.deliver()
    assert merged(it)[9] == "abc", "the late value counts"
    for _ in range(4):
        it.wait(1.5)
        it.step("a", "b", "c")
    assert "c" in "".join(list(merged(it).values())[4:])
    it.check_bits()
    it.check_replay()


def test_a_late_value_delays_nobodys_steps() -> None:
    it = pair("a", "b", "c", late={"c"}, pull_timeout_s=1000.0)
    before = it.learners["a"].local_step
    for _ in range(20):
        it.rounds(1, "a", "b", "c")
        assert all(learner.may_step() for learner in it.learners.values())
    assert it.learners["a"].local_step == before + 20


def test_a_round_is_merged_without_the_late_value_when_its_time_is_over() -> None:
    it = pair("a", "b", "c", late={"c"}, pull_timeout_s=7.0)
    for _ in range(10):
        it.wait(1.5)
        it.step("a", "b", "c")
    assert list(merged(it).items())[:4] == [(10, "ab"), (11, "ab"), (12, "ab"), (9, "ab")]
    versions = [m.version for m in it.messages(GlobalFragment, "a") if m.fragment_id == 1]
    assert versions[:5] == [0, 1, 5, 9, 13]


def test_a_waiting_round_names_those_that_it_waits_for_and_those_that_it_excludes() -> None:
    it = pair("a", "b", "c", late={"c"})
    for _ in range(2):
        it.wait(1.5)
        it.step("a", "b", "c")
    reason = "0 of 2 live learners reported a step, the quorum is 2, without c, which an earlier round still waits for"
    assert it.syncer.waiting_for(it.now_s) == f"round 12: {reason}; not yet: a, b"


def test_a_learner_that_owes_a_value_counts_when_the_quorum_needs_it() -> None:
    it = pair("a", "b", "c", late={"c"}, quorum=3)
    it.rounds(1, "a", "b", "c")
    assert it.syncer.global_step == 10 and not merged(it), "round 10 is pulled too, and waits"
    it.held = set()
    it.deliver()
    assert merged(it) == {9: "abc", 10: "abc"}


def test_as_long_as_most_are_under_way_nobody_is_late() -> None:
    it = pair("a", "b", "c", "d", late={"b", "c", "d"}, quorum=1)
    it.wait(1.5)
    it.step("a", "b", "c", "d")
    assert it.syncer.global_step == 10 and not merged(it)
    it.held = set()
    it.deliver()
    assert merged(it) == {9: "abcd", 10: "abcd"}


def test_a_learner_that_has_answered_counts_at_once() -> None:
    it = pair("a", "b", "c", "d", late={"c", "d"})
    it.wait(1.5)
    it.step("a", "c", "d")
    it.wait(1.5)
    assert it.syncer.global_step == 9, "only a has reported of the learners that are not late; b is slow"
    it.let_pass("c:FragmentValue")
    it.wait(1.5)
    assert it.notes("closed")[-1].members == ("a", "c") and it.syncer.global_step == 10


def test_a_value_that_takes_less_than_twice_as_long_as_the_others_is_not_late() -> None:
    for passed_s, expected in ((1.5, "abc"), (2.5, "ab")):
        it = pair("a", "b", "c", late={"a", "b", "c"})
        it.wait(1.0)
        it.held = {"c:FragmentValue"}
        it.deliver()
        it.wait(passed_s - 1.0)
        it.step("c", "a", "b")
        it.wait(0.1)
        it.held = set()
        it.deliver()
        it.wait(2.0)
        assert merged(it)[10] == expected, passed_s
