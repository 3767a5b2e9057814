"""Checks of the config, names, and commands of learner and syncer, shared by all ways of launching."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from diloco_jax.settings.cloud import CloudConfig
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.slices import Topology
from diloco_jax.transport.link import split_address
from diloco_jax.transport.trust.security import is_loopback

# Paths in containers; the volume outlives its container.
CONFIG_PATH = "/etc/diloco/config/config.yaml"
CERTIFICATES_PATH = "/etc/diloco/certs"
VOLUME = "/var/diloco"
RUN_DIR = f"{VOLUME}/run"
# Settings of `cloud` that every way needs.
NEEDED = ("project", "image", "network", "service_account", "bucket")
# Properties of a TPU generation that each way needs; a generation may not have them.
OF_CHIPS = {
    "gke": ("gke_accelerator", "machine_family"),
    "pathways": ("gke_accelerator", "machine_family", "pathways"),
    "gce": ("machine_family",),
    "tpu-vm": ("runtime_version",),
}
# The ways whose machines GKE makes; they ask for them alike.
ON_GKE = ("gke", "pathways")
# The ways that start each slice of an island of several where the others find it again.
WITH_SLICES = ("gke", "tpu-vm", "slurm")
# The port where each host of such a slice listens for those of the others.
SLICES_PORT = 7100
# The placeholder for the bucket's name in paths.
BUCKET = "{bucket}"
ABOUT_SYNCER = "The syncer. `delete` keeps its disk; when the syncer is created again, the run continues from it."
# The limit of a GKE node pool's name. Names of pods and instances start with it and may have 63 characters.
NAME_LENGTH_MAX = 40
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
CAPACITY = tomllib.loads(Path(__file__).with_name("capacity.toml").read_text(encoding="utf-8"))
_ZONE = re.compile(r"[a-z]+(-[a-z0-9]+)+-[a-z0-9]+")


class Asked(NamedTuple):
    """A request for machines."""

    # Flags of the command that creates the machines.
    flags: tuple[str, ...] = ()
    # A label of the nodes and its value, on GKE.
    selector: tuple[str, ...] = ()
    # Whether only the alpha version of the command has these flags.
    alpha: bool = False


class Site(NamedTuple):
    """The part of a run that one provider makes, in a folder beside those of other providers."""

    # Names of its islands.
    names: tuple[str, ...]
    # Whether it has the syncer; otherwise the file `address` in its folder has host:port of the syncer.
    syncer: bool


class IslandMachines(NamedTuple):
    """The machines of an island, or of one slice of an island of several."""

    # The names of the island and of these machines.
    name: str
    resource: str
    # The island's TPU slice.
    topology: Topology
    zone: str
    asked: Asked
    image: str
    # The number of the slice, and the names of the machines of all slices of the island; none for an island of one.
    slice: int = 0
    slices: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Return the name of these machines in the run, which files have too."""
        return f"{self.name}-slice-{self.slice}" if self.slices else self.name

    @property
    def region(self) -> str:
        return region_of(self.zone)

    def __str__(self) -> str:
        hosts = f"{self.topology.hosts} host{'s' * (self.topology.hosts > 1)}"
        return f"{self.label}: {self.topology} ({self.topology.accelerator_type}, {hosts}) in {self.zone}"


def region_of(zone: str) -> str:
    """Return the region of a zone: us-east5-a -> us-east5."""
    return zone.rpartition("-")[0]


