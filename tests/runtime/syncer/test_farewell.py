"""The end of a run, as a learner hears of it whose link broke right before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from diloco_jax.protocol.member import ACTIVE, GONE
from diloco_jax.protocol.messages import MetricsReport
from diloco_jax.runtime.syncer.driver import ADRIFT_S, FAREWELL_S, SyncerDriver
from diloco_jax.transport.link import Delivery


class Scene:
    """A driver of which everything else is made up: each look at the listener takes its timeout."""

    def __init__(self, *deliveries: Delivery | None) -> None:
        self.now_s, self._deliveries = 1000.0, list(deliveries)
        self.member = SimpleNamespace(state=ACTIVE, incarnation=1)
        parts, listener, results = MagicMock(), MagicMock(), MagicMock()
        parts.clock.now_s = lambda: self.now_s
        parts.machine.membership = SimpleNamespace(members={"a": self.member}, connected=self.connected)
        parts.taped.on_disconnect, parts.machine.finished = self.lose, False
        parts.machine.next_deadline_s.return_value = None
        listener.receive, results.take.return_value = self.receive, []
        parts.stop.is_set.side_effect = lambda: not self._deliveries
        other: Any = MagicMock()
        self.driver = SyncerDriver(
            parts, listener, results=results, merges=other, evaluations=other, keeper=other, watch=other
        )

    def connected(self) -> list[Any]:
        return [] if self.member.state == GONE else [self.member]

    def receive(self, timeout_s: float) -> Delivery | None:
        self.now_s += timeout_s
        return self._deliveries.pop(0) if self._deliveries else None

    def lose(self, *_: object) -> list[Any]:
        self.member.state = GONE
        return []


BROKEN, BACK = Delivery("disconnected", "a", reason="lost"), Delivery("message", "a", MetricsReport("a", 1, 0, ()))


@pytest.mark.parametrize(
    ("deliveries", "state", "ago_s", "waits"),
    [
        ([BROKEN], ACTIVE, 0.0, True),  # it may be on its way back: nobody else can tell it that the run is over
        ([BROKEN, BACK], ACTIVE, 0.0, False),  # it was heard again, and has left
        ([BROKEN], ACTIVE, ADRIFT_S, False),  # dead
        ([BROKEN], GONE, 0.0, False),  # it had said goodbye
    ],
)
def test_a_learner_whose_link_broke_lately_hears_of_the_end(
    deliveries: list[Delivery], state: str, ago_s: float, waits: bool
) -> None:
    scene = Scene(*deliveries)
    scene.member.state = state
    scene.driver.serve([])
    scene.now_s += ago_s + 1.0
    began_s = scene.now_s
    scene.driver.bid_farewell(lingers=False)
    assert (scene.now_s - began_s >= FAREWELL_S) == waits
