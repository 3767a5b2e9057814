"""Deltas between two versions of a fragment: their receivers, their bases, and the recovery of lost ones."""

import json
from typing import Any

import pytest

from diloco_jax.protocol.effects import Adopt, Effect, Send
from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.protocol.messages import (
    NO_VERSION,
    Adopted,
    Advance,
    GlobalFragment,
    Hello,
    Lease,
    PullRequest,
    Welcome,
)
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.progress import STEPS_MAX
from tests.protocol.pair import Pair
from tests.protocol.syncer_inputs import (
    FINGERPRINT,
    digest,
    fragment,
    hello,
    merged,
    new,
    only,
    report,
    running,
    sent,
    value,
)

WHOLE, STEP = 400, 50  # bytes
SIZES = (dict.fromkeys(range(4), WHOLE), dict.fromkeys(range(4), STEP))
HEARTBEAT_S = 100.0


def stepping(*names: str, **settings: Any) -> Syncer:
    """Round 1, of fragment 1, is pulled from everybody."""
    return running(*names, **{"sizes": SIZES} | settings)


def first_version(syncer: Syncer, *names: str) -> list[Effect]:
    for name in names:
        syncer.on_message(value(name, 1, 1, 1), 1.0)
    return merged(syncer, 1, 2.0)


def fragments(effects: list[Effect], peer: str) -> list[tuple[int, int, int, int]]:
    """Return (fragment, version, base, bytes) of the fragments that were sent to a peer."""
    found = [message for message in sent(effects, peer) if isinstance(message, GlobalFragment)]
    return [(m.fragment_id, m.version, m.base, m.payload_bytes) for m in found]


def test_a_new_version_is_sent_as_a_delta_to_learners_that_hold_its_base() -> None:
    syncer = stepping("a", "b")
    # It gets version 0 of fragment 1 whole, and then the delta.
    syncer.on_message(hello("late", versions=(0, -1, 0, 0)), 1.0)
    # It holds other bits, so it gets the same as a late learner.
    syncer.on_message(hello("other", versions=(0, 0, 0, 0), digests=(0, 5, 0, 0)), 1.0)
    effects = first_version(syncer, "a", "b")
    for name in ("a", "b", "late", "other"):
        assert fragments(effects, name) == [(1, 1, 0, STEP)], name
    message = sent(effects, "a")[0]
    assert isinstance(message, GlobalFragment) and message.digest == digest(1, 1), "of the value that it leads to"


def test_without_the_size_of_a_step_values_go_out_whole() -> None:
    syncer = stepping("a", sizes=(SIZES[0], {0: STEP}))
    assert fragments(first_version(syncer, "a"), "a") == [(1, 1, NO_VERSION, WHOLE)]


@pytest.mark.parametrize(
    ("versions", "digests", "expected"),
    [
        ((0, 0, 0, 0), (0, 0, 0, 0), [(1, 1, 0, STEP)]),
        ((0, 1, 0, 0), (0, digest(1, 1), 0, 0), []),
        ((0, -1, 0, 0), (0, 0, 0, 0), [(1, 1, NO_VERSION, WHOLE)]),
        ((0, 0, 0, 0), (0, 7, 0, 0), [(1, 1, NO_VERSION, WHOLE)]),
        ((0, 1, 0, 0), (0, 7, 0, 0), [(1, 1, NO_VERSION, WHOLE)]),
    ],
)
def test_a_greeting_is_answered_with_what_its_sender_can_use(
    versions: tuple[int, ...], digests: tuple[int, ...], expected: list[tuple[int, int, int, int]]
) -> None:
    syncer = stepping("a")
    first_version(syncer, "a")
    assert fragments(syncer.on_message(hello("b", versions=versions, digests=digests), 3.0), "b") == expected


def test_a_step_that_did_not_help_is_followed_by_the_whole_value() -> None:
    syncer = stepping("a")
    first_version(syncer, "a")
    again = [fragments(syncer.on_message(hello("a"), 3.0), "a") for _ in range(STEPS_MAX + 1)]
    assert again == [[(1, 1, 0, STEP)]] * (STEPS_MAX - 1) + [[(1, 1, NO_VERSION, WHOLE)]] * 2


