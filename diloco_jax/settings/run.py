"""Settings of a run: the sections of all owners in one `RunConfig`, and the checks that concern several sections.

Every section is a frozen dataclass beside the code that it configures. `text.py` reads and writes a RunConfig as YAML.
"""

from dataclasses import dataclass, field, replace
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
from diloco_jax.settings.cloud import CloudConfig, ExtraConfig, GpuConfig
from diloco_jax.settings.islands import IslandConfig, IslandOverride, IslandsConfig
from diloco_jax.settings.providers import IslandPlace
from diloco_jax.training.data.config import DataConfig
from diloco_jax.training.models.config import OF_TOKENS, ModelConfig
from diloco_jax.training.named import check_setting
from diloco_jax.training.optimizers import OptimizerConfig
from diloco_jax.training.sharding import AXIS_RULES, MeshLayout, planned_mesh
from diloco_jax.transport.link import TransportConfig, bucket_scheme, split_address

SUBSCRIBERS_MAX = 256
# The limit holds for every count below `train`.
TOKENS_MAX = 10**18
# A folder gets this name, and a number may follow it there.
NAME_LENGTH_MAX = 100
# The limit holds for trackers and for callbacks.
OUTLETS_MAX = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncerConfig:
    """The syncer's process: restarts, merge threads, and what it serves."""

    restarts_max: int = 20
    """How often a local run restarts a syncer that failed. The count restarts after ten minutes without a failure. 0:
    the run ends with the first failure. Raise it if the syncer fails often but recovers, for example because its
    machine lacks memory at times. Each restart takes the time to load the newest snapshot. A syncer that can never
    start is then given up later."""
    restart_delay_s: float = 0.2
    """Seconds between a failure of the syncer and its next start. The delay grows while the syncer fails soon after
    each start. Raise it if the port or the disk needs a while to become free after a failure; islands train on their
    leased data meanwhile."""
    merge_threads: int = 0
    """Threads that all merges share; 0: one per core. Lower it if merges take cores from islands on the same
    machine."""
    parameters_max: int = 2_000_000_000
    """The most parameters of a model that a first learner may bring (model.module: own). Larger models are refused.
    Raise it for a larger model of that kind; a mistaken or hostile learner can then take more of the syncer's
    memory."""
    standby: bool = False
    """Keep tape and snapshots in the bucket, too, so that another machine can take over if this one is lost (`diloco
    syncer --standby`, docs/bucket.md). Needs a bucket as transport.address. Set it if the syncer's machine may be lost;
    every decision then takes two requests to the bucket before it leaves this process."""
    metrics: str = ""
    """host:port where Prometheus scrapes the run's metrics (docs/metrics.md), without encryption and without a
    password; 0.0.0.0 lets scrapers on other machines connect. Port 0 lets the system choose a port, which the log
    names. Empty: no metrics are served. Set it for graphs and alerts over days."""
    page: str = ""
    """host:port where a process beside the syncer serves the page of the run (docs/page.md). Empty: no page is served.
    Set it to watch a run from a browser while it trains."""
    subscribers_max: int = 16
    """The most processes of `diloco follow` that the syncer serves at a time (docs/follow.md); 0 for none. Raise it for
    more of them; each takes a share of the syncer's link, and memory for a whole fragment."""

    def __post_init__(self) -> None:
        if self.restarts_max < 0 or not 0 <= self.restart_delay_s < inf:
            raise ValueError(
                f"syncer.restarts_max {self.restarts_max} and restart_delay_s {self.restart_delay_s} must be at least 0"
            )
        if not 0 <= self.merge_threads <= 256:
            raise ValueError(f"syncer.merge_threads is {self.merge_threads}; use 1 to 256, or 0 for one per core")
        if self.parameters_max < 1:
            raise ValueError(f"syncer.parameters_max is {self.parameters_max}; it must be at least 1")
        if not 0 <= self.subscribers_max <= SUBSCRIBERS_MAX:
            raise ValueError(f"syncer.subscribers_max is {self.subscribers_max}; use 0 (none) to {SUBSCRIBERS_MAX}")
        for name in ("metrics", "page"):
            if address := getattr(self, name):
                split_address(address, f"syncer.{name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsConfig:
    """Snapshots of the run on disk; how often they are taken is protocol.snapshot_every."""

    keep: int = 3
    """Snapshots of the whole run that are kept, at least 1. Lower it if snapshots fill the disk; with 1, a damaged
    snapshot cannot be replaced by an older one."""
    states: str = ""
    """A second folder for the state that each host of an island saves, beside the run's folder: a path or a URL that
    fsspec can write, such as gs://bucket/folder. An island restores its optimizer's moments from it when its disk is
    lost. Set it if machines return without their disks, as spot machines do."""

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"checkpoints.keep is {self.keep}; it must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The length of the training, its batches, and its evaluations."""

    steps: int = 1000
    """T: global steps of the run; every island makes about as many inner steps. 0, only with train.tokens: as many as
    the tokens need. The learning-rate schedule stretches with this number. Set it for every run, or set
    train.tokens."""
    tokens: int = 0
    """Tokens that rounds must have merged before the run ends, over all islands; 0: the run ends after train.steps. The
    learning rate then follows the merged tokens: one step of the schedule (optimizer.warmup_steps) is train.seq_len
    times the sum of the islands' batches. train.steps still ends the run if it comes first; use 0, or more steps than
    the tokens need so that absent islands have time to return. Set it if islands join and leave, so that the run ends
    after a fixed amount of training."""
    batch_size: int = 32
    """Sequences per global step over all islands together. Each island takes an equal share unless islands.batch_size
    is set. Raise it if gradients are noisy; a step then takes more memory, and the same tokens give fewer updates."""
    seq_len: int = 128
    """Tokens per sequence that are predicted. Raise it for longer context; a step then takes more memory and time."""
    eval_every: int = 0
    """Global steps between two evaluations of the global model; 0: only at the end. Set it to see the loss during the
    run; each evaluation takes time from one island's training."""
    eval_batches: int = 16
    """Batches per evaluation during the run. Raise it if the evaluation loss is noisy; the evaluating island is then
    away from its steps for longer."""
    final_eval_batches: int = 64
    """Batches of the evaluation at the end and of `diloco eval`. Raise it if you compare results, because few batches
    give a noisy loss."""
    eval_batch_size: int = 16
    """Sequences per batch of an evaluation. If fewer are held out, all of them are one batch. Lower it if an evaluation
    needs too much memory."""
    settle_batches: int = 300
    """Only for models with state beside their parameters, such as batch statistics, which islands do not exchange. So
    many training batches pass through the global model before an evaluation, without an update, so that this state fits
    the model. A share momentum^settle_batches of the initial value remains: 5 % after 300 batches with momentum 0.99.
    0: the state keeps its initial value. Lower it if evaluations take too long and this state fits the model after
    fewer batches; with too few batches the evaluation loss is too high."""

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
    """Evaluations of the global model on islands, and your own numbers beside the held-out loss."""

    module: str = ""
    """Your own class as package.module:Name. An object of it is called with the global model (flax.nnx.Module, in
    evaluation mode) and its global step, and returns at most 32 named numbers. Set it if the held-out loss does not
    show what you train for. One island makes no steps during each call."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the class. Set it if your class takes arguments; after a change, older numbers may not be
    comparable."""
    timeout_s: float = 600.0
    """Seconds for one call of the module. The run continues without its numbers after that. Raise it if your module
    needs longer."""
    wait_s: float = 900.0
    """Seconds for an island to evaluate the global model, compiling included. After that the syncer requests it from
    another island; at the end of a run it waits equally long for an island to return. The timeout_s of a module is
    added. Raise it if an evaluation needs longer, because two islands may otherwise evaluate the same model."""
    baseline: str = ""
    """Folder of an earlier run on the syncer's machine, with evaluations. Two evaluations in a row with a loss above
    that run's at equal tokens, after its first tenth, are an alarm. Set it if you know what a good run looks like, with
    the same schedule and held-out data: the run before a change, or data parallel."""
    baseline_excess: float = 0.05
    """How far the loss may be above that of `baseline`, as a share of it. Runs of equal settings differ by 1 to 2 %
    with small models. Lower it for a baseline with the same settings, and raise it for data parallel: a healthy run is
    3 to 11 % above that, more with a longer H."""

    subtract: bool = False
    """Whether each evaluation during the run also tests a contribution to the newest round. The islands that evaluate
    get its effect on one fragment, without a name, and evaluate the model without it too. The difference is the score
    `gain of NAME`; islands are tested in turn, and negative gains in a row are an alarm. It doubles the time of such an
    evaluation and of the merge before it, and each of these islands gets one fragment in float32. Set it if you do not
    control all islands' data."""

    def __post_init__(self) -> None:
        check_setting("evaluation", self.module, self.args)
        if not 0 < self.timeout_s < inf:
            raise ValueError(f"evaluation.timeout_s is {self.timeout_s}; use a number of seconds above 0")
        if not 0 < self.wait_s < inf:
            raise ValueError(f"evaluation.wait_s is {self.wait_s}; use a number of seconds above 0")
        if not 0 <= self.baseline_excess < inf:
            raise ValueError(f"evaluation.baseline_excess is {self.baseline_excess}; use a share of at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptConfig:
    """A learner's adoption of a new version of a fragment."""

    mode: Literal["overwrite", "blend", "rebase"] = "overwrite"
    """overwrite: local = global (the paper). blend: alpha local + (1 - alpha) global (Streaming DiLoCo). rebase: local
    = global + (local now - local sent), which keeps what the island learned while the fragment travelled. Leave it
    unless you compare adoptions. In our trials the loss of blend with alpha 0.5 was about 1 % higher than that of
    overwrite. rebase and overwrite differed less than two seeds do (docs/results/adopt.md)."""
    alpha: float = 0.5
    """Share of the local value that blend keeps, in [0, 1). 0 is overwrite. With a large alpha the global value has
    little effect. Lower it if blend leaves the islands too far apart; the other modes ignore it."""

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < 1:
            raise ValueError(f"adopt.alpha is {self.alpha}; it must be at least 0 and below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class WireConfig:
    """Number formats of what travels between learners and syncer."""

    up: Format = "int4"
    """Format of the outer gradients that learners send. int2 (2.125 bits per element) and ternary (1.6875) have the
    levels -1, 0 and 1 times a scale. The learner adds the rounding error of a fragment to the next outer gradient of
    that fragment (error feedback). Set it to int2 or ternary if the link is narrow, and to float32 or bfloat16 to
    exclude rounding as a cause."""
    down: Format = "int4"
    """Format of the syncer's answer to a round: the difference to the version before, which every learner adds to its
    anchor, so that anchors equal the syncer's value bit for bit. float32 sends the whole value each round. Set it
    together with wire.up."""
    states: Literal["float32", "bfloat16", "int8"] = "float32"
    """Format of the inner optimizer's moments on their way to an island that returns without its saved state. Set it to
    int8 if the moments of a large model take too long on the link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchdogConfig:
    """Limits on the time of a step. A process that exceeds them ends itself, and its supervisor restarts it."""

    least_s: float = 300.0
    """Seconds that a step of an island, or a turn of the syncer's loop, may always take. A process ends if a step takes
    longer than this and longer than median_factor times the median of the last steps; its log then shows the stacks of
    all threads. Time while the whole process is suspended does not count. 0: nothing is ever ended. Raise it if the
    watchdog ends a process that is only slow."""
    median_factor: float = 10.0
    """Multiple of the median step time that a step may take, at least 1; see least_s. Raise it if the length of steps
    varies more than this."""
    start_s: float = 1800.0
    """Seconds for phases that may take long: everything before the first step (compiling included), loading a whole
    state, an evaluation, a merge (which may wait for a snapshot), the end of a process, and whatever your own loop does
    between two steps. It is also the upper bound of every other limit. Raise it if the watchdog ends a process that
    still compiles."""

    def __post_init__(self) -> None:
        if not (0 <= self.least_s <= self.start_s and self.start_s < inf):
            raise ValueError(
                f"watchdog.least_s is {self.least_s} and start_s {self.start_s}; use 0 (never) or seconds up to start_s"
            )
        if not 1 <= self.median_factor < inf:
            raise ValueError(f"watchdog.median_factor is {self.median_factor}; it must be at least 1")

    def bound_s(self, median_s: float | None) -> float:
        """Return the seconds that the next step may take; infinity if nothing is to be ended.

        Args:
            median_s: median of the last steps in seconds, None before the first step.
        """
        if not self.least_s:
            return inf
        return self.start_s if median_s is None else min(self.start_s, max(self.least_s, self.median_factor * median_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything that defines a run."""

    name: str = "run"
    """Name of the run and of its folder. Set it for every run. Two runs with one name need different folders
    (--run-dir)."""
    runs_dir: str = "runs"
    """Folder that holds the folders of runs. Set it to a disk with room for the snapshots; diloco plan prints their
    size."""
    algorithm: Literal["decoupled", "data_parallel"] = "decoupled"
    """decoupled: islands and a syncer. data_parallel: one process, one mesh, and gradients summed in every step. Set it
    to data_parallel for a baseline on the same data and the same tokens. Such a run has no islands, so a failure stops
    all of it."""
    seed: int = 0
    """Seed of the initial parameters and of the order of the data. Change it to repeat a run with other random values,
    for example to see how much a result depends on chance."""
    islands: IslandsConfig = field(default_factory=IslandsConfig)
    """The number of islands, their devices, and how each is restarted."""
    syncer: SyncerConfig = field(default_factory=SyncerConfig)
    """The process that merges: its restarts, threads, metrics and page."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Length of the training, batches and evaluations."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Your own evaluation beside the held-out loss."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The shape and the family of the model."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The inner optimizer: what each island applies in every step."""
    data: DataConfig = field(default_factory=DataConfig)
    """What the islands train on, and how it is divided among them."""
    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    """How often islands exchange a fragment, and for how many a round waits: H, P, tau, K, grace."""
    fragments: FragmentConfig = field(default_factory=FragmentConfig)
    """How the model is cut into fragments."""
    weights: WeightScheme = "tokens2_per_step"
    """A learner's weight in a merge, from its tokens and steps since it adopted the fragment: tokens^2 / steps, tokens,
    or equal weights. Leave it unless you compare weights. All three are equal while all islands have equal batches and
    make equal numbers of steps. With uniform, a slow or small island counts as much as a large one."""
    merge: MergeConfig = field(default_factory=MergeConfig)
    """How the outer gradients of several islands become one."""
    outer: OuterConfig = field(default_factory=OuterConfig)
    """The outer optimizer: what the syncer applies to a fragment in every round."""
    adopt: AdoptConfig = field(default_factory=AdoptConfig)
    """How learners adopt a new version of a fragment."""
    wire: WireConfig = field(default_factory=WireConfig)
    """Number formats on the wire."""
    transport: TransportConfig = field(default_factory=TransportConfig)
    """Connections between islands and the syncer: address, sizes, waits, and encryption."""
    checkpoints: CheckpointsConfig = field(default_factory=CheckpointsConfig)
    """Snapshots on disk."""
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    """The time that a step may take before its process counts as hung."""
    cloud: CloudConfig = field(default_factory=CloudConfig)
    """Machines on Google Cloud, for `diloco launch`."""
    gpu: GpuConfig = field(default_factory=GpuConfig)
    """GPU machines, for `diloco launch`."""
    trackers: tuple[str, ...] = ("tensorboard",)
    """Where metrics go beside metrics.jsonl: tensorboard, wandb, trackio, mlflow, opentelemetry (rounds only), or your
    own class as package.module:Class. Set it to the service that your team uses; most need an extra package
    (docs/metrics.md). The empty list saves the time to write TensorBoard's files."""
    callbacks: tuple[str, ...] = ()
    """Your own classes as package.module:Class, with methods on_step, on_round, on_eval or on_event. Set it to react to
    steps or rounds in Python, for example to send a message. Each is called in a separate thread and cannot delay the
    run. If more than 4,096 calls wait for it, it misses the next ones."""

    def __post_init__(self) -> None:
        plain = self.name.isprintable() and not self.name.startswith(".") and not {"/", "\\"} & {*self.name}
        if not plain or not 1 <= len(self.name) <= NAME_LENGTH_MAX:
            raise ValueError(
                f"name is {self.name[:NAME_LENGTH_MAX]!r}; use a plain word of 1 to {NAME_LENGTH_MAX} characters, "
                "it names the run's folder"
            )
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
        if self.algorithm == "decoupled" and 0 < self.islands.least < self.protocol.quorum:
            raise ValueError(
                f"islands.least is {self.islands.least}, but protocol.quorum is {self.protocol.quorum}, so rounds "
                "would stop while enough islands are there; lower the quorum or raise islands.least"
            )
        if self.cloud.extra != ExtraConfig() and self.islands.base == self.islands.names:
            raise ValueError(
                f"cloud.extra is set, but the run needs all {count} islands, so none is extra; set islands.least to "
                "fewer, or remove cloud.extra"
            )
        if self.algorithm == "decoupled" and self.protocol.lockstep and self.protocol.quorum < count:
            raise ValueError(
                f"protocol.overlap_steps is 0 (learners wait for the merge), but protocol.quorum is "
                f"{self.protocol.quorum} of {count} islands, so the first to finish would be merged alone; "
                f"set the quorum to {count}, or overlap_steps to at least 1"
            )
        if self.protocol.learners_max < count:
            raise ValueError(f"protocol.learners_max is {self.protocol.learners_max}, islands.count {count}; raise it")
        # A user's own loops choose their batches.
        ours = self.algorithm == "decoupled" and not self.model.own
        shared = ours and any(not self.islands.resolve(name, 0).batch_size for name in self.islands.names)
        if shared and self.train.batch_size % count:
            raise ValueError(
                f"train.batch_size is {self.train.batch_size}, which {count} islands cannot share equally; use a "
                "multiple of islands.count, or set islands.batch_size"
            )
        if self.transport.queue_payloads_max < self.protocol.num_fragments:
            raise ValueError(
                f"transport.queue_payloads_max is {self.transport.queue_payloads_max}, but a joining learner gets all "
                f"{self.protocol.num_fragments} fragments at once; raise it"
            )
        if self.evaluation.subtract and not self.train.eval_every:
            raise ValueError(
                "evaluation.subtract tests contributions at the evaluations during the run, and train.eval_every is 0, "
                "so there is none; set train.eval_every, or leave evaluation.subtract out"
            )
        if self.islands.slices > 1:
            self._check_slices(ours)
        self._check_bucket()
        self._check_own_data()
        self._check_budget()
        self.protocol.check_steps(self.planned_steps)
        check_classes([name for names in self.protocol.groups.classes for name in names], "protocol.sync_every")
        for name in ("", *self.islands.each):
            self.check_mesh(self.island(name))
        if self.model.module.startswith("diloco_jax.training.models."):
            self._check_built_in()

    def _check_slices(self, ours: bool) -> None:
        if not ours:
            raise ValueError(
                f"islands.slices is {self.islands.slices}, which needs algorithm decoupled and a built-in loop; set it "
                "to 1"
            )
        if self.adopt.mode == "rebase":
            raise ValueError(
                "adopt.mode rebase needs what was sent, which only one slice of an island has; use overwrite or blend, "
                "or set islands.slices to 1"
            )

    def _check_bucket(self) -> None:
        if self.syncer.standby and not bucket_scheme(self.transport.address):
            raise ValueError(
                f"syncer.standby is true, but transport.address is {self.transport.address}: a standby reads the run "
                "from a bucket, so name one (docs/bucket.md), or remove syncer.standby"
            )
        if self.model.own and bucket_scheme(self.transport.address):
            raise ValueError(
                f"transport.address is {self.transport.address}, a bucket, and model.module is own: a loop sends its "
                "model over a connection; set transport.address to host:port, or name the model in model.module"
            )

    def _check_own_data(self) -> None:
        if self.algorithm == "data_parallel" and any(own.data is not None for own in self.islands.each.values()):
            raise ValueError(
                "algorithm data_parallel has no islands, so nobody reads islands.each.NAME.data; name all sources in "
                "data.mixture"
            )
        for name, own in self.islands.each.items():
            if own.data is not None:
                try:
                    own.data.over(self.data, name)
                except ValueError as error:
                    raise ValueError(f"islands.each.{name}: {error}") from error

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
        """Return the tokens that end the run, and the tokens of one global step of all islands."""
        sizes = [self.island(name).batch_size for name in self.islands.names]
        batch_size = self.train.batch_size if self.algorithm == "data_parallel" else sum(sizes)
        return Budget(self.train.tokens, batch_size * self.train.seq_len)

    @property
    def limits(self) -> Limits:
        """Return the global steps and merged tokens that complete the run."""
        text = f"{self.planned_steps}" + f" for {self.train.tokens} tokens" * bool(self.train.tokens)
        return Limits(self.train.steps, self.train.tokens, text)

    @property
    def evaluations(self) -> EvaluationPlan:
        """Return when an island evaluates the global model, and how long the syncer waits for it."""
        extra_s = self.evaluation.timeout_s if self.evaluation.module else 0.0
        # The second evaluation of a test takes as long as the first one.
        tests_s = self.evaluation.wait_s if self.evaluation.subtract else 0.0
        return EvaluationPlan(self.evaluation.wait_s + extra_s + tests_s, self.train.eval_every)

    @property
    def planned_steps(self) -> int:
        """Return the global steps of the learning-rate schedule; the run may take more if islands are absent."""
        tokens, step_tokens = self.budget
        return -(-tokens // step_tokens) if tokens else self.train.steps

    def check_mesh(self, island: IslandConfig) -> None:
        """Check that an island's devices can share its batch, if their number is known; ValueError if not."""
        slices = self.islands.slices
        if island.batch_size % slices:
            raise ValueError(
                f"{island.name or 'an island'}'s batch of {island.batch_size} sequences cannot be cut into equal parts "
                f"for islands.slices {slices}; change train.batch_size, islands.batch_size or islands.slices"
            )
        devices = island.slice.devices if island.slice else island.devices
        # The number of devices may be unknown until the island runs.
        if not devices:
            return
        steps = self.optimizer.accumulate_steps
        parts = MeshLayout(planned_mesh(island.mesh, devices), island.mesh.all_rules()).batch_parts * steps
        share, what = island.batch_size // slices, "part" if slices > 1 else "batch"
        if share % parts:
            raise ValueError(
                f"{island.name or 'an island'}'s {what} of {share} sequences cannot be shared equally by "
                f"{parts // steps} devices (mesh axes data x fsdp x expert) in {steps} optimizer.accumulate_steps; "
                "change train.batch_size, islands.batch_size or islands.mesh"
            )

    def _check_built_in(self) -> None:
        """Check ids, lengths and axes of arrays, which only the built-in models declare."""
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
        # An embedding silently clamps ids beyond its table.
        have = self.model.args.get("vocab_size", 256)
        if isinstance(have, int) and have < (need := self.data.ids):
            raise ValueError(
                f"model.args.vocab_size is {have}, but the data has ids below {need}; raise it, or correct "
                "data.vocab_size"
            )

    def of_island(self, name: str) -> "RunConfig":
        """Return this config with the data of one island, which may have a separate corpus."""
        own = self.islands.each.get(name, IslandOverride()).data
        if own is None:
            return self
        # The data of other islands is none of this island's business.
        each = {other: replace(settings, data=None) for other, settings in self.islands.each.items()}
        return replace(self, data=own.over(self.data, name), islands=replace(self.islands, each=each))

    @property
    def shares_corpus(self) -> bool:
        """True if an island reads the corpus that `data` names."""
        each = self.islands.each
        return not self.data.corpus and any(each.get(n, IslandOverride()).data is None for n in self.islands.names)

    @property
    def corpora(self) -> dict[str, "RunConfig"]:
        """Return the config of an island for each corpus of the run, by the name of the corpus; "" is the run's."""
        made = [self.of_island(name) for name in self.islands.names]
        return {config.data.corpus: config for config in reversed(made)}

    def island(self, name: str) -> IslandConfig:
        """Return the settings of one island; a learner whose name is not in `islands.names` has the common settings."""
        island = self.islands.resolve(name, self.train.batch_size // self.islands.count)
        island = island._replace(accelerator=island.accelerator or self.gpu.accelerator)
        whole = self.algorithm == "data_parallel"
        return island._replace(batch_size=self.train.batch_size) if whole else island

    def cloud_of(self, name: str) -> CloudConfig:
        """Return the settings of one island's machines on a cloud; those beyond islands.least may differ."""
        cloud, own = self.cloud, self.islands.each.get(name, IslandOverride())
        if name not in self.islands.base:
            cloud = cloud.of_extra
        if own.capacity not in (None, cloud.capacity):
            # Another capacity has no reservation.
            reservation = self.cloud.reservation if own.capacity == "reservation" else ""
            cloud = replace(cloud, capacity=own.capacity, reservation=reservation)
        return replace(cloud, image=own.image) if own.image else cloud

    def place(self, name: str) -> IslandPlace:
        """Return where an island's machines are; settings of all islands count where the island has none."""
        own, cloud = self.islands.each.get(name, IslandOverride()), self.cloud_of(name)
        return IslandPlace(
            own.provider,
            own.accelerator or self.gpu.accelerator,
            own.region or "",
            cloud.capacity,
            cloud.image,
            own.price_per_chip_hour,
        )
