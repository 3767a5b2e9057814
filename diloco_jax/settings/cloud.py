"""Settings of a run on Google Cloud and on GPU machines, for `diloco launch`."""

import ipaddress
import re
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from diloco_jax.settings.providers import Capacity

PORT_MAX = 65535
DISK_MIN_GB, DISK_MAX_GB = 50, 65_536
# Entries of env and of xla_flags, and characters of one value.
WORDS_MAX, LENGTH_MAX = 64, 4096
AUTO = "auto"
# These settings become arguments in scripts and manifests.
PLAIN = (
    "project", "image", "network", "subnetwork", "service_account", "tpu_image_family", "bucket", "reservation",
    "queue", "priority_class", "nat", "syncer_zone", "syncer_machine_type", "head_machine_type", "pathways_version",
)  # fmt: skip
NAMES = {"env": r"[A-Za-z_][A-Za-z0-9_]*", "xla_flags": r"xla_[a-z0-9_]+"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraConfig:
    """The machines of the islands beyond islands.least. A setting that is left out has the value of the others."""

    capacity: Literal["on-demand", "spot", "flex-start"] | None = None
    """See cloud.capacity. Set it to spot or flex-start if only the first islands have a reservation, or machines on
    demand."""
    queue: str | None = None
    """See cloud.queue. Set it if another LocalQueue admits these islands, for example one that lends unused quota."""
    priority_class: str | None = None
    """See cloud.priority_class. Set it to a lower class than that of the first islands, so that these islands give way
    first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudConfig:
    """The place of the run's machines on Google Cloud. An island's zone and slice are islands.zone and
    islands.topology."""

    project: str = ""
    """Google Cloud project. Set it for diloco launch on Google Cloud, which bills this project."""
    image: str = ""
    """Container image with this package, such as us-docker.pkg.dev/PROJECT/diloco/diloco:1; the Dockerfile builds it.
    Set it for diloco launch on Google Cloud, and for sky if machines run containers. An image with your own code is
    needed for your own model, data or loop."""
    network: str = "default"
    """VPC network of all machines. Set it if your project has no network named default, or if machines must be in
    another network."""
    subnetwork: str = ""
    """Subnetwork with the same name in every region; empty: the network's name, as in auto mode. Set it if the network
    is in custom mode and its subnetworks have another name."""
    service_account: str = ""
    """E-mail address of the account that machines and, on GKE, pods run as. It needs to read the image and to read and
    write the bucket. Set it for diloco launch on Google Cloud; an account with few permissions limits what an attacker
    on a machine can do."""
    tpu_image_family: str = ""
    """Image family of TPU machines in the project ubuntu-os-accelerator-images; for gce. Set it for launch gce, which
    refuses to start without it. Other ways of launching do not use it."""
    bucket: str = ""
    """Cloud Storage bucket, without gs://, for what a new machine needs to continue: saved states and compiled programs
    of the islands. It also holds the data if data.path names it. Set it for diloco launch on Google Cloud. Place it in
    the islands' region if you can, because traffic between regions costs money."""
    capacity: Capacity = "on-demand"
    """Kind of the islands' machines. spot: spare machines, cheaper, which Google may take away at any time.
    reservation: the machines of cloud.reservation. flex-start: machines as soon as they are free (Dynamic Workload
    Scheduler), for at most 7 days. Set it to spot to pay less for islands that may lose their machines at any time. Set
    it to reservation or flex-start if your project has no quota for machines on demand. Not every way of launching has
    all of them (docs/launch-reference.md)."""
    reservation: str = ""
    """Name of the reservation; with capacity: reservation. Set it together with cloud.capacity: reservation."""
    queue: str = ""
    """Kueue's LocalQueue in the namespace, which admits the islands' jobs; for gke. Empty: they start immediately. Set
    it if your cluster shares its TPUs through Kueue; islands then wait for their turn."""
    priority_class: str = ""
    """Kubernetes PriorityClass of the islands' pods; for gke. Set it if pods of other users take the islands' nodes, or
    if islands must give way to the pods of others."""
    extra: ExtraConfig = field(default_factory=ExtraConfig)
    """Machines of the islands beyond islands.least."""
    private: bool = False
    """Give no machine a public address. The subnetwork then needs Private Google Access. Set it if your organisation
    forbids public addresses. Images and data must then be in Google's services, or cloud.nat must be set."""
    nat: str = ""
    """Name of a Cloud NAT and its router, which connect private machines to the internet; created in each region that
    has none with this name. Empty: no NAT, so everything must come from Google's APIs. Set it if private machines need
    the internet, for example for packages or data of other clouds; Cloud NAT costs money for each GB."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the islands' processes. Set it for variables that your code or a tracker reads. The
    values are readable in the written files and in machines' metadata, so keep secrets out."""
    xla_flags: dict[str, str] = field(default_factory=dict)
    """Options of XLA's compiler, {xla_name: value}, added to the defaults of the TPU generation; "" removes a default.
    Set it to try an option of the compiler; diloco preflight shows what it changes. Without TPUs the options go into
    XLA_FLAGS."""
    syncer_zone: str = ""
    """Zone of the syncer; empty: the zone of the first island. Set it if another zone is closer to most islands, or has
    machines with enough memory."""
    syncer_machine_type: str = AUTO
    """Machine type of the syncer; auto: the smallest listed type with enough memory. Set it if diloco launch
    warns that the type is too small, or if merges need more cores."""
    head_machine_type: str = AUTO
    """Machine type for Pathways' resource manager and proxy and the one process of all islands; auto: the
    smallest listed type with enough memory; for pathways. Set it if the head runs out of memory; other ways of
    launching do not use it."""
    pathways_version: str = "latest"
    """Tag of Pathways' images; for pathways. Choose the one for the image's release of JAX. Set it to the tag of your
    release of JAX, because latest may change while a run restarts."""
    syncer_disk_gb: int = 500
    """Size in GB of the disk with the run's folder, which is kept when the syncer's machine is deleted. It must hold
    the snapshots. Raise it if diloco launch warns that saved states need more: checkpoints.keep is the number of
    snapshots on the disk."""
    host_disk_gb: int = 200
    """Size in GB of the boot disk of TPU hosts, where an island saves its state; for gke and gce. Every host pays for
    it. Raise it if diloco launch warns that saved states need more, or if the hosts copy a large data store."""
    port: int = 50051
    """Port where the syncer listens. Change it if your firewall allows only another port, or several runs share a
    machine."""
    source_ranges: tuple[str, ...] = ("10.0.0.0/8",)
    """Address ranges that may reach the syncer. Set it to the addresses of your islands only, because anyone in these
    ranges can try to connect."""
    external: bool = False
    """Give the syncer a public address, for islands outside of its network. Set it, together with cloud.source_ranges,
    if an island is on another network, such as a laptop at home. Certificates then protect the run from strangers on
    the internet."""
    cluster: str = "diloco"
    """Name of the GKE cluster in each region that has islands. Set it to use a cluster that exists already."""
    namespace: str = "diloco"
    """Kubernetes namespace. Set it if several runs or teams share a cluster."""
    restarts_max: int = 100
    """How often GKE restarts an island that failed. Preemptions and maintenance do not count, and an island with wrong
    input is never restarted. Lower it if an island that cannot run must not keep costing money."""

    def __post_init__(self) -> None:
        plain = {name: getattr(self, name) for name in PLAIN}
        plain |= {f"extra.{each.name}": getattr(self.extra, each.name) or "" for each in fields(ExtraConfig)}
        for name, value in plain.items():
            if not re.fullmatch(r"[A-Za-z0-9._:/@-]*", value) or value.startswith("-"):
                raise ValueError(f"cloud.{name} is {value!r}; use letters, digits and . _ : / @ - only")
        if "/" in self.bucket or ":" in self.bucket:
            raise ValueError(
                f"cloud.bucket is {self.bucket!r}; write the bucket's name alone, without gs:// and folders"
            )
        if (self.capacity == "reservation") != bool(self.reservation):
            raise ValueError(
                f"cloud.capacity is {self.capacity}, but cloud.reservation {self.reservation!r}; set both or neither"
            )
        if self.nat and not self.private:
            raise ValueError(f"cloud.nat is {self.nat!r}, but machines have public addresses; set cloud.private")
        for name, pattern in NAMES.items():
            _check_words(name, pattern, getattr(self, name))
        if not 1 <= self.port <= PORT_MAX:
            raise ValueError(f"cloud.port is {self.port}; use 1 to {PORT_MAX}")
        for name in ("syncer_disk_gb", "host_disk_gb"):
            if not DISK_MIN_GB <= getattr(self, name) <= DISK_MAX_GB:
                raise ValueError(f"cloud.{name} is {getattr(self, name)}; use {DISK_MIN_GB} to {DISK_MAX_GB}")
        if self.restarts_max < 0:
            raise ValueError(f"cloud.restarts_max is {self.restarts_max}; use at least 0")
        if not self.source_ranges:
            raise ValueError(
                "cloud.source_ranges is empty, so no learner could connect; write ranges such as 10.0.0.0/8"
            )
        networks = [_network(text) for text in self.source_ranges]
        if self.external and all(network.is_private for network in networks):
            raise ValueError(
                f"cloud.external is true, but cloud.source_ranges {', '.join(self.source_ranges)} are private "
                "addresses, which nobody on the internet has; write the ranges of the islands' addresses"
            )

    @property
    def of_extra(self) -> "CloudConfig":
        """Return the settings of the islands beyond islands.least."""
        own = {each.name: getattr(self.extra, each.name) for each in fields(ExtraConfig)}
        given: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
        # Another capacity has no reservation.
        given |= {"reservation": ""} if "capacity" in given else {}
        return replace(self, **given)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuConfig:
    """GPU machines, for `diloco launch slurm` and `sky`; cloud.env, port, image and restarts_max apply there too."""

    accelerator: str = ""
    """GPU by SkyPilot's name, such as H100. Set it for launch sky, which refuses to start without it. Slurm's jobs do
    not request it; diloco plan estimates the time of a step from it."""
    options: tuple[str, ...] = ()
    """Options of sbatch for every job: [--partition=gpu, --account=me, --time=48:00:00]. Set it to what your Slurm
    cluster requires, such as partition, account and time limit; sky does not use it."""
    setup: str = ""
    """One line of bash that runs before each process, such as source /shared/venv/bin/activate. Set it if processes
    need an environment, modules or variables before they start."""

    def __post_init__(self) -> None:
        for option in self.options:
            if not re.fullmatch(r"--[a-z][a-z-]*(=[^\s'\"$`\\]*)?", option):
                raise ValueError(f"gpu.options has {option!r}; write options of sbatch as --name=value, without spaces")
        if "\n" in self.setup:
            raise ValueError("gpu.setup has several lines; write one, with && between its commands")
        if not re.fullmatch(r"[A-Za-z0-9-]*", self.accelerator):
            raise ValueError(f"gpu.accelerator is {self.accelerator!r}; write a name such as H100")


def _check_words(section: str, pattern: str, given: dict[str, str]) -> None:
    if len(given) > WORDS_MAX:
        raise ValueError(f"cloud.{section} has {len(given)} entries; use at most {WORDS_MAX}")
    for name, value in given.items():
        if not re.fullmatch(pattern, name) or name.startswith("MEGASCALE_"):
            raise ValueError(f"cloud.{section} has the name {name!r}; it must match {pattern}, and not be MEGASCALE_*")
        if len(value) > LENGTH_MAX or not re.fullmatch(r"[\x20-\x7e]*", value) or re.search(r"[\s'\"$`\\]", value):
            raise ValueError(
                f"cloud.{section}.{name} is {value[:80]!r}; use at most {LENGTH_MAX} characters, no spaces, quotes, "
                "$, ` or backslashes"
            )


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise ValueError(f"cloud.source_ranges has {text!r}: {error}; write a range such as 10.0.0.0/8") from error