def test_a_lost_step_is_repeated_once_and_then_followed_by_the_whole_value() -> None:
    it = Pair(quorum=2, steps=True, sync_every=4, num_fragments=4)
    it.join("a", "b")
    it.held = {"b:GlobalFragment"}
    it.rounds(1, "a", "b")
    it.lose_wire("b")
    it.held = set()
    it.rounds(3, "a", "b")
    it.held = {"b:GlobalFragment"}
    it.step("b")
    it.lose_wire("b")
    it.held = set()
    for _ in range(8):
        it.step("b")
    sent = [m for m in it.messages(GlobalFragment, "b") if (m.fragment_id, m.version) == (1, 1)]
    assert [m.base for m in sent] == [0, 0, NO_VERSION] and it.learners["b"].adopted[1].version == 1


def test_restarts_and_rewinds_forget_from_where_steps_lead() -> None:
    for back in ("restart", "rewind"):
        syncer = stepping("a")
        first_version(syncer, "a")
        if back == "restart":
            syncer.on_restart(syncer.versions, syncer.digests, 9.0)
        else:
            syncer.on_rewind(7, 9.0)
        assert fragments(syncer.on_message(hello("b"), 10.0), "b") == [(1, 1, NO_VERSION, WHOLE)], back


def test_a_restored_machine_knows_who_can_use_which_step() -> None:
    syncer = stepping("a", "b")
    first_version(syncer, "a", "b")
    other = new(quorum=2, sizes=SIZES)
    other.restore(json.loads(json.dumps(syncer.state())))
    assert other.state() == syncer.state()
    for again in range(2):
        told, expected = other.on_message(hello("b"), 3.0), syncer.on_message(hello("b"), 3.0)
        assert told == expected and fragments(told, "b")[0][2] == (NO_VERSION if again else 0)


def learner() -> Learner:
    """Return a learner that holds version 1 of both fragments."""
    settings: dict[str, Any] = {"heartbeat_s": HEARTBEAT_S, "silence_s": 3 * HEARTBEAT_S, "resend_s": 2.0}
    config = ProtocolConfig(sync_every=2, num_fragments=2, recover_from_peers=False, **settings)
    machine = Learner("a", 1, config, FINGERPRINT)
    machine.on_connected(0.0)
    machine.on_message(Welcome(1, (1, 1), 1), 0.0)
    machine.on_message(Lease(0, 0, 100), 0.0)
    for fragment_id in range(2):
        assert take(machine, whole(fragment_id, 1)) == [Adopt(fragment_id, 1)]
    assert machine.may_step() and asks_at_s(machine) is None
    return machine


def whole(fragment_id: int, version: int, epoch: int = 1) -> GlobalFragment:
    return GlobalFragment(version, fragment_id, version, epoch, digest(fragment_id, version), WHOLE)


def step(fragment_id: int, base: int, version: int, epoch: int = 1) -> GlobalFragment:
    return whole(fragment_id, version, epoch)._replace(base=base, payload_bytes=STEP)


def take(machine: Learner, message: GlobalFragment) -> list[Effect]:
    assert machine.wants(message, 1.0)
    machine.on_read(message, 1.0)
    return machine.on_message(message, 1.0)


def asks_at_s(machine: Learner) -> float | None:
    """Return the time of its next greeting; None if it does not plan one."""
    deadline_s = machine.next_deadline_s()
    return deadline_s if deadline_s != HEARTBEAT_S else None


def test_a_step_applies_to_what_was_read_last_adopted_or_not() -> None:
    machine = learner()
    first, second = step(0, 1, 3), step(0, 3, 5)
    assert machine.wants(first, 1.0)
    machine.on_read(first, 1.0)
    assert machine.wants(second, 1.0), "the training state still has version 1"
    machine.on_read(second, 1.0)
    assert machine.on_message(second, 2.0) == [Adopt(0, 5)], "the one between is skipped"
    assert machine.on_message(first, 2.0) == []


@pytest.mark.parametrize("message", [whole(0, 1), whole(0, 0), step(0, 0, 1), step(0, 1, 1), whole(0, 9, 0)])
def test_what_is_stale_is_not_read_and_nobody_is_asked(message: GlobalFragment) -> None:
    machine = learner()
    assert not machine.wants(message, 1.0) and asks_at_s(machine) is None


