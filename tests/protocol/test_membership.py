"""Learners are let in or refused; what moves a member from state to state, and the median of step times."""

import json

import pytest

from diloco_jax.protocol.member import ACTIVE, DISCONNECTED, JOINING, SILENT
from diloco_jax.protocol.membership import BASE_WEIGHTS, OPEN, Membership
from diloco_jax.protocol.messages import DRAINED, SYNCER_STOPPED, Hello
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.tape import TapedSyncer, replay
from diloco_jax.tools.replay import script

EPOCH = 3
FINGERPRINT = (("model", "abc"), ("sync_every", "24"))


def hello(learner_id: str = "a", incarnation: int = 1, versions: tuple[int, ...] = (-1, -1), **changed: str) -> Hello:
    fingerprint = dict(FINGERPRINT) | changed
    return Hello(learner_id, incarnation, tuple(fingerprint.items()), versions, (0,) * len(versions), 1, 4, 0)


def membership(learners_max: int = 8) -> Membership:
    return Membership(FINGERPRINT, 2, learners_max)


def test_a_newcomer_is_joining_and_does_not_count_as_live() -> None:
    members = membership()
    assert members.refusal(hello(), EPOCH, 0) == ""
    member = members.join(hello(), 3.0)
    assert (member.state, member.incarnation, member.heard_s, member.since_s) == (JOINING, 1, 3.0, 3.0)
    assert members.live == 0
    assert members.get("a", 1) is member


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (hello("syncer"), ["'syncer' is reserved", "another name"]),
        (hello(""), ["'' is reserved"]),
        (
            hello(model="xyz")._replace(speaks=3),
            ["a speaks protocol 3, the syncer 1 to 2", "upgrade the syncer first, then the islands"],
        ),
        # A release from before messages had a protocol number.
        (hello()._replace(speaks=0), ["a speaks protocol 0", "; upgrade a"]),
        (hello(model="xyz"), ["model differs", "the syncer has abc, a has xyz", "same config"]),
        (hello(codec="int8"), ["codec differs", "absent", "int8"]),
        (hello()._replace(fingerprint=(("model", "abc"),)), ["sync_every differs", "has 24, a has absent"]),
        (hello("../../x"), ["'../../x' is not allowed", "64 letters"]),
        (hello("a" * 65), ["is not allowed"]),
        (hello(versions=(-1,)), ["1 versions and 1 digests offered, 2 fragments expected", "same config"]),
        (hello()._replace(digests=(0,)), ["2 versions and 1 digests offered, 2 fragments"]),
        (hello()._replace(epoch=4), ["a has heard of epoch 4 of the syncer, this is epoch 3", "stop it"]),
    ],
)
def test_refusals_say_what_differs_and_what_to_do(message: Hello, words: list[str]) -> None:
    refusal = membership().refusal(message, EPOCH, 0)
    assert all(word in refusal for word in words), refusal


