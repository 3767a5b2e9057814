"""Checkers catch the mailbox that gives a learner's machine its mail at the wrong moment."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from faulty.scenario import FaultyScenario
from invariants import all as checkers
from invariants.checker import Checker
from invariants.verdict import judge

from diloco_jax.protocol.learner.mailbox import Given, Mailbox
from diloco_jax.protocol.messages import SyncerMessage
from diloco_jax.sim import learner_driver
from tests.invariants.test_checkers import RECOVERY, SCENARIO

LONG_LOADS = replace(RECOVERY, load_s=3.0, seed=3)


class Rash(Mailbox[Any]):
    """Has nothing wait."""

    def arrive(self, message: SyncerMessage, item: Any, now_s: float) -> Given[Any]:
        return Given(message, item, self._machine.on_message(message, now_s))


class Headlong(Mailbox[Any]):
    """Hands over what waits while a state is being taken over."""

    def take(self, now_s: float) -> Given[Any] | None:
        if not self._waiting:
            return None
        message, item = self._waiting.pop(next(iter(self._waiting)))
        return Given(message, item, self._machine.on_message(message, now_s))


@pytest.mark.parametrize(
    ("mailbox", "checker", "scenario", "text"),
    [
        (Rash, checkers.StepsUndisturbed, SCENARIO, "is given .* while a step runs"),
        (Headlong, checkers.RecoveryIsWhole, LONG_LOADS, "takes parameters that are based on"),
    ],
)
def test_a_broken_mailbox_is_caught(
    mailbox: type[Mailbox[Any]],
    checker: type[Checker],
    scenario: FaultyScenario,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(learner_driver, "Mailbox", mailbox)
    verdict = judge(scenario, checkers=[checker])
    assert verdict.problem.startswith(f"Violation: {checker.__name__} at "), verdict
    assert re.search(text, verdict.problem), verdict
