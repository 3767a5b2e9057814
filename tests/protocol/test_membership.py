"""Who is let in and why not, what moves a member from state to state, and the median of step times."""

from __future__ import annotations

import pytest

from diloco_jax.protocol.membership import ACTIVE, GONE, JOINING, SILENT, Membership
from diloco_jax.protocol.messages import Hello

VERSIONS = (5, 5)
FINGERPRINT = (("model", "abc"), ("sync_every", "24"))


def hello(learner_id: str = "a", incarnation: int = 1, versions: tuple[int, ...] = (-1, -1), **changed: str) -> Hello:
    fingerprint = dict(FINGERPRINT) | changed
    return Hello(learner_id, incarnation, tuple(fingerprint.items()), versions)


def membership(learners_max: int = 8) -> Membership:
    return Membership(FINGERPRINT, 2, learners_max)


def test_a_newcomer_is_joining_and_does_not_count_as_live() -> None:
    members = membership()
    assert members.refusal(hello(), VERSIONS) == ""
    member = members.join(hello(), 3.0)
    assert (member.state, member.incarnation, member.heard_s, member.since_s) == (JOINING, 1, 3.0, 3.0)
    assert members.live == 0
    assert members.get("a", 1) is member


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (hello("syncer"), ["'syncer' is reserved", "another name"]),
        (hello(""), ["'' is reserved"]),
        (hello(model="xyz"), ["model differs", "the syncer has abc, a has xyz", "same config"]),
        (hello(codec="int8"), ["codec differs", "absent", "int8"]),
        (Hello("a", 1, (("model", "abc"),), (-1, -1)), ["sync_every differs", "has 24, a has absent"]),
        (hello("../../x"), ["'../../x' is not allowed", "64 letters"]),
        (hello("a" * 65), ["is not allowed"]),
        (hello(versions=(5, 6)), ["a holds version 6, which this syncer never made", "start the learner again"]),
        (hello(versions=(-1,)), ["1 fragments offered, 2 expected", "same config"]),
    ],
)
def test_refusals_say_what_differs_and_what_to_do(message: Hello, words: list[str]) -> None:
    refusal = membership().refusal(message, VERSIONS)
    assert all(word in refusal for word in words), refusal


def test_the_order_of_the_fingerprint_does_not_matter() -> None:
    assert membership().refusal(Hello("a", 1, FINGERPRINT[::-1], (0, 0)), VERSIONS) == ""


def test_an_older_incarnation_is_refused() -> None:
    members = membership()
    members.join(hello(incarnation=3), 0.0)
    refusal = members.refusal(hello(incarnation=2), VERSIONS)
    assert "incarnation 2 of a is older than 3" in refusal and "stop one of the two" in refusal
    members.set_state(members.members["a"], GONE, 1.0)
    assert members.refusal(hello(incarnation=2), VERSIONS), "the newer one has left, the older one is no better for it"


def test_a_newer_incarnation_starts_anew_and_keeps_the_totals() -> None:
    members = membership()
    member = members.join(hello(), 0.0)
    members.set_state(member, ACTIVE, 0.0)
    member.local_step, member.tokens, member.rounds, member.used_step = 7, 70, 2, 6
    again = members.join(hello(incarnation=2), 5.0)
    assert again is member
    assert (member.state, member.incarnation, member.restarts) == (JOINING, 2, 1)
    assert (member.local_step, member.tokens, member.used_step, member.adopted) == (0, 0, 0, ())
    assert (member.total_steps, member.total_tokens, member.rounds) == (7, 70, 2)
    assert members.live == 0
    assert members.get("a", 1) is None, "the old incarnation is not known any more"


def test_the_same_incarnation_that_dials_again_keeps_its_counters() -> None:
    members = membership()
    member = members.join(hello(), 0.0)
    member.local_step = 7
    members.set_state(member, GONE, 1.0)
    assert members.get("a", 1) is None
    members.join(hello(), 2.0)
    assert (member.state, member.local_step, member.restarts, member.heard_s) == (JOINING, 7, 0, 2.0)


def test_live_counts_the_active_ones() -> None:
    members = membership()
    a, b = members.join(hello("a"), 0.0), members.join(hello("b"), 0.0)
    for state, live in [(ACTIVE, 1), (ACTIVE, 1), (SILENT, 0), (ACTIVE, 1), (GONE, 0), (GONE, 0)]:
        members.set_state(a, state, 0.0)
        assert members.live == live, state
    members.set_state(b, ACTIVE, 0.0)
    assert members.live == 1
    assert [m.learner_id for m in members.connected()] == ["b"]


def test_only_active_members_expire_and_at_the_lease() -> None:
    members = membership()
    for name, state in [("c", ACTIVE), ("a", ACTIVE), ("joining", JOINING), ("silent", SILENT), ("gone", GONE)]:
        members.set_state(members.join(hello(name), 0.0), state, 0.0)
    late = members.join(hello("late"), 0.5)
    members.set_state(late, ACTIVE, 0.5)
    assert members.expired(10.0, 9.999) == []
    assert [m.learner_id for m in members.expired(10.0, 10.0)] == ["a", "c"]


def test_learners_max() -> None:
    members = membership(learners_max=2)
    members.join(hello("a"), 0.0)
    members.join(hello("b"), 0.0)
    assert members.refusal(hello("c"), VERSIONS) == "2 learners are connected, the limit; raise protocol.learners_max"
    assert members.refusal(hello("a"), VERSIONS) == "", "whoever is in may greet again"
    members.set_state(members.members["b"], GONE, 1.0)
    assert members.refusal(hello("c"), VERSIONS) == "", "a place is free"


def test_learners_max_holds_for_those_who_come_back() -> None:
    members = membership(learners_max=1)
    members.set_state(members.join(hello("a"), 0.0), GONE, 1.0)
    members.join(hello("b"), 2.0)
    assert "the limit" in members.refusal(hello("a"), VERSIONS)
    assert "the limit" in members.refusal(hello("a", incarnation=2), VERSIONS)


def test_lower_median_of_the_live() -> None:
    members = membership()
    assert members.median_step_s() is None
    for name, step_s, state in [
        ("a", 4.0, ACTIVE),
        ("b", 1.0, ACTIVE),
        ("c", None, ACTIVE),
        ("d", 90.0, ACTIVE),
        ("e", 2.0, ACTIVE),
        ("f", 0.1, SILENT),
    ]:
        member = members.join(hello(name), 0.0)
        member.step_s = step_s
        members.set_state(member, state, 0.0)
    assert members.median_step_s() == 2.0  # of 1, 2, 4, 90
    members.set_state(members.members["b"], GONE, 0.0)
    assert members.median_step_s() == 4.0  # of 2, 4, 90
