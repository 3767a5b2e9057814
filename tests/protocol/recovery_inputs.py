"""A receiver named r, and the parts of a donor's state that it may be sent."""

from typing import Any

from diloco_jax.protocol.messages import StatePart
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.recovery import Receiver

H = 6


def config(**settings: Any) -> ProtocolConfig:
    return ProtocolConfig(
        **{
            "sync_every": H,
            "num_fragments": 4,
            "resend_s": 2.0,
            "lease_s": 20.0,
            "recovery_attempts": 4,
            "recovery_turns": 1,
        }
        | settings
    )


def receiver(**settings: Any) -> Receiver:
    return Receiver("r", 3, config(**settings))


def part(number: int, parts: int = 9, donor: str = "d", step: int = 50, **changed: Any) -> StatePart:
    return StatePart(donor, 1, "r", step, number, parts, 99, 1000, clock=1 << 20)._replace(**changed)


def begun(*parts: StatePart, **settings: Any) -> Receiver:
    """One that has asked at global step 10, and got these parts at once."""
    it = receiver(**settings)
    it.begin(10, 0.0)
    for each in parts:
        it.on_part(each, 10, 0.0)
    return it
