"""One run's settings: the owners' configurations composed, and the checks that concern several of them.

Every section is a frozen dataclass that lives beside the code which it configures; nothing is decided twice.
`text.py` reads and writes this as YAML.
"""

from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

from diloco_jax.core.codec import Format
from diloco_jax.core.fragments import FragmentConfig
from diloco_jax.core.kinds import check_classes
from diloco_jax.core.merge import MergeConfig, WeightScheme
from diloco_jax.core.outer import OuterConfig
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.evaluations import EvaluationPlan
from diloco_jax.protocol.syncer.progress import Budget, Limits
from diloco_jax.settings.cloud import CloudConfig, GpuConfig
from diloco_jax.settings.islands import IslandConfig, IslandsConfig
from diloco_jax.training.data.config import DataConfig
from diloco_jax.training.models.config import OF_TOKENS, ModelConfig
from diloco_jax.training.named import check_setting
from diloco_jax.training.optimizers import OptimizerConfig
from diloco_jax.training.sharding import AXIS_RULES, MeshLayout, planned_mesh
from diloco_jax.transport.link import TransportConfig, split_address

SHARDS_MAX = 64
TOKENS_MAX = 10**18  # and of every count below train
NAME_LENGTH_MAX = 100  # of a folder, which gets a number behind it
OUTLETS_MAX = 16  # trackers, and callbacks


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncerConfig:
    """The syncer's process in a local run."""

    restarts_max: int = 20
    """Starts of a dead syncer before a local run ends; ten minutes of life count anew. Low: 0, none. High: no end."""
    restart_delay_s: float = 0.2
    """Seconds from its death to its next start, longer after brief lives. Low: merges soon. High: merges late."""
    merge_threads: int = 0
    """Threads of a merge, shared by shards; 0: one per core. Low: slow merges. High: takes cores from islands."""
    shards: int = 0
    """Processes on the syncer's host among which the model is dealt out, at most 64; 0 or 1: the syncer merges itself.
    Learners send each its part and get parts back. Decisions and values are the same. They listen on the ports after
    that of transport.address. Low: one process has all memory and traffic. High: costs processes."""
    parameters_max: int = 2_000_000_000
    """Parameters of a model that a first learner may bring (model.module: own). Low: refuses it. High: takes memory."""
    metrics: str = ""
    """host:port where the syncer tells Prometheus about the run (docs/metrics.md), without encryption, to whoever asks;
    0.0.0.0 for a scraper on another machine. Port 0 lets the system choose one, and the log says which. Empty: none."""
    page: str = ""
    """host:port where a process beside the syncer serves the page of the run (docs/page.md). Empty: nowhere."""

    def __post_init__(self) -> None:
        if self.restarts_max < 0 or not 0 <= self.restart_delay_s < inf:
            raise ValueError(
                f"syncer.restarts_max {self.restarts_max} and restart_delay_s {self.restart_delay_s} must be at least 0"
            )
        if not 0 <= self.merge_threads <= 256:
            raise ValueError(f"syncer.merge_threads is {self.merge_threads}; use 1 to 256, or 0 for one per core")
        if self.parameters_max < 1:
            raise ValueError(f"syncer.parameters_max is {self.parameters_max}; it must be at least 1")
        if not 0 <= self.shards <= SHARDS_MAX:
            raise ValueError(f"syncer.shards is {self.shards}; use 0 (the syncer merges itself) to {SHARDS_MAX}")
        for name in ("metrics", "page"):
            if address := getattr(self, name):
                split_address(address, f"syncer.{name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsConfig:
    """Snapshots of the run on disk; how often they are taken is protocol.snapshot_every."""

    keep: int = 3
    """Snapshots of the whole run that stay, at least 1. Low: with 1, a bad disk may end the run. High: takes disk."""
    states: str = ""
    """Another folder for what each host of an island saves of itself, beside the run's own: a path or a URL that fsspec
    writes, such as gs://bucket/folder. With it an island comes back with its moments where its disk does not."""

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"checkpoints.keep is {self.keep}; it must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The amount of training, its batches, and how it is watched."""

    steps: int = 1000
    """T: global steps of the run; about as many inner steps on every island. 0, with train.tokens only: as many as the
    tokens need. Low: ends before the model has learned. High: a longer run, whose schedule stretches with it."""
    tokens: int = 0
    """Tokens that rounds must have merged before the run ends, whoever trained on them; 0 = it ends after train.steps.
    The learning rate then follows the merged tokens, where a step (optimizer.warmup_steps) is as many as a global step
    of all islands has: train.seq_len times the sum of their batches. train.steps still ends the run where it comes
    first: 0, or no less than the tokens need, more of it for absent islands. Low: one global step's. High: long."""
    batch_size: int = 32
    """Sequences per global step over all islands together; each takes an equal share, unless islands.batch_size says
    how many. Low: noisy steps. High: more memory, and fewer updates for the same tokens."""
    seq_len: int = 128
    """Tokens per sequence that are predicted. Low: no long context is learned. High: takes memory and time."""
    eval_every: int = 0
    """Global steps between two evaluations of the global model; 0: at the end only. Low: costs steps. High: late."""
    eval_batches: int = 16
    """Batches per evaluation during the run. Low: a noisy loss. High: an island is longer away from its steps."""
    final_eval_batches: int = 64
    """Batches of the evaluation at the end, and of `diloco eval`. Low: a noisy result. High: the run ends later."""
    eval_batch_size: int = 16
    """Sequences per batch of an evaluation. Low: slow. High: more memory."""
    settle_batches: int = 300
    """Only for models with state beside their parameters, such as batch statistics, which islands do not exchange:
    training batches that go through the global model before an evaluation, without an update, so that this state is the
    model's own. Of its first value momentum^settle_batches remains: 5 % of 300 with 0.99. Low: 0, all. High: slow."""

    def __post_init__(self) -> None:
        if not 0 <= self.tokens <= TOKENS_MAX:
            raise ValueError(f"train.tokens is {self.tokens}; use 1 to 10^18, or 0 for a run of train.steps")
        for name in ("steps", "batch_size", "seq_len", "eval_batches", "final_eval_batches", "eval_batch_size"):
            if not (0 if name == "steps" and self.tokens else 1) <= getattr(self, name) <= TOKENS_MAX:
                raise ValueError(f"train.{name} is {getattr(self, name)}; it must be at least 1 and at most 10^18")
        if self.eval_every < 0:
            raise ValueError(f"train.eval_every is {self.eval_every}; use 0 (only at the end) or more")
        if self.settle_batches < 0:
            raise ValueError(f"train.settle_batches is {self.settle_batches}; use 0 (initial state) or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """Evaluations of the global model, which islands do, and numbers of your own beside the held-out loss."""

    module: str = ""
    """A class of your own as package.module:Name. An object of it is called with the global model (flax.nnx.Module, in
    the mode of an evaluation) and its global step, and returns named numbers; at most 32."""
    args: dict[str, Any] = field(default_factory=dict)
    """Passed to the class by name."""
    timeout_s: float = 600.0
    """Seconds for one call, then the run goes on without these numbers. Low: cuts slow ones off. High: a hang lasts."""
    wait_s: float = 900.0
    """Seconds for an island to evaluate the global model, compiling included, after which another is asked; at the end
    of a run also for one to come back. A module's timeout_s comes on top. Low: asks twice. High: late results."""

    def __post_init__(self) -> None:
        check_setting("evaluation", self.module, self.args)
        if not 0 < self.timeout_s < inf:
            raise ValueError(f"evaluation.timeout_s is {self.timeout_s}; use a number of seconds above 0")
        if not 0 < self.wait_s < inf:
            raise ValueError(f"evaluation.wait_s is {self.wait_s}; use a number of seconds above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptConfig:
    """The learner's way to take a global fragment that arrives."""

    mode: Literal["overwrite", "blend", "rebase"] = "overwrite"
    """overwrite: local = global (the paper). blend: alpha local + (1 - alpha) global (Streaming DiLoCo). rebase: keep
    what was learned while the fragment travelled, local = global + (local now - local sent)."""
    alpha: float = 0.5
    """Share of the local value that blend keeps, in [0, 1). Low: 0 is overwrite. High: global values hardly arrive."""

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < 1:
            raise ValueError(f"adopt.alpha is {self.alpha}; it must be at least 0 and below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class WireConfig:
    """The formats of fragments on their way."""

    up: Format = "int4"
    """Format of the outer gradients that learners send: float32, bfloat16, int8, int4 or int2. What rounding takes
    from one is added to the learner's next one of the fragment (error feedback)."""
    down: Format = "int4"
    """Format of what the syncer sends after a round: the step from the value before, which every learner adds to its
    anchor, so that anchors equal the syncer's value bit for bit; float32 sends the whole value each round."""
    states: Literal["float32", "bfloat16", "int8"] = "float32"
    """Format of the inner optimizer's moments on their way to an island that returns without a state of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchdogConfig:
    """The end of a process that hangs, so that whoever supervises it starts it again."""

    least_s: float = 300.0
    """Seconds that a step of an island, or a turn of the syncer, may take in any case; one that takes longer than this
    and than median_factor times the median of the last ones ends its process with the stacks of all threads in its log.
    Time in which the whole process is stopped does not count. 0: nothing is ever ended. Low: ends what is only slow.
    High: a hang is found as late."""
    median_factor: float = 10.0
    """See least_s. Low: 1 ends a step that is a little slow, after least_s. High: start_s is the only bound."""
    start_s: float = 1800.0
    """Seconds for what may take long: everything before the first step, which compiles, taking over a whole state, an
    evaluation, a merge (which may wait for a snapshot), the goodbye, and what a loop of the user's own does between two
    steps. No bound is above it. Low: ends what still compiles. High: a hang in a start is found as late."""

    def __post_init__(self) -> None:
        if not (0 <= self.least_s <= self.start_s and self.start_s < inf):
            raise ValueError(
                f"watchdog.least_s is {self.least_s} and start_s {self.start_s}; use 0 (never) or seconds up to start_s"
            )
        if not 1 <= self.median_factor < inf:
            raise ValueError(f"watchdog.median_factor is {self.median_factor}; it must be at least 1")

    def bound_s(self, median_s: float | None) -> float:
        """Return the seconds that the next step may take, of which the last ones took so many; None before the first.

        It is infinite if nothing is to be ended.
        """
        if not self.least_s:
            return inf
        return self.start_s if median_s is None else min(self.start_s, max(self.least_s, self.median_factor * median_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything that defines a run."""

    name: str = "run"
    """Name of the run, also of its folder."""
    runs_dir: str = "runs"
    """Folder that holds the run folders."""
    algorithm: Literal["decoupled", "data_parallel"] = "decoupled"
    """decoupled: islands and a syncer. data_parallel: one process, one mesh, gradients summed in every step."""
    seed: int = 0
    """Seed of the initial parameters and of the order of the data."""
    islands: IslandsConfig = field(default_factory=IslandsConfig)
    """The islands."""
    syncer: SyncerConfig = field(default_factory=SyncerConfig)
    """The syncer of a local run."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Amount of training."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Evaluation beside the held-out loss."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The inner optimizer."""
    data: DataConfig = field(default_factory=DataConfig)
    """The data."""
    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    """H, P, tau, K, grace."""
    fragments: FragmentConfig = field(default_factory=FragmentConfig)
    """How the model is cut."""
    weights: WeightScheme = "tokens2_per_step"
    """A learner's weight in a merge."""
    merge: MergeConfig = field(default_factory=MergeConfig)
    """How outer gradients become one."""
    outer: OuterConfig = field(default_factory=OuterConfig)
    """The outer optimizer."""
    adopt: AdoptConfig = field(default_factory=AdoptConfig)
    """How learners take a global fragment."""
    wire: WireConfig = field(default_factory=WireConfig)
    """Formats on the wire."""
    transport: TransportConfig = field(default_factory=TransportConfig)
    """Connections."""
    checkpoints: CheckpointsConfig = field(default_factory=CheckpointsConfig)
    """Snapshots on disk."""
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    """Processes that hang."""
    cloud: CloudConfig = field(default_factory=CloudConfig)
    """Machines on Google Cloud, for `diloco launch`."""
    gpu: GpuConfig = field(default_factory=GpuConfig)
    """GPU hosts, for `diloco launch`."""
    trackers: tuple[str, ...] = ("tensorboard",)
    """Where metrics go beside metrics.jsonl: tensorboard, wandb, trackio, mlflow, opentelemetry (rounds only), or a
    class of your own as package.module:Class."""
    callbacks: tuple[str, ...] = ()
    """Classes of your own, package.module:Class, with on_step, on_round, on_eval or on_event."""

    def __post_init__(self) -> None:
        plain = self.name.isprintable() and not self.name.startswith(".") and not {"/", "\\"} & {*self.name}
        if not plain or not 1 <= len(self.name) <= NAME_LENGTH_MAX:
            told = f"a plain word of 1 to {NAME_LENGTH_MAX} characters, it names the run's folder"
            raise ValueError(f"name is {self.name[:NAME_LENGTH_MAX]!r}; use {told}")
        check_setting("outer", self.outer.module, self.outer.args)
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed is {self.seed}; it must be in [0, 2^31)")
        for name in ("trackers", "callbacks"):
            if len(getattr(self, name)) > OUTLETS_MAX:
                raise ValueError(f"{name} has {len(getattr(self, name))} names; use at most {OUTLETS_MAX}")
        count = self.islands.count
        if self.algorithm == "decoupled" and self.protocol.quorum > count:
            raise ValueError(
                f"protocol.quorum (K) is {self.protocol.quorum}, but there are only {count} islands (M), so no round "
                "could ever close; lower protocol.quorum or raise islands.count"
            )
        if self.algorithm == "decoupled" and self.protocol.lockstep and self.protocol.quorum < count:
            raise ValueError(
                f"protocol.overlap_steps is 0 (learners wait for the merge), but protocol.quorum is "
                f"{self.protocol.quorum} of {count} islands, so the first to finish would be merged alone; "
                f"set the quorum to {count}, or overlap_steps to at least 1"
            )
        if self.protocol.learners_max < count:
            raise ValueError(f"protocol.learners_max is {self.protocol.learners_max}, islands.count {count}; raise it")
        shared = any(not self.islands.resolve(name, 0).batch_size for name in self.islands.names)
        if self.algorithm == "decoupled" and shared and self.train.batch_size % count:
            raise ValueError(
                f"train.batch_size is {self.train.batch_size}, which {count} islands cannot share equally; use a "
                "multiple of islands.count, or set islands.batch_size"
            )
        if self.transport.queue_payloads_max < self.protocol.num_fragments:
            raise ValueError(
                f"transport.queue_payloads_max is {self.transport.queue_payloads_max}, but a joining learner gets all "
                f"{self.protocol.num_fragments} fragments at once; raise it"
            )
        self._check_budget()
        self.protocol.check_steps(self.planned_steps)
        check_classes([name for names in self.protocol.groups.classes for name in names], "protocol.sync_every")
        for name in ("", *self.islands.each):
            self.check_mesh(self.island(name))
        if self.model.module.startswith("diloco_jax.training.models."):
            self._check_built_in()

    def _check_budget(self) -> None:
        tokens, step_tokens = self.budget
        if 0 < tokens < step_tokens:
            raise ValueError(
                f"train.tokens is {tokens}, less than the {step_tokens} of one global step of all islands "
                "(train.seq_len times their batches); raise it, or leave it out and set train.steps"
            )
        if tokens and 0 < self.train.steps < self.planned_steps:
            raise ValueError(
                f"train.steps {self.train.steps} ends the run before its train.tokens {tokens} are merged, which takes "
                f"{self.planned_steps} global steps or more; set train.steps to 0 (as many as they need), or higher"
            )

    @property
    def budget(self) -> Budget:
        """The tokens after which the run ends, and those of one global step of all islands."""
        sizes = [self.island(name).batch_size for name in self.islands.names]
        batch_size = self.train.batch_size if self.algorithm == "data_parallel" else sum(sizes)
        return Budget(self.train.tokens, batch_size * self.train.seq_len)

    @property
    def limits(self) -> Limits:
        """The global steps and merged tokens after which the run is complete."""
        told = f"{self.planned_steps}" + f" for {self.train.tokens} tokens" * bool(self.train.tokens)
        return Limits(self.train.steps, self.train.tokens, told)

    @property
    def evaluations(self) -> EvaluationPlan:
        """The times at which an island evaluates the global model."""
        extra_s = self.evaluation.timeout_s if self.evaluation.module else 0.0
        return EvaluationPlan(self.evaluation.wait_s + extra_s, self.train.eval_every)

    @property
    def planned_steps(self) -> int:
        """Global steps of the learning-rate schedule, and of the run if all islands take part in each."""
        tokens, step_tokens = self.budget
        return -(-tokens // step_tokens) if tokens else self.train.steps

    def check_mesh(self, island: IslandConfig) -> None:
        """Check that an island's devices, as far as they are known, can share its batch; ValueError if not."""
        devices = island.slice.devices if island.slice else island.devices
        if not devices:  # nobody knows yet
            return
        steps = self.optimizer.accumulate_steps
        parts = MeshLayout(planned_mesh(island.mesh, devices), island.mesh.all_rules()).batch_parts * steps
        if island.batch_size % parts:
            raise ValueError(
                f"{island.name or 'an island'}'s batch of {island.batch_size} sequences cannot be shared equally by "
                f"{parts // steps} devices (mesh axes data x fsdp x expert) in {steps} optimizer.accumulate_steps; "
                "change train.batch_size, islands.batch_size or islands.mesh"
            )

    def _check_built_in(self) -> None:
        """Check what only the built-in models say of themselves: their ids, lengths and axes."""
        for name in ("", *self.islands.each):
            if unknown := sorted(set(self.island(name).mesh.rules) - set(AXIS_RULES)):
                raise ValueError(
                    f"mesh.rules has the logical axis '{unknown[0]}', which no array of the model has; choose from "
                    f"{', '.join(AXIS_RULES)}"
                )
            if self.model.args.get("routing") == "dropless" and (axis := self.island(name).mesh.expert) != 1:
                raise ValueError(
                    "model.args.routing dropless needs all experts on each device, but islands.mesh.expert is "
                    f"{axis}; make it 1 (fsdp shares the weights too), or routing capacity"
                )
        if self.model.module not in OF_TOKENS:
            return
        longest = self.model.args.get("seq_len_max", 2048)
        if isinstance(longest, int) and self.train.seq_len > longest:
            raise ValueError(
                f"train.seq_len is {self.train.seq_len}, but model.args.seq_len_max {longest}; raise it, or lower "
                "train.seq_len"
            )
        # an embedding clamps ids that it does not have, silently
        have = self.model.args.get("vocab_size", 256)
        if isinstance(have, int) and have < (need := self.data.ids):
            raise ValueError(
                f"model.args.vocab_size is {have}, but the data has ids below {need}; raise it, or correct "
                "data.vocab_size"
            )

    def island(self, name: str) -> IslandConfig:
        """Return what this island has; a learner that is none of `islands.names` has what all have."""
        if self.algorithm == "data_parallel":
            return self.islands.resolve(name, 0)._replace(batch_size=self.train.batch_size)
        return self.islands.resolve(name, self.train.batch_size // self.islands.count)
