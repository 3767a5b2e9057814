"""Subscribers beside the syncer's machine: what they get, one value at a time, and that nobody waits for them."""

from collections.abc import Callable
from typing import Any

import pytest

from diloco_jax.protocol.messages import (
    RUN_COMPLETE,
    Adopted,
    Advance,
    AnchorValue,
    GlobalFragment,
    Hello,
    Message,
    Refuse,
    Stop,
    Welcome,
)
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.subscribers import MODEL_LAYOUT, Subscribers
from tests.protocol.syncer_inputs import digest, fragment, hello, merged, new, report, running, value

LAYOUT = "a plan of four fragments"
SIZES = {0: 11, 1: 22, 2: 33, 3: 44}
NOTHING = (-1,) * 4


def subscribers(syncer: Syncer) -> Subscribers:
    return Subscribers(syncer, LAYOUT)


def asks(name: str = "s", versions: tuple[int, ...] = NOTHING, **changed: Any) -> Hello:
    return hello(name, versions=versions, fingerprint=((MODEL_LAYOUT, LAYOUT),), **changed)


def close_round(syncer: Syncer, global_step: int, draw: Callable[[int], int] | None = None) -> None:
    """Let learner a adopt all newest values, report a step and answer the pull; then its value is merged.

    Args:
        draw: Makes the new value of a fragment, and returns its digest.
    """
    held = tuple(Adopted(version, version, 10 * version) for version in syncer.versions)
    syncer.on_message(report("a", global_step, held), float(global_step))
    number = syncer.rounds.flying[global_step].fragment_id
    base, steps = held[number].version, global_step - held[number].version
    answer = value("a", global_step, number, global_step, base_version=base, steps=steps, tokens=10 * steps)
    syncer.on_message(answer, float(global_step))
    if draw is None:
        merged(syncer, global_step, float(global_step))
    else:
        syncer.on_merged(global_step, draw(number), (), float(global_step))


def trained(rounds: int) -> Syncer:
    """Return the syncer of a run whose learner has made so many rounds; K = 1."""
    syncer = new(sizes=[SIZES], quorum=1, total_steps=9)
    syncer.on_message(hello("a"), 0.0)
    for global_step in range(1, rounds + 1):
        close_round(syncer, global_step)
    assert syncer.global_step == syncer.merged_rounds == rounds
    return syncer


def receive(found: Subscribers, versions: list[int], *, requests: int) -> list[Message]:
    """Make requests with what the subscriber holds, which each answered value changes; return the answers."""
    answers = list[Message]()
    for _ in range(requests):
        for _, message in found.on_hello(asks(versions=tuple(versions))):
            answers.append(message)
            if isinstance(message, GlobalFragment):
                versions[message.fragment_id] = message.version
    return answers


def test_each_request_is_answered_by_one_whole_value_until_all_are_the_newest() -> None:
    syncer = trained(2)
    held = list(NOTHING)
    answers = receive(subscribers(syncer), held, requests=5)
    newest = [fragment(2, number, syncer.versions[number], SIZES[number]) for number in range(4)]
    assert answers == [*newest, Welcome(2, (0, 1, 2, 0), 1)]
    assert held == syncer.versions


def test_the_machine_stays_as_it_is() -> None:
    syncer = running("a", "b")
    before, waits = syncer.state(), syncer.waiting_for(1.0)
    found = subscribers(syncer)
    receive(found, list(NOTHING), requests=6)
    found.on_hello(asks("a"))
    assert syncer.state() == before and syncer.waiting_for(1.0) == waits
    assert sorted(syncer.membership.members) == ["a", "b"] and syncer.membership.live == 2
    assert found.state() == [{"subscriber": "a", "lacks": 4}, {"subscriber": "s", "lacks": 0}]


def test_a_slow_subscriber_skips_versions_and_delays_nobody() -> None:
    syncer = trained(0)
    found = subscribers(syncer)
    # It never asks again after its first value.
    assert len(found.on_hello(asks("slow"))) == 1
    for global_step in range(1, 8):
        close_round(syncer, global_step)
        told = [(name, message) for name, message in found.proceed() if name == "slow"]
        assert told == [("slow", Advance(global_step))], "nothing but a short message waits for it"
    assert syncer.versions == [4, 5, 6, 7], "every round was merged"
    held = [0, *NOTHING[1:]]
    got = [answer.version for answer in receive(found, held, requests=4) if isinstance(answer, GlobalFragment)]
    assert sorted(got) == [4, 5, 6, 7], "it skips the versions in between"


def test_values_take_turns_so_that_quick_rounds_starve_no_fragment() -> None:
    syncer = trained(0)
    found, came = subscribers(syncer), list[int]()
    for _ in range(8):
        # All fragments are missing at each request, as if all were merged all the time.
        ((_, answer),) = found.on_hello(asks())
        assert isinstance(answer, GlobalFragment)
        came.append(answer.fragment_id)
    assert came == [0, 1, 2, 3] * 2


def test_rounds_and_the_end_are_told_once() -> None:
    syncer = trained(8)
    found, held = subscribers(syncer), list(NOTHING)
    receive(found, held, requests=5)
    assert found.proceed() == []
    close_round(syncer, 9)
    assert syncer.progress.finished
    assert [message for _, message in found.proceed()] == [Advance(9), Stop(9, RUN_COMPLETE)]
    assert found.proceed() == []
    assert receive(found, held, requests=2) == [fragment(9, 1, 9, SIZES[1]), Welcome(9, (8, 9, 6, 7), 1)]
    found.on_disconnect("s")
    assert not found


def test_no_answer_while_learners_may_bring_newer_values() -> None:
    syncer = trained(3)
    # The syncer returns with the initial value of fragment 1, and learner a has a newer one.
    syncer.on_restart([0, 0, 2, 3], [0, 0, digest(2, 2), digest(3, 3)], 10.0)
    assert syncer.restoring
    found = subscribers(syncer)
    assert found.on_hello(asks()) == [] and found.proceed() == []
    syncer.on_message(hello("a", versions=(0, 1, 2, 3)), 11.0)
    assert syncer.restoring and found.proceed() == []
    syncer.on_message(AnchorValue("a", 1, 1, 1, digest(1, 1), SIZES[1]), 12.0)
    assert not syncer.restoring and syncer.versions == [0, 1, 2, 3]
    assert [message for _, message in found.proceed()] == [fragment(3, 0, 0, SIZES[0])._replace(epoch=syncer.epoch)]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        pytest.param({"fingerprint": ((MODEL_LAYOUT, "another"),)}, "expects another model", id="layout"),
        pytest.param({"versions": (0,), "digests": (0,)}, "expects another model", id="fragments"),
        pytest.param({"speaks": 99}, "speaks protocol 99", id="protocol"),
        pytest.param({"versions": (-9, 0, 0, 0)}, "which is impossible", id="bounds"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused(changed: dict[str, Any], reason: str) -> None:
    found = subscribers(trained(1))
    found.on_hello(asks())
    ((name, refusal),) = found.on_hello(asks()._replace(**changed))
    assert name == "s" and isinstance(refusal, Refuse) and reason in refusal.reason
    assert not found, "a refused subscriber is forgotten"
