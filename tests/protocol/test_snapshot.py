"""The syncer's state as plain values, its way back after a death, and its way back to a snapshot."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_jax.protocol.effects import Discard, Drop, Effect, Finish, Merge, Note, Restore, SaveSnapshot
from diloco_jax.protocol.member import DISCONNECTED
from diloco_jax.protocol.messages import (
    NO_VERSION,
    Adopted,
    AnchorRequest,
    AnchorValue,
    Heartbeat,
    Refuse,
    Stop,
    Welcome,
)
from diloco_jax.protocol.syncer.machine import Syncer
from tests.drawn import examples
from tests.protocol.pair import Pair
from tests.protocol.steady import STEADY
from tests.protocol.syncer_inputs import digest, fragment, hello, merged, new, only, report, running, sent, value
from tests.protocol.test_properties import FINGERPRINT, config, syncer_inputs


class Driven:
    """A syncer that is fed the inputs of the property tests."""

    def __init__(self, tau: int, quorum: int) -> None:
        self._settings = (config(tau, quorum), 12, FINGERPRINT)
        self.machine = Syncer(*self._settings)
        self.merging: list[int] = []
        self.now_s = 0.0

    def feed(self, item: Any) -> list[Effect]:
        effects = self._feed(item)
        self.merging += [effect.global_step for effect in effects if isinstance(effect, Merge)]
        return effects

    def _feed(self, item: Any) -> list[Effect]:
        kind = item[0] if isinstance(item, tuple) else ""
        if kind == "tick":
            self.now_s += item[1]
            return self.machine.on_tick(self.now_s)
        if kind == "cut":
            return self.machine.on_disconnect(item[1], item[2], "", self.now_s)
        if kind == "merged":
            if not self.merging:
                return []
            global_step = self.merging.pop(item[1] % len(self.merging))
            excluded = tuple(sorted(item[2] & self.machine.rounds.flying[global_step].values.keys()))
            return self.machine.on_merged(global_step, 1000 + global_step, excluded, self.now_s)
        if kind == "restart":
            self.merging.clear()
            held = [max(0, version - item[1]) for version in self.machine.versions]
            return self.machine.on_restart(held, held, self.now_s)
        return self.machine.on_message(item, self.now_s)

    def copy(self) -> Driven:
        """The same through JSON, in a fresh machine."""
        other = Driven.__new__(Driven)
        other._settings, other.merging, other.now_s = self._settings, list(self.merging), self.now_s
        other.machine = Syncer(*self._settings)
        other.machine.restore(json.loads(json.dumps(self.machine.state())))
        return other


@settings(STEADY, max_examples=examples(60))
@given(syncer_inputs, syncer_inputs, st.integers(0, 3), st.integers(1, 3))
def test_a_restored_machine_has_the_same_future(before: list[Any], after: list[Any], tau: int, quorum: int) -> None:
    first = Driven(tau, quorum)
    for item in before:
        first.feed(item)
    second = first.copy()
    taken = json.dumps(first.machine.state())
    kept = first.machine.state()
    assert json.dumps(second.machine.state()) == taken
    for item in after:
        assert first.feed(item) == second.feed(item)
        assert first.machine.next_deadline_s() == second.machine.next_deadline_s()
        assert first.machine.waiting_for(first.now_s) == second.machine.waiting_for(second.now_s)
    assert json.dumps(first.machine.state()) == json.dumps(second.machine.state())
    assert json.dumps(kept) == taken, "what came later has changed a state that was taken before"


def test_a_snapshot_is_taken_when_a_round_closes_that_crosses_its_marker() -> None:
    pair = Pair(snapshot_every=3, quorum=2)
    pair.join("a", "b")
    pair.rounds(7, "a", "b")
    assert [effect.global_step for effect in pair.effects if isinstance(effect, SaveSnapshot)] == [3, 6]
    for effects in pair.history:
        kinds = [effect.kind if isinstance(effect, Note) else type(effect).__name__ for effect in effects]
        if "SaveSnapshot" in kinds:
            assert kinds.index("closed") + 1 == kinds.index("SaveSnapshot"), "before the round's values are asked for"
    assert not any(isinstance(effect, SaveSnapshot) for effect in Pair().effects)


@pytest.mark.parametrize(("num_fragments", "taken"), [(1, [4, 8]), (2, [2, 4, 6, 8])])
def test_in_lockstep_the_marker_is_crossed_at_the_next_due_step(num_fragments: int, taken: list[int]) -> None:
    pair = Pair(snapshot_every=2, quorum=1, sync_every=4, num_fragments=num_fragments, overlap_steps=0)
    pair.join("a")
    pair.rounds(9, "a")
    assert [effect.global_step for effect in pair.effects if isinstance(effect, SaveSnapshot)] == taken


def lived() -> Syncer:
    """Two learners; round 1 made version 1 of fragment 1, round 2 is being pulled."""
    syncer = running("a", "b", restore_s=10.0)
    for name in ("a", "b"):
        syncer.on_message(value(name, 1, 1, 1), 1.0)
    merged(syncer, 1, 1.0)
    for name in ("a", "b"):
        syncer.on_message(report(name, 2, (Adopted(0), Adopted(1, 1, 10), Adopted(0), Adopted(0))), 2.0)
    assert syncer.versions == [0, 1, 0, 0] and syncer.global_step == 2
    return syncer


HELD_ALL = {"held": (0, 1, 0, 0), "digests": (0, digest(1, 1), 0, 0)}
HELD_NONE = {"held": (0, 0, 0, 0), "digests": (0, 0, 0, 0)}


def anchor(name: str, fragment_id: int, version: int, bits: int | None = None) -> AnchorValue:
    return AnchorValue(name, 1, fragment_id, version, digest(fragment_id, version) if bits is None else bits, 0)


def restarted() -> Syncer:
    """The same after a restart at 5.0 that lost every value."""
    syncer = lived()
    syncer.on_restart(**HELD_NONE, now_s=5.0)
    return syncer


def test_a_restart_forgets_links_and_rounds_and_counts_the_epoch() -> None:
    syncer = lived()
    effects = syncer.on_restart(**HELD_ALL, now_s=5.0)
    assert effects == [Note("restarted", 2, -1, (), "epoch 2 of the syncer"), Discard(2), Discard(3)]
    assert {m.state for m in syncer.membership.members.values()} == {DISCONNECTED} and syncer.membership.live == 0
    assert not syncer.restoring, "the driver has every value"
    syncer.on_message(hello("a", versions=(0, 1, 0, 0), epoch=1), 6.0)
    effects = syncer.on_message(hello("b", versions=(0, 1, 0, 0), epoch=1), 6.0)
    assert sent(effects) == [Welcome(2, (0, 1, 0, 0), 2)]
    held = (Adopted(0), Adopted(1, 1, 10), Adopted(0), Adopted(0))
    syncer.on_message(report("a", 3, held), 7.0)
    effects = syncer.on_message(report("b", 3, held), 7.0)
    assert only(effects, Note)[0].global_step == 3, "round 2 is never opened again: some may have heard of it"


def test_values_that_came_before_the_death_count_again() -> None:
    syncer = new(overlap_steps=1, sync_every=1, num_fragments=1)
    syncer.on_message(hello("a", versions=(0,)), 0.0)
    syncer.on_message(report("a", 1, (Adopted(0),)), 1.0)
    assert only(syncer.on_message(value("a", 1, 0, 1), 1.0), Merge)
    syncer.on_restart((0,), (0,), 2.0)
    syncer.on_message(hello("a", versions=(0,), epoch=1), 3.0)
    syncer.on_message(report("a", 2, (Adopted(0),)), 4.0)
    assert syncer.global_step == 2, "its steps since version 0 were merged by nobody, so they count"


def test_while_values_are_missing_no_round_opens() -> None:
    syncer = restarted()
    assert syncer.restoring
    assert syncer.waiting_for(5.0) == "learners to bring what the syncer lost: a, b"
    effects = syncer.on_message(hello("a", versions=(0, 1, 0, 0), epoch=1), 6.0)
    assert sent(effects, "a") == [Welcome(2, (0, 1, 0, 0), 2), AnchorRequest(1, 1)]
    assert syncer.on_message(report("a", 3, (Adopted(0), Adopted(1), Adopted(0), Adopted(0))), 6.0) == []
    effects = syncer.on_message(anchor("a", 1, 1), 6.5)
    assert only(effects, Restore) == [Restore(1, 1)] and not syncer.restoring
    assert only(effects, Note)[0] == Note("restored", 2, 1, (), "version 1, from a learner")


def test_nothing_is_sent_of_a_fragment_that_is_being_restored() -> None:
    syncer = restarted()
    effects = syncer.on_message(hello("c", versions=(-1,) * 4), 6.0)
    assert [m.fragment_id for m in sent(effects, "c")[1:]] == [0, 2, 3]
    syncer.on_message(hello("a", versions=(0, 1, 0, 0), epoch=1), 7.0)
    effects = syncer.on_message(anchor("a", 1, 1), 7.5)
    assert sent(effects, "c") == [fragment(2, 1, 1)._replace(epoch=2)], "c gets it as soon as it is here"
    assert sent(effects, "a") == [], "a holds it"


def test_the_first_by_name_of_those_who_hold_the_newest_is_asked() -> None:
    syncer = restarted()
    assert sent(syncer.on_message(hello("b", versions=(0, 1, 0, 0), epoch=1), 6.0), "b")[1:] == [AnchorRequest(1, 1)]
    assert sent(syncer.on_message(hello("a", versions=(0, 1, 0, 0), epoch=1), 6.0), "a")[1:] == [], "b was asked"
    effects = syncer.on_disconnect("b", 1, "broke", 6.5)
    assert sent(effects, "a") == [AnchorRequest(1, 1)], "b is gone"


def test_a_version_with_other_bits_than_were_made_is_not_taken() -> None:
    syncer = restarted()
    for name in ("a", "b"):
        syncer.on_message(hello(name, versions=(0, 1, 0, 0), epoch=1), 6.0)
    effects = syncer.on_message(anchor("a", 1, 1, bits=666), 6.5)
    assert "another digest than was made" in only(effects, Drop)[0].reason and not only(effects, Restore)
    assert sent(effects, "b") == [AnchorRequest(1, 1)]
    assert only(syncer.on_message(anchor("b", 1, 1), 7.0), Restore) == [Restore(1, 1)]


def test_a_version_that_cannot_exist_is_neither_asked_for_nor_taken() -> None:
    # The snapshot is at global step 2 and tau is 2, so learners can hold versions of rounds 3 and 4 at most.
    syncer = restarted()
    effects = syncer.on_message(hello("evil", versions=(0, 1_000_000, 0, 0), epoch=1), 6.0)
    assert not any(isinstance(message, AnchorRequest) for message in sent(effects, "evil"))
    effects = syncer.on_message(anchor("evil", 1, 1_000_000), 6.5)
    assert "cannot exist: the run is at global step 2" in only(effects, Drop)[0].reason and not only(effects, Restore)
    effects = syncer.on_message(hello("a", versions=(0, 1, 0, 0), epoch=1), 7.0)
    assert sent(effects, "a")[1:] == [AnchorRequest(1, 1)], "the one that was made is asked for"
    effects = syncer.on_message(anchor("a", 1, 1), 7.5)
    assert only(effects, Restore) == [Restore(1, 1)] and syncer.global_step == 2 and not syncer.finished
    assert fragment(2, 1, 1)._replace(epoch=2) in sent(effects, "evil"), "it gets the version that the run uses"


def test_two_learners_with_the_same_bits_know_more_than_a_tape_that_lost_its_end() -> None:
    syncer = restarted()
    for name, version in (("a", 41), ("b", 41), ("evil", 1_000_001)):
        effects = syncer.on_message(hello(name, versions=(0, version, 0, 0), epoch=1), 6.0)
    copy = new(restore_s=10.0, quorum=2)
    copy.restore(json.loads(json.dumps(syncer.state())))
    for machine in (syncer, copy):
        effects = machine.on_message(anchor("b", 1, 41), 7.0)
        assert only(effects, Restore) == [Restore(1, 41)] and machine.global_step == 41


@pytest.mark.parametrize("version", [3, 5, 6])
def test_a_version_that_no_round_in_flight_can_have_made_is_not_believed(version: int) -> None:
    """Round 3 is of fragment 3, round 5 of fragment 1 but too far, round 6 of fragment 2 and too far."""
    syncer = restarted()
    effects = syncer.on_message(hello("a", versions=(0, version, 0, 0), epoch=1), 6.0)
    assert not any(isinstance(message, AnchorRequest) for message in sent(effects, "a"))


def test_an_anchor_that_a_driver_cannot_use_is_asked_of_another_holder() -> None:
    syncer = restarted()
    for name in ("a", "b"):
        syncer.on_message(hello(name, versions=(0, 1, 0, 0), epoch=1), 6.0)
    effects = syncer.on_message(anchor("a", 1, NO_VERSION, 0), 6.5)
    assert only(effects, Drop) == [Drop("a", "its value of fragment 1 cannot be used")]
    assert sent(effects, "b") == [AnchorRequest(1, 1)]
    again = syncer.on_message(anchor("a", 1, NO_VERSION, 0), 6.6)
    assert sent(again, "b") == [], "its repeated claim does not make others send twice"
    assert only(syncer.on_message(anchor("b", 1, 1), 7.0), Restore) == [Restore(1, 1)]


def test_a_learner_that_offers_a_version_and_never_brings_it_hides_nothing() -> None:
    syncer = restarted()
    assert syncer.comeback.restoring is not None
    syncer.comeback.restoring.possible[1] = [5]
    effects = syncer.on_message(hello("evil", versions=(0, 5, 0, 0), epoch=1), 6.0)
    assert sent(effects, "evil")[1:] == [AnchorRequest(1, 5)]
    for name in ("a", "b"):
        syncer.on_message(hello(name, versions=(0, 1, 0, 0), epoch=1), 6.1)
    asked: list[AnchorRequest] = []
    for _ in range(20):
        now_s = syncer.next_deadline_s()
        assert now_s is not None and now_s < 60.0, "the wait has a bound"
        for name in ("a", "b", "evil"):
            syncer.on_message(Heartbeat(name, 1), now_s)
        copy = new(restore_s=10.0, quorum=2)
        copy.restore(json.loads(json.dumps(syncer.state())))
        effects = syncer.on_tick(now_s)
        assert copy.on_tick(now_s) == effects, "the state holds who did not answer"
        if asked := [each for each in sent(effects, "a") if isinstance(each, AnchorRequest)]:
            break
    assert asked == [AnchorRequest(1, 1)]
    effects = syncer.on_message(anchor("a", 1, 1), now_s)
    assert only(effects, Restore) == [Restore(1, 1)] and not syncer.restoring
    assert [note.kind for note in only(effects, Note)] == ["restored"], "nothing is lost"


@pytest.mark.parametrize("message", [anchor("a", 0, 0), anchor("a", 1, 0), anchor("a", 7, 1), anchor("z", 1, 1)])
def test_an_anchor_that_is_not_needed_is_dropped(message: AnchorValue) -> None:
    syncer = restarted()
    syncer.on_message(hello("a", versions=(0, 1, 0, 0), epoch=1), 6.0)
    effects = syncer.on_message(message, 6.5)
    assert only(effects, Drop) and not only(effects, Restore)


def test_a_version_that_nobody_holds_is_lost_when_all_are_back() -> None:
    syncer = restarted()
    syncer.on_message(hello("a", epoch=1), 6.0)
    assert syncer.restoring, "b may hold it"
    effects = syncer.on_message(hello("b", epoch=1), 7.0)
    assert only(effects, Note)[-1] == Note("lost", 2, 1, (), "version 1: nobody holds it, version 0 continues")
    assert syncer.versions == [0, 0, 0, 0] and syncer.global_step == 2
    for name in ("a", "b"):
        syncer.on_message(report(name, 3), 8.0)
    assert syncer.global_step == 3, "and its steps count again"


def test_what_a_lost_version_had_merged_is_not_merged() -> None:
    syncer = running("a", "b", restore_s=10.0)
    for name in ("a", "b"):
        syncer.on_message(value(name, 1, 1, 1), 1.0)
    merged(syncer, 1, 1.0)
    assert [holding.pending for holding in syncer.leases.of("").holdings.values()] == [[(1, 1, 0, 1)], [(1, 1, 0, 1)]]
    syncer.on_restart(**HELD_NONE, now_s=5.0)
    for name in ("a", "b"):
        syncer.on_message(hello(name, epoch=1), 6.0)
    assert not any(holding.pending for holding in syncer.leases.of("").holdings.values())


def test_it_waits_for_those_who_were_connected_also_after_a_second_death() -> None:
    syncer = restarted()
    syncer.on_message(hello("a", epoch=1), 6.0)
    syncer.on_restart(**HELD_NONE, now_s=7.0)
    assert syncer.epoch == 3
    syncer.on_message(hello("a", epoch=2), 8.0)
    assert syncer.restoring, "b has not come back yet"
    syncer.on_message(hello("b", versions=(0, 1, 0, 0), epoch=1), 9.0)
    syncer.on_message(anchor("b", 1, 1), 9.5)
    assert syncer.versions == [0, 1, 0, 0] and not syncer.restoring


def test_a_merge_that_had_come_through_counts_once() -> None:
    """The tape's last line is lost: that the merge was done. But somebody holds its result."""
    syncer = running("a", "b", restore_s=10.0)
    for name in ("a", "b"):
        syncer.on_message(value(name, 1, 1, 1), 1.0)
    syncer.on_restart(**HELD_NONE, now_s=2.0)
    assert syncer.restoring, "the merge may have been done"
    syncer.on_message(hello("a", epoch=1), 3.0)
    effects = syncer.on_message(hello("b", versions=(0, 1, 0, 0), epoch=1), 3.0)
    assert AnchorRequest(1, 1) in sent(effects, "b")
    effects = syncer.on_message(anchor("b", 1, 1), 4.0)
    assert Note("merged", 1, 1, ("a", "b"), "") in effects
    assert (syncer.merged_rounds, syncer.versions) == (1, [0, 1, 0, 0])
    assert sent(effects, "a")[0] == fragment(1, 1, 1)._replace(epoch=2), "a lacks it"


