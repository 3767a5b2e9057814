"""The learner's side of leases: the samples that it reads when leases are lost, repeated or late."""

import math
import random
from collections import Counter
from itertools import pairwise

import pytest

from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.protocol.leases import BOOK, Allotment, Batch, LeaseBook, earlier_range
from diloco_jax.protocol.messages import NO_VERSION, SYNCER, FragmentValue, GlobalFragment, Lease, PullRequest, Welcome
from diloco_jax.protocol.pacing import ProtocolConfig
from tests.protocol.syncer_inputs import expand, indices, sent


def new(step_samples: int) -> Allotment:
    """Return the allotment of incarnation 7 of the learner a."""
    return Allotment("a", 7, step_samples)


def test_batches_follow_the_leases_across_their_borders() -> None:
    allotment = new(4)
    for lease in (Lease(0, 10, 16), Lease(6, 40, 41), Lease(7, 90, 100)):
        allotment.add(lease)
    assert allotment.granted == 17
    assert allotment.take() == Batch(((10, 14),), 4)
    assert allotment.take() == Batch(((14, 16), (40, 41), (90, 91)), 8)
    assert allotment.take() == Batch(((91, 95),), 12)


def test_repeated_overlapping_and_gapping_leases_do_no_harm() -> None:
    allotment = new(2)
    allotment.add(Lease(0, 10, 14))
    allotment.add(Lease(0, 10, 14))
    # Only samples 4 to 9 at positions 14 to 19 are new in it.
    allotment.add(Lease(2, 12, 20))
    # The lease before this one is not here yet.
    allotment.add(Lease(50, 0, 4))
    assert allotment.granted == 10
    allotment.add(Lease(5, 15, 18))
    assert allotment.granted == 10
    assert [allotment.take().ranges for _ in range(5)] == [((s, s + 2),) for s in range(10, 20, 2)]


def test_a_new_book_voids_what_is_not_read_yet() -> None:
    """It was away for so long that its data went to others."""
    allotment = new(2)
    allotment.add(Lease(0, 0, 8))
    read = [allotment.take(), allotment.take()]
    allotment.add(Lease(BOOK, 50, 56))
    assert allotment.granted == BOOK + 6
    # This lease belongs to the old book and is late.
    allotment.add(Lease(6, 6, 8))
    read += [allotment.take() for _ in range(3)]
    assert [batch.ranges for batch in read] == [((s, s + 2),) for s in (0, 2, 50, 52, 54)]
    assert [batch.end for batch in read] == [2, 4, BOOK + 2, BOOK + 4, BOOK + 6]
    assert allotment.take() == Batch((earlier_range("a", 7, 6, 56, 2),), BOOK + 6), "then it reads earlier positions"


def test_what_is_left_for_the_next_step_is_not_read_before_it() -> None:
    """An island that had fewer slices for three steps has its whole batch again, and too little data for it."""
    allotment = new(4)
    allotment.add(Lease(0, 10, 22))
    read = [allotment.take()]
    allotment.resize(2)
    read += [allotment.take() for _ in range(3)]
    allotment.resize(4)
    again = [allotment.take() for _ in range(3)]
    assert [batch.ranges for batch in read] == [((10, 14),), ((14, 16),), ((16, 18),), ((18, 20),)]
    assert [batch.ranges for batch in again] == [(earlier_range("a", 7, step, 22, 4),) for step in (5, 6, 7)]
    assert {batch.end for batch in again} == {10}
    allotment.add(Lease(12, 40, 44))
    assert allotment.take() == Batch(((20, 22), (40, 42)), 14)


@pytest.mark.parametrize("left", [1, 2, 3])
def test_a_new_book_after_half_a_batch(left: int) -> None:
    allotment = new(4)
    allotment.add(Lease(0, 0, 4))
    allotment.add(Lease(4, 10, 10 + left))
    allotment.take()
    allotment.add(Lease(BOOK, 50, 54))
    assert allotment.take() == Batch(((50, 54),), BOOK + 4)


def test_without_new_leases_earlier_positions_are_read_and_do_not_count() -> None:
    allotment = new(2)
    allotment.add(Lease(0, 0, 2))
    allotment.add(Lease(2, 10, 12))
    allotment.add(Lease(4, 20, 25))
    read = [allotment.take() for _ in range(9)]
    assert [batch.end for batch in read] == [2, 4, 6, 8, 8, 8, 8, 8, 8]
    assert read[3] == Batch(((22, 24),), 8)
    assert [batch.ranges for batch in read[4:]] == [(earlier_range("a", 7, step, 25, 2),) for step in range(5, 10)]
    assert allotment.earlier_steps == 5
    allotment.add(Lease(9, 30, 40))
    assert allotment.take() == Batch(((24, 25), (30, 31)), 10), "the sample that was left over comes first"
    assert allotment.earlier_steps == 0


