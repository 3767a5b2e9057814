"""The settings of a simulation with faults."""

from dataclasses import dataclass, field

from diloco_jax.protocol.syncer.evaluations import NEVER, EvaluationPlan
from diloco_jax.sim.engine import NEVER_S
from diloco_jax.sim.faults.faults import Fault
from diloco_jax.sim.faults.network import TroubledOptions
from diloco_jax.sim.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultyScenario(Scenario):
    """The settings of a run in which things go wrong: equal scenarios give equal runs, event by event."""

    network: TroubledOptions = field(default_factory=TroubledOptions)
    """What messages suffer."""
    faults: tuple[Fault, ...] = ()
    """What happens to learners and to the syncer, sorted by time."""
    wake_s: float = 0.0
    """A learner that does not step sees what waits for it up to so many seconds later."""
    connect_timeout_s: float = NEVER_S
    """A process that nobody answers for so long after its start ends, and is started again."""
    step_bytes: int | None = None
    """Size of one encoded step from a version of a fragment to the next; None: values always go out whole."""
    plan: EvaluationPlan = NEVER
    """When the global model is evaluated."""
    eval_s: float = 0.0
    """An evaluation takes 0.5 to 1.5 times this, in seconds."""
    bad_scores: float = 0.0
    """Probability that an evaluation comes to no number."""
