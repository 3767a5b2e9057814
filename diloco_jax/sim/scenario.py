"""The settings of one simulation."""

from dataclasses import dataclass, field

from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.progress import Budget
from diloco_jax.sim.network import NetworkOptions
from diloco_jax.sim.norms import NormSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The settings of a run: equal scenarios give equal runs, event by event."""

    config: ProtocolConfig = field(default_factory=ProtocolConfig)
    """The algorithm, shared by all machines."""
    learners: int = 4
    """M: how many there are, those included that join late."""
    total_steps: int = 100
    """Global steps after which the run is complete."""
    tokens: int = 0
    """Merged tokens after which it is complete already; 0: no budget."""
    network: NetworkOptions = field(default_factory=NetworkOptions)
    """What messages suffer."""
    step_s: float = 1.0
    """Seconds per inner step of the fastest learner."""
    speed_spread: float = 0.1
    """The slowest learner's steps take up to this share longer, all the time."""
    step_noise: float = 0.05
    """Every step takes up to this share longer, drawn anew."""
    step_samples: tuple[int, int] = (1, 1)
    """Fewest and most samples in an inner step; each learner has a number of its own."""
    sample_tokens: int = 1024
    """Tokens in one sample."""
    reads_ahead: bool = True
    """Whether a learner draws the next batch while a step runs."""
    merge_s: float = 0.05
    """A merge takes 0.5 to 1.5 times this, in seconds: so merges of different rounds may end out of turn."""
    payload_bytes: int = 0
    """Size of one encoded fragment, and of one part of a state."""
    state_parts: int = 3
    """Parts of a learner's whole state."""
    load_s: float = 0.0
    """Seconds in which a learner takes a whole state over."""
    save_s: float = 0.2
    """Saving takes 0.5 to 1.5 times this, in seconds; what is not finished when its process dies is lost."""
    redials_s: tuple[float, ...] = (0.5,)
    """Seconds before each attempt to connect again, when the connection broke or nobody listens; the last one stays."""
    restart_s: float = 0.0
    """Seconds that a supervisor takes to start a process again, over and above the time that the simulation draws."""
    bad_states: float = 0.0
    """Probability that a whole state turns out to be of no use."""
    norms: NormSettings | None = None
    """The norms of the learners' values; None draws none, and merges exclude nobody because of a norm."""
    seed: int = 0
    """Of everything that is drawn during the run."""

    def __post_init__(self) -> None:
        if self.learners < 1:
            raise ValueError(f"learners is {self.learners}, but a simulation needs at least 1")
        if self.step_s <= 0:
            raise ValueError(f"step_s is {self.step_s}, but must be above 0")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"island-{number}" for number in range(self.learners))

    @property
    def budget(self) -> Budget:
        """The budget: a step of the schedule is what all learners together do in one, on average."""
        return Budget(self.tokens, self.learners * sum(self.step_samples) * self.sample_tokens // 2)
