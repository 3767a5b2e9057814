"""Google Kubernetes Engine: a cluster per region, a JobSet per island, the syncer a StatefulSet behind a load balancer.

Fields of JobSet: jobset.sigs.k8s.io, API jobset.x-k8s.io/v1alpha2. A host that fails makes its Job fail, and with it
the JobSet starts all hosts of the island again; the other islands are JobSets of their own and do not notice.
"""

import json
import math
from collections.abc import Mapping
from shlex import quote
from typing import Any, TypeAlias

import yaml

from diloco_jax.runtime.records.files import HEALTH, STATES
from diloco_jax.runtime.records.signals import INTERRUPTED, WRONG_INPUT
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import dump
from diloco_jax.tools.launch import common
from diloco_jax.tools.launch.common import IslandMachines, asked_of, flags
from diloco_jax.tools.launch.launcher import POD_ACCOUNT, Launcher, Plan, piece, script, slice_policy
from diloco_jax.tools.launch.needs import GIB, Needs, island_bytes, syncer_host

Manifest: TypeAlias = dict[str, Any]

GIVE_UP = f"failed with exit code {WRONG_INPUT} "  # in the words of Kubernetes' Job controller
POLITE = (INTERRUPTED, 143)  # asked to end by SIGTERM, also when that came before the process could listen
START_MINUTES = 180  # until a process begins to touch its file: a token store may be copied first
LATER_MINUTES = 5  # than its own watchdog, which says where a process hangs
HEALTH_PATH = f"{common.RUN_DIR}/{HEALTH}"
MOUNTS = (
    {"name": "config", "mountPath": "/etc/diloco/config", "readOnly": True},
    {"name": "certificates", "mountPath": common.CERTIFICATES_PATH, "readOnly": True},
    {"name": "run", "mountPath": common.VOLUME},
)
INTERNAL = {
    "networking.gke.io/load-balancer-type": "Internal",
    "networking.gke.io/internal-load-balancer-allow-global-access": "true",  # for islands of other regions
}
JOBSET = "https://github.com/kubernetes-sigs/jobset/releases/download/v0.12.0/manifests.yaml"
CONTROLLER_MACHINE = "e2-standard-4"  # JobSet's controller asks for half a processor, which small nodes have not left


def parts(config: RunConfig, slices: list[IslandMachines], needs: Needs) -> Plan:
    regions = common.regions_of(config, slices)
    files, settings = {"syncer.sh": syncer_script(config)}, dump(common.remote(config))
    for region in regions:
        here = [each for each in slices if each.region == region]
        folder = f"clusters/{region}"
        files[f"{folder}/cluster.sh"] = cluster_script(config, region, here)
        files[f"{folder}/common.yaml"] = manifests(*common_manifests(config, settings))
        files |= {f"{folder}/{each.name}.yaml": manifests(*island(config, each, needs)) for each in here}
    files[f"clusters/{common.syncer_region(config)}/syncer.yaml"] = manifests(*syncer(config, needs))
    scripts = [f"clusters/{region}/cluster.sh" for region in regions]
    return Plan(
        files=files,
        create=(
            *(f"{each} create" for each in scripts),
            *(f"{each} configure" for each in scripts),
            "./syncer.sh create",
            *(f"{each} start" for each in scripts),
        ),
        delete=(*(f"{each} stop" for each in scripts), "./syncer.sh delete", *(f"{each} delete" for each in scripts)),
    )