def test_a_merge_that_died_is_given_up() -> None:
    syncer = running("a", restore_s=10.0)
    syncer.on_message(value("a", 1, 1, 1), 1.0)
    syncer.on_restart(**HELD_NONE, now_s=2.0)
    effects = syncer.on_message(hello("a", epoch=1), 3.0)
    assert Note("abandoned", 1, 1, (), "its merge was lost with the syncer") in effects
    assert syncer.merged_rounds == 0
    syncer.on_message(report("a", 2), 4.0)
    assert syncer.global_step == 2


def test_learners_of_every_earlier_epoch_are_welcome_and_of_a_later_one_are_not() -> None:
    syncer = lived()
    for now_s in (5.0, 6.0):
        syncer.on_restart(**HELD_ALL, now_s=now_s)
    for epoch in (1, 2, 3, 0):
        assert isinstance(sent(syncer.on_message(hello("a", versions=(0, 1, 0, 0), epoch=epoch), 7.0))[0], Welcome)
    (refusal,) = sent(syncer.on_message(hello("a", epoch=4), 8.0))
    assert isinstance(refusal, Refuse) and "has heard of epoch 4" in refusal.reason


def test_the_end_of_a_run_survives_a_death_before_its_last_snapshot() -> None:
    syncer = running("a", total_steps=1, restore_s=10.0)
    syncer.on_message(value("a", 1, 1, 1), 1.0)
    merged(syncer, 1, 1.0)
    assert syncer.finished
    syncer.on_restart(**HELD_NONE, now_s=2.0)
    assert syncer.restoring, "the last version is in the hands of the learner only"
    effects = syncer.on_message(hello("a", versions=(0, 1, 0, 0), epoch=1), 3.0)
    assert AnchorRequest(1, 1) in sent(effects) and not any(isinstance(m, Stop) for m in sent(effects))
    effects = syncer.on_message(anchor("a", 1, 1), 4.0)
    assert only(effects, Restore) and sent(effects, "a") == [Stop(1, "run complete")] and only(effects, Finish)


