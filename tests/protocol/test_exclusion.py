"""The rule that excludes values from a merge, on small exact numbers."""

import math
from collections.abc import Sequence

import pytest

from diloco_jax.protocol.effects import Contribution
from diloco_jax.protocol.exclusion import (
    EARLIER_MIN,
    GROWTH,
    HARMLESS,
    OUTLIERS_KEPT,
    RATES_KEPT,
    RATES_MIN,
    VOTERS_MIN,
    Decision,
    MeasuredValue,
    Outlier,
    RateHistory,
    anchor_problem,
    decide,
    evidence_of,
    exclude_largest,
    median,
    next_history,
    repeat,
    usual_elsewhere,
)

FACTOR = 100.0
# So small that no rate of these tests is harmless.
LENGTH = 1.0
USUAL = RateHistory(rates=(1.0,) * RATES_MIN, peaks=(1.0, 1.0))
QUIET = RateHistory(rates=(1e-3,) * RATES_MIN, peaks=(1e-3, 1e-3))


def value(name: str, norm: float, steps: int = 1, base: int = 0) -> MeasuredValue:
    return MeasuredValue(Contribution(name, 10, steps, 64 * steps, base, 4), norm)


def decided(
    values: Sequence[MeasuredValue], history: RateHistory = USUAL, length: float = LENGTH, factor: float = FACTOR
) -> Decision:
    return decide(values, history, length, factor)


class Story:
    """A fragment over several rounds: what was not merged of a learner stays in its next value."""

    def __init__(self, history: RateHistory, length: float = 1e3) -> None:
        self.history, self.length, self.version = history, length, 0
        self._held: dict[str, tuple[float, int, int]] = {}

    def round(self, **moves: float) -> list[str]:
        """Let each learner move by a norm in 10 steps; return whom the round excludes."""
        values = []
        for name, move in sorted(moves.items()):
            norm, steps, base = self._held.get(name, (0.0, 0, self.version))
            self._held[name] = (norm + move, steps + 10, base)
            values.append(value(name, norm + move, steps + 10, base))
        decision = decided(values, self.history, self.length)
        self.history = next_history(self.history, decision, values)
        if decision.merged:
            self.version += 1
            self._held.clear()
        return sorted(decision.excluded)


