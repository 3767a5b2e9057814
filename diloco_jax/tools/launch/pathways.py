"""Pathways on Google Kubernetes Engine: one JobSet for all islands, and a StatefulSet for the syncer beside it.

The JobSet's head runs Pathways' resource manager and proxy, and one process that drives all islands. Each worker Job is
the slice of one island. Fields and arguments are those of pathwaysutils.experimental.gke.jobset.PathwaysJobSet 0.1.13,
which tests compare with this manifest (decision 0081). Nobody has run these files on Pathways.
"""

from typing import NamedTuple

from diloco_jax.runtime.records.signals import ASKED_TO_END, WRONG_INPUT
from diloco_jax.settings.cloud import AUTO, ExtraConfig
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.slices import CHIPS_PER_HOST, Topology
from diloco_jax.settings.text import dump
from diloco_jax.tools.launch import common, gke
from diloco_jax.tools.launch.common import IslandMachines
from diloco_jax.tools.launch.gke import Pool
from diloco_jax.tools.launch.launcher import Launcher, Plan, render
from diloco_jax.tools.launch.needs import GB, MACHINE_GIB, MARGIN, Needs, allocatable, island_bytes

IMAGES = "us-docker.pkg.dev/cloud-tpu-v2-images/pathways"
PROXY_PORT = 29000
# Hosts with more chips than usual have another name in Pathways' instance types.
LARGE_HOST = 8
NAME = "islands"
# A pod's name is that of the JobSet with the Job's name, two indices and a suffix; this is the limit of its length.
POD_NAME_MAX = 63


class ContainerLimits(NamedTuple):
    """The limits of a container of the head."""

    cpus: int
    gb: int


MANAGER, PROXY = ContainerLimits(8, 32), ContainerLimits(16, 100)


def parts(config: RunConfig, slices: list[IslandMachines], needs: Needs, syncer: bool) -> Plan:
    """Return the files and commands; ValueError if one controller cannot drive the islands."""
    assert syncer, "Pathways makes all islands and the syncer"
    check(config, slices)
    region, settings = slices[0].region, dump(common.remote(config))
    folder = f"clusters/{region}"
    script = f"{folder}/cluster.sh"
    head = Pool(f"{config.name}-head", slices[0].zone, head_machine(config, slices, needs), 1, ())
    cluster = gke.cluster_script(
        config,
        region,
        slices,
        manifests=[NAME],
        pools=[head, *gke.pools(config, region, slices)],
        certificates={NAME: islands_certificates(config), "syncer": common.certificate_files("syncer")},
    )
    return Plan(
        files={
            "syncer.sh": gke.syncer_script(config),
            script: cluster,
            f"{folder}/common.yaml": gke.common_manifest(config, settings),
            f"{folder}/{NAME}.yaml": islands_manifest(config, slices, needs),
            f"{folder}/syncer.yaml": gke.syncer_manifest(config, needs),
        },
        create=(f"{script} create", f"{script} configure", "./syncer.sh create", f"{script} start"),
        delete=(f"{script} stop", "./syncer.sh delete", f"{script} delete"),
    )


def check(config: RunConfig, slices: list[IslandMachines]) -> None:
    """Check that one controller of Pathways can drive the islands; ValueError with the setting to change."""
    if config.islands.controller != "single" or not config.islands.pathways:
        raise ValueError(
            "launch pathways starts one process for all islands: set islands.controller to single and islands.pathways "
            "to true, or use launch gke for a process per host"
        )
    if config.cloud.extra != ExtraConfig():
        raise ValueError(
            "cloud.extra is set, but launch pathways starts all islands as one JobSet; remove it, or use launch gke"
        )
    first = slices[0]
    other = next((each for each in slices if each[2:] != first[2:]), None)
    if other is not None:
        raise ValueError(
            f"{other.name} is {other.topology} in {other.zone}, and {first.name} {first.topology} in {first.zone}: "
            "Pathways has slices of one kind in one zone; make them alike, or use launch gke"
        )
    if common.syncer_region(config) != first.region:
        raise ValueError(
            f"cloud.syncer_zone is {config.cloud.syncer_zone}, but the islands are in {first.region}: launch pathways "
            "has one cluster; remove cloud.syncer_zone"
        )
    pod = f"{config.name}-{NAME}-pathways-worker-{len(slices) - 1}-{first.topology.hosts - 1}-xxxxx"
    if len(pod) > POD_NAME_MAX:
        raise ValueError(
            f"name is {config.name!r}, and a pod's name would have {len(pod)} characters; shorten it by "
            f"{len(pod) - POD_NAME_MAX}"
        )
    if first.topology.chips_per_host not in (CHIPS_PER_HOST, LARGE_HOST):
        raise ValueError(
            f"{first.name} is {first.topology}, one host with {first.topology.chips_per_host} chips, which Pathways' "
            f"JobSet does not have; use hosts of {CHIPS_PER_HOST} or {LARGE_HOST} chips"
        )