def test_what_is_read_without_a_lease_is_spread_over_everything_that_was_leased_before() -> None:
    """An independent reference: the fractions of the golden ratio in float arithmetic."""
    front, size, steps = 100_000, 8, 5_000
    read = [earlier_range("a", 7, step, front, size) for step in range(1, steps + 1)]
    assert all(start >= 0 and stop <= front and stop - start == size for start, stop in read)
    first = read[0][0] / (front - size + 1)
    expected = [(first + step * (math.sqrt(5) - 1) / 2) % 1.0 * (front - size + 1) for step in range(steps)]
    far = [min(abs(start - at), front - abs(start - at)) for (start, _), at in zip(read, expected, strict=True)]
    assert max(far) < 2
    tenths = Counter(start * 10 // front for start, _ in read)
    assert set(tenths) == set(range(10)) and max(tenths.values()) - min(tenths.values()) <= 5
    # No batch comes twice within as many steps as there are batches.
    starts = sorted(start for start, _ in read)
    assert min(b - a for a, b in pairwise(starts)) >= size - 1
    assert earlier_range("a", 8, 1, front, size) != read[0] != earlier_range("b", 7, 1, front, size)
    assert earlier_range("a", 7, 3, size, size) == (0, size)


def test_what_is_upcoming_is_what_will_be_taken_and_nothing_that_is_not_leased() -> None:
    allotment = new(2)
    assert allotment.upcoming(3) == ()
    allotment.add(Lease(0, 0, 3))
    allotment.add(Lease(3, 10, 14))
    assert allotment.upcoming(9) == ((0, 3), (10, 13)) and allotment.upcoming(2) == ((0, 3), (10, 11))
    assert [allotment.take().ranges for _ in range(2)] == [((0, 2),), ((2, 3), (10, 11))]
    assert allotment.upcoming(9) == ((11, 13),)
    allotment.add(Lease(BOOK, 50, 54))
    assert allotment.upcoming(9) == ((50, 54),), "the rest went to others"
    assert [allotment.take().ranges for _ in range(3)][:2] == [((50, 52),), ((52, 54),)]
    assert allotment.upcoming(9) == (), "what is read without a lease may change before it is read"


def test_a_batch_before_the_first_lease_is_a_fault_of_the_driver() -> None:
    allotment = new(4)
    assert not allotment.ready
    allotment.add(Lease(0, 0, 3))
    assert not allotment.ready, "less than a step"
    with pytest.raises(AssertionError, match="before the first lease"):
        allotment.take()


@pytest.mark.parametrize("seed", range(40))
def test_every_sample_is_read_once_in_order_whatever_the_network_does(seed: int) -> None:
    """Leases are lost, repeated and overtaken; the learner reads each index of its samples once."""
    rng = random.Random(seed)
    step_samples = rng.randint(1, 4)
    book, allotment = LeaseBook(1), new(step_samples)
    book.open("a")
    under_way: list[Lease] = []
    counted: list[int] = []
    end = 0
    for _ in range(200):
        if rng.random() < 0.3:
            count = rng.randint(1, 9)
            book.grant("a", count)
            # Another learner takes some of the order.
            if rng.random() < 0.5:
                if "b" not in book.holdings:
                    book.open("b")
                book.grant("b", rng.randint(1, 5))
        if rng.random() < 0.5:
            under_way += book.holdings["a"].after(allotment.granted)
        rng.shuffle(under_way)
        for lease in under_way[: rng.randint(0, 4)]:
            allotment.add(lease)
        del under_way[8:]
        # Once it has begun, no step waits for a lease.
        if allotment.ready or end:
            batch = allotment.take()
            assert len(indices(batch.ranges)) == step_samples
            if batch.end > end:
                assert batch.end == end + step_samples
                counted += indices(batch.ranges)
                end = batch.end
    truth = expand(book.holdings["a"].after(0))
    assert counted == [truth[sample] for sample in range(end)] and len(counted) > 50
    assert len(allotment._ranges) < 40, "what is long read is forgotten"


def fragment(version: int, merged_round: int = NO_VERSION) -> GlobalFragment:
    return GlobalFragment(version, 0, version, 1, 10 + version, 0, merged_round=merged_round)


@pytest.mark.parametrize(
    ("adopt_mode", "shared", "merged", "since"),
    [
        ("overwrite", True, True, 8),
        ("overwrite", False, False, 8),
        ("rebase", True, True, 4),
        ("rebase", True, False, 8),
        ("rebase", False, False, 8),
        ("blend", True, True, 0),
        ("blend", True, False, 8),
        ("blend", False, False, 0),
    ],
)
def test_a_value_says_from_which_sample_on_it_holds_what_was_taught(
    adopt_mode: str, shared: bool, merged: bool, since: int
) -> None:
    """Staged after step 2 of 2 samples each; the round's result is adopted after step 4.

    Of a value that was left out nothing stays.
    """
    config = ProtocolConfig(sync_every=1, num_fragments=1, overlap_steps=2)
    learner = Learner("a", 1, config, (), step_samples=2, adopt_mode=adopt_mode)
    learner.on_connected(0.0)
    learner.on_message(Welcome(0, (0,), 1), 0.0)
    learner.on_message(Lease(0, 0, 1000), 0.0)
    learner.on_message(fragment(0), 0.0)

    def step() -> None:
        learner.on_step(10, 1.0, 2.5, 1.0, samples_end=learner.take_batch().end)

    step()
    step()
    if shared:
        (first,) = sent(learner.answer(PullRequest(1, 0, 2), 1.0), SYNCER)
        assert isinstance(first, FragmentValue) and (first.since, first.samples) == (0, 4)
    step()
    step()
    learner.on_message(fragment(1, 1 if merged else NO_VERSION), 2.0)
    step()
    (second,) = sent(learner.answer(PullRequest(2, 0, 5), 3.0), SYNCER)
    assert isinstance(second, FragmentValue) and (second.since, second.samples) == (since, 10)


def test_a_learner_with_its_own_data_needs_no_lease() -> None:
    allotment = new(0)
    assert allotment.ready and allotment.take() == allotment.take() == Batch((), 0) and allotment.upcoming(8) == ()