def test_a_rewind_begins_an_epoch_that_knows_nobody() -> None:
    syncer = lived()
    state = json.loads(json.dumps(syncer.state()))
    for name in ("a", "b"):
        syncer.on_message(value(name, 2, 2, 2), 3.0)
    merged(syncer, 2, 3.0)
    again = new(quorum=2, restore_s=10.0)
    again.restore(state)
    effects = again.on_rewind(4, 50.0)
    assert effects[0] == Note("restarted", 2, -1, (), "epoch 4, from the snapshot")
    assert (again.versions, again.epoch, again.restoring) == ([0, 1, 0, 0], 4, False)
    for epoch, kind in [(1, Refuse), (3, Refuse), (4, Welcome), (0, Welcome)]:
        answer = sent(again.on_message(hello("a", versions=(0, 1, 0, 0), epoch=epoch), 51.0))[0]
        assert isinstance(answer, kind), epoch
    again.on_message(hello("b", incarnation=2, versions=(0, 1, 0, 0), epoch=4), 52.0)
    assert again.membership.members["b"].restarts == 0, "it starts by the resume"


def test_an_epoch_cannot_be_numbered_like_an_earlier_one() -> None:
    syncer = lived()
    with pytest.raises(AssertionError, match="epoch 1 after 1"):
        syncer.on_rewind(1, 5.0)


