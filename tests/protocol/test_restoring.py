"""Whom a restarted syncer asks for what it lacks, how often, and for how long it waits."""

from __future__ import annotations

import pytest

from diloco_jax.protocol.effects import Effect, Note, Restore, Send
from diloco_jax.protocol.messages import AnchorRequest, Heartbeat
from diloco_jax.protocol.syncer.machine import Syncer
from tests.protocol.syncer_inputs import hello, merged, only, running, sent, value
from tests.protocol.test_snapshot import HELD_NONE, anchor, lived


def beat(syncer: Syncer, now_s: float, *names: str) -> list[Effect]:
    """Signs of life."""
    return [effect for name in names for effect in syncer.on_message(Heartbeat(name, 1), now_s)]


def test_an_unanswered_request_is_repeated_to_another_holder() -> None:
    syncer = lived()
    syncer.on_restart(**HELD_NONE, now_s=5.0)
    for name in ("a", "b"):
        syncer.on_message(hello(name, versions=(0, 1, 0, 0), epoch=1), 6.0)
    asked = {}
    for tenth in range(60, 160):
        effects = beat(syncer, tenth / 10, "a", "b") + syncer.on_tick(tenth / 10)
        asked |= {e.peer: tenth / 10 for e in effects if isinstance(e, Send) and isinstance(e.message, AnchorRequest)}
    assert asked == {"b": 9.0, "a": 15.0}, "a was asked at 6.0; b after resend_s, then a after twice as long"


def test_the_wait_ends_restore_s_after_the_first_is_back() -> None:
    syncer = lived()
    syncer.on_restart(**HELD_NONE, now_s=5.0)
    for now_s in range(6, 60):
        syncer.on_tick(float(now_s))
    assert syncer.restoring, "nobody is back, so there is nothing to go on with"
    syncer.on_message(hello("a", epoch=1), 60.0)
    beat(syncer, 65.0, "a")
    syncer.on_tick(69.9)
    assert syncer.restoring
    effects = syncer.on_tick(70.0)
    assert not syncer.restoring and only(effects, Note)[-1].kind == "lost"


def test_what_somebody_who_is_back_holds_is_asked_for_behind_the_deadline_but_not_for_ever() -> None:
    syncer = lived()
    syncer.on_restart(**HELD_NONE, now_s=5.0)
    syncer.on_message(hello("a", versions=(0, 1, 0, 0), epoch=1), 6.0)
    asked = []
    for tenth in range(60, 270):
        effects = beat(syncer, tenth / 10, "a") + syncer.on_tick(tenth / 10)
        asked += [tenth / 10 for e in effects if isinstance(e, Send) and isinstance(e.message, AnchorRequest)]
        deadline_s = syncer.next_deadline_s()
        assert deadline_s is not None and deadline_s > tenth / 10 and syncer.restoring
    assert asked == [9.0, 15.0], "b, who is not back, was waited for until 16.0"
    assert only(syncer.on_tick(27.0), Note)[-1].kind == "lost" and not syncer.restoring


@pytest.mark.parametrize("lease_s", [4.0, 30.0], ids=["it becomes silent", "its lease is long"])
def test_what_a_learner_holds_that_greeted_and_is_not_heard_then_is_not_given_up(lease_s: float) -> None:
    syncer = running("a", restore_s=5.0, lease_s=lease_s, heartbeat_s=1.0, resend_s=0.5)
    syncer.on_message(value("a", 1, 1, 1), 1.0)
    merged(syncer, 1, 1.0)
    syncer.on_restart(**HELD_NONE, now_s=5.0)
    syncer.on_message(hello("a", versions=(0, 1, 0, 0), epoch=1), 6.0)
    for tenth in range(61, 300):
        syncer.on_tick(tenth / 10)
    assert syncer.restoring, "cut off before it was asked, and nobody else is there to go on"
    asked = []
    for tenth in range(300, 500):
        effects = beat(syncer, tenth / 10, "a") + syncer.on_tick(tenth / 10)
        asked += [tenth / 10 for e in effects if isinstance(e, Send) and isinstance(e.message, AnchorRequest)]
        if len(asked) == 2:  # the first answer is lost, say
            break
    assert asked, "it is heard again"
    assert only(syncer.on_message(anchor("a", 1, 1), asked[-1] + 1.0), Restore) == [Restore(1, 1)]
    assert syncer.versions[1] == 1 and not syncer.restoring


@pytest.mark.parametrize("silent", [False, True])
def test_who_is_back_and_lost_again_is_waited_for_as_the_others_are(silent: bool) -> None:
    syncer = lived()
    syncer.on_restart(**HELD_NONE, now_s=5.0)
    syncer.on_message(hello("a", versions=(0, 1, 0, 0), epoch=1), 6.0)
    if silent:
        syncer.on_tick(14.0)
    else:
        syncer.on_disconnect("a", 1, "broke", 6.5)
    effects = syncer.on_message(hello("b", epoch=1), 14.0)
    assert syncer.restoring and not only(effects, Note)[1:], "a holds it, and has until restore_s after b is back"
    assert AnchorRequest(1, 1) in sent(syncer.on_message(hello("a", versions=(0, 1, 0, 0), epoch=1), 15.0), "a")
    syncer.on_message(anchor("a", 1, 1), 16.0)
    assert syncer.versions == [0, 1, 0, 0] and not syncer.restoring
