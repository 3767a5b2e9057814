"""Counters of a value and of a report, against what its sender reported before, and against what is usual."""

import json
from typing import Any

import pytest

from diloco_jax.protocol.claims import LEAPS, AskedReport, Reported, contradiction, plausible_tokens
from diloco_jax.protocol.effects import Drop, Effect, Merge
from diloco_jax.protocol.messages import Adopted
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.progress import Budget
from tests.protocol.syncer_inputs import FINGERPRINT, hello, merged, new, only, report, running, value

ASKED = AskedReport(7, 30, 300, Adopted(4, 20, 200))
NEWEST = Reported(32, 320, 64, ASKED.held)
SENT = value("a", 7, 0, 30, steps=10, tokens=100, base_version=4, samples=60)


@pytest.mark.parametrize(
    ("changed", "newest", "wrong"),
    [
        ({}, {}, ""),
        ({"steps": 11}, {}, "value of 11 steps, where its reports say 10"),
        ({"steps": 9}, {}, "value of 9 steps"),
        ({"steps": 1 << 40}, {}, "value of 1099511627776 steps"),
        ({"tokens": 121}, {}, "value of 121 tokens, where its reports allow 120"),
        ({"samples": 65}, {}, "value of the samples from 0 to 65, where its newest report says 64"),
        # A state of an older release does not name its samples.
        ({"samples": 65}, {"samples": -1}, ""),
        ({"since": 61}, {}, "value of the samples from 61 to 60"),
        ({"local_step": 29, "steps": 9}, {}, "value of its step 29, where step 30 was asked for"),
        # The copy of that step was gone, so a later one is sent, which a report has confirmed.
        ({"local_step": 32, "steps": 12, "tokens": 120}, {}, ""),
        ({"local_step": 33, "steps": 13, "tokens": 130}, {}, "its newest report is of 32"),
        # a version that it has adopted since, told of or not
        ({"local_step": 32, "base_version": 5, "steps": 1}, {"held": Adopted(5, 31, 310), "tokens": 410}, ""),
        ({"local_step": 32, "base_version": 5, "steps": 2, "tokens": 20}, {}, ""),
        ({"local_step": 32, "base_version": 5, "steps": 3}, {}, "where its reports say at most 2"),
        # its base was replaced while the value was on its way
        ({}, {"held": Adopted(5, 31, 310)}, ""),
        ({"steps": 11}, {"held": Adopted(5, 31, 310)}, "where its reports say 10"),
    ],
)
def test_a_value_is_held_against_reports(changed: dict[str, int], newest: dict[str, Any], wrong: str) -> None:
    found = contradiction(SENT._replace(**changed), ASKED, NEWEST._replace(**newest))
    assert wrong in found and bool(found) == bool(wrong)


@pytest.mark.parametrize("changed", [{"steps": 1 << 50, "tokens": 1 << 52}, {"steps": 1 << 60}, {"tokens": 11}])
def test_a_value_that_contradicts_its_reports_is_not_merged(changed: dict[str, int]) -> None:
    syncer = running("a", "b")
    effects = syncer.on_message(value("a", 1, 1, 1, **changed), 1.0)
    assert only(effects, Drop) and syncer.membership.members["a"].credit.strikes == 0
    effects = syncer.on_message(value("b", 1, 1, 1), 1.0) + syncer.on_tick(40.0)
    (merge,) = only(effects, Merge)
    assert [each.learner_id for each in merge.contributions] == ["b"]


def test_a_member_of_an_older_release_is_not_held_against_what_it_did_not_write() -> None:
    syncer = running("a", "b")
    state = json.loads(json.dumps(syncer.state()))
    for member in state["members"]:
        for name in ("asked", "reported_tokens", "samples"):
            del member[name]
    other = new(quorum=2)
    other.restore(state)
    assert not only(other.on_message(value("a", 1, 1, 1), 1.0), Drop)
    assert other.membership.members["a"].reported_tokens == 10


def test_as_many_tokens_are_plausible_as_the_factor_allows() -> None:
    assert plausible_tokens(1 << 50, 2, 10.0, 64.0) == 1280
    assert plausible_tokens(1000, 2, 10.0, 64.0) == 1000
    assert plausible_tokens(1 << 50, 2, 10.0, 0.0) == plausible_tokens(1 << 50, 2, float("inf"), 64.0) == 1 << 50


def parts_of(effects: list[Effect]) -> dict[str, int]:
    (merge,) = only(effects, Merge)
    return {each.learner_id: each.tokens for each in merge.contributions}


