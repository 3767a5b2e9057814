"""Google Kubernetes Engine: a cluster per region, a JobSet per island, and a StatefulSet for the syncer.

The syncer is behind a load balancer. When a host fails, its Job fails, and the JobSet restarts all hosts of the island.
Other islands have separate JobSets, so they are not affected. Each slice of an island of several has a separate JobSet
too, and finds the others under the names of their pods, which outlive the pods. Fields of JobSet:
jobset.sigs.k8s.io, API jobset.x-k8s.io/v1alpha2.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from diloco_jax.runtime.records.files import HEALTH, STATES
from diloco_jax.runtime.records.signals import ASKED_TO_END, WRONG_INPUT
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import dump
from diloco_jax.tools.launch import common
from diloco_jax.tools.launch.common import IslandMachines
from diloco_jax.tools.launch.launcher import POD_ACCOUNT, Launcher, Plan, render
from diloco_jax.tools.launch.needs import GIB, Needs, island_bytes, syncer_machine

# The time until a process must have touched its health file; a token store may be copied first.
START_MINUTES = 180
# The probe waits longer than the process's own watchdog, because the watchdog reports where a process hangs.
LATER_MINUTES = 5
HEALTH_PATH = f"{common.RUN_DIR}/{HEALTH}"
JOBSET = "https://github.com/kubernetes-sigs/jobset/releases/download/v0.12.0/manifests.yaml"
# JobSet's controller requests half a processor, which smaller nodes do not have free.
CONTROLLER_MACHINE = "e2-standard-4"
# Kueue's check that requests machines of flex-start capacity; all runs of a cluster share it.
CHECK = "diloco-flex-start"
# The name of a JobSet's pod: that of the pod with the same number in another JobSet of the island, for slices.
HOST = "{}-host-0-$(JOB_COMPLETION_INDEX).{}"
# Flags of a pool that may stay empty until there is capacity.
GROWS = ("--enable-autoscaling", "--min-nodes=0", "--location-policy=ANY")


class Pool(NamedTuple):
    """A node pool of a cluster."""

    name: str
    zone: str
    machine: str
    nodes: int
    flags: tuple[str, ...]


def parts(config: RunConfig, slices: list[IslandMachines], needs: Needs, syncer: bool) -> Plan:
    regions = common.regions_of(config, slices, syncer=syncer)
    files, settings = {"syncer.sh": syncer_script(config)} if syncer else {}, dump(common.remote(config))
    syncer_region = common.syncer_region(config) if syncer else None
    for region in regions:
        here = [each for each in slices if each.region == region]
        folder = f"clusters/{region}"
        names = list(dict.fromkeys(each.name for each in here))
        certified = [*names, "syncer"] if region == syncer_region else names
        files[f"{folder}/cluster.sh"] = cluster_script(
            config,
            region,
            here,
            manifests=[each.label for each in here],
            pools=pools(config, region, here, syncer=syncer),
            queued=[each.label for each in here if config.cloud_of(each.name).queue],
            by_request=any(_by_request(config, each.name) for each in here),
            certificates={name: common.certificate_files(name) for name in certified},
        )
        files[f"{folder}/common.yaml"] = common_manifest(config, settings)
        if queued := [each.label for each in here if _by_request(config, each.name)]:
            files[f"{folder}/admission.yaml"] = render("gke/admission.yaml", check=CHECK, islands=queued)
        files |= {f"{folder}/{each.label}.yaml": island_manifest(config, each, needs) for each in here}
    if syncer:
        files[f"clusters/{syncer_region}/syncer.yaml"] = syncer_manifest(config, needs)
    create, delete = (("./syncer.sh create",), ("./syncer.sh delete",)) if syncer else ((), ())
    scripts = [f"clusters/{region}/cluster.sh" for region in regions]
    return Plan(
        files=files,
        create=(
            *(f"{each} create" for each in scripts),
            *(f"{each} configure" for each in scripts),
            *create,
            *(f"{each} start" for each in scripts),
        ),
        delete=(*(f"{each} stop" for each in scripts), *delete, *(f"{each} delete" for each in scripts)),
    )


def common_manifest(config: RunConfig, settings: str) -> str:
    """Return the manifest with the run's namespace, its account, and the config for all containers."""
    account = config.cloud.service_account
    return render("gke/common.yaml", **everywhere(config), service_account=account, settings=settings)


def island_manifest(config: RunConfig, each: IslandMachines, needs: Needs) -> str:
    """Return the manifest of the JobSet of an island, or of one slice of it."""
    cloud = config.cloud_of(each.name)
    return render(
        "gke/island.yaml",
        **everywhere(config) | {"image": each.image},
        island=each,
        queue=cloud.queue,
        priority_class=cloud.priority_class,
        selector=each.asked.selector,
        restarts=cloud.restarts_max,
        wrong_input=WRONG_INPUT,
        ends=[WRONG_INPUT, *ASKED_TO_END],
        states=f"{common.RUN_DIR}/{STATES}/{each.name}",
        arguments=[*common.learner_words(each.name, "$(DILOCO_SYNCER)"), *common.slice_words(each, HOST)],
        environment=common.environment(config, each.name),
        memory=memory(island_bytes(needs, each.name)),
    )