def test_a_gap_is_asked_for_once() -> None:
    machine = learner()
    assert not machine.wants(step(0, 3, 5), 1.0)
    assert asks_at_s(machine) == pytest.approx(3.0)
    assert not machine.wants(step(0, 5, 7), 2.0) and not machine.wants(step(1, 4, 6), 2.5)
    assert asks_at_s(machine) == pytest.approx(3.0)
    machine.on_step(10, 1.0, 2.0, 3.0, samples_end=1)
    greetings = [effect.message for effect in only(machine.on_tick(3.0), Send) if isinstance(effect.message, Hello)]
    assert [greeting.versions for greeting in greetings] == [(1, 1)]
    assert machine.wants(whole(0, 7), 4.0), "a whole value helps"


def test_a_later_epoch_of_the_syncer_may_continue_from_an_earlier_version() -> None:
    machine = learner()
    take(machine, whole(0, 5))
    assert not machine.wants(step(0, 3, 7, epoch=2), 2.0), "5 is lost, and 7 was made of 3"
    assert machine.wants(whole(0, 3, epoch=2), 2.0)
    machine.on_read(whole(0, 3, epoch=2), 1.0)
    assert machine.wants(step(0, 3, 7, epoch=2), 2.0)
    assert not machine.wants(step(0, 3, 9, epoch=1), 2.0), "late, of the epoch before"


def test_heads_outlive_the_link() -> None:
    machine = learner()
    machine.on_read(step(0, 1, 3), 1.0)
    machine.on_disconnected(2.0)
    machine.on_connected(3.0)
    assert not machine.wants(step(0, 1, 3), 4.0) and machine.wants(step(0, 3, 5), 4.0)


def test_without_faults_nothing_is_whole_after_the_beginning() -> None:
    it = Pair(quorum=3, steps=True)
    it.join("a", "b", "c")
    it.rounds(20, "a", "b", "c")
    assert it.syncer.merged_rounds == 20
    for name in "abc":
        got = it.messages(GlobalFragment, name)
        assert [m.fragment_id for m in got if m.base == NO_VERSION] == [0, 1]
        assert len(got) == 2 + 20 and len(it.messages(Hello, name)) == 1
    it.check_bits()


def test_a_learner_whose_arithmetic_differs_continues_with_whole_values_and_few_greetings() -> None:
    it = Pair(quorum=1, steps=True, resend_s=2.0)
    it.join("a", "b")
    it.drivers["b"].misreads = True
    it.rounds(60, "a", "b")
    assert len(it.messages(Hello, "b")) <= 1 + 60 / 2
    assert min(held.version for held in it.learners["b"].adopted) > 40
    it.check_bits()


def test_a_pair_of_answers_that_cross_a_broadcast_leaves_nothing_behind() -> None:
    it = Pair(quorum=2, steps=True, resend_s=1.0, overlap_steps=2)
    it.join("a", "b")
    it.rounds(1, "a", "b")
    it.held = {"b:GlobalFragment"}
    it.rounds(3, "a", "b")
    it.lose_wire("b")
    # Its request is under way while the syncer makes the next versions.
    it.held = {"b:Hello"}
    for _ in range(4):
        it.wait(1.5)
        it.step("a", "b")
    it.held = set()
    it.deliver()
    it.rounds(4, "a", "b")
    assert [a.version for a in it.learners["b"].adopted] == it.syncer.versions
    assert not it.messages(Advance) and it.messages(PullRequest)
    it.check_bits()


ONE = {"sync_every": 1, "num_fragments": 1}


def told(messages: list[object]) -> list[tuple[int, int]]:
    """Version and merged round of the global fragments among these messages."""
    return [(m.version, m.merged_round) for m in messages if isinstance(m, GlobalFragment)]


def first_round(excluded: tuple[str, ...] = ()) -> tuple[Syncer, dict[str, list[object]]]:
    """Two learners and a model of one fragment, after the first round; what each of them heard."""
    syncer = running_one()
    for name in ("a", "b"):
        syncer.on_message(value(name, 1, 0, 1), 2.0)
    effects = merged(syncer, 1, 3.0, excluded)
    return syncer, {name: list(sent(effects, name)) for name in ("a", "b")}


def running_one() -> Syncer:
    """As `running`, with one fragment."""
    syncer = running(quorum=2, **ONE)
    for name in ("a", "b"):
        syncer.on_message(hello(name, versions=(0,)), 0.0)
    for name in ("a", "b"):
        syncer.on_message(report(name, 1, (Adopted(0),)), 1.0)
    return syncer


