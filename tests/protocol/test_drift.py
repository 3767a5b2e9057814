"""Averages of drift, and the alarm about an island whose contributions differ from the others for many rounds."""

from random import Random
from statistics import median

import pytest

from diloco_jax.protocol.watch.alarms import alarms_of
from diloco_jax.protocol.watch.drift import COSINE_MIN, DECAY, NORM_RATIO_MAX, ROUNDS_MIN, DriftWatch, MeanDrift
from diloco_jax.protocol.watch.stats import RunStats
from tests.protocol.syncer_inputs import hello, new, report

USUAL = MeanDrift(1.0, 0.3)


def watched(rounds: int, odd: MeanDrift, others: MeanDrift = USUAL, count: int = 3) -> DriftWatch:
    """The averages after rounds of `count` islands; island a differs."""
    watch = DriftWatch()
    for _ in range(rounds):
        watch.on_round({"a": odd} | dict.fromkeys("bcdefgh"[: count - 1], others))
    return watch


def test_averages_follow_the_rounds_that_merged_an_island() -> None:
    watch = watched(1, MeanDrift(2.0, 0.5))
    assert watch.of("a") == MeanDrift(2.0, 0.5) and watch.of("nobody") == MeanDrift(None, None)
    watch.on_round({"b": USUAL, "c": USUAL})
    assert watch.of("a") == MeanDrift(2.0, 0.5)
    watch.on_round({"a": MeanDrift(1.0, None), "b": USUAL})
    assert watch.of("a") == MeanDrift(round(2.0 * DECAY + 1.0 * (1 - DECAY), 4), 0.5), "no number changes no average"


@pytest.mark.parametrize("odd", [MeanDrift(1.0, -0.1), MeanDrift(NORM_RATIO_MAX + 0.1, 0.3)])
def test_trouble_must_last(odd: MeanDrift) -> None:
    assert watched(ROUNDS_MIN - 1, odd).trouble("a") == ""
    watch = watched(ROUNDS_MIN, odd)
    assert watch.trouble("a") and not watch.trouble("b")
    watch.on_round({"a": MeanDrift(1.0, 5.0), "b": USUAL, "c": USUAL})
    for _ in range(ROUNDS_MIN):
        watch.on_round({"a": USUAL, "b": USUAL, "c": USUAL})
    assert watch.trouble("a") == "", "it is over"


def test_texts_have_their_evidence() -> None:
    assert watched(30, MeanDrift(6.5, -0.25)).trouble("a") == (
        "its contributions are 6.5 times as long as the median of their rounds; its contributions point against those "
        "of the others: their cosine is -0.25, where 0.3 is usual"
    )


@pytest.mark.parametrize(
    ("odd", "others", "count"),
    [
        (MeanDrift(1.0, COSINE_MIN), USUAL, 3),
        (MeanDrift(NORM_RATIO_MAX, 0.3), USUAL, 3),
        # No island is odd where every cosine is negative.
        (MeanDrift(1.0, -0.2), MeanDrift(1.0, -0.1), 3),
        # Of two, nobody can tell which one is odd.
        (MeanDrift(9.0, -0.9), MeanDrift(1.0, -0.9), 2),
        (MeanDrift(None, None), MeanDrift(None, None), 4),
    ],
)
def test_what_is_no_trouble(odd: MeanDrift, others: MeanDrift, count: int) -> None:
    watch = watched(3 * ROUNDS_MIN, odd, others, count)
    assert not any(watch.trouble(name) for name in "abc")


def test_others_are_all_islands_of_the_round_but_one() -> None:
    random = Random(7)
    for count in range(3, 9):
        # Equal cosines are common, and an island may have none.
        cosines = {name: random.choice([None, -0.5, 0.1, 0.1, 0.2, random.random()]) for name in "abcdefgh"[:count]}
        watch = DriftWatch()
        watch.on_round({name: MeanDrift(1.0, each) for name, each in cosines.items()})
        for name in cosines:
            others = [each for other, each in cosines.items() if other != name and each is not None]
            assert watch._averages[name].others == pytest.approx(median(others) if others else 0.0, abs=0)


def test_one_odd_round_is_no_trouble() -> None:
    watch = watched(50, USUAL)
    watch.on_round({"a": MeanDrift(99.0, -1.0), "b": USUAL, "c": USUAL})
    for _ in range(2 * ROUNDS_MIN):
        assert watch.trouble("a") == ""
        watch.on_round({"a": USUAL, "b": USUAL, "c": USUAL})


def test_the_alarm_names_the_island_and_excludes_nobody() -> None:
    syncer = new(quorum=3)
    stats = RunStats(("a", "b", "c"), 100, syncer)
    for name in "abc":
        syncer.on_message(hello(name), 0.0)
        syncer.on_message(report(name, 1), 1.0)
    stats.drifts = watched(ROUNDS_MIN, MeanDrift(8.0, 0.2))
    before = syncer.state()
    (alarm,) = alarms_of(syncer, stats, 1.0)
    assert (alarm.kind, alarm.who) == ("drift", "a") and alarm.text.startswith("a: its contributions are 8 times")
    assert "nothing excludes it" in alarm.as_dict()["remedy"] and syncer.state() == before
    rows = {row["learner"]: (row["drift_norm_ratio"], row["drift_cosine"]) for row in stats.status(1.0)}
    assert rows == {"a": (8.0, 0.2), "b": (1.0, 0.3), "c": (1.0, 0.3)}
    syncer.on_disconnect("a", 1, "no connection", 2.0)
    assert "drift" not in {alarm.kind for alarm in alarms_of(syncer, stats, 2.0)}, "it contributes nothing now"
