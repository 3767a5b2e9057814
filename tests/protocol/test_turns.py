"""The table of turns against tables written by hand, its rules for any periods, and both machines that follow it."""

import json
from dataclasses import asdict
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.turns import Periods, Turns, deal, fits, groups_of
from tests.protocol.pair import Pair
from tests.protocol.steady import STEADY

MIXED: dict[str, Any] = {"sync_every": {"mlp": 4, "rest": 8}, "num_fragments": 4, "class_fragments": (2, 2)}


def table(turns: Turns, steps: range) -> list[int]:
    return [turns.due(step) for step in steps]


def test_short_periods_take_their_steps_first_and_long_ones_what_is_left() -> None:
    # mlp: 2 of 4 steps, 0 and floor(4 / 2) = 2. Left of 8 steps are 1, 3, 5, 7: the first and the third
    turns = ProtocolConfig(**MIXED).turns
    assert table(turns, range(16)) == [0, 2, 1, -1, 0, 3, 1, -1] * 2
    assert [turns.next_due(step) for step in range(8)] == [1, 2, 4, 4, 5, 6, 8, 8]
    assert turns.due_within(2, 4) == (0, 1, 3) and turns.due_within(3, 1) == () == turns.due_within(11, 1)


def test_numbers_of_fragments_follow_the_order_in_the_config() -> None:
    turns = Turns({"rest": 8, "mlp": 4}, 4, class_fragments=(2, 2))
    assert table(turns, range(8)) == [2, 0, 3, -1, 2, 1, 3, -1]


def test_three_classes_fill_every_step() -> None:
    turns = Turns({"a*": 2, "b*": 6, "rest": 12}, 5, class_fragments=(1, 2, 2))
    assert table(turns, range(12)) == [0, 1, 0, 2, 0, 3, 0, 1, 0, 2, 0, 4]


def test_classes_with_equal_periods_are_one() -> None:
    groups = groups_of({"mlp": 4, "norm": 8, "rest": 8}, {20: {"mlp": 8, "norm": 16, "rest": 16}})
    assert groups.classes == (("mlp",), ("norm", "rest"))
    assert [(phase.first_step, phase.periods) for phase in groups.phases] == [(0, (4, 8)), (20, (8, 16))]
    assert groups_of({"mlp": 4, "rest": 4}).classes == (("mlp", "rest"),)
    apart = groups_of({"mlp": 4, "norm": 8, "rest": 8}, {20: {"mlp": 8, "norm": 8, "rest": 16}})
    assert apart.classes == (("mlp",), ("norm",), ("rest",))


def test_periods_change_at_a_step() -> None:
    # Fragments are due at 0 and 2 of 4 steps, then at 0 and 4 of 8.
    turns = Turns(4, 2, {6: 8})
    assert {step: turns.due(step) for step in range(1, 17) if turns.due(step) >= 0} == {
        2: 1, 4: 0, 8: 0, 12: 1, 16: 0,
    }  # fmt: skip
    assert turns.due_within(4, 2) == (0,) and turns.due_within(5, 3) == () and turns.due_within(2, 7) == (0, 1)
    assert turns.next_due(4) == 8
    assert groups_of(4, {6: 8}).gap_max == 12 and groups_of({"mlp": 4, "rest": 8}).gap_max == 8


@st.composite
def dealt(draw: st.DrawFn) -> tuple[dict[str, int], dict[int, Periods], tuple[int, ...]]:
    """Periods of up to three classes in two phases, and fragments that fit."""
    names = draw(st.sampled_from((("rest",), ("mlp", "rest"), ("mlp", "norm", "rest"))))

    def periods() -> dict[str, int]:
        factors = draw(st.lists(st.integers(2, 4), min_size=len(names) - 1, max_size=len(names) - 1))
        found = [draw(st.integers(1, 8))]
        for factor in factors:
            found.append(found[-1] * factor)
        return dict(zip(names, draw(st.permutations(found)), strict=True))

    first, later = periods(), {draw(st.integers(1, 40)): periods()} if draw(st.booleans()) else {}
    groups = groups_of(first, later)
    counts = tuple(draw(st.integers(1, 5)) for _ in groups.classes)
    assume(fits(counts, groups, 99))
    return first, later, counts


@STEADY
@given(dealt(), st.integers(0, 200))
def test_every_fragment_has_one_turn_in_each_of_its_periods(
    drawn: tuple[dict[str, int], dict[int, Periods], tuple[int, ...]], start: int
) -> None:
    first, later, counts = drawn
    turns = Turns(first, sum(counts), later, counts)
    change = next(iter(later), 10**9)
    phase = groups_of(first, later).phases[bool(later) and start >= change]
    periods = [period for period, count in zip(phase.periods, counts, strict=True) for _ in range(count)]
    for fragment_id, period in enumerate(periods):
        if start >= change or start + 2 * period <= change:
            due = [s for s in range(start, start + 2 * period) if turns.due(s) == fragment_id]
            assert len(due) == 2 and due[1] - due[0] == period
    assert sum(Fraction(1, period) for period in periods) <= 1


