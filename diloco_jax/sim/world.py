"""What all processes of a simulation share: time, network, the scenario, and who watches."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple

from diloco_jax.protocol.learner import Learner
from diloco_jax.protocol.syncer import Syncer
from diloco_jax.sim.engine import Engine
from diloco_jax.sim.network import Network
from diloco_jax.sim.node import Observer
from diloco_jax.sim.scenario import Scenario

FINGERPRINT = (("model", "simulated"),)

MakeLearner = Callable[..., Learner]  # as Learner(...)
MakeSyncer = Callable[..., Syncer]  # as Syncer(...)


def digest_of(*what: object) -> int:
    """64 bits that stand for bytes which were never made: equal for equal arguments, different for others."""
    return int.from_bytes(blake2b(repr(what).encode(), digest_size=8).digest(), "little")


class Step(NamedTuple):
    """What a step's payload says: it makes the one digest of the other, and garbage of any other."""

    base: int
    made: int


class World:
    """See above.

    Args:
        scenario: what is simulated.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.engine = Engine(scenario.seed)
        self.network = Network(self.engine, scenario.network, faultless=not scenario.faults)
        self.observers: list[Observer] = []
        self.steps: dict[tuple[int, int, int], Step] = {}  # life of the syncer, fragment, version -> payload
        self.useless: set[tuple[str, int]] = set()  # learner and round of values that cannot be used