@pytest.mark.parametrize("norm", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("factor", [FACTOR, 0.0])
def test_a_value_that_is_not_finite_is_excluded(norm: float, factor: float) -> None:
    decision = decided([value("a", 1.0), value("b", norm)], factor=factor)
    assert decision == Decision((0,), {"b": "NaN or infinity in its value"}, ())


@pytest.mark.parametrize(("norm", "steps", "merged"), [(100.0, 1, True), (100.1, 1, False), (200.0, 2, True)])
def test_the_limit_is_a_multiple_of_the_usual_norm_per_inner_step(norm: float, steps: int, merged: bool) -> None:
    decision = decided([value("a", norm, steps)])
    assert bool(decision.merged) == merged
    if not merged:
        told = "its value has norm 100 per inner step, where 1 is usual (merge.outlier_factor 100)"
        assert decision.excluded == {"a": told}


def test_nothing_is_an_outlier_without_a_factor_or_enough_accepted_rates() -> None:
    assert decided([value("a", 1e9)], factor=0.0).merged == (0,)
    short = RateHistory(rates=(1.0,) * (RATES_MIN - 1), elsewhere=1.0)
    assert decided([value("a", 1e9)], short).merged == (0,)


def test_the_usual_rate_is_the_largest_of_three_medians() -> None:
    own, elsewhere, votes = 1e-3, 2e-3, 4e-3
    quiet = RateHistory(rates=(own,) * RATES_MIN)
    assert not decided([value("a", 1.1 * FACTOR * own)], quiet).merged
    lively = quiet._replace(elsewhere=elsewhere)
    assert decided([value("a", FACTOR * elsewhere)], lively).merged == (0,)
    assert not decided([value("a", 1.1 * FACTOR * elsewhere)], lively).merged
    others = [value(name, votes) for name in "bc"]
    assert decided([value("a", FACTOR * votes), *others], lively).merged == (0, 1, 2)
    assert decided([value("a", 1.1 * FACTOR * votes), *others], lively).merged == (1, 2)


def test_a_learner_that_did_not_move_has_no_vote() -> None:
    values = [value("a", 1.0), value("b", 0.0), value("c", 0.0)]
    assert len(values) >= VOTERS_MIN
    assert decided(values, QUIET).merged == (1, 2), "only one of three moved"


def test_a_change_that_concerns_everybody_excludes_nobody() -> None:
    """The end of a warm-up: all rates are a thousand times the usual one."""
    assert decided([value(name, 1.0) for name in "abc"], QUIET).excluded == {}


def test_a_small_fraction_of_the_fragments_length_is_harmless() -> None:
    tiny = RateHistory(rates=(1e-9,) * RATES_MIN)
    assert decided([value("a", HARMLESS * LENGTH)], tiny).merged == (0,)
    assert not decided([value("a", 1.1 * HARMLESS * LENGTH)], tiny).merged


def test_a_rate_that_was_accepted_twice_before_is_not_an_outlier() -> None:
    for peaks, merged in [((7.0, 5.0), True), ((7.0, 4.0), False), ((7.0,), False)]:
        decision = decided([value("a", GROWTH * 5.0)], QUIET._replace(peaks=peaks))
        assert bool(decision.merged) == merged, peaks


def test_an_outlier_is_remembered_unless_it_was_outvoted() -> None:
    outlier = Outlier("a", 0, 10, 1010.0, 101.0, lasts=True, merged=False)
    alone = decided([value("a", 1010.0, 10)])
    assert alone.outliers == (outlier,)
    after = USUAL._replace(outliers=(outlier, outlier._replace(learner_id="b")))
    crowd = [value("a", 1010.0, 10), value("c", 10.0, 10), value("d", 10.0, 10)]
    assert decided(crowd, after).outliers == (outlier._replace(learner_id="b"),)


@pytest.mark.parametrize("times", [101.0, 300.0, 1e4, 1e6])
@pytest.mark.parametrize("names", ["a", "ab"])
def test_a_lasting_change_is_excluded_twice_then_merged(names: str, times: float) -> None:
    story = Story(USUAL)
    rounds = [story.round(**dict.fromkeys(names, 10.0 * times)) for _ in range(30)]
    expected = [list(names)] * EARLIER_MIN + [[]] * 28
    assert rounds == expected


def test_a_lasting_change_of_one_of_two_is_excluded_twice_then_merged() -> None:
    story = Story(USUAL)
    assert [story.round(a=2000.0, b=10.0) for _ in range(4)] == [["a"], ["a"], [], []]


def test_a_ramp_is_excluded_twice() -> None:
    story = Story(QUIET, length=10.0)
    assert [story.round(a=2.0 * number) for number in range(1, 20)] == [["a"], ["a"]] + [[]] * 17


@pytest.mark.parametrize("growth", [2.0, 3.0, 10.0, 1e3])
@pytest.mark.parametrize("others", ["", "b", "bc"])
def test_a_diverging_learner_is_excluded_as_long_as_it_grows(others: str, growth: float) -> None:
    story = Story(USUAL, length=10.0)
    rounds = int(30 / math.log10(growth))
    found = [story.round(a=1100.0 * growth**n, **dict.fromkeys(others, 10.0)) for n in range(rounds)]
    assert found == [["a"]] * rounds


@pytest.mark.parametrize("times", [300.0, 3e4, 1e10, 1e30])
def test_damage_that_stays_in_a_value_is_excluded_until_its_learner_is(times: float) -> None:
    """With nobody else no version replaces the damage. The third strike ends the learner's incarnation."""
    story = Story(USUAL, length=10.0)
    assert [story.round(a=10.0 * times), story.round(a=10.0), story.round(a=10.0)] == [["a"]] * 3


@pytest.mark.parametrize("others", ["b", "bc"])
def test_damage_that_comes_back_is_excluded_every_time(others: str) -> None:
    """Each value is farther away than a learner moves in its steps."""
    story = Story(USUAL, length=10.0)
    assert [story.round(a=1e6, **dict.fromkeys(others, 10.0)) for _ in range(20)] == [["a"]] * 20


def test_three_voters_decide_against_one_that_is_far_above_them() -> None:
    story = Story(USUAL)
    assert [story.round(a=2000.0, b=10.0, c=10.0) for _ in range(10)] == [["a"]] * 10
    assert story.round(a=2000.0, b=10.0) == ["a"], "no outlier of a voted round is remembered"


def test_a_merge_that_overflows_excludes_the_largest_value_too() -> None:
    values = [value("a", 5.0), value("b", 8.0), value("c", 16.0, steps=2)]
    outlier = Outlier("c", 0, 2, 16.0, 8.0, lasts=True, merged=True)
    decision = exclude_largest(Decision((0, 1, 2), {}, (outlier,)), values)
    assert decision == Decision((0, 1), {"c": "its value is so large that the result is not finite"}, ())
    assert exclude_largest(decision, values).merged == (0,)


def test_the_next_history_has_the_rates_of_merged_values() -> None:
    values = [value("a", 6.0, steps=2), value("b", 0.0), value("c", 9.0)]
    outlier = Outlier("c", 0, 1, 9.0, 9.0, lasts=True, merged=False)
    before = RateHistory((1.0,), (2.0, 1.0), (), 0.5)
    after = next_history(before, Decision((0, 1), {"c": "why"}, (outlier,)), values)
    assert after == RateHistory((1.0, 3.0), (3.0, 2.0), (outlier,), 0.5)


def test_a_history_is_bounded() -> None:
    history = RateHistory()
    for number in range(100):
        values = [value("a", 1.0 + number)]
        history = next_history(history, Decision((0,), {}, ()), values)
    assert history.rates == tuple(69.0 + number for number in range(RATES_KEPT)) and history.peaks == (100.0, 99.0)
    for number in range(100):
        history = history._replace(outliers=decided([value(str(number), 1e9)], history).outliers)
    assert [each.learner_id for each in history.outliers] == [str(number) for number in range(84, 100)]
    assert len(history.outliers) == OUTLIERS_KEPT


def test_the_liveliest_other_fragment_counts_for_an_equal_number_of_parameters() -> None:
    histories = [RateHistory(rates=(rate,) * RATES_MIN) for rate in (8.0, 3.0, 5.0)]
    assert usual_elsewhere(histories, (4, 9, 16), 0) == 5.0 / 4 * 2
    assert usual_elsewhere(histories, (4, 9, 16), 2) == 8.0 / 2 * 4
    young = [histories[0]._replace(rates=(8.0,) * (RATES_MIN - 1)), histories[1]]
    assert usual_elsewhere(young, (4, 9), 1) == 0.0


def test_the_median_is_one_of_the_values() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0 and median([4.0, 1.0, 3.0, 2.0]) == 2.0


def test_evidence_repeats_its_decision_and_the_next_history() -> None:
    values = [value("a", 1.0), value("b", math.nan), value("c", 90.0), value("d", 80.0), value("e", 1e9)]
    history = USUAL._replace(elsewhere=1.5)
    decision = exclude_largest(decided(values, history), values)
    evidence = evidence_of(values, history, LENGTH, FACTOR, 1, decision.excluded)
    assert evidence.norms == {"a": 1.0, "b": None, "c": 90.0, "d": 80.0, "e": 1e9} and evidence.elsewhere == 1.5
    parts = [each.contribution for each in values]
    again, after = repeat(evidence, parts, history._replace(elsewhere=0.0))
    assert again == decision and after == next_history(history, decision, values)
    undecoded = repeat(evidence, [*parts, value("f", 1.0).contribution], history)[0]
    assert undecoded.excluded.keys() == {"b", "c", "e", "f"}


@pytest.mark.parametrize(
    ("distance", "steps", "history", "factor", "problem"),
    [
        (math.nan, 1, USUAL, FACTOR, "NaN or infinity in it"),
        (math.inf, 1, USUAL, 0.0, "NaN or infinity in it"),
        (100.0, 1, USUAL, FACTOR, ""),
        (300.0, 3, USUAL, FACTOR, ""),
        (301.0, 3, USUAL, FACTOR, "it is 301 away from the snapshot's value, allowed is 300 (merge.outlier_factor)"),
        (1e9, 1, USUAL, 0.0, ""),
        (100.0, 9, RateHistory(), FACTOR, ""),
        (101.0, 9, RateHistory(), FACTOR, "allowed is 100 "),
    ],
)
def test_a_global_value_that_a_learner_brings_has_a_limit_for_each_global_step(
    distance: float, steps: int, history: RateHistory, factor: float, problem: str
) -> None:
    found = anchor_problem(distance, steps, history, LENGTH, factor)
    assert problem in found and bool(found) == bool(problem)