def syncer_manifest(config: RunConfig, needs: Needs) -> str:
    """Return the manifest of the syncer's StatefulSet and Service, and with `syncer.metrics` of its PodMonitoring."""
    machine = syncer_machine(config, needs)
    return render(
        "gke/syncer.yaml",
        **everywhere(config),
        arguments=common.syncer_words(),
        environment={"DILOCO_CACHE": f"{common.VOLUME}/cache", "DILOCO_LOG": "json"},
        port=config.cloud.port,
        metrics_port=common.metrics_port(config),
        request=memory(machine.request_bytes),
        limit=memory(machine.limit_bytes),
        disk_gb=config.cloud.syncer_disk_gb,
        external=config.cloud.external,
        source_ranges=config.cloud.source_ranges,
    )


def everywhere(config: RunConfig) -> dict[str, Any]:
    """Return the values that all manifests share."""
    watchdog = config.watchdog
    return {
        "run": config.name,
        "namespace": config.cloud.namespace,
        "account": POD_ACCOUNT,
        "image": config.cloud.image,
        "health": HEALTH_PATH,
        "certificates_path": common.CERTIFICATES_PATH,
        "volume": common.VOLUME,
        # Without a watchdog the probe must not end any process.
        "stale_minutes": math.ceil(watchdog.start_s / 60) + LATER_MINUTES if watchdog.least_s else 0,
        "start_minutes": START_MINUTES,
    }


def memory(num_bytes: float) -> str:
    """Return an amount of memory for Kubernetes; "" if it is 0, unknown."""
    return f"{math.ceil(num_bytes / GIB)}Gi" if num_bytes else ""


LAUNCHER = Launcher("gke", (), parts)


def cluster_script(
    config: RunConfig,
    region: str,
    slices: list[IslandMachines],
    *,
    manifests: Sequence[str],
    pools: Sequence[Pool],
    certificates: Mapping[str, Sequence[str]],
    queued: Sequence[str] = (),
    by_request: bool = False,
) -> str:
    """Return the script that creates, configures, starts and deletes everything in one region's cluster.

    Args:
      manifests: names of the files, without .yaml, that start the islands.
      certificates: files from `diloco certs` for each secret, by the secret's name after the run's.
      queued: manifests that wait in a queue of Kueue until they are admitted.
      by_request: whether Kueue requests machines for some of them.
    """
    return render(
        "gke/cluster.sh",
        region=region,
        context=_context(region),
        slices=slices,
        manifests=manifests,
        by_policy=[each for each in slices if _by_policy(each)],
        pools=pools,
        certificates=certificates,
        queued=queued,
        by_request=by_request,
        controller_machine=CONTROLLER_MACHINE,
        jobset=JOBSET,
        private=config.cloud.private,
    )


def pools(config: RunConfig, region: str, slices: list[IslandMachines], *, syncer: bool = True) -> list[Pool]:
    """Return the node pools of a region's cluster: one for each slice, and one for the syncer if it runs there."""
    found = [_island_pool(config, each) for each in slices]
    if syncer and region == common.syncer_region(config):
        where = common.syncer_name(config), common.syncer_zone(config)
        found.append(Pool(*where, config.cloud.syncer_machine_type, 1, ()))
    return found


def _by_request(config: RunConfig, name: str) -> bool:
    """Return whether Kueue requests an island's machines before it admits the island."""
    cloud = config.cloud_of(name)
    return bool(cloud.queue) and cloud.capacity == "flex-start"


def _by_policy(each: IslandMachines) -> bool:
    return each.topology.generation.gke_policy and each.topology.hosts > 1


def _island_pool(config: RunConfig, each: IslandMachines) -> Pool:
    topology = each.topology
    # For a slice with one host, the machine type determines the shape.
    shape = ("--tpu-topology", topology.dims) if topology.hosts > 1 else ()
    shape = ("--placement-policy", each.resource) if _by_policy(each) else shape
    asked, count = each.asked.flags, topology.hosts
    if each.name not in config.islands.base and "--enable-autoscaling" not in asked:
        asked = (*asked, *GROWS)
    if "--enable-autoscaling" in asked:
        # GKE creates the machines when a pod waits for them.
        asked, count = (*asked, "--max-nodes", str(count)), 0
    if _by_request(config, each.name):
        asked = (*asked, "--enable-queued-provisioning")
    flags = (*shape, *asked, "--disk-size", str(config.cloud.host_disk_gb))
    return Pool(each.resource, each.zone, topology.machine_type, count, flags)


def _context(region: str) -> str:
    # `gcloud container clusters get-credentials` gives the context this name.
    return f"gke_${{PROJECT}}_{region}_${{CLUSTER}}"


def syncer_script(config: RunConfig) -> str:
    """Return the script that creates and deletes the syncer in an existing cluster."""
    region = common.syncer_region(config)
    manifest = f"clusters/{region}/syncer.yaml"
    return render("gke/syncer.sh", about=common.ABOUT_SYNCER, context=_context(region), manifest=manifest)
