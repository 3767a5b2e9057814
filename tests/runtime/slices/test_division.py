"""The division of a step: balanced owners that keep what they computed, and chunks without a gap."""

from itertools import combinations

import pytest

from diloco_jax.runtime.slices.division import bounds, owners_of

SOME = [members for size in (1, 2, 3, 4) for members in combinations(range(5), size)]


@pytest.mark.parametrize("count", range(1, 8))
def test_members_differ_by_at_most_one_part(count: int) -> None:
    for members in SOME:
        owners = owners_of(count, members)
        loads = [owners.count(member) for member in members]
        assert len(owners) == sum(loads) == count and max(loads) - min(loads) <= 1, (members, owners)


@pytest.mark.parametrize("count", range(1, 8))
def test_what_was_computed_is_kept_when_members_are_lost(count: int) -> None:
    for before in SOME:
        first = owners_of(count, before)
        for left in (left for left in SOME if {*left} < {*before}):
            had = {member: {part for part in range(count) if first[part] == member} for member in left}
            second = owners_of(count, left, had)
            assert {*second} <= {*left} and all(second[part] == m for m in left for part in had[m])
            loads = [second.count(member) for member in left]
            assert max(loads) - min(loads) <= 1, "what a lost member had goes to those with the fewest parts"


def test_a_member_that_has_more_than_its_share_keeps_it() -> None:
    assert owners_of(4, (0, 2), {0: {0, 1, 2}, 1: {3}}) == (0, 0, 0, 2), "slice 1 is not a member"


@pytest.mark.parametrize("size", [0, 1, 2, 7, 64, 1_000_003])
@pytest.mark.parametrize("count", range(1, 8))
def test_chunks_cover_a_gradient_without_a_gap(size: int, count: int) -> None:
    found = bounds(size, count)
    lengths = [stop - start for start, stop in found]
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])] and found[-1][1] == size
    assert len(found) == count and max(lengths) - min(lengths) <= 1