def slices_of(
    config: RunConfig, way: str, needed: Sequence[str], names: Sequence[str] | None = None
) -> list[IslandMachines]:
    """Check the config for a way of launching, and return the islands' machines.

    Args:
      needed: settings of `cloud` that this way needs in addition to `NEEDED`.
      names: islands that are launched this way; None for all.

    Raises:
      ValueError: a setting is missing or does not work with this way.
    """
    if config.algorithm != "decoupled":
        raise ValueError(
            f"algorithm is {config.algorithm}, which has one process; launch needs islands and a syncer: set it to "
            "decoupled"
        )
    if missing := [f"cloud.{name}" for name in (*NEEDED, *needed) if not getattr(config.cloud, name)]:
        raise ValueError(
            f"launch {way} needs {', '.join(missing)}: write {'it' if len(missing) == 1 else 'them'} into the config, "
            f"or add --{missing[0]} VALUE"
        )
    check_label("name", config.name)
    check_label("cloud.namespace", config.cloud.namespace)
    check_label("cloud.cluster", config.cloud.cluster)
    check_slices(config, way)
    slices = []
    for name in config.islands.names if names is None else names:
        island, place = config.island(name), config.place(name)
        for what in ("topology", "zone"):
            if not getattr(island, what):
                raise ValueError(
                    f"{name} has no {what}; set islands.{what}, or islands.each.{name}.{what}: --islands.{what} VALUE"
                )
        check_zone(f"{name}'s zone", island.zone)
        numbers = [f"-slice-{number}" * (config.islands.slices > 1) for number in range(config.islands.slices)]
        resources = tuple(
            check_label(f"the name of {name}'s machines (name, island)", f"{config.name}-{name}{number}")
            for number in numbers
        )
        assert island.slice is not None, "an island with a topology has a slice"
        if lacks := [each for each in OF_CHIPS[way] if not getattr(island.slice.generation, each)]:
            raise ValueError(
                f"{name} is a {island.slice}, which launch {way} cannot make: its generation has no {lacks[0]}; use "
                "another way, or write it into islands.generations"
            )
        asked = asked_of(config.cloud_of(name), way)
        machines = IslandMachines(name, "", island.slice, island.zone, asked, place.image)
        siblings = resources if len(resources) > 1 else ()
        slices += [
            machines._replace(resource=resource, slice=number, slices=siblings)
            for number, resource in enumerate(resources)
        ]
    check_zone("cloud.syncer_zone", syncer_zone(config))
    return slices


def check_slices(config: RunConfig, way: str) -> None:
    """Check that a way can start islands of several slices, if the config has them; ValueError otherwise."""
    if config.islands.slices > 1 and way not in WITH_SLICES:
        raise ValueError(
            f"islands.slices is {config.islands.slices}, but with launch {way} a machine that replaces another one has "
            f"a new address, where other slices do not look for it; use launch {', '.join(WITH_SLICES)}, or start the "
            "slices yourself (docs/slices.md)"
        )


def check_label(what: str, name: str) -> str:
    """Return a name unchanged if Kubernetes and Compute Engine accept it; ValueError otherwise."""
    if len(name) > NAME_LENGTH_MAX or not _LABEL.fullmatch(name):
        raise ValueError(
            f"{what} is {name!r}; use a lower-case letter first, then lower-case letters, digits and '-', no '-' at "
            f"the end, and at most {NAME_LENGTH_MAX} characters"
        )
    return name


def check_zone(what: str, zone: str) -> None:
    """Check that a text has the form of a zone's name; ValueError otherwise."""
    if not _ZONE.fullmatch(zone):
        raise ValueError(f"{what} is {zone!r}; write a zone such as us-east5-a")


def syncer_zone(config: RunConfig) -> str:
    return config.cloud.syncer_zone or config.island(config.islands.names[0]).zone


def syncer_region(config: RunConfig) -> str:
    return region_of(syncer_zone(config))


def regions_of(config: RunConfig, slices: Sequence[IslandMachines], *, syncer: bool) -> list[str]:
    """List the regions of the islands and, if it is there too, of the syncer."""
    return sorted({each.region for each in slices} | ({syncer_region(config)} if syncer else set()))


def syncer_name(config: RunConfig) -> str:
    """Return the name of the syncer's machine, disk, address or Service."""
    return f"{config.name}-syncer"