@STEADY
@given(st.lists(st.integers(0, 10_000), min_size=2, max_size=2), st.integers(2, 12), st.integers(2, 6))
def test_fragments_are_dealt_so_that_no_other_numbers_have_a_smaller_largest_one(
    sizes: list[int], short: int, factor: int
) -> None:
    assume(all(sizes))
    groups = groups_of({"mlp": short, "rest": short * factor})
    counts = deal(sizes, groups, 99)
    largest = max(size / count for size, count in zip(sizes, counts, strict=True))
    mean = sizes[0] / short + sizes[1] / (short * factor)
    others = [(a, b) for a in range(1, short + 1) for b in range(1, short * factor + 1)]
    best = min(max(sizes[0] / a, sizes[1] / b) for a, b in others if fits((a, b), groups, 99))
    assert largest <= max(best, mean), (counts, best, mean)


def test_a_class_without_tensors_has_no_fragment_and_the_number_of_all_is_kept() -> None:
    groups = groups_of({"mlp": 4, "norm": 8, "rest": 16})
    assert deal([800, 100, 0], groups, 24) == (3, 1, 0)
    assert deal([800, 100, 100], groups, 3) == (1, 1, 1)
    with pytest.raises(ValueError, match=r"mlp: 800, norm: 100, rest: 100 elements\) within num_fragments = 2; use"):
        deal([800, 100, 100], groups, 2)
    with pytest.raises(ValueError, match="longer periods, or fewer different ones"):
        deal([8, 8], groups_of({"mlp": 1, "rest": 2}), 24)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"sync_every": {"mlp": 0, "rest": 8}}, "protocol.sync_every.mlp is 0, but must be at least 1"),
        ({"sync_every": 4, "num_fragments": 4, "sync_later": {9: 0}}, "protocol.sync_later.9 is 0, but must"),
        ({"sync_every": {"mlp": 4, "rest": 10}}, "the periods 4 and 10, .* use 8 or 12 for 10"),
        ({"sync_later": {0: 48}}, "sync_later starts at global step 0; use 1 or later"),
        ({"sync_later": {9: 12}}, "num_fragments is 24, but must be at most sync_every = 12"),
        ({"sync_every": {"mlp": 4, "rest": 8}, "sync_later": {9: {"mlp": 4}}}, "do not both name 'rest'"),
        ({"sync_every": {"mlp": 2, "rest": 8}}, "overlap_steps is 2, but must be less than the shortest period, 2"),
        (MIXED | {"class_fragments": (4,)}, "2 numbers, for mlp, rest, which add up to num_fragments = 4"),
        (MIXED | {"class_fragments": (1, 2)}, "class_fragments is .1, 2.*add up to num_fragments = 4"),
        (MIXED | {"class_fragments": (4, 1), "num_fragments": 5}, "leave each fragment a separate global step"),
        ({"class_fragments": (20, 4)}, "1 numbers, for rest, which add up"),
    ],
)
def test_periods_that_cannot_be_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ProtocolConfig(**settings)


def test_a_run_must_be_long_enough_for_its_phases() -> None:
    config = ProtocolConfig(sync_every={"mlp": 4, "rest": 24}, sync_later={100: {"mlp": 8, "rest": 48}})
    config.check_steps(101)
    with pytest.raises(ValueError, match="begins at global step 100, but the run has 100; leave it out"):
        config.check_steps(100)
    for sync_every in ({"mlp": 4, "rest": 24}, 24):
        # The fragments that are never merged are reported at the end.
        ProtocolConfig(sync_every=sync_every).check_steps(3)


def test_processes_compare_the_table_and_tapes_tell_it() -> None:
    assert ProtocolConfig().words == "H=24 P=24 tau=2"
    told, bare = ProtocolConfig(**MIXED), ProtocolConfig(sync_every=MIXED["sync_every"])
    assert told.words == "H={'mlp': 4, 'rest': 8} P=2+2 tau=2"
    assert bare.agreed(told.words) == told == bare.with_fragments((2, 2)) == told.agreed("of no use")
    with pytest.raises(ValueError, match="does not say how many fragments"):
        bare.agreed("P= tau=2")
    assert ProtocolConfig().agreed("nothing") == ProtocolConfig()
    assert json.loads(json.dumps(asdict(told)))["class_fragments"] == [2, 2]


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_both_machines_follow_the_table_over_a_failover(overlap_steps: int) -> None:
    later = {21: {"mlp": 8, "rest": 16}}
    pair = Pair(quorum=2, overlap_steps=overlap_steps, sync_later=later, snapshot_every=5, **MIXED)
    first, second = [0, 2, 1, -1, 0, 3, 1, -1], {0: 0, 4: 1, 1: 2, 9: 3, 8: 0, 12: 1}
    due = {step: first[step % 8] if step < 21 else second.get(step % 16, -1) for step in range(1, 99)}
    pair.join("a", "b")
    for number in range(30):
        if number == 10:
            pair.restart_syncer()
            pair.connect("a", "b")
        pair.rounds(1, "a", "b")
        for learner in pair.learners.values():
            coming = range(learner.stager.next_round, learner.stager.next_round + overlap_steps)
            assert set(learner.stager.staged) <= {due[step] for step in coming}
    merged = {merge.global_step: merge.fragment_id for merge in pair.merges()}
    assert max(merged) >= 24 and merged.items() <= due.items()
    assert [step for step, p in due.items() if p >= 0 and step <= max(merged) and step not in merged] == []
    pair.check_replay()
    pair.check_bits()
