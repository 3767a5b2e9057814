"""The values that a process holds to which faults happen: payloads may be garbage.

A whole value carries its own digest; a payload that is a step makes the right one from its base only.
"""

from typing import NamedTuple

from diloco_jax.protocol.messages import NO_VERSION, GlobalFragment
from diloco_jax.sim.holdings import Holdings, Value
from diloco_jax.sim.node import World


class Step(NamedTuple):
    """A payload that makes the one digest of the other, and garbage of any other."""

    base: int
    made: int


class MortalHoldings(Holdings):
    """The memory of one process, with the values to which steps apply."""

    __slots__ = ("_steps", "heads")

    def __init__(self, name: str, incarnation: int, world: World) -> None:
        super().__init__(name, incarnation, world.scenario)
        self.heads: dict[int, Value] = {}  # fragment -> value that was read last, adopted or not
        self._steps: dict[tuple[int, int, int], Step] = world.steps

    def read(self, message: GlobalFragment) -> bool:
        """Decode a payload; returns whether the value has the digest that it should."""
        fragment_id = message.fragment_id
        if message.base != NO_VERSION:
            step, held = self._steps.get((message.epoch, fragment_id, message.version)), self.heads.get(fragment_id)
            if step is None or held is None or held[1] != step.base or step.made != message.digest:
                return False
        self.heads[fragment_id] = (message.version, message.digest)
        return True
