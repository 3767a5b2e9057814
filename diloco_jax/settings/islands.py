"""The islands of a run: common settings, and what single islands have differently."""

from dataclasses import dataclass, field, fields
from math import inf
from typing import Literal, NamedTuple

from diloco_jax.settings import providers
from diloco_jax.settings.providers import Capacity, Provider
from diloco_jax.settings.slices import Generation, Topology
from diloco_jax.training.data.config import OwnDataConfig
from diloco_jax.training.sharding import MeshConfig

Controller = Literal["processes", "single"]
Devices = int | Literal["auto"]

AUTO: Literal["auto"] = "auto"
DEVICES_MAX = 64
SLICES_MAX = 64
GS = "gs://"
# Ray's names for devices that JAX finds.
ACCELERATORS = ("GPU", "TPU")
ISLANDS_MAX = 1024
# A slice of 6144 v5p chips has 1536 hosts.
HOSTS_MAX = 2048
# Fields of IslandConfig without a setting of all islands in this section.
ALONE = ("name", "generations", "accelerator")


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandOverride:
    """The settings of one island that differ from the common ones. A setting that is left out has the common value."""

    devices: Devices | None = None
    """See islands.devices. Set it if this island has more or fewer devices than the others."""
    hosts: int | None = None
    """See islands.hosts. Set it if this island has more or fewer processes than the others."""
    topology: str | None = None
    """See islands.topology. Set it if this island's slice differs from the slices of the others, and fit the island's
    batch to its speed."""
    mesh: MeshConfig | None = None
    """See islands.mesh. Set it if this island must divide its devices differently from the others."""
    batch_size: int | None = None
    """See islands.batch_size. Set it if this island differs from the others in speed or memory."""
    zone: str | None = None
    """See islands.zone. Set it for each island if islands are in different zones."""
    resources: dict[str, float] | None = None
    """See islands.resources. Set it if this island needs other nodes of a Ray cluster than the others do."""
    provider: Provider | None = None
    """Where diloco launch makes this island's machines, if not at the target that the command names. Set it if islands
    are at several providers; launch then writes a folder for each."""
    accelerator: str | None = None
    """See gpu.accelerator. Set it if this island has other GPUs than the others."""
    region: str | None = None
    """Place of this island for SkyPilot: CLOUD, CLOUD/REGION or CLOUD/REGION/ZONE, such as aws/us-east-1. Left out:
    SkyPilot chooses the cheapest. Set it if the island must be at a certain provider or near its data."""
    capacity: Capacity | None = None
    """See cloud.capacity. Set it if this island's machines are of another kind, such as spot beside reserved ones."""
    image: str | None = None
    """See cloud.image. Set it if this island needs another container, such as one with CUDA beside one with libtpu."""
    price_per_chip_hour: float | None = None
    """Price of one chip or GPU of this island per hour, for diloco plan and stage. Left out: --price-per-chip-hour. Set
    it if islands have different prices."""
    data: OwnDataConfig | None = None
    """A corpus of this island's own. Set it if the island's data must stay at its site, or differs from that of the
    others; tokenizer, vocabulary and train.seq_len are those of the run."""


