"""The common ground of all ways of launching: checks of the config, names, and commands of learner and syncer."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from diloco_jax.settings.cloud import PORT_MAX, CloudConfig
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.slices import Topology
from diloco_jax.transport.link import split_address
from diloco_jax.transport.trust.security import is_loopback

CONFIG_PATH = "/etc/diloco/config/config.yaml"  # in containers
CERTIFICATES_PATH = "/etc/diloco/certs"
VOLUME = "/var/diloco"  # outlives the container
RUN_DIR = f"{VOLUME}/run"
NEEDED = ("project", "image", "network", "service_account", "bucket")  # settings of `cloud` that every way needs
# of a TPU generation, which may not have them
OF_CHIPS = {"gke": ("gke_accelerator", "machine_family"), "gce": ("machine_family",), "tpu-vm": ("runtime_version",)}
BUCKET = "{bucket}"  # in data.path: the name of the bucket
ABOUT_SYNCER = "The syncer. `delete` leaves its disk, from which the same run goes on when it is made again."
NAME_LENGTH_MAX = 40  # of a node pool of GKE; pods and instances, whose names begin with it, may have 63
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
CAPACITY = tomllib.loads(Path(__file__).with_name("capacity.toml").read_text(encoding="utf-8"))
_ZONE = re.compile(r"[a-z]+(-[a-z0-9]+)+-[a-z0-9]+")


class Asked(NamedTuple):
    """A request for machines."""

    flags: tuple[str, ...] = ()  # of the command that makes them
    selector: tuple[str, ...] = ()  # label that their nodes have, and its value, on GKE
    alpha: bool = False  # only the alpha version of the command knows these flags


class IslandMachines(NamedTuple):
    """One island's machines."""

    name: str  # of the island
    resource: str  # of its machines
    topology: Topology  # its TPU slice
    zone: str  # where it is

    @property
    def region(self) -> str:
        return region_of(self.zone)

    def __str__(self) -> str:
        hosts = f"{self.topology.hosts} host{'s' * (self.topology.hosts > 1)}"
        return f"{self.name}: {self.topology} ({self.topology.accelerator_type}, {hosts}) in {self.zone}"


def region_of(zone: str) -> str:
    """Return the region of a zone: us-east5-a -> us-east5."""
    return zone.rpartition("-")[0]


def slices_of(config: RunConfig, way: str, needed: Sequence[str]) -> list[IslandMachines]:
    """Check what every way needs, and these settings of `cloud`; return the islands' machines, or raise ValueError."""
    if config.algorithm != "decoupled":
        raise ValueError(f"algorithm is {config.algorithm}, which has one process; launch starts islands and a syncer")
    if missing := [f"cloud.{name}" for name in (*NEEDED, *needed) if not getattr(config.cloud, name)]:
        raise ValueError(
            f"launch {way} needs {', '.join(missing)}: write {'it' if len(missing) == 1 else 'them'} into the config, "
            f"or add --{missing[0]} VALUE"
        )
    check_label("name", config.name)
    check_label("cloud.namespace", config.cloud.namespace)
    check_label("cloud.cluster", config.cloud.cluster)
    if ports(config)[-1] > PORT_MAX:
        raise ValueError(
            f"cloud.port is {config.cloud.port}, and {config.syncer.shards} merge shards take the ports after it, but "
            f"{PORT_MAX} is the last port; lower cloud.port or syncer.shards"
        )
    slices = []
    for name in config.islands.names:
        island = config.island(name)
        for what in ("topology", "zone"):
            if not getattr(island, what):
                raise ValueError(
                    f"{name} has no {what}; set islands.{what}, or islands.each.{name}.{what}: --islands.{what} VALUE"
                )
        check_zone(f"{name}'s zone", island.zone)
        resource = check_label(f"the name of {name}'s machines (name, island)", f"{config.name}-{name}")
        assert island.slice is not None, "checked above"
        if lacks := [each for each in OF_CHIPS[way] if not getattr(island.slice.generation, each)]:
            raise ValueError(
                f"{name} is a {island.slice}, which launch {way} cannot make: its generation has no {lacks[0]}; use "
                "another way, or write it into islands.generations"
            )
        slices.append(IslandMachines(name, resource, island.slice, island.zone))
    check_zone("cloud.syncer_zone", syncer_zone(config))
    return slices


def check_label(what: str, name: str) -> str:
    """Return a name that Kubernetes and Compute Engine take; ValueError if this is none."""
    if len(name) > NAME_LENGTH_MAX or not _LABEL.fullmatch(name):
        raise ValueError(
            f"{what} is {name!r}; Google Cloud takes a lower-case letter first, then lower-case letters, digits and "
            f"'-', no '-' at the end, and here at most {NAME_LENGTH_MAX} characters: choose another"
        )
    return name


def check_zone(what: str, zone: str) -> None:
    """Raise ValueError when this is no name of a zone."""
    if not _ZONE.fullmatch(zone):
        raise ValueError(f"{what} is {zone!r}; write a zone such as us-east5-a")


def syncer_zone(config: RunConfig) -> str:
    return config.cloud.syncer_zone or config.island(config.islands.names[0]).zone


