"""Leases: the book against a model that tracks every single index, and how the syncer gives them."""

import json
import random

import pytest

from diloco_jax.protocol.effects import Note
from diloco_jax.protocol.leases import BOOK, Fates, LeaseBook
from diloco_jax.protocol.messages import ON_PURPOSE, Adopted, Heartbeat, Lease, Leave
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.watch.health import conditions
from tests.protocol.syncer_inputs import expand, hello, indices, leases, merged, new, report, sent, value


class Model:
    """Every index by itself, and every sample of every learner by itself: slow, and hard to get wrong."""

    def __init__(self, num_fragments: int) -> None:
        self.num_fragments = num_fragments
        self.leased = self.merged = self.overwritten = self.released = 0
        self.next = 0
        self.free: set[int] = set()
        # learner -> its leased samples -> their indices.
        self.samples: dict[str, dict[int, int]] = {}
        self.granted: dict[str, int] = {}
        # learner -> per fragment: number of samples in the newest version that it is known to hold.
        self.seen: dict[str, list[int]] = {}
        # Learner, fragment, version, and the first and the end of the samples that it confirms.
        self.pending: list[tuple[str, int, int, int, int]] = []
        # learner -> samples that are part of a version which somebody holds.
        self.taught: dict[str, set[int]] = {}
        # learner -> number of samples up to the end of its book.
        self.ended: dict[str, int] = {}

    def open(self, name: str, first: int) -> None:
        # The old numbers of this learner are void.
        if name in self.ended:
            first = (max(first, self.ended.pop(name)) // BOOK + 1) * BOOK
        self.samples[name], self.granted[name], self.seen[name] = {}, first, [first] * self.num_fragments
        self.taught[name] = set()

    def grant(self, name: str, count: int) -> None:
        for _ in range(count):
            index = min(self.free) if self.free else self.next
            self.free.discard(index)
            self.next = max(self.next, index + 1)
            self.samples[name][self.granted[name]] = index
            self.granted[name] += 1
            self.leased += 1

    def merge(self, name: str, fragment_id: int, version: int, samples: int, since: int) -> None:
        if name in self.samples:
            self.pending.append((name, fragment_id, version, since, min(samples, self.granted[name])))

    def confirm(self, fragment_id: int, version: int) -> None:
        for name, p, made, since, samples in list(self.pending):
            if p == fragment_id and made <= version:
                self.pending.remove((name, p, made, since, samples))
                self.taught[name] |= {s for s in self.samples[name] if since <= s < samples}
                self.seen[name][p] = max(self.seen[name][p], samples)
        for name, samples_of in self.samples.items():
            for sample in [s for s in samples_of if s < min(self.seen[name])]:
                del samples_of[sample]
                self.merged += sample in self.taught[name]
                self.overwritten += sample not in self.taught[name]

    def revert(self, fragment_id: int, version: int) -> None:
        self.pending = [one for one in self.pending if one[1] != fragment_id or one[2] <= version]

    def release(self, name: str) -> int:
        if name in self.samples:
            self.ended[name] = self.granted[name]
        given_back = self.samples.pop(name, {})
        self.pending = [one for one in self.pending if one[0] != name]
        self.free |= set(given_back.values())
        self.released += len(given_back)
        return len(given_back)

    @property
    def fates(self) -> Fates:
        out = sum(map(len, self.samples.values()))
        return Fates(self.leased, self.merged, self.overwritten, self.released, out)


@pytest.mark.parametrize("seed", range(60))
def test_the_book_agrees_with_a_model_of_single_indices(seed: int) -> None:
    rng = random.Random(seed)
    num_fragments = rng.randint(1, 3)
    book, model = LeaseBook(num_fragments), Model(num_fragments)
    version = 0
    for _ in range(120):
        name, fragment_id = rng.choice("abc"), rng.randrange(num_fragments)
        taken = book.state()
        text = json.dumps(taken)
        kind = rng.choices(["grant", "merge", "confirm", "revert", "release", "restore"], [6, 8, 6, 1, 2, 1])[0]
        if kind == "grant":
            if name not in book.holdings:
                first = rng.choice([0, 0, 5])
                book.open(name, first)
                model.open(name, first)
            count, before = rng.randint(1, 9), book.holdings[name].granted
            model.grant(name, count)
            given = expand(book.grant(name, count))
            assert given == {s: i for s, i in model.samples[name].items() if s >= before}
        elif kind == "merge":
            version += 1
            since, samples = sorted((rng.randint(0, 40), rng.randint(0, 40)))
            if name in book.holdings:
                samples += book.holdings[name].granted // BOOK * BOOK
                since += rng.choice([0, book.holdings[name].granted // BOOK * BOOK])
            book.on_merged(name, fragment_id, version, samples, since)
            model.merge(name, fragment_id, version, samples, since)
        elif kind == "confirm":
            # The syncer confirms only the newest version of a fragment.
            known = book.unconfirmed.get(fragment_id)
            if known is not None:
                book.confirm(fragment_id, known)
                model.confirm(fragment_id, known)
        elif kind == "revert":
            lost = max(0, version - rng.randint(0, 3))
            book.revert(fragment_id, lost)
            model.revert(fragment_id, lost)
        elif kind == "release":
            assert book.release(name) == model.release(name)
            # A newer incarnation of the learner greets.
            if rng.random() < 0.5:
                book.forget(name)
                model.ended.pop(name, None)
        else:
            state = json.loads(json.dumps(book.state()))
            book = LeaseBook(num_fragments)
            book.restore(state)
        assert json.dumps(taken) == text, "a state that was taken before has changed"
        assert book.fates == model.fates
        assert book.fates.leased == sum(book.fates[1:])
        assert set(indices(book.state()["pool"])) == model.free
        for name, holding in book.holdings.items():
            assert expand(holding.after(0)) == model.samples[name]
            assert sorted(indices(holding.ranges)) == sorted(model.samples[name].values())


def test_ranges_that_meet_become_one() -> None:
    book = LeaseBook(1)
    for name in ("a", "b", "c"):
        book.open(name)
        book.grant(name, 2)
    book.release("a")
    book.release("c")
    book.release("b")
    assert book.state()["pool"] == [(0, 6)]


def test_a_merge_that_died_with_the_syncer_merged_nothing() -> None:
    book = LeaseBook(1)
    book.open("a")
    book.grant("a", 4)
    book.on_merged("a", 0, 3, 4)
    book.revert(0, 2)
    book.confirm(0, 2)
    assert book.fates == Fates(4, 0, 0, 0, 4)


def held(version: int) -> tuple[Adopted, ...]:
    return (Adopted(version, 0, 0),)


@pytest.mark.parametrize("newest", [2, 1], ids=["a version of others alone", "the version after it is lost"])
def test_a_merge_counts_by_the_version_that_stays(newest: int) -> None:
    """Seeds 300138 and 300776 of the simulator: the book waited for a version that nobody would ever tell of."""
    book = LeaseBook(1)
    book.open("a")
    book.grant("a", 4)
    book.on_merged("a", 0, 1, 4)
    if newest == 2:
        # Its values come from learners that have left.
        book.on_version(0, 2)
        book.on_held(held(1))
        assert book.fates.merged == 0, "version 2 stays, and nobody is known to hold it"
    else:
        book.open("b")
        book.grant("b", 4)
        book.on_merged("b", 0, 2, 4)
        book.revert(0, 1)
        book.on_version(0, 1)
    book.on_held(held(newest))
    assert book.fates.merged == 4 and not book.unconfirmed


def test_nobody_holds_leases_twice() -> None:
    book = LeaseBook(1)
    book.open("a")
    with pytest.raises(AssertionError, match="a holds leases already"):
        book.open("a")
    assert book.release("stranger") == 0


def test_a_newcomer_gets_its_first_lease_with_the_welcome() -> None:
    syncer = new(lease_ahead_steps=8)
    assert leases(syncer.on_message(hello("a", step_samples=3), 0.0), "a") == [Lease(0, 0, 24)]


def test_a_learner_with_its_own_data_gets_no_lease_and_leaves_none_to_others() -> None:
    syncer = new(lease_ahead_steps=8, quorum=2)
    effects = syncer.on_message(hello("a", step_samples=0), 0.0)
    effects += syncer.on_message(report("a", 1, samples=0, granted=0), 1.0)
    assert leases(effects, "a") == [] and syncer.leases.fates == (0, 0, 0, 0, 0)
    effects = syncer.on_message(Leave("a", 1, ON_PURPOSE[0]), 2.0)
    assert "released" not in [effect.kind for effect in effects if isinstance(effect, Note)]
    (condition,) = conditions(syncer, 3.0)
    assert condition.reason == ON_PURPOSE[0]


def test_a_learner_gets_more_when_half_is_used_up() -> None:
    syncer = new(lease_ahead_steps=4, quorum=2)
    syncer.on_message(hello("a", step_samples=3), 0.0)
    assert leases(syncer.on_message(report("a", 1, samples=3, granted=12), 1.0)) == []
    assert leases(syncer.on_message(report("a", 2, samples=6, granted=12), 2.0)) == [Lease(12, 12, 18)]


def test_a_larger_step_leaves_no_gap() -> None:
    syncer = new(lease_ahead_steps=2, quorum=2)
    syncer.on_message(hello("a", step_samples=4), 0.0)
    (lease,) = leases(syncer.on_message(report("a", 1, samples=4, granted=8), 1.0))
    assert (lease.stop - lease.start) % 4 == 0, "whole steps"


def test_greeting_again_does_not_hoard() -> None:
    syncer = new(lease_ahead_steps=4)
    syncer.on_message(hello("a"), 0.0)
    for granted in (4, 4, 4):
        assert leases(syncer.on_message(hello("a", granted=granted), 1.0)) == []
    assert leases(syncer.on_message(hello("a", granted=0), 1.0)) == [Lease(0, 0, 4)], "it lacks them: sent again"
    assert syncer.leases.fates.leased == 4


def test_a_lost_lease_is_sent_again_but_not_while_it_may_be_on_its_way() -> None:
    syncer = new(lease_ahead_steps=8, quorum=2)
    syncer.on_message(hello("a"), 0.0)
    # The learner gets samples 8 to 11.
    syncer.on_message(report("a", 1, samples=4, granted=8), 1.0)
    found = {
        step: leases(syncer.on_message(report("a", step, samples=4, granted=8), float(step))) for step in range(2, 5)
    }
    assert found == {2: [], 3: [Lease(8, 8, 12)], 4: []}


def test_an_overtaken_report_gives_nothing() -> None:
    syncer = new(lease_ahead_steps=4, quorum=2)
    syncer.on_message(hello("a"), 0.0)
    syncer.on_message(report("a", 5, samples=2, granted=4), 1.0)
    leased = syncer.leases.fates.leased
    syncer.on_message(report("a", 4, samples=2, granted=2), 2.0)
    syncer.on_message(report("a", 3, samples=4, granted=4), 2.0)
    assert syncer.leases.fates.leased == leased


@pytest.mark.parametrize("changed", [{"samples": 9, "granted": 8}, {"samples": -1}, {"samples": 1, "granted": 0}])
def test_nobody_has_used_more_than_it_was_given(changed: dict[str, int]) -> None:
    syncer = new(lease_ahead_steps=8, quorum=2)
    syncer.on_message(hello("a"), 0.0)
    before = syncer.leases.state()
    (drop,) = syncer.on_message(report("a", 1, **changed), 1.0)
    assert "is impossible" in drop.reason and syncer.leases.state() == before


def test_leases_of_a_forgotten_time_are_taken_back() -> None:
    """The tape's end was lost, and with it that 8 samples more were leased."""
    syncer = new(lease_ahead_steps=8, quorum=2)
    syncer.on_message(hello("a"), 0.0)
    effects = syncer.on_message(report("a", 1, samples=12, granted=16), 1.0)
    assert leases(effects) == [Lease(16, 0, 8)], "numbered from where the learner stands; what was free is leased first"
    assert syncer.leases.fates == Fates(16, 0, 0, 8, 8)


def leased(*names: str) -> Syncer:
    """Members that have data for eight steps ahead and have made one."""
    syncer = new(quorum=len(names), lease_ahead_steps=8, release_s=20.0)
    for name in names:
        syncer.on_message(hello(name), 0.0)
        syncer.on_message(report(name, 1, samples=1, granted=8), 1.0)
    return syncer


def test_samples_go_to_others_when_their_learner_does_not_come_back() -> None:
    syncer = leased("a", "b")
    syncer.on_disconnect("a", 1, "broke", 2.0)
    for now_s in range(2, 26):
        syncer.on_message(Heartbeat("b", 1), float(now_s))
    for now_s in range(2, 22):
        syncer.on_tick(float(now_s))
        assert "a" in syncer.leases.holders
    for now_s in range(22, 26):
        syncer.on_tick(float(now_s))
    assert "a" not in syncer.leases.holders and syncer.leases.fates == Fates(16, 0, 0, 8, 8)


def test_samples_of_a_silent_learner_go_to_others_too() -> None:
    syncer = leased("a")
    for now_s in range(2, 40):
        syncer.on_tick(float(now_s))
    assert syncer.membership.members["a"].state == "silent" and syncer.leases.fates.released == 8
    effects = syncer.on_message(report("a", 4, samples=4, granted=8), 40.0)
    assert leases(effects, "a") == [Lease(BOOK, 0, 8)], "it was not dead; from now on it reads what it is given now"


def test_a_value_takes_its_samples_along_when_its_version_is_known_to_be_held() -> None:
    syncer = new(sync_every=1, num_fragments=1, overlap_steps=1, lease_ahead_steps=8)
    syncer.on_message(hello("a", versions=(0,)), 0.0)
    held = report("a", 1).adopted[:1]
    syncer.on_message(report("a", 1, held, samples=2, granted=8), 1.0)
    syncer.on_message(value("a", 1, 0, 1, samples=2), 1.0)
    assert sent(merged(syncer, 1, 1.0), "a")
    assert syncer.leases.fates.merged == 0
    syncer.on_message(report("a", 2, held, samples=4, granted=8), 2.0)
    assert syncer.leases.fates.merged == 0, "it does not hold version 1 yet"
    syncer.on_message(report("a", 3, (held[0]._replace(version=1),), samples=6, granted=8), 3.0)
    assert syncer.leases.fates.merged == 2
