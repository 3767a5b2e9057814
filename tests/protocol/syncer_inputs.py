"""Short ways to write down what a syncer hears, and to read what it asks for."""

from __future__ import annotations

from typing import Any

from diloco_jax.protocol.messages import Adopted, Effect, FragmentValue, Hello, Message, Send, StepReport
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer import Syncer

FINGERPRINT = (("model", "abc"),)


def new(total_steps: int = 100, **settings: Any) -> Syncer:
    """Four fragments, one due at every global step: 1, 2, 3, 0, 1, ... No grace window, so that K alone decides."""
    small = {"sync_every": 4, "num_fragments": 4, "grace_steps_max": 0.0, "lease_s": 8.0, "resend_s": 3.0}
    return Syncer(ProtocolConfig(**small | settings), total_steps, FINGERPRINT)


def hello(name: str, incarnation: int = 1, versions: tuple[int, ...] = (0, 0, 0, 0)) -> Hello:
    return Hello(name, incarnation, FINGERPRINT, versions)


def report(name: str, local_step: int, adopted: tuple[Adopted, ...] = (Adopted(0),) * 4, **changed: Any) -> StepReport:
    return StepReport(name, 1, local_step, 10 * local_step, 0, adopted, 1.0, 2.5)._replace(**changed)


def value(name: str, global_step: int, fragment_id: int, local_step: int, **changed: Any) -> FragmentValue:
    steps = local_step
    return FragmentValue(name, 1, global_step, fragment_id, local_step, steps, 10 * steps, 0, 0)._replace(**changed)


def running(*names: str, **settings: Any) -> Syncer:
    """Members that greeted and reported their first step; with K = their number round 1 is being pulled."""
    syncer = new(**{"quorum": len(names)} | settings)
    for name in names:
        syncer.on_message(hello(name), 0.0)
    for name in names:
        syncer.on_message(report(name, 1), 1.0)
    return syncer


def sent(effects: list[Effect], peer: str = "") -> list[Message]:
    return [e.message for e in effects if isinstance(e, Send) and peer in ("", e.peer)]


def only(effects: list[Effect], kind: type[Any]) -> list[Any]:
    return [e for e in effects if isinstance(e, kind)]