def test_an_excluded_learner_is_informed_and_not_asked_again_before_it_holds_the_new_version() -> None:
    syncer, heard = first_round(excluded=("b",))
    assert told(heard["a"]) == [(1, 1)] and told(heard["b"]) == [(1, NO_VERSION)]
    syncer.on_message(report("a", 2, (Adopted(1, 1, 10),)), 4.0)
    # Its parameters still hold the bad value, which would be a second strike for one value.
    for step in (2, 3):
        effects = syncer.on_message(report("b", step, (Adopted(0),)), 4.0 + step)
        assert not [m for m in sent(effects, "b") if isinstance(m, PullRequest)]
    effects = syncer.on_message(report("b", 4, (Adopted(1, 3, 30),)), 9.0)
    assert PullRequest(2, 0, 4) in sent(effects, "b")
    assert syncer.membership.members["b"].credit.strikes == 1


def test_without_a_new_version_nothing_will_replace_its_parameters_so_it_is_asked_again() -> None:
    syncer, heard = first_round(excluded=("a", "b"))
    assert told(heard["a"]) == told(heard["b"]) == []
    syncer.on_message(report("a", 2, (Adopted(0),)), 4.0)
    assert PullRequest(2, 0, 2) in sent(syncer.on_message(report("b", 2, (Adopted(0),)), 4.0), "b")


def test_a_learner_that_missed_a_version_learns_later_that_it_has_a_share_in_it() -> None:
    syncer, _ = first_round()
    # The version is on its way to "b".
    syncer.on_disconnect("b", 1, "lost", 4.0)
    back = syncer.on_message(hello("b", versions=(0,)), 5.0)
    assert told(list(sent(back, "b"))) == [(1, 1)]
    newer = syncer.on_message(hello("b", 2, versions=(NO_VERSION,)), 6.0)
    assert told(list(sent(newer, "b"))) == [(1, NO_VERSION)], "its next incarnation gave nothing"


def test_what_a_learner_gave_is_told_after_a_restart() -> None:
    syncer, _ = first_round(excluded=("b",))
    other = running_one()
    other.restore(syncer.state())
    other.on_restart([1], [syncer.digests[0]], 10.0)
    for name, share in (("a", 1), ("b", NO_VERSION)):
        effects = other.on_message(hello(name, versions=(0,)), 11.0)
        assert told(list(sent(effects, name))) == [(1, share)]


def test_of_a_version_that_was_lost_with_the_syncer_nobody_has_a_share() -> None:
    syncer, _ = first_round()
    syncer.on_restart([0], [0], 10.0)
    # Neither learner has adopted version 1, so the version is lost.
    for name in ("a", "b"):
        syncer.on_message(hello(name, versions=(0,)), 11.0)
    assert syncer.versions == [0]
    effects = syncer.on_message(hello("a", versions=(NO_VERSION,)), 12.0)
    assert told(list(sent(effects, "a"))) == [(0, NO_VERSION)]


def test_when_the_end_of_the_tape_is_lost_nobody_is_promised_a_share_that_it_may_not_have() -> None:
    """A value left out is then forgotten: an old residual twice does less harm than one of a bad value once."""
    pair = Pair(quorum=2, snapshot_every=1)
    pair.join("a", "b")
    pair.poisoned = {"b"}
    pair.holds_merges = True
    pair.step("a", "b")
    pair.held = {"b"}
    pair.merge()
    assert pair.syncer.versions[1] == 1
    pair.lose_wire("b")
    lost = len(pair.tape) - max(n for n, line in enumerate(pair.tape) if line.startswith('["merged"'))
    pair.held = set()
    pair.restart_syncer(lost_lines=lost)
    pair.connect("a", "b")
    pair.wait(60.0)
    assert pair.syncer.versions[1] == 1, "a brought it"
    assert told([m for _, receiver, m in pair.sent if receiver == "b"])[-1] == (1, NO_VERSION)


def test_a_whole_value_and_a_step_both_tell() -> None:
    pair = Pair(quorum=2, steps=True)
    pair.join("a", "b")
    pair.rounds(3, "a", "b")
    steps = [m for _, _, m in pair.sent if isinstance(m, GlobalFragment) and m.base >= 0]
    assert steps and all(m.merged_round == m.version for m in steps)
    assert fragment(1, 0, 1).merged_round == NO_VERSION, "the initial model holds nobody's"