@pytest.mark.parametrize("seed", range(40))
def test_what_somebody_holds_is_never_lost(seed: int) -> None:
    """The syncer dies at any input, sometimes twice; everybody who still runs comes back with what it holds."""
    rng = random.Random(seed)
    pair = Pair(total_steps=10_000, overlap_steps=rng.choice([1, 2]), quorum=2, snapshot_every=rng.choice([0, 2, 5]))
    pair.join("a", "b", "c")
    for _ in range(12):
        pair.dies_in = rng.choice([None, rng.randint(0, 20)])
        for _ in range(rng.randint(1, 4)):
            pair.wait(1.0)
            pair.step(*rng.sample(["a", "b", "c"], rng.randint(1, 3)))
            if rng.random() < 0.3:
                pair.held = set(rng.sample(["a:GlobalFragment", "b:GlobalFragment", "a", "b"], 2))
        pair.dies_in = None
        pair.held.clear()
        pair.deliver()
        for _ in range(rng.choice([0, 0, 1, 2])):
            pair.restart_syncer()
        if pair.linked:
            continue
        newest = [
            max(pair.drivers[name].anchors[p] for name in pair.learners) for p in range(pair.config.num_fragments)
        ]
        names = sorted(pair.learners)
        rng.shuffle(names)
        pair.connect(*names)
        assert not pair.syncer.restoring
        assert [tuple(value) for value in pair.driver.values] == [tuple(value) for value in newest]
        assert pair.syncer.versions == [value.version for value in newest]
        pair.check_bits()
    pair.check_replay()