def metrics_port(config: RunConfig) -> int | None:
    """Return the port that Prometheus scrapes, None if there is none; ValueError if a collector could not reach it."""
    if not config.syncer.metrics:
        return None
    port = split_address(config.syncer.metrics)[1]
    if is_loopback(config.syncer.metrics) or not port or port == config.cloud.port:
        raise ValueError(
            f"syncer.metrics is {config.syncer.metrics}, which the cluster's collector cannot reach; write "
            f"0.0.0.0:PORT with a port other than {config.cloud.port}, such as 0.0.0.0:9464"
        )
    return port


def environment(config: RunConfig, name: str) -> dict[str, str]:
    """Return the environment of an island's processes; the compiler's options are in the config."""
    return {
        # The cache has the copy of a token store.
        "DILOCO_CACHE": f"{VOLUME}/cache",
        "DILOCO_LOG": "json",
        "JAX_COMPILATION_CACHE_DIR": f"gs://{config.cloud.bucket}/{config.name}/programs/{name}",
        **config.cloud.env,
    }


def remote(config: RunConfig) -> RunConfig:
    """Return the config for all containers.

    The syncer listens on all addresses, every process has a certificate, and paths have the bucket's name.
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
    profiles = config.islands.profiles or (f"gs://{bucket}/profiles" if config.islands.pathways and bucket else "")
    each = {
        name: replace(own, data=replace(own.data, path=own.data.path.replace(BUCKET, bucket)))
        if own.data is not None and own.data.path is not None
        else own
        for name, own in config.islands.each.items()
    }
    islands = replace(config.islands, profiles=profiles.replace(BUCKET, bucket), each=each)
    return replace(config, transport=transport, data=data, checkpoints=checkpoints, islands=islands)


def flags(*words: str) -> str:
    """Return flags as the end of a command line, without empty ones."""
    return "".join(f" {word}" for word in words if word)


def make_certificates(config: RunConfig) -> str:
    """Return the command that makes all missing certificates."""
    return f"diloco certs certs --learners {','.join(config.islands.names)}"


def certificate_files(name: str) -> list[str]:
    """List the files from `diloco certs` that a learner, or "syncer", needs."""
    return ["ca.pem", "token", f"{name}.pem", f"{name}.key"]


def learner_words(name: str, syncer: str) -> list[str]:
    """Return the arguments of `diloco` on every host of an island; `syncer` is host:port."""
    return ["learner", CONFIG_PATH, "--island", name, "--syncer", syncer, "--run-dir", RUN_DIR]


def slice_words(each: IslandMachines, host: str) -> list[str]:
    """Return the arguments that name a slice and where its host finds the hosts of the others; [] for an island of one.

    Args:
      host: name of a slice's host, with {} for the name of the slice's machines.
    """
    addresses = ",".join(f"{host.replace('{}', resource)}:{SLICES_PORT}" for resource in each.slices)
    return ["--slice", str(each.slice), "--slices", addresses] if each.slices else []


def syncer_words() -> list[str]:
    """Return the arguments of `diloco` in the syncer's container; in a run's folder it continues the run."""
    return ["syncer", CONFIG_PATH, "--run-dir", RUN_DIR]


def asked_of(cloud: CloudConfig, way: str) -> Asked:
    """Return the request for an island's machines; ValueError if this way cannot provide the capacity or the queue."""
    way = "gke" if way in ON_GKE else way
    if way != "gke" and (unknown := next((name for name in ("queue", "priority_class") if getattr(cloud, name)), "")):
        raise ValueError(
            f"cloud.{unknown} is {getattr(cloud, unknown)!r}, but only launch gke and pathways have queues; remove it"
        )
    if cloud.capacity == "on-demand":
        return Asked()
    asked = CAPACITY[way].get(cloud.capacity)
    if asked is None:
        able = " and ".join(name for name, known in CAPACITY.items() if cloud.capacity in known)
        raise ValueError(f"cloud.capacity is {cloud.capacity}, which launch {way} cannot request; only {able} can")
    names = {"reservation": cloud.reservation, "name": cloud.reservation.rpartition("/")[2]}
    words, label = (tuple(word.format(**names) for word in asked.get(part, ())) for part in ("flags", "selector"))
    return Asked(words, label, asked.get("alpha", False))
