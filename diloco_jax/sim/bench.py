"""How many events per second the simulator handles, in the fast configuration: no faults, no checkers, no tape."""

from __future__ import annotations

import time
from typing import NamedTuple

from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.faults import NEVER_S
from diloco_jax.sim.scenario import Scenario


class Speed(NamedTuple):
    """What a measurement came to. Seconds are of this process's CPU time: others on the machine do not count."""

    events: int
    cpu_s: float
    simulated_s: float

    @property
    def events_per_s(self) -> float:
        return self.events / self.cpu_s


def measure(scenario: Scenario) -> Speed:
    """Simulate the scenario once and measure it."""
    cluster = Cluster(scenario, taped=False)
    began_s = time.process_time()
    cluster.run(NEVER_S)
    cpu_s = time.process_time() - began_s
    return Speed(cluster.engine.events, cpu_s, cluster.engine.now_s)
