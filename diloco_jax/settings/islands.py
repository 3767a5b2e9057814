"""The islands of a run: alike by default, each with what it has differently."""

from dataclasses import dataclass, field, fields
from math import inf
from typing import Literal, NamedTuple

from diloco_jax.settings.slices import Generation, Topology
from diloco_jax.training.sharding import MeshConfig

Controller = Literal["processes", "single"]
Devices = int | Literal["auto"]

AUTO: Literal["auto"] = "auto"
DEVICES_MAX = 64
ISLANDS_MAX = 1024
HOSTS_MAX = 2048  # a slice of 6144 v5p chips has 1536


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandOverride:
    """The differences of one island; what is not given is as for all islands."""

    devices: Devices | None = None
    """See islands.devices."""
    hosts: int | None = None
    """See islands.hosts."""
    topology: str | None = None
    """See islands.topology."""
    mesh: MeshConfig | None = None
    """See islands.mesh."""
    batch_size: int | None = None
    """See islands.batch_size."""
    zone: str | None = None
    """See islands.zone."""


class IslandConfig(NamedTuple):
    """One island, resolved."""

    name: str  # of the learner
    devices: int  # how many, over all its hosts; 0: what is there
    hosts: int  # processes
    topology: str  # TPU slice, "" if none was named
    mesh: MeshConfig  # how its devices are used
    batch_size: int  # sequences in an inner step
    zone: str  # where it runs, "" if that was not said
    generations: dict[str, Generation]  # that the config describes

    @property
    def slice(self) -> Topology | None:
        """Return the TPU slice, None if none was named."""
        return Topology.parse(self.topology, self.generations) if self.topology else None


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandsConfig:
    """The islands of the run; `each` says what one has differently."""

    count: int = 4
    """M: number of islands. Low: fewer samples per second. High: a somewhat higher loss after the same tokens."""
    devices: Devices = AUTO
    """Devices per island, over all its hosts. auto: what is there: TPU chips, an equal number of the machine's GPUs, a
    share of one GPU's memory, or 2 emulated CPU devices where there is neither. A number counts GPUs where there are
    any, and emulated devices elsewhere; JAX_PLATFORMS=cpu in the environment emulates in any case."""
    hosts: int = 1
    """Processes of an island, one SPMD program over all of them. With a topology as many as that has hosts. If one
    dies, the island is started again as a whole. Low: 1 drives all devices. High: more die together."""
    topology: str = ""
    """TPU slice of an island, such as v5p:4x4x8 or v6e:16x16; for preflight and launch. Needs islands.devices auto."""
    mesh: MeshConfig = field(default_factory=lambda: MeshConfig(data=-1))
    """How an island's devices are laid out."""
    batch_size: int = 0
    """Sequences in one inner step of an island; islands may differ in it. 0: an equal share of train.batch_size. Low:
    short, noisy steps that weigh less in a merge. High: more memory, fewer updates per token."""
    zone: str = ""
    """Cloud zone of an island, such as us-east5-a; for launch."""
    controller: Controller = "processes"
    """processes: each island has its own. single: one process drives them all, a thread for each, on devices of its
    own; for a controller that sees several slices, such as Pathways. If it dies, all islands start again."""
    pathways: bool = False
    """Let that one process see its devices through Pathways; needs the package pathwaysutils there."""
    command: tuple[str, ...] = ()
    """The program of an island's process in a local run: a training loop that calls diloco_jax.join, for example
    [python, my_loop.py]; python is the one that runs diloco. It sees islands.devices, and its place in DILOCO_SYNCER,
    DILOCO_ISLAND, DILOCO_RUN_DIR and the like. Empty: the built-in loop."""
    each: dict[str, IslandOverride] = field(default_factory=dict)
    """What single islands have differently, by name: {island-3: {topology: v6e:16x16, batch_size: 512}}."""
    generations: dict[str, Generation] = field(default_factory=dict)
    """TPU generations that the package does not know, by the name with which a topology begins, which libtpu must know;
    one of a known name replaces it."""
    peak_tflops: float = 0.0
    """Peak of one device in TFLOP/s, of which MFU is a share; 0: that of the known TPUs and GPUs, without it no MFU."""
    restarts_max: int = 10
    """How often a local run starts a failed island again before it gives it up; ten minutes of life count anew. Low: 0
    gives it up at its first death. High: one that cannot run dies and starts without end."""
    restart_delay_s: float = 1.0
    """Seconds between an island's death and its next start in a local run; while its lives are shorter than 20 s, twice
    as many each time, up to a minute. Low: it is back sooner. High: it is away longer."""
    standby: bool = False
    """Keep a spare process for each island in a local run, which becomes it at once when it dies: imports done, and on
    emulated devices the model and its programs loaded, so it has the memory of an island. Only for the built-in loop
    and islands of one process. Spares are started one after the other, once their islands train."""

    def __post_init__(self) -> None:
        if not 1 <= self.count <= ISLANDS_MAX:
            raise ValueError(f"islands.count is {self.count}; use 1 to {ISLANDS_MAX}")
        if unknown := sorted(set(self.each) - set(self.names)):
            raise ValueError(
                f"islands.each has '{unknown[0]}', but the {self.count} islands are {self.names[0]} to "
                f"{self.names[-1]}; correct the name or islands.count"
            )
        if self.restarts_max < 0 or not 0 <= self.restart_delay_s < inf:
            told = f"islands.restarts_max {self.restarts_max} and restart_delay_s {self.restart_delay_s}"
            raise ValueError(f"{told} must be at least 0")
        several = any(self.resolve(name, 0).hosts > 1 for name in ("", *self.each))
        if self.standby and (self.command or self.controller == "single" or several):
            raise ValueError(
                "islands.standby needs islands of one process with the built-in loop; set it to false, or "
                "islands.hosts to 1, islands.controller to processes and no islands.command"
            )
        if not 0 <= self.peak_tflops < inf:
            raise ValueError(f"islands.peak_tflops is {self.peak_tflops}; use TFLOP/s of one device, or 0 if unknown")
        self._check_controller()
        for name in ("", *self.each):
            _check(self._own(name), f"islands.each.{name}" if name else "islands")

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

    def _own(self, name: str) -> IslandConfig:
        """Return an island as the settings say, before anything is derived."""
        other = self.each.get(name, IslandOverride())
        own = {each.name: getattr(other, each.name) for each in fields(IslandOverride)}
        given = {key: getattr(self, key) if value is None else value for key, value in own.items()}
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

    def resolve(self, name: str, batch_size: int) -> IslandConfig:
        """Return what this island has; a name that is none of `names` has what all have."""
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
    if own.slice:
        if own.devices:
            raise ValueError(
                f"{where}.topology is {own.topology}, but {where}.devices is {own.devices}: set devices to auto for "
                "its chips, or leave the topology out"
            )
        own.mesh.sizes(own.slice.devices)
