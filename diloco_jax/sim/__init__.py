"""The protocol machines of a real run on virtual time, with faults, watched by checkers. Standard library only."""

from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.faults import Fault
from diloco_jax.sim.network import NetworkOptions
from diloco_jax.sim.scenario import Scenario

__all__ = ["Cluster", "Fault", "NetworkOptions", "Scenario"]
