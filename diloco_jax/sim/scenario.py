"""The settings of one simulated run, faults included."""

from dataclasses import dataclass, field

from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.evaluations import NEVER, EvaluationPlan
from diloco_jax.protocol.syncer.progress import Budget
from diloco_jax.sim.engine import NEVER_S
from diloco_jax.sim.fault import Fault
from diloco_jax.sim.network import NetworkOptions
from diloco_jax.sim.norms import NormSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The settings of a simulated run: equal scenarios give equal runs, event by event."""

    config: ProtocolConfig = field(default_factory=ProtocolConfig)
    """Settings of the algorithm, shared by all machines."""
    learners: int = 4
    """M: number of learners, including those that join late."""
    total_steps: int = 100
    """Global steps of the complete run."""
    tokens: int = 0
    """Merged tokens that complete the run earlier; 0 means no budget."""
    network: NetworkOptions = field(default_factory=NetworkOptions)
    """Delay, bandwidth and random faults of links."""
    faults: tuple[Fault, ...] = ()
    """Faults of learners, links and the syncer, sorted by time."""
    step_s: float = 1.0
    """Seconds per inner step of the fastest learner."""
    speed_spread: float = 0.1
    """The slowest learner's steps take up to this share longer in the whole run."""
    step_noise: float = 0.05
    """Every step takes up to this share longer, drawn for each step."""
    step_samples: tuple[int, int] = (1, 1)
    """Fewest and most samples in an inner step, of each slice; each learner draws its own number once."""
    slices: int = 1
    """Slices of each learner, which share its steps equally; see the fault `slice`."""
    shrinks: bool = False
    """True: steps have only the parts of the slices that are there. False: these compute the others' parts too."""
    corpora: tuple[str, ...] = ()
    """Name of each learner's corpus, in the order of the learners; a name that is empty or missing is the run's."""
    sample_tokens: int = 1024
    """Tokens in one sample."""
    reads_ahead: bool = True
    """Whether a learner draws the next batch while a step runs."""
    wake_s: float = 0.0
    """Longest time until a learner between two steps sees the messages that wait for it, in seconds."""
    tick_late_s: float = 0.0
    """Longest time from a deadline of the syncer's machine until its driver sees it, in seconds."""
    merge_s: float = 0.05
    """A merge takes 0.5 to 1.5 times this, in seconds, so merges of different rounds may end out of turn."""
    payload_bytes: int = 0
    """Size of one encoded fragment, and of one part of a state."""
    delta_bytes: int | None = None
    """Size of one encoded step from a version of a fragment to the next; None: fragments are always sent whole."""
    state_parts: int = 3
    """Parts of a learner's whole state."""
    load_s: float = 0.0
    """Seconds that a learner needs to load a whole state."""
    save_s: float = 0.2
    """Saving takes 0.5 to 1.5 times this, in seconds; an unfinished file is lost when its process ends."""
    redials_s: tuple[float, ...] = (0.5,)
    """Seconds before each attempt to connect again; the last value repeats."""
    connect_timeout_s: float = NEVER_S
    """Seconds until a process that never connected ends and is started again."""
    restart_s: float = 0.0
    """Seconds that a supervisor needs to start a process again, in addition to the time that the simulation draws."""
    bad_states: float = 0.0
    """Probability that a whole state turns out to be unusable."""
    plan: EvaluationPlan = NEVER
    """When the global model is evaluated."""
    eval_s: float = 0.0
    """An evaluation takes 0.5 to 1.5 times this, in seconds."""
    bad_scores: float = 0.0
    """Probability that an evaluation gives no finite loss."""
    norms: NormSettings | None = None
    """The norms of the learners' values; None draws none, and merges exclude nobody because of a norm."""
    seed: int = 0
    """Seed of everything that is drawn during the run."""

    def __post_init__(self) -> None:
        if self.learners < 1:
            raise ValueError(f"learners is {self.learners}, but a simulation needs at least 1")
        if self.slices < 1:
            raise ValueError(f"slices is {self.slices}, but a learner has at least 1")
        if self.step_s <= 0:
            raise ValueError(f"step_s is {self.step_s}, but must be above 0")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all learners."""
        return tuple(f"island-{number}" for number in range(self.learners))

    def corpus_of(self, name: str) -> str:
        """Return the name of a learner's corpus."""
        return dict(zip(self.names, self.corpora, strict=False)).get(name, "")

    @property
    def budget(self) -> Budget:
        """The budget in tokens; a step of the schedule is the mean number of tokens that all learners make in one."""
        samples = self.slices * sum(self.step_samples)
        return Budget(self.tokens, self.learners * samples * self.sample_tokens // 2)
