"""The parts that all processes of a simulation share: time, network, the scenario, and who watches."""

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
MakeNetwork = Callable[..., Network]  # as Network(...)


class World:
    """Time, network and bytes of one simulation.

    Args:
        make_network: builds the network; of a run with faults it is another.
    """

    def __init__(self, scenario: Scenario, make_network: MakeNetwork = Network) -> None:
        self.scenario = scenario
        self.engine = Engine(scenario.seed)
        self.network = make_network(self.engine, scenario.network)
        self.observers: list[Observer] = []
        self.steps: dict[tuple[int, int, int], Step] = {}  # life of the syncer, fragment, version -> payload
        self.useless: set[tuple[str, int]] = set()  # learner and round of values that cannot be used
