"""The settings of one simulation, and how a seed becomes them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.progress import Budget
from diloco_jax.sim.faults import NEVER_S, Fault, random_faults
from diloco_jax.sim.network import NetworkOptions

LEARNERS_MAX = 8


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
    faults: tuple[Fault, ...] = ()
    """What happens to learners and to the syncer, sorted by time."""
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
    step_bytes: int | None = None
    """Size of one encoded step from a version of a fragment to the next; None: values always go out whole."""
    state_parts: int = 3
    """Parts of a learner's whole state."""
    load_s: float = 0.0
    """Seconds in which a learner takes a whole state over."""
    save_s: float = 0.2
    """Saving takes 0.5 to 1.5 times this, in seconds; what is not finished when its process dies is lost."""
    wake_s: float = 0.0
    """A learner that does not step sees what waits for it up to so many seconds later."""
    redials_s: tuple[float, ...] = (0.5,)
    """Seconds before each attempt to connect again, when the connection broke or nobody listens; the last one stays."""
    restart_s: float = 0.0
    """Seconds that a supervisor takes to start a process again, over and above the time that the simulation draws."""
    connect_timeout_s: float = NEVER_S
    """A process that nobody answers for so long after its start ends, and is started again."""
    bad_states: float = 0.0
    """Probability that a whole state turns out to be of no use."""
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

    @property
    def faults_over_s(self) -> float:
        """Time at which the last fault is healed."""
        return max((fault.over_s for fault in self.faults), default=0.0)

    @property
    def longest_step_s(self) -> float:
        """Upper bound of a healthy learner's step."""
        return self.step_s * (1 + self.speed_spread) * (1 + self.step_noise)


def random_scenario(seed: int) -> Scenario:
    """Draw a scenario with random settings and faults, the same for equal seeds."""
    random = Random(seed)
    learners = random.randint(1, LEARNERS_MAX)
    names = Scenario(learners=learners).names
    joining = names[learners - random.randint(0, max(0, learners - 1)) // 2 :]  # fewer than half come late
    stayers = [name for name in names if name not in joining]
    leaving = stayers[1:][: random.choice((0, 0, 1, 2))]  # the first one always stays
    config = _random_config(random, learners - len(leaving))
    until_s = random.choice((10.0, 30.0, 60.0))
    faults = list(random_faults(random, names, random.choice((0, 1, 2, 4, 8, 12)), until_s))
    faults += [Fault(random.uniform(0.0, until_s), random.choice(("leave", "drain")), (name,)) for name in leaving]
    faults += [Fault(random.uniform(0.5, until_s), "join", (name,)) for name in joining]
    most_samples = random.choice((1, 1, 4, 8))
    drawn = Scenario(
        config=config,
        learners=learners,
        total_steps=random.choice((20, 50, 80)) + 2 * config.sync_every,
        network=_random_network(random, until_s),
        faults=tuple(sorted(faults)),
        step_s=random.choice((0.5, 1.0, 2.0)),
        speed_spread=random.choice((0.0, 0.1, 1.0, 3.0)),
        step_noise=random.choice((0.0, 0.05, 0.5)),
        step_samples=(random.choice((1, most_samples)), most_samples),
        reads_ahead=random.random() < 0.7,
        merge_s=random.choice((0.0, 0.05, 0.8)),
        payload_bytes=random.choice((0, 1_000_000)),  # 0.1 s on the slowest link: pulls do not time out by themselves
        state_parts=random.randint(1, 6),
        load_s=random.choice((0.0, 0.1, 2.0)),
        save_s=random.choice((0.0, 0.2, 3.0)),
        bad_states=random.choice((0.0, 0.0, 0.3)),
        seed=seed,
    )
    step_bytes = random.choice((None, drawn.payload_bytes // 8, drawn.payload_bytes // 8))
    drawn = replace(drawn, step_bytes=step_bytes, wake_s=random.choice((0.0, 0.0, 0.1, 0.5)))
    share = random.choice(
        (0.0, random.uniform(0.1, 0.9))
    )  # of the tokens of all steps; half of the runs have no budget
    return replace(drawn, tokens=int(share * drawn.total_steps * drawn.budget.step_tokens))


def _random_config(random: Random, stayers: int) -> ProtocolConfig:
    sync_every = random.choice((1, 2, 3, 4, 6, 8, 12, 24))
    lease_s = random.choice((4.0, 8.0, 15.0))
    return ProtocolConfig(
        sync_every=sync_every,
        num_fragments=random.randint(1, sync_every),
        overlap_steps=random.choice((0, 0, 1, 2, 2, 2, 3, 5)),
        quorum=random.randint(1, stayers) if random.random() < 0.6 else 1,
        grace_steps_max=random.choice((0.0, 0.5, 1.0, 1.0, 2.0)),
        ema_decay=random.choice((0.0, 0.5, 0.9)),
        lease_s=lease_s,
        heartbeat_s=lease_s / random.choice((2.0, 4.0)),
        resend_s=random.choice((0.3, 1.0, 2.0)),
        pull_timeout_s=random.choice((3.0, 10.0, 30.0)),
        anchor_history=random.choice((1, 2, 2, 4)),
        lease_ahead_steps=random.choice((2, 4, 8, 64)),
        release_s=random.choice((1.0, 5.0, 60.0)),
        snapshot_every=random.choice((0, 3, 5, 10, 10, 20)),
        restore_s=random.choice((2.0, 5.0, 15.0)),
        recover_from_peers=random.random() < 0.85,
        recovery_attempts=random.choice((1, 2, 3)),
        strikes_max=random.choice((1, 2, 3)),
        unmerged_rounds_max=random.choice((5, 96)),
    )


def _random_network(random: Random, until_s: float) -> NetworkOptions:
    lossy = random.random() < 0.6
    return NetworkOptions(
        delay_s=random.choice((0.001, 0.01, 0.1, 0.6)),
        jitter_s=random.choice((0.0, 0.01, 0.3)),
        bandwidth_bytes_per_s=random.choice((0.0, 1e7, 1e9)),
        loss=random.uniform(0.0, 0.1) if lossy else 0.0,
        duplication=random.uniform(0.0, 0.1) if lossy else 0.0,
        reorder=random.uniform(0.0, 0.2) if lossy else 0.0,
        reorder_s=random.choice((0.05, 0.5, 5.0)),
        late=random.choice((0.0, 0.5)),
        heals_s=random.choice((0.0, until_s)) if lossy else 0.0,
    )
