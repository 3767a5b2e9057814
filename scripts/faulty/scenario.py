"""The settings of a simulation with faults."""

from dataclasses import dataclass, field

from diloco_jax.sim.scenario import Scenario
from faulty.faults import Fault
from faulty.network import TroubledOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultyScenario(Scenario):
    """The settings of a run in which things go wrong: equal scenarios give equal runs, event by event."""

    network: TroubledOptions = field(default_factory=TroubledOptions)
    """What messages suffer."""
    faults: tuple[Fault, ...] = ()
    """What happens to learners and to the syncer, sorted by time."""
