"""Scripts for clusters of Google Kubernetes Engine: what is done in each region, and for the syncer."""

from __future__ import annotations

from diloco_jax.launch import common
from diloco_jax.launch.common import Slice
from diloco_jax.launch.plan import command, script, unless_there, verbs
from diloco_jax.runtime.settings import RunConfig

JOBSET = "https://github.com/kubernetes-sigs/jobset/releases/download/v0.10.1/manifests.yaml"


def cluster_script(config: RunConfig, region: str, slices: list[Slice]) -> str:
    """What is done in one region's cluster."""
    folder = f"clusters/{region}"
    names = [each.name for each in slices]
    pools = [_pool(config, each) for each in slices]
    pool_names = [each.resource for each in slices]
    if region == common.syncer_region(config):
        names.append("syncer")
        pools.append(_syncer_pool(config))
        pool_names.append(common.syncer_name(config))
    where = ("--location", region, "--project", "$PROJECT")
    make = command(
        *("gcloud", "container", "clusters", "create", "$CLUSTER", *where, "--network", "$NETWORK"),
        *("--subnetwork", "$SUBNETWORK", "--enable-ip-alias", "--num-nodes", "1", "--release-channel", "regular"),
    )
    create = [
        unless_there(("gcloud", "container", "clusters", "describe", "$CLUSTER", *where), make),
        command("gcloud", "container", "clusters", "get-credentials", "$CLUSTER", *where),
        _kubectl(region, "apply", "--server-side", "-f", JOBSET),
        *pools,
    ]
    address = 'address="$(./syncer.sh address)"'
    mapping = ("create", "configmap", "$RUN-syncer", "--from-literal=address=$address:$PORT")
    apply = [_kubectl(region, "apply", "-f", f"{folder}/{each.name}.yaml") for each in slices]
    functions = {
        "create": create,
        "configure": [
            _kubectl(region, "apply", "-f", f"{folder}/common.yaml"),
            *(_secret(region, name) for name in names),
        ],
        "start": [address, _applied(region, *mapping), *apply] if slices else [":"],
        "stop": [
            _kubectl(region, "delete", "--ignore-not-found", "-f", f"{folder}/{each.name}.yaml") for each in slices
        ]
        or [":"],
        "delete": [
            _if_there(
                *("gcloud", "container", "node-pools"),
                then=(name, "--cluster", "$CLUSTER", *where),
            )
            for name in pool_names
        ],
    }
    about = "\n".join(map(str, slices)) or "the syncer alone"
    return script(f"The cluster in {region}. In it:\n{about}", verbs(functions), depth=2)


def _if_there(*noun: str, then: tuple[str, ...]) -> str:
    there = command(*noun, "describe", *then)
    return f"if have {there}; then\n  {command(*noun, 'delete', *then, '--quiet')}\nfi"


def _pool(config: RunConfig, each: Slice) -> str:
    topology = each.topology
    shape = ("--tpu-topology", topology.dims) if topology.hosts > 1 else ()  # one host: its machine type says it
    spot = ("--spot",) if config.cloud.spot else ()
    more = (*shape, *spot, "--disk-size", str(config.cloud.host_disk_gb))
    return _node_pool(each.resource, each.region, each.zone, topology.machine_type, topology.hosts, more)


def _syncer_pool(config: RunConfig) -> str:
    zone = common.syncer_zone(config)
    return _node_pool(common.syncer_name(config), common.region_of(zone), zone, config.cloud.syncer_machine_type, 1, ())


def _node_pool(name: str, region: str, zone: str, machine: str, count: int, more: tuple[str, ...]) -> str:
    where = ("--cluster", "$CLUSTER", "--location", region, "--project", "$PROJECT")
    make = command(
        *("gcloud", "container", "node-pools", "create", name, *where, "--node-locations", zone),
        *("--machine-type", machine, "--num-nodes", str(count), *more),
    )
    return unless_there(("gcloud", "container", "node-pools", "describe", name, *where), make)


def _context(region: str) -> str:
    return f"gke_${{PROJECT}}_{region}_${{CLUSTER}}"  # as `clusters get-credentials` names it


def _kubectl(region: str, *words: str) -> str:
    return command("kubectl", "--context", _context(region), *words)


def _applied(region: str, *create: str) -> str:
    """A command of `kubectl create`, but one that also changes what is there."""
    made = _kubectl(region, "--namespace", "$NAMESPACE", *create, "--dry-run=client", "-o", "yaml")
    return f"{made} |\n  {_kubectl(region, 'apply', '-f', '-')}"


def _secret(region: str, name: str) -> str:
    files = [f"--from-file=certs/{file}" for file in common.certificate_files(name)]
    return _applied(region, "create", "secret", "generic", f"$RUN-{name}", *files)


def syncer_script(config: RunConfig) -> str:
    """What is done for the syncer, once its cluster is there."""
    region = common.syncer_region(config)
    path = f"clusters/{region}/syncer.yaml"
    inside = ("--namespace", "$NAMESPACE")
    look = _kubectl(
        region, *inside, "get", "service", "$RUN-syncer", "-o", "jsonpath={.status.loadBalancer.ingress[0].ip}"
    )
    functions = {
        "create": [
            _kubectl(region, "apply", "-f", path),
            _kubectl(region, *inside, "rollout", "status", "statefulset/$RUN-syncer", "--timeout=30m"),
        ],
        "address": [
            f'until address="$({look})" && [ -n "$address" ]; do',
            "  sleep 5",
            "done",
            'echo "$address"',
        ],
        "delete": [_kubectl(region, "delete", "--ignore-not-found", "-f", path)],
    }
    about = "The syncer. `delete` leaves its disk, from which the same run goes on when it is made again."
    return script(about, verbs(functions))