class _Dumper(yaml.SafeDumper):
    """A dumper for people: texts of several lines as blocks, and nothing by reference."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def manifests(*all_of: Manifest) -> str:
    """Write manifests as one YAML text."""
    return yaml.dump_all(all_of, Dumper=_Dumper, sort_keys=False, width=common.NAME_LENGTH_MAX * 10)


def common_manifests(config: RunConfig, text: str) -> list[Manifest]:
    """Describe the namespace of the run, its account, and its settings as all containers read them."""
    account = config.cloud.service_account
    return _filled("common_manifest", config, "run", service_account=account, settings=text)


def island(config: RunConfig, each: IslandMachines, needs: Needs) -> list[Manifest]:
    """Describe the JobSet of an island.

    Three ends are told apart: the machine was taken away, or the island left politely: start again, uncounted; wrong
    input: never again; anything else: start again, `restarts_max` times.
    """
    topology, cloud = each.topology, config.cloud
    chips = {"google.com/tpu": topology.chips_per_host}
    selector = {
        "cloud.google.com/gke-tpu-accelerator": topology.generation.gke_accelerator,
        "cloud.google.com/gke-tpu-topology": topology.dims,
        "topology.kubernetes.io/zone": each.zone,
    }
    if label := asked_of(cloud, "gke").selector:
        selector[label[0]] = label[1]
    address = {"configMapKeyRef": {"name": f"{config.name}-syncer", "key": "address"}}
    queue = {"kueue.x-k8s.io/queue-name": cloud.queue} if cloud.queue else {}
    return _filled(
        "island_manifest",
        config,
        each.name,
        name=each.resource,
        jobset_labels=_labels(config, each.name) | queue,
        restarts=cloud.restarts_max,
        give_up=GIVE_UP,
        hosts=topology.hosts,
        ends=[WRONG_INPUT, *POLITE],
        selector=selector,
        priority=cloud.priority_class or None,
        # No file of an earlier start tells that this one lives, a start after a failure waits for 2, 4, ... 64 seconds,
        # and the TPU runtime gets the large pages that it asks for.
        before=piece("before", health=HEALTH_PATH, states=f"{common.RUN_DIR}/{STATES}/{each.name}"),
        words=common.learner_words(each.name, "$(DILOCO_SYNCER)"),
        env=[{"name": "DILOCO_SYNCER", "valueFrom": address}, *_values(common.environment(config, each.name))],
        resources={"requests": chips | _memory(island_bytes(needs, each.name)), "limits": chips},
        ready=f"ls {HEALTH_PATH}/*.ready",
        host_path=f"/var/lib/diloco/{each.resource}",
    )


def syncer(config: RunConfig, needs: Needs) -> list[Manifest]:
    """Describe the syncer's StatefulSet, and the Service that is its address, the same on every machine.

    With `syncer.metrics` also who asks there: a PodMonitoring of Google Cloud Managed Service for Prometheus.
    """
    machine, ports, name = syncer_host(config, needs), common.ports(config), common.syncer_name(config)
    metrics = common.metrics_port(config)
    scraped = [{"name": "metrics", "containerPort": metrics}] if metrics else []
    found = _filled(
        "syncer_manifest",
        config,
        "syncer",
        name=name,
        health=HEALTH_PATH,
        words=common.syncer_words(),
        env=_values({"DILOCO_CACHE": f"{common.VOLUME}/cache", "DILOCO_LOG": "json"}),
        container_ports=[*({"name": f"port-{port}", "containerPort": port} for port in ports), *scraped],
        resources={"requests": _memory(machine.request_bytes), "limits": _memory(machine.limit_bytes)},
        port=ports[0],
        disk=f"{config.cloud.syncer_disk_gb}Gi",
        annotations=None if config.cloud.external else INTERNAL,
        ranges=config.cloud.source_ranges,
        ports=[{"name": f"port-{port}", "port": port, "targetPort": port} for port in ports],
    )
    return [*found, *_filled("monitoring_manifest", config, "syncer", name=name)] if metrics else found


def _filled(piece_name: str, config: RunConfig, part: str, **values: Any) -> list[Manifest]:
    """Fill in manifests of pieces.txt for a part of the run; what is None is left out."""
    startup = alive = None
    if config.watchdog.least_s:  # otherwise nothing is to be ended
        minutes = math.ceil(config.watchdog.start_s / 60) + LATER_MINUTES
        fresh = f"find {HEALTH_PATH} -name '*.alive' -mmin -{minutes} | grep -q ."
        asked = {"exec": {"command": ["sh", "-c", fresh]}, "periodSeconds": 60, "timeoutSeconds": 10}
        startup, alive = (asked | {"failureThreshold": count} for count in (START_MINUTES, 3))
    everywhere = {
        "namespace": config.cloud.namespace,
        "account": POD_ACCOUNT,
        "labels": _labels(config, part),
        "image": config.cloud.image,
        "mounts": MOUNTS,
        "config_name": f"{config.name}-config",
        "secret": f"{config.name}-{part}",
        "startup": startup,
        "alive": alive,
    }
    text = piece(piece_name, **{key: json.dumps(value) for key, value in (everywhere | values).items()})
    return [_present(each) for each in yaml.safe_load_all(text)]


def _present(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _present(value) for key, value in node.items() if value is not None}
    return [_present(value) for value in node] if isinstance(node, list) else node


def _values(variables: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in variables.items()]


def _memory(num_bytes: float) -> dict[str, str]:
    return {"memory": f"{math.ceil(num_bytes / GIB)}Gi"} if num_bytes else {}


def _labels(config: RunConfig, part: str) -> dict[str, str]:
    names = {"name": "diloco", "instance": config.name, "component": part}
    return {f"app.kubernetes.io/{name}": value for name, value in names.items()}


LAUNCHER = Launcher("gke", (), parts)


def cluster_script(config: RunConfig, region: str, slices: list[IslandMachines]) -> str:
    """Write what is done in one region's cluster."""
    names, context = [each.name for each in slices], _context(region)
    pools = [_island_pool(config, each) for each in slices]
    policies = [slice_policy(each) for each in slices if _by_policy(each)]
    if region == common.syncer_region(config):
        names.append("syncer")
        where = common.syncer_name(config), common.syncer_zone(config)
        pools.append(_pool(*where, config.cloud.syncer_machine_type, 1))
    files = [f"clusters/{region}/{each.name}.yaml" for each in slices]
    body = piece(
        "cluster",
        region=region,
        context=context,
        machine=CONTROLLER_MACHINE,
        private=flags("--enable-private-nodes" * config.cloud.private),
        jobset=JOBSET,
        policies=[policy for policy, _ in policies],
        pools=[pool for pool, _ in pools],
        secrets=[_certificates(context, name) for name in names],
        start=[piece("pod_address", context=context) if files else "  :\n"]
        + [f'  kubectl --context "{context}" apply -f {file}\n' for file in files],
        stop=[f'  kubectl --context "{context}" delete --ignore-not-found -f {file}\n' for file in files] or ["  :\n"],
        no_pools=[pool for _, pool in pools],
        no_policies=[policy for _, policy in policies],
    )
    about = "\n".join(map(str, slices)) or "the syncer alone"
    return script(f"The cluster in {region}. In it:\n{about}", body, depth=2)