def syncer_region(config: RunConfig) -> str:
    return region_of(syncer_zone(config))


def regions_of(config: RunConfig, slices: Sequence[IslandMachines]) -> list[str]:
    """List the regions of the islands and of the syncer."""
    return sorted({each.region for each in slices} | {syncer_region(config)})


def syncer_name(config: RunConfig) -> str:
    """Name the syncer's machine, disk, address or Service."""
    return f"{config.name}-syncer"


def ports(config: RunConfig) -> range:
    """Return the ports on which the syncer and its merge shards listen."""
    shards = config.syncer.shards if config.syncer.shards > 1 else 0
    return range(config.cloud.port, config.cloud.port + shards + 1)


def metrics_port(config: RunConfig) -> int | None:
    """Return the port at which the syncer tells Prometheus of the run, if it does; ValueError if nobody could ask."""
    if not config.syncer.metrics:
        return None
    port = split_address(config.syncer.metrics)[1]
    if is_loopback(config.syncer.metrics) or not port or port in ports(config):
        raise ValueError(
            f"syncer.metrics is {config.syncer.metrics}, where no collector of the cluster can ask; write 0.0.0.0:PORT "
            f"with a port beside {port_range(config)}, such as 0.0.0.0:9464"
        )
    return port


def port_range(config: RunConfig) -> str:
    """Write the ports as text: 50051, or 50051-50055."""
    first, *_, last = [*ports(config)] * 2
    return f"{first}" if first == last else f"{first}-{last}"


def environment(config: RunConfig, name: str) -> dict[str, str]:
    """Return the environment of an island's processes; options of the compiler they take from the config."""
    return {
        "DILOCO_CACHE": f"{VOLUME}/cache",  # the copy of a token store
        "DILOCO_LOG": "json",
        "JAX_COMPILATION_CACHE_DIR": f"gs://{config.cloud.bucket}/{config.name}/programs/{name}",
        **config.cloud.env,
    }


def remote(config: RunConfig) -> RunConfig:
    """Make the settings that all containers read.

    The syncer listens everywhere, every process has a certificate, and paths name the bucket.
    """
    transport = replace(
        config.transport,
        address=f"0.0.0.0:{config.cloud.port}",
        allow_plaintext=False,
        tls_ca=f"{CERTIFICATES_PATH}/ca.pem",
        tls_certificate=f"{CERTIFICATES_PATH}/{{name}}.pem",
        tls_key=f"{CERTIFICATES_PATH}/{{name}}.key",
        token_file=f"{CERTIFICATES_PATH}/token",
    )
    bucket, data = config.cloud.bucket, config.data
    mixture, evaluation = (
        {name: replace(part, path=part.path.replace(BUCKET, bucket)) for name, part in parts.items()}
        for parts in (data.mixture, data.evaluation)
    )
    data = replace(data, path=data.path.replace(BUCKET, bucket), mixture=mixture, evaluation=evaluation)
    states = config.checkpoints.states or (f"gs://{bucket}/{config.name}/states" if bucket else "")
    checkpoints = replace(config.checkpoints, states=states.replace(BUCKET, bucket))
    return replace(config, transport=transport, data=data, checkpoints=checkpoints)


def flags(*words: str) -> str:
    """Write flags of a command behind others; those that are empty are none."""
    return "".join(f" {word}" for word in words if word)


def make_certificates(config: RunConfig) -> str:
    """Write the command that makes all certificates; those that are there stay."""
    return f"diloco certs certs --learners {','.join(config.islands.names)}"


def certificate_files(name: str) -> list[str]:
    """List what this learner, or "syncer", needs of the folder that `diloco certs` makes."""
    return ["ca.pem", "token", f"{name}.pem", f"{name}.key"]


def learner_words(name: str, syncer: str) -> list[str]:
    """Return the arguments of `diloco` in every host of an island; the syncer is at host:port."""
    return ["learner", CONFIG_PATH, "--island", name, "--syncer", syncer, "--run-dir", RUN_DIR]


def syncer_words() -> list[str]:
    """Return the arguments of `diloco` in the syncer's container; in a run's folder it goes on."""
    return ["syncer", CONFIG_PATH, "--run-dir", RUN_DIR]


def asked_of(cloud: CloudConfig, way: str) -> Asked:
    """Return how this way asks for the machines of an island; ValueError if it cannot, or has no queue."""
    if way != "gke" and (unknown := next((name for name in ("queue", "priority_class") if getattr(cloud, name)), "")):
        raise ValueError(
            f"cloud.{unknown} is {getattr(cloud, unknown)!r}, but only launch gke has queues; leave it out"
        )
    if cloud.capacity == "on-demand":
        return Asked()
    asked = CAPACITY[way].get(cloud.capacity)
    if asked is None:
        able = " and ".join(name for name, known in CAPACITY.items() if cloud.capacity in known)
        raise ValueError(f"cloud.capacity is {cloud.capacity}, which launch {way} cannot ask for; only {able} can")
    names = {"reservation": cloud.reservation, "name": cloud.reservation.rpartition("/")[2]}
    words, label = (tuple(word.format(**names) for word in asked.get(part, ())) for part in ("flags", "selector"))
    return Asked(words, label, asked.get("alpha", False))