def test_a_newer_syncer_takes_older_islands(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is upgraded from its syncer on, one island after the other."""
    monkeypatch.setattr("diloco_jax.protocol.membership.PROTOCOL", 3)
    assert membership().refusal(hello()._replace(speaks=1), EPOCH, 0) == ""
    monkeypatch.setattr("diloco_jax.protocol.membership.OLDEST", 2)
    assert "speaks protocol 1, the syncer 2 to 3" in membership().refusal(hello()._replace(speaks=1), EPOCH, 0)


def test_the_order_of_the_fingerprint_does_not_matter() -> None:
    assert membership().refusal(hello()._replace(fingerprint=FINGERPRINT[::-1]), EPOCH, 0) == ""


def test_a_tape_that_names_merge_shards_can_be_continued() -> None:
    config = ProtocolConfig(sync_every=2, num_fragments=2)
    before = (*FINGERPRINT, ("shards", "4, average, nesterov"))
    taped = TapedSyncer(Syncer(config, 10, before), (lines := list[str]()).append)
    taped.on_begin((0, 0), 0.0)
    taped.on_message(hello(shards="4, average, nesterov")._replace(epoch=0), 1.0)
    ours = Syncer(config, 10, FINGERPRINT)
    list(replay(lines, ours))
    assert ours.membership.get("a", 1) is not None
    assert script.differences(FINGERPRINT, before) == []


def test_what_the_syncer_does_not_know_the_first_learner_says() -> None:
    members = Membership((*FINGERPRINT, ("corpus", OPEN)), 2, 8)
    refused = hello("c", sync_every="25", corpus="other")
    assert members.refusal(refused, EPOCH, 0), "who is refused says nothing"
    first, same, other = hello("a", corpus="9 tokens"), hello("b", corpus="9 tokens"), hello("c", corpus="8 tokens")
    assert members.refusal(other, EPOCH, 0) == members.refusal(first, EPOCH, 0) == ""
    members.join(first, 0.0)
    assert members.refusal(same, EPOCH, 0) == ""
    refusal = members.refusal(other, EPOCH, 0)
    assert "corpus differs: the first learner of the run has 9 tokens, c has 8 tokens" in refusal
    assert "the same config, on the same data" in refusal
    assert "corpus differs" in members.refusal(hello("d"), EPOCH, 0), "one that says nothing"


def test_another_base_names_the_folder_of_the_model() -> None:
    members = Membership((*FINGERPRINT, (BASE_WEIGHTS, OPEN)), 2, 8)
    assert members.expected[BASE_WEIGHTS] == OPEN
    members.join(hello("a", **{BASE_WEIGHTS: "11"}), 0.0)
    assert members.expected == {**dict(FINGERPRINT), BASE_WEIGHTS: "11"}
    refusal = members.refusal(hello("b", **{BASE_WEIGHTS: "22"}), EPOCH, 0)
    assert refusal.startswith("base weights differs: the first learner of the run has 11, b has 22; let model.weights")
    assert "another --run-dir" in refusal and "same config" not in refusal


def test_what_the_first_learner_said_outlives_the_syncer() -> None:
    config, fingerprint = ProtocolConfig(sync_every=2, num_fragments=2), (*FINGERPRINT, ("corpus", OPEN))
    lines: list[str] = []
    syncer = Syncer(config, 10, fingerprint)
    taped = TapedSyncer(syncer, lines.append)
    taped.on_begin((0, 0), 0.0)
    taped.on_message(hello("a", corpus="9 tokens")._replace(epoch=0), 1.0)
    from_tape, from_snapshot = Syncer(config, 10, fingerprint), Syncer(config, 10, fingerprint)
    list(replay(lines, from_tape))
    from_snapshot.restore(json.loads(json.dumps(syncer.state())))
    for machine in (syncer, from_tape, from_snapshot):
        effects = machine.on_message(hello("b", corpus="8 tokens")._replace(epoch=0), 2.0)
        assert "corpus differs: the first learner of the run has 9 tokens" in str(effects)
        assert machine.state()["agreed"] == {"corpus": "9 tokens"}


def test_an_older_incarnation_is_refused() -> None:
    members = membership()
    members.join(hello(incarnation=3), 0.0)
    refusal = members.refusal(hello(incarnation=2), EPOCH, 0)
    assert "incarnation 2 of a is stale: 3" in refusal and "stop one of the two" in refusal
    members.set_state(members.members["a"], DISCONNECTED, 1.0)
    assert members.refusal(hello(incarnation=2), EPOCH, 0), "an older process stays refused after the newer one left"


def test_a_newer_incarnation_starts_again_and_keeps_the_totals() -> None:
    members = membership()
    member = members.join(hello(), 0.0)
    members.set_state(member, ACTIVE, 0.0)
    member.local_step, member.tokens, member.rounds, member.credit.used_step = 7, 70, 2, 6
    member = members.join(hello(incarnation=2), 5.0)
    assert members.members == {"a": member}
    assert (member.state, member.incarnation, member.restarts) == (JOINING, 2, 1)
    assert (member.local_step, member.tokens, member.credit.used_step, member.adopted) == (0, 0, 0, ())
    assert (member.total_steps, member.total_tokens, member.rounds) == (7, 70, 2)
    assert members.live == 0
    assert members.get("a", 1) is None, "the old incarnation is not known any more"


@pytest.mark.parametrize(("goodbye", "restarts"), [("", 1), (DRAINED, 1), (SYNCER_STOPPED, 0)])
def test_a_start_by_a_resume_of_the_run_is_not_a_restart(goodbye: str, restarts: int) -> None:
    members = membership()
    members.join(hello(), 0.0).goodbye = goodbye
    assert members.join(hello(incarnation=2), 5.0).restarts == restarts


def test_the_same_incarnation_that_dials_again_keeps_its_counters() -> None:
    members = membership()
    member = members.join(hello(), 0.0)
    member.local_step = 7
    members.set_state(member, DISCONNECTED, 1.0)
    assert members.get("a", 1) is None
    members.join(hello(), 2.0)
    assert (member.state, member.local_step, member.restarts, member.heard_s) == (JOINING, 7, 0, 2.0)


def test_live_counts_the_active_ones() -> None:
    members = membership()
    a, b = members.join(hello("a"), 0.0), members.join(hello("b"), 0.0)
    for state, live in [(ACTIVE, 1), (ACTIVE, 1), (SILENT, 0), (ACTIVE, 1), (DISCONNECTED, 0), (DISCONNECTED, 0)]:
        members.set_state(a, state, 0.0)
        assert members.live == live, state
    members.set_state(b, ACTIVE, 0.0)
    assert members.live == 1
    assert [m.learner_id for m in members.connected()] == ["b"]


def test_a_learner_that_remembers_a_void_version_is_refused() -> None:
    members = membership()
    assert [members.refusal(hello()._replace(epoch=epoch), 5, 4) == "" for epoch in range(6)] == [
        True,  # knows nothing yet
        False,
        False,
        False,
        True,
        True,
    ]
    refusal = members.refusal(hello()._replace(epoch=3), 5, 4)
    assert (
        "a belongs to epoch 3 of the run, which went back to a snapshot in epoch 4; start the learner again" in refusal
    )


def test_an_expelled_incarnation_is_refused_and_the_next_is_not() -> None:
    members = membership()
    member = members.join(hello(), 0.0)
    member.credit.expelled, member.credit.strikes = True, 3
    members.set_state(member, DISCONNECTED, 1.0)
    assert "incarnation 1 of a was expelled; start the learner again" in members.refusal(hello(), EPOCH, 0)
    assert members.refusal(hello(incarnation=2), EPOCH, 0) == ""
    member = members.join(hello(incarnation=2), 2.0)
    assert (member.credit.expelled, member.credit.strikes) == (False, 0)


def test_a_connected_learner_expires_after_silence_s() -> None:
    members = membership()
    for name, state in [("c", ACTIVE), ("a", ACTIVE), ("joining", JOINING), ("silent", SILENT), ("gone", DISCONNECTED)]:
        members.set_state(members.join(hello(name), 0.0), state, 0.0)
    late = members.join(hello("late"), 0.5)
    members.set_state(late, ACTIVE, 0.5)
    assert members.expired(10.0, 9.999) == []
    assert [m.learner_id for m in members.expired(10.0, 10.0)] == ["a", "c", "joining"], "a joining one may die, too"


def test_learners_max() -> None:
    members = membership(learners_max=2)
    members.join(hello("a"), 0.0)
    members.join(hello("b"), 0.0)
    assert members.refusal(hello("c"), EPOCH, 0) == "2 learners are connected, the limit; raise protocol.learners_max"
    assert members.refusal(hello("a"), EPOCH, 0) == "", "a member may greet again"
    members.set_state(members.members["b"], DISCONNECTED, 1.0)
    assert members.refusal(hello("c"), EPOCH, 0) == "", "a place is free"


def test_learners_max_holds_for_those_who_come_back() -> None:
    members = membership(learners_max=1)
    members.set_state(members.join(hello("a"), 0.0), DISCONNECTED, 1.0)
    members.join(hello("b"), 2.0)
    assert "the limit" in members.refusal(hello("a"), EPOCH, 0)
    assert "the limit" in members.refusal(hello("a", incarnation=2), EPOCH, 0)


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
    assert members.median_step_s() == 2.0, "the median of 1, 2, 4, 90"
    members.set_state(members.members["b"], DISCONNECTED, 0.0)
    assert members.median_step_s() == 4.0, "the median of 2, 4, 90"
