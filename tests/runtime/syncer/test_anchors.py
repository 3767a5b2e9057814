"""The syncer's driver when a learner brings a value after a restart: a useless one is asked of another holder."""

import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from diloco_jax.protocol.messages import Adopted, AnchorRequest, AnchorValue, Hello, StepReport
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.subscribers import Subscribers
from diloco_jax.protocol.syncer.tape import TapedSyncer
from diloco_jax.runtime.model.global_model import GlobalModel
from diloco_jax.runtime.syncer.run import SyncerDriver
from diloco_jax.transport.link import Delivery
from tests.runtime.models import make_model

FINGERPRINT = (("model", "m"),)
CONFIG = ProtocolConfig(sync_every=2, num_fragments=2, restore_s=10.0)


class Bringers:
    """A syncer that has lost version 1 of fragment 1, which two learners hold; and what it sends."""

    def __init__(self) -> None:
        self.model: GlobalModel = make_model()
        self.tape: list[str] = []
        machine = Syncer(CONFIG, 100, FINGERPRINT)
        machine.on_begin(self.model.digests, 0.0)
        self.made = np.frombuffer(bytes(self.model.payload(1)), np.float32) * np.float32(1.01)
        digest = self.digest_of(self.made)
        self.hello("a", machine, (0, 0), 0)
        machine.on_message(StepReport("a", 1, 1, 10, 0, (Adopted(0),) * 2, 1.0, 2.0, 1, 64), 1.0)
        machine.downstream.renew(1, 1, digest)
        machine.on_restart(self.model.versions, self.model.digests, 2.0)
        for name in ("a", "b"):
            self.hello(name, machine, (0, 1), digest)
        self.machine, self.sent = machine, list[tuple[str, Any]]()
        other = MagicMock()
        listener = MagicMock(send=lambda peer, message, payload=b"": self.sent.append((peer, message)))
        clock = SimpleNamespace(now_s=lambda: 4.0)
        taped = TapedSyncer(machine, self.tape.append)
        parts: Any = SimpleNamespace(
            taped=taped,
            tape=MagicMock(),
            machine=machine,
            model=self.model,
            clock=clock,
            stop=threading.Event(),
            config=None,
        )
        readers = Subscribers(machine, "")
        self.driver = SyncerDriver(
            parts, listener, other, merges=other, snapshots=other, watch=other, subscribers=readers
        )

    def hello(self, name: str, machine: Syncer, versions: tuple[int, int], digest: int) -> None:
        digests = (self.model.digests[0], digest if versions[1] else self.model.digests[1])
        machine.on_message(Hello(name, 1, FINGERPRINT, versions, digests, 0, 1, 0), 3.0)

    def digest_of(self, flat: np.ndarray) -> int:
        return self.model._digest(1, flat)

    def bring(self, name: str, flat: np.ndarray, version: int = 1) -> None:
        message = AnchorValue(name, 1, 1, version, self.digest_of(flat), flat.nbytes)
        self.driver._on_delivery(Delivery("message", name, message, memoryview(flat.tobytes())), 4.0)


@pytest.mark.parametrize("factor", [1e30, np.nan, 1e4])
def test_a_wild_anchor_is_asked_of_another_holder(factor: float) -> None:
    scene = Bringers()
    scene.bring("a", scene.made * np.float32(factor))
    assert scene.model.versions == [0, 0] and scene.machine.restoring
    assert ("b", AnchorRequest(1, 1)) in scene.sent and '"AnchorValue",4.0,"a",1,1,-1,' in scene.tape[-1]
    scene.bring("b", scene.made)
    assert scene.model.versions == [0, 1] and not scene.machine.restoring


def test_one_learner_cannot_end_the_run() -> None:
    scene = Bringers()
    scene.bring("a", scene.made, version=1_000_000)
    assert scene.model.versions == [0, 0] and scene.machine.global_step < 5 and not scene.machine.finished