def second_round(tokens: int, **settings: Any) -> tuple[Syncer, dict[str, int]]:
    """Return tokens of each part of round 2, where steps have 10 and the second step of one member has so many."""
    syncer = running("a", "b", "c", **settings)
    for name in ("a", "b", "c"):
        syncer.on_message(value(name, 1, 1, 1), 1.0)
    merged(syncer, 1, 1.0)
    held = (Adopted(0), Adopted(1, 1, 10), Adopted(0), Adopted(0))
    effects: list[Effect] = []
    for name in ("a", "b", "c"):
        syncer.on_message(report(name, 2, held, tokens=10 + tokens if name == "c" else 20), 2.0)
    for name in ("a", "b", "c"):
        effects = syncer.on_message(value(name, 2, 2, 2, tokens=10 + tokens if name == "c" else 20), 2.0)
    return syncer, parts_of(effects)


def test_one_counter_has_a_bound_in_a_merge() -> None:
    """A step weighs tokens^2 / steps: at most 64 times a usual one, which are 8 times its tokens."""
    syncer, parts = second_round(1 << 50)
    assert parts == {"a": 20, "b": 20, "c": 8 * 10 * 2}
    assert syncer.membership.members["c"].tokens == 10 + 640, "and in what counts as trained on"


@pytest.mark.parametrize("tokens", [5, 10, 80, 150])
def test_islands_of_different_batches_count_in_full(tokens: int) -> None:
    assert second_round(tokens)[1] == {"a": 20, "b": 20, "c": 10 + tokens}


def test_a_value_of_a_later_step_waits_for_its_report() -> None:
    syncer = running("a", "b")
    syncer.on_message(value("a", 1, 1, 1), 1.0)
    assert not syncer.on_message(value("b", 1, 1, 3), 1.0), "no merge and no drop before the report"
    assert only(syncer.on_message(value("b", 1, 1, 3), 1.1), Drop), "a second copy is not kept"
    assert not only(syncer.on_message(report("b", 2), 1.2), Merge), "a report of an earlier step confirms nothing"
    restored = new(quorum=2)
    restored.restore(json.loads(json.dumps(syncer.state())))
    for each in (syncer, restored):
        (merge,) = only(each.on_message(report("b", 3), 1.3), Merge)
        assert [(part.learner_id, part.steps, part.tokens) for part in merge.contributions] == [
            ("a", 1, 10),
            ("b", 3, 30),
        ]


def test_a_value_whose_report_contradicts_it_or_never_comes_is_not_merged() -> None:
    for reports in ([report("b", 3, tokens=29)], []):
        syncer = running("a", "b")
        syncer.on_message(value("a", 1, 1, 1), 1.0)
        syncer.on_message(value("b", 1, 1, 3), 1.0)
        effects = [effect for each in reports for effect in syncer.on_message(each, 1.1)]
        assert bool(only(effects, Drop)) == bool(reports)
        effects += syncer.on_tick(40.0)
        (merge,) = only(effects, Merge)
        assert [part.learner_id for part in merge.contributions] == ["a"]


def test_the_bound_can_be_turned_off() -> None:
    assert second_round(1 << 40, tokens_per_step_factor_max=0.0)[1]["c"] == 10 + (1 << 40)
    with pytest.raises(ValueError, match=r"tokens_per_step_factor_max is 0\.5, but must be at least 1"):
        ProtocolConfig(tokens_per_step_factor_max=0.5)


CONFIG = ProtocolConfig(sync_every=4, num_fragments=4, overlap_steps=2, grace_steps_max=0.0)


@pytest.mark.parametrize(("local_step", "tokens"), [(1, 1 << 50), (1 << 50, 1 << 52)])
def test_one_report_does_not_complete_a_run(local_step: int, tokens: int) -> None:
    """Neither by tokens that no step has, nor by steps that nobody can have made."""
    budget = Budget(10**12, 40)
    syncer = Syncer(CONFIG, 0, FINGERPRINT, budget=budget)
    syncer.on_message(hello("evil"), 0.0)
    syncer.on_message(report("evil", local_step, tokens=tokens, samples=1), 1.0)
    syncer.on_message(value("evil", 1, 1, local_step, tokens=tokens, samples=1), 1.0)
    merged(syncer, 1, 1.0)
    assert not syncer.finished and 0 < syncer.progress.merged_tokens <= budget.tokens // LEAPS
    if local_step == 1:
        assert syncer.progress.merged_tokens <= 64 * budget.step_tokens


def test_a_counter_that_was_wrong_once_does_no_lasting_harm() -> None:
    """A flipped bit in one report: the next one says what is true, and counts again."""
    syncer = running("a")
    syncer.on_message(report("a", 2, tokens=20 + (1 << 40)), 2.0)
    syncer.on_message(report("a", 3, tokens=30), 3.0)
    assert syncer.membership.members["a"].tokens == 30
