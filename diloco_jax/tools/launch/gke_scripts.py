"""Scripts for clusters of Google Kubernetes Engine, for each region and for the syncer."""

from __future__ import annotations

from diloco_jax.settings.run import RunConfig
from diloco_jax.tools.launch import common
from diloco_jax.tools.launch.capacity import asked_of
from diloco_jax.tools.launch.common import IslandMachines
from diloco_jax.tools.launch.files import IN_PROJECT, Resource, command, script, verbs
from diloco_jax.tools.launch.project import slice_policy

JOBSET = "https://github.com/kubernetes-sigs/jobset/releases/download/v0.12.0/manifests.yaml"
CONTROLLER = "deployment/jobset-controller-manager"
CONTROLLER_MACHINE = "e2-standard-4"  # JobSet's controller asks for half a processor, which small nodes have not left


def regions_of(config: RunConfig, slices: list[IslandMachines]) -> list[str]:
    """List the regions that have a cluster."""
    return sorted({each.region for each in slices} | {common.syncer_region(config)})


def cluster_script(config: RunConfig, region: str, slices: list[IslandMachines]) -> str:
    """Write what is done in one region's cluster."""
    files = [f"clusters/{region}/{each.name}.yaml" for each in slices]
    names = [each.name for each in slices]
    pools = [_island_pool(config, each) for each in slices]
    policies = [slice_policy(each) for each in slices if _by_policy(each)]
    if region == common.syncer_region(config):
        names.append("syncer")
        where = common.syncer_name(config), common.syncer_zone(config)
        pools.append(_node_pool(*where, config.cloud.syncer_machine_type, 1))
    where = ("--location", region)
    cluster = Resource(("gcloud", "container", "clusters"), "$CLUSTER", where)
    create = [
        cluster.make(
            *("--network", "$NETWORK", "--subnetwork", "$SUBNETWORK"),
            *("--enable-ip-alias", "--num-nodes", "1", "--release-channel", "regular"),
            *("--machine-type", CONTROLLER_MACHINE, "--service-account", "$SERVICE_ACCOUNT"),
            "--workload-pool=$PROJECT.svc.id.goog",
            *(("--enable-private-nodes",) if config.cloud.private else ()),
        ),
        command(*cluster.group, "get-credentials", "$CLUSTER", *where, *IN_PROJECT),
        _kubectl(region, "apply", "--server-side", "-f", JOBSET),
        # it is ready when its webhook answers, without which no JobSet is taken
        _kubectl(region, *("--namespace", "jobset-system", "rollout", "status", "--timeout=10m"), CONTROLLER),
        *(make for _, make in policies),
        *(pool.make(*flags) for pool, flags in pools),
    ]
    address = 'address="$(./syncer.sh address)"'
    mapping = ("create", "configmap", "$RUN-syncer", "--from-literal=address=$address:$PORT")
    apply = [_kubectl(region, "apply", "-f", file) for file in files]
    stop = [_kubectl(region, "delete", "--ignore-not-found", "-f", file) for file in files]
    functions = {
        "create": create,
        "configure": [
            _kubectl(region, "apply", "-f", f"clusters/{region}/common.yaml"),
            *(_secret(region, name) for name in names),
        ],
        "start": [address, _applied(region, *mapping), *apply] if slices else [":"],
        "stop": stop or [":"],
        "delete": [each.delete() for each, _ in (*pools, *policies)],
    }
    about = "\n".join(map(str, slices)) or "the syncer alone"
    return script(f"The cluster in {region}. In it:\n{about}", verbs(functions), depth=2)


def _by_policy(each: IslandMachines) -> bool:
    return each.topology.generation.gke_policy and each.topology.hosts > 1


def _island_pool(config: RunConfig, each: IslandMachines) -> tuple[Resource, tuple[str, ...]]:
    topology = each.topology
    shape = ("--tpu-topology", topology.dims) if topology.hosts > 1 else ()  # one host: its machine type says it
    shape = ("--placement-policy", each.resource) if _by_policy(each) else shape
    asked, count = asked_of(config.cloud, "gke").flags, topology.hosts
    if "--flex-start" in asked:  # machines come when a pod waits for them
        asked, count = (*asked, "--max-nodes", str(count)), 0
    more = (*shape, *asked, "--disk-size", str(config.cloud.host_disk_gb))
    return _node_pool(each.resource, each.zone, topology.machine_type, count, *more)


def _node_pool(name: str, zone: str, machine: str, count: int, *more: str) -> tuple[Resource, tuple[str, ...]]:
    """Return a pool, and the flags that make it."""
    where = ("--cluster", "$CLUSTER", "--location", common.region_of(zone))
    flags = ("--node-locations", zone, "--machine-type", machine, "--num-nodes", str(count), *more)
    flags += ("--service-account", "$SERVICE_ACCOUNT", "--workload-metadata=GKE_METADATA")
    return Resource(("gcloud", "container", "node-pools"), name, where), flags


def _kubectl(region: str, *words: str) -> str:
    context = f"gke_${{PROJECT}}_{region}_${{CLUSTER}}"  # as `clusters get-credentials` names it
    return command("kubectl", "--context", context, *words)


def _applied(region: str, *create: str) -> str:
    """Write a command of `kubectl create`, but one that also changes what is there."""
    made = _kubectl(region, "--namespace", "$NAMESPACE", *create, "--dry-run=client", "-o", "yaml")
    return f"{made} |\n  {_kubectl(region, 'apply', '-f', '-')}"


def _secret(region: str, name: str) -> str:
    files = [f"--from-file=certs/{file}" for file in common.certificate_files(name)]
    return _applied(region, "create", "secret", "generic", f"$RUN-{name}", *files)


def syncer_script(config: RunConfig) -> str:
    """Write what is done for the syncer, once its cluster is there."""
    region = common.syncer_region(config)
    path = f"clusters/{region}/syncer.yaml"
    inside = ("--namespace", "$NAMESPACE")
    ip = ("-o", "jsonpath={.status.loadBalancer.ingress[0].ip}")
    look = _kubectl(region, *inside, "get", "service", "$RUN-syncer", *ip)
    functions = {
        "create": [
            _kubectl(region, "apply", "-f", path),
            _kubectl(region, *inside, "rollout", "status", "statefulset/$RUN-syncer", "--timeout=30m"),
        ],
        "address": [f'until address="$({look})" && [ -n "$address" ]; do', "  sleep 5", "done", 'echo "$address"'],
        "delete": [_kubectl(region, "delete", "--ignore-not-found", "-f", path)],
    }
    return script(common.ABOUT_SYNCER, verbs(functions))