class IslandConfig(NamedTuple):
    """One island's settings after its differences are applied."""

    # The learner has the same name.
    name: str
    # Over all hosts of the island, or of one of its slices. 0: all devices that the island finds.
    devices: int
    hosts: int  # processes
    # TPU slice; "" if none is named.
    topology: str
    mesh: MeshConfig
    batch_size: int  # sequences
    # Cloud zone; "" if none is named.
    zone: str
    # GPU by SkyPilot's name; "" if none is named.
    accelerator: str
    # What a Ray cluster gives to each process, by name.
    resources: dict[str, float]
    # TPU generations that the config describes itself.
    generations: dict[str, Generation]

    @property
    def slice(self) -> Topology | None:
        """Return the TPU slice; None if none is named."""
        return Topology.parse(self.topology, self.generations) if self.topology else None


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandsConfig:
    """The islands of the run; `each` has the differences of single islands."""

    count: int = 4
    """M: number of islands. More islands train more samples per second; the loss after the same tokens is somewhat
    higher. Raise it if you have more machines or devices; the syncer's work and traffic grow in proportion. Keep
    train.batch_size a multiple of it."""
    least: int = 0
    """Number of islands that the run needs; 0: all. The others come and go with capacity: no alarm is raised while they
    are away, and the run uses all it gets. The first islands by name are those that it needs. Set it if you may not get
    all machines, or may lose some at any time; an alarm then says when fewer islands are connected."""
    devices: Devices = AUTO
    """Devices per island, over all its hosts, or per slice if islands.slices is above 1. auto: TPU chips, an equal
    number of the machine's GPUs, a share of one GPU's memory, or 2 emulated CPU devices on a machine without TPU and
    GPU. A number counts GPUs on a machine with GPUs, and emulated devices elsewhere. JAX_PLATFORMS=cpu in the
    environment always emulates. Set it to use fewer GPUs or emulated devices than auto would."""
    hosts: int = 1
    """Processes of an island, or of each of its slices, that run one SPMD program together. A topology determines this
    number. If one process fails, the island or the slice restarts as a whole. Set it for an island of several GPU
    machines."""
    slices: int = 1
    """Slices of an island. They share the batch of a step equally, and each has the whole model on separate devices, in
    islands.hosts processes. If one fails, the others continue without a restart, and it returns later. In each step
    they exchange gradients in float32 over the network. The model must have no state beside its parameters, such as
    batch statistics. Set it if an island has several machines with a fast network between them, and must survive the
    loss of one."""
    slices_least: int = 1
    """Number of slices that an island needs; while fewer are connected, it waits. Set it if steps of a few slices would
    be too slow, or their batch too small with slices_batch shrink."""
    slices_batch: Literal["keep", "shrink"] = "keep"
    """The batch of a step while slices are missing. keep: the others compute the parts of the missing slices, so steps
    have the same result and take longer. shrink: the batch has only the parts of the connected slices. Set it to shrink
    if steps must not take longer; the island then has less weight in a merge."""
    straggler_s: float = 3.0
    """Seconds beyond the usual time of a step that the slices of an island wait for one of them. After that they
    continue without it. Raise it if slices or their network often pause longer."""
    topology: str = ""
    """TPU slice of an island, such as v5p:4x4x8 or v6e:16x16; for preflight and launch. It needs islands.devices auto.
    Set it to compile for TPU slices with diloco preflight, or to create them with diloco launch."""
    mesh: MeshConfig = field(default_factory=lambda: MeshConfig(data=-1))
    """Layout of an island's devices."""
    batch_size: int = 0
    """Sequences in one inner step of an island, over all its slices; islands may differ. 0: an equal share of
    train.batch_size. Set it if islands differ in memory or speed, or join and leave often. A larger batch takes more
    memory, and gives the island more weight in a merge."""
    zone: str = ""
    """Cloud zone of an island, such as us-east5-a; for launch. Set it to create machines with diloco launch, in a zone
    that offers the topology."""
    ray: str = ""
    """Address of the Ray cluster that runs the islands of `diloco train` (docs/ray.md): auto for the cluster of this
    machine, or HOST:PORT of its head node. Empty: the islands run on this machine. Set it if Ray places your jobs; the
    syncer stays on this machine, which must be a node of the cluster."""
    resources: dict[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    """What each process of an island needs on a Ray cluster, by Ray's names: {GPU: 8}, {TPU: 4}, or {CPU: 2, site: 1}
    with a name that you gave to nodes. Islands without GPU and TPU emulate devices. Set it together with islands.ray;
    other runs ignore it."""
    controller: Controller = "processes"
    """processes: each island has a separate process. single: one process drives all islands, each in a thread with
    separate devices; for a controller that sees several slices, such as Pathways. If that process fails, all islands
    restart. Leave it unless a controller such as Pathways gives all slices to one process."""
    pathways: bool = False
    """Let the one process of controller single see its devices through Pathways; it needs the package pathwaysutils and
    JAX_PLATFORMS=proxy. Set it only on a cluster that runs Pathways (docs/launch.md); diloco_jax has never run
    there."""
    slice_wait_s: float = 86400.0
    """Seconds that an island waits for its slice after Pathways took it away; the wait does not count for restarts_max.
    After that the island is given up. Raise it if slices may return later than this."""
    profiles: str = ""
    """Folder for the results of `diloco profile` on Pathways, whose profiler writes to Cloud Storage only, such as
    gs://bucket/profiles. Set it if you profile on Pathways. diloco launch pathways sets it, and other runs ignore
    it."""
    command: tuple[str, ...] = ()
    """The program of an island's process in a local run: a training loop that calls diloco_jax.join, for example
    [python, my_loop.py]; python is the interpreter that runs diloco. The program sees islands.devices, and finds its
    place in the run in DILOCO_SYNCER, DILOCO_ISLAND, DILOCO_RUN_DIR and similar variables. Empty: the built-in loop.
    Set it to train your own loop."""
    each: dict[str, IslandOverride] = field(default_factory=dict)
    """Differences of single islands by name: {island-3: {topology: v6e:16x16, batch_size: 512}}. Set it if islands
    differ in slice, batch, mesh or zone; equal islands of a machine share one compilation, and each different island
    compiles separately."""
    generations: dict[str, Generation] = field(default_factory=dict)
    """TPU generations that the package does not know, by the first word of their topology names. libtpu must know them.
    A generation with a known name replaces the known one. Set it for a TPU that is newer than this release, with the
    values from its public documentation."""
    peak_tflops: float = 0.0
    """Peak of one device in TFLOP/s; MFU is the share of it that a step uses. 0: the known peak of TPUs and GPUs, and
    no MFU on other devices. Set it if you want MFU on a device that is not in the table; nothing else depends on it."""
    restarts_max: int = 10
    """How often a local run restarts a failed island. The count restarts after ten minutes without a failure. 0: an
    island is given up after its first failure. Raise it if islands fail often and return, as on spot machines."""
    restart_delay_s: float = 1.0
    """Seconds between a failure of an island and its next start in a local run. While the island fails within 20 s of
    each start, the delay doubles up to one minute. Raise it if the devices or ports of a failed process are free only
    after a while; the island then trains later."""
    standby: bool = False
    """Keep a spare process for each island in a local run, which replaces the island immediately when it fails. A spare
    has done its imports and, on emulated devices, has loaded the model and its programs, so it takes as much memory as
    an island. Only for islands of one process with the built-in loop. Spares start one after another once their islands
    train. Set it if a failed island must return quickly, and the memory is there."""

    def __post_init__(self) -> None:
        if not 1 <= self.count <= ISLANDS_MAX:
            raise ValueError(f"islands.count is {self.count}; use 1 to {ISLANDS_MAX}")
        if not 0 <= self.least <= self.count:
            raise ValueError(f"islands.least is {self.least}; use 1 to islands.count = {self.count}, or 0 for all")
        if unknown := sorted(set(self.each) - set(self.names)):
            raise ValueError(
                f"islands.each has '{unknown[0]}', but the {self.count} islands are {self.names[0]} to "
                f"{self.names[-1]}; correct the name or islands.count"
            )
        if self.restarts_max < 0 or not 0 <= self.restart_delay_s < inf:
            told = f"islands.restarts_max {self.restarts_max} and restart_delay_s {self.restart_delay_s}"
            raise ValueError(f"{told} must be at least 0")
        if self.profiles and not self.profiles.startswith(GS):
            raise ValueError(
                f"islands.profiles is {self.profiles!r}; write a folder of Cloud Storage, {GS}BUCKET/FOLDER"
            )
        if not 0 < self.slice_wait_s < inf:
            raise ValueError(f"islands.slice_wait_s is {self.slice_wait_s}; use seconds, more than 0")
        several = any(self.resolve(name, 0).hosts > 1 for name in ("", *self.each))
        if self.standby and (self.command or self.controller == "single" or several):
            raise ValueError(
                "islands.standby needs islands of one process with the built-in loop; set it to false, or "
                "islands.hosts to 1, islands.controller to processes and no islands.command"
            )
        self._check_slices()
        if not 0 <= self.peak_tflops < inf:
            raise ValueError(f"islands.peak_tflops is {self.peak_tflops}; use TFLOP/s of one device, or 0 if unknown")
        self._check_controller()
        for name, own in self.each.items():
            providers.check(name, {each.name: getattr(own, each.name) for each in fields(own)}, own.provider)
        self._check_ray()
        for name in ("", *self.each):
            _check(self._own(name), f"islands.each.{name}" if name else "islands")

    def _check_slices(self) -> None:
        if not 1 <= self.slices <= SLICES_MAX:
            raise ValueError(f"islands.slices is {self.slices}; use 1 to {SLICES_MAX}")
        if not 1 <= self.slices_least <= self.slices:
            raise ValueError(
                f"islands.slices_least is {self.slices_least}; use 1 to islands.slices = {self.slices}, or raise slices"
            )
        if not 0 < self.straggler_s < inf:
            raise ValueError(f"islands.straggler_s is {self.straggler_s}; use seconds, more than 0")
        if self.slices == 1:
            return
        apart = {
            "controller single": self.controller == "single",
            "command": self.command,
            "standby": self.standby,
            "ray": self.ray,
        }
        if others := [name for name, value in apart.items() if value]:
            raise ValueError(
                f"islands.slices is {self.slices}, which needs the built-in loop in processes without Ray, so "
                f"islands.{others[0]} does not fit; leave one of them out"
            )

    def _check_controller(self) -> None:
        if self.pathways and self.controller != "single":
            raise ValueError("islands.pathways is set, but islands.controller is 'processes'; set it to single")
        if self.controller != "single":
            return
        if self.command:
            raise ValueError("islands.command starts a process for each island; set islands.controller to processes")
        own = [self._own(name) for name in self.names]
        if len({bool(each.devices) for each in own}) > 1:
            raise ValueError(
                "islands.controller is single, but only some islands say how many devices they have; give all a "
                "number, or none"
            )
        if hosts := next((each.hosts for each in own if each.hosts > 1), 0):
            raise ValueError(
                f"islands.controller is single, so an island is part of one process, not of {hosts}; set "
                "islands.hosts to 1"
            )
        far = next((each.topology for each in own if each.slice and each.slice.hosts > 1), "")
        if far and not self.pathways:
            raise ValueError(
                f"islands.controller is single, but {far} has several hosts, whose chips one process sees "
                "through islands.pathways only; set it, or the controller to processes"
            )

    def _check_ray(self) -> None:
        if not self.ray:
            return
        if self.ray != "auto":
            host, _, port = self.ray.rpartition(":")
            if not host or "/" in host or not port.isdecimal():
                raise ValueError(
                    f"islands.ray is {self.ray!r}; use auto on a node of the cluster, or HOST:PORT of its head node, "
                    "such as 10.0.0.1:6379"
                )
        here = {"command": self.command, "standby": self.standby, "controller single": self.controller == "single"}
        if others := [name for name, value in here.items() if value]:
            raise ValueError(
                f"islands.{others[0]} needs islands on this machine, but islands.ray is {self.ray}; leave one of them "
                "out"
            )

    def _own(self, name: str) -> IslandConfig:
        """Return an island's settings before anything is derived from them."""
        other = self.each.get(name, IslandOverride())
        own = {name: getattr(other, name) for name in IslandConfig._fields if name not in ALONE}
        given = {key: getattr(self, key) if value is None else value for key, value in own.items()}
        given["accelerator"] = other.accelerator or ""
        if given["devices"] != AUTO and not 1 <= given["devices"] <= DEVICES_MAX:
            where = f"islands.each.{name}" if other.devices is not None else "islands"
            raise ValueError(
                f"{where}.devices is {given['devices']}; use 1 to {DEVICES_MAX}, or auto for what the machine has"
            )
        given["devices"] = 0 if given["devices"] == AUTO else given["devices"]
        return IslandConfig(name=name, generations=self.generations, **given)

    @property
    def names(self) -> tuple[str, ...]:
        """List the learners' names: island-0, island-1, ..."""
        return tuple(f"island-{index}" for index in range(self.count))

    @property
    def base(self) -> tuple[str, ...]:
        """List the names of the islands that the run needs; the others are extra."""
        return self.names[: self.least or self.count]

    def resolve(self, name: str, batch_size: int) -> IslandConfig:
        """Return the settings of one island; a name that is not in `names` has the common settings."""
        island = self._own(name)
        if island.slice and self.controller == "processes":
            island = island._replace(hosts=island.slice.hosts)
        return island._replace(batch_size=island.batch_size or batch_size)


def _check(own: IslandConfig, where: str) -> None:
    if not 1 <= own.hosts <= HOSTS_MAX:
        raise ValueError(f"{where}.hosts is {own.hosts}; use 1 to {HOSTS_MAX}")
    if own.devices % own.hosts:
        raise ValueError(f"{where}: {own.hosts} hosts cannot share {own.devices} devices equally; change one of them")
    if own.batch_size < 0:
        raise ValueError(f"{where}.batch_size is {own.batch_size}; use at least 1, or 0 for an equal share")
    _check_resources(own, where)
    if own.slice:
        if own.devices:
            raise ValueError(
                f"{where}.topology is {own.topology}, but {where}.devices is {own.devices}: set devices to auto for "
                "its chips, or leave the topology out"
            )
        own.mesh.sizes(own.slice.devices)


def _check_resources(own: IslandConfig, where: str) -> None:
    """Check what Ray gives to a process of an island; ValueError if Ray could never give it, or devices differ."""
    if not own.resources:
        raise ValueError(f"{where}.resources is empty; name what a process needs, such as {{CPU: 1}} or {{GPU: 8}}")
    for name, amount in own.resources.items():
        if not 0 < amount < inf or (amount > 1 and amount != int(amount)):
            raise ValueError(
                f"{where}.resources has {name}: {amount:g}; use a whole number, or a share between 0 and 1"
            )
    accelerators = sum(own.resources.get(name, 0) for name in ACCELERATORS)
    if own.devices and accelerators and own.hosts * max(1, accelerators) != own.devices:
        raise ValueError(
            f"{where}.devices is {own.devices}, but {where}.resources gives {accelerators:g} to each of its "
            f"{own.hosts} processes; change one of them, or set devices to auto"
        )