def instance_type(topology: Topology) -> str:
    """Return Pathways' name of a slice, such as tpuv5:4x4x8."""
    large = "1t" if topology.chips_per_host == LARGE_HOST else ""
    return f"{topology.generation.pathways}{large}:{topology.dims}"


def islands_certificates(config: RunConfig) -> list[str]:
    """List the files from `diloco certs` that the process of all islands needs."""
    return list(dict.fromkeys(file for name in config.islands.names for file in common.certificate_files(name)))


def islands_bytes(needs: Needs, slices: list[IslandMachines]) -> float:
    """Return the memory that the process of all islands needs, in bytes; 0 if unknown."""
    return sum(each.topology.hosts * island_bytes(needs, each.name) for each in slices)


def head_machine(config: RunConfig, slices: list[IslandMachines], needs: Needs) -> str:
    """Return the machine type of the head: the config's, or the smallest with enough memory; ValueError if none is."""
    if config.cloud.head_machine_type != AUTO:
        return config.cloud.head_machine_type
    if needs is None:
        raise ValueError(
            "cloud.head_machine_type is auto, but the model cannot be loaded here, so its size is unknown; name a "
            "machine type with 32 processors or more"
        )
    need = (MANAGER.gb + PROXY.gb) * GB + MARGIN * islands_bytes(needs, slices)
    for name, gib in MACHINE_GIB.items():
        # The limits of the first two containers are 24 processors.
        if int(name.rpartition("-")[2]) > MANAGER.cpus + PROXY.cpus and allocatable(gib) >= need:
            return name
    raise ValueError(
        f"the head needs {need / GB:.0f} GB of memory, more than {name} has; name a larger machine in "
        "cloud.head_machine_type, or use launch gke"
    )


def islands_manifest(config: RunConfig, slices: list[IslandMachines], needs: Needs) -> str:
    """Return the manifest of the JobSet of all islands."""
    cloud, first = config.cloud, slices[0]
    environment = common.environment(config, NAME)
    # Pathways has another cache, and pathwaysutils switches JAX's off.
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    memory = islands_bytes(needs, slices)
    return render(
        "pathways/islands.yaml",
        **gke.everywhere(config),
        jobset=f"{config.name}-{NAME}",
        head_pool=f"{config.name}-head",
        slices=slices,
        topology=first.topology,
        zone=first.zone,
        instance_type=instance_type(first.topology),
        scratch=f"gs://{cloud.bucket}/{config.name}/pathways",
        server_image=f"{IMAGES}/server:{cloud.pathways_version}",
        proxy_image=f"{IMAGES}/proxy_server:{cloud.pathways_version}",
        proxy_port=PROXY_PORT,
        rm=MANAGER,
        proxy=PROXY,
        queue=cloud.queue,
        priority_class=cloud.priority_class,
        selector=first.asked.selector,
        restarts=cloud.restarts_max,
        wrong_input=WRONG_INPUT,
        ends=[WRONG_INPUT, *ASKED_TO_END],
        arguments=["islands", common.CONFIG_PATH, "--syncer", "$(DILOCO_SYNCER)", "--run-dir", common.RUN_DIR],
        environment=environment,
        memory=gke.memory(MARGIN * memory),
    )


LAUNCHER = Launcher("pathways", (), parts)