def _by_policy(each: IslandMachines) -> bool:
    return each.topology.generation.gke_policy and each.topology.hosts > 1


def _island_pool(config: RunConfig, each: IslandMachines) -> tuple[str, str]:
    topology = each.topology
    shape = ("--tpu-topology", topology.dims) if topology.hosts > 1 else ()  # one host: its machine type says it
    shape = ("--placement-policy", each.resource) if _by_policy(each) else shape
    asked, count = asked_of(config.cloud, "gke").flags, topology.hosts
    if "--flex-start" in asked:  # machines come when a pod waits for them
        asked, count = (*asked, "--max-nodes", str(count)), 0
    more = (*shape, *asked, "--disk-size", str(config.cloud.host_disk_gb))
    return _pool(each.resource, each.zone, topology.machine_type, count, *more)


def _pool(name: str, zone: str, machine: str, count: int, *more: str) -> tuple[str, str]:
    """Write how a pool of nodes is made, and taken away."""
    where = {"name": name, "region": common.region_of(zone), "zone": zone}
    made = piece("pool", **where, machine=quote(machine), count=count, flags=flags(*more))
    return made, piece("no_pool", **where)


def _context(region: str) -> str:
    return f"gke_${{PROJECT}}_{region}_${{CLUSTER}}"  # as `clusters get-credentials` names it


def _certificates(context: str, name: str) -> str:
    files = " ".join(f"--from-file=certs/{file}" for file in common.certificate_files(name))
    return piece("pod_certificates", context=context, name=name, files=files)


def syncer_script(config: RunConfig) -> str:
    """Write what is done for the syncer, once its cluster is there."""
    region = common.syncer_region(config)
    body = piece("pod_syncer", context=_context(region), file=f"clusters/{region}/syncer.yaml")
    return script(common.ABOUT_SYNCER, body)
