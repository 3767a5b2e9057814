"""Inputs for tests of recovery: a receiver named r, and chunks of a donor's state for it."""

from collections.abc import Callable
from typing import Any

from diloco_jax.protocol.effects import Effect, Effects
from diloco_jax.protocol.learner.recovery import Receiver
from diloco_jax.protocol.messages import StateChunk
from diloco_jax.protocol.pacing import ProtocolConfig

H = 6


def config(**settings: Any) -> ProtocolConfig:
    return ProtocolConfig(
        **{
            "sync_every": H,
            "num_fragments": 4,
            "resend_s": 2.0,
            "silence_s": 20.0,
            "recovery_attempts": 4,
            "recovery_turns": 1,
        }
        | settings
    )


class Alone:
    """One component of a machine with its separate list of effects; a call that returns nothing returns them."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        self._effects = Effects()
        self._part = make(self._effects, *arguments)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._part, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> list[Effect] | Any:
            result = found(*args, **kwargs)
            effects = self._effects.drain()
            return effects if result is None else result

        return call


def receiver(**settings: Any) -> Alone:
    return Alone(Receiver, "r", 3, config(**settings))


def part(number: int, parts: int = 9, donor: str = "d", step: int = 50, **changed: Any) -> StateChunk:
    return StateChunk(donor, 1, "r", step, number, parts, 99, 1000, clock=1 << 20)._replace(**changed)


def begun(*parts: StateChunk, **settings: Any) -> Alone:
    """Return a receiver that has asked at global step 10 and got these chunks at once."""
    it = receiver(**settings)
    it.begin(10, 0.0)
    for each in parts:
        it.on_part(each, 10, 0.0)
    return it
