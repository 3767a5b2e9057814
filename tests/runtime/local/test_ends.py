"""The consequence of each end of an island for the supervisor of a local run."""

import signal

import pytest

from diloco_jax.runtime.local.ends import RULES, IslandEnd, rule_of
from diloco_jax.runtime.records.signals import FAILED, HUNG, INTERRUPTED, TERMINATED, WRONG_INPUT
from diloco_jax.runtime.records.status import COMPLETE, EVALUATING

RUNS = "running"


@pytest.mark.parametrize(
    ("end", "then", "words"),
    [
        (IslandEnd(0, RUNS), "left", "left:"),
        (IslandEnd(0, EVALUATING), "left", ""),
        (IslandEnd(0, COMPLETE, own_program=True), "left", ""),
        (IslandEnd(0, RUNS, own_program=True), "failed", "without joining"),
        (IslandEnd(0, RUNS, own_program=True, joined=True), "left", "left:"),
        (IslandEnd(WRONG_INPUT, RUNS, joined=True), "failed", "not started again"),
        (IslandEnd(WRONG_INPUT, COMPLETE), "left", ""),
        *((IslandEnd(status, RUNS, banned=True), "left", "banned") for status in (WRONG_INPUT, FAILED, HUNG)),
        (IslandEnd(FAILED, RUNS, unloadable=True), "failed", "not started again"),
        (IslandEnd(FAILED, RUNS, unloadable=True, joined=True), "restart", ""),
        (IslandEnd(FAILED, EVALUATING), "restart", ""),
        (IslandEnd(FAILED, COMPLETE), "left", ""),
        *((IslandEnd(status, RUNS), "restart", "") for status in (FAILED, HUNG, INTERRUPTED, TERMINATED, 77)),
        *((IslandEnd(-number, RUNS), "restart", "") for number in (signal.SIGKILL, signal.SIGTERM)),
    ],
)
def test_an_end_has_one_consequence(end: IslandEnd, then: str, words: str) -> None:
    rule = rule_of(end)
    assert rule.then == then and words in rule.line and bool(words) == bool(rule.line)


def test_every_rule_has_an_end_to_which_it_applies() -> None:
    ends = [
        IslandEnd(status, state, own_program=own, joined=joined, banned=banned)
        for status in (0, FAILED, WRONG_INPUT)
        for state in (RUNS, COMPLETE)
        for own in (False, True)
        for joined in (False, True)
        for banned in (False, True)
    ]
    assert {RULES.index(rule_of(end)) for end in ends} == set(range(len(RULES)))
