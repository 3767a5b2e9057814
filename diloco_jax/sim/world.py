"""The parts that all processes of a simulation share: time, network, the scenario, and who watches."""

from __future__ import annotations

from collections.abc import Callable

from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.sim.engine import Engine
from diloco_jax.sim.holdings import Step
from diloco_jax.sim.network import Network
from diloco_jax.sim.node import Observer
from diloco_jax.sim.scenario import Scenario

FINGERPRINT = (("model", "simulated"),)

MakeLearner = Callable[..., Learner]  # as Learner(...)
MakeSyncer = Callable[..., Syncer]  # as Syncer(...)


class World:
    """Time, network and bytes of one simulation.

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
