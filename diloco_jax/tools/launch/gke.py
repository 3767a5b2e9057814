"""Google Kubernetes Engine: a cluster per region, a JobSet per island, the syncer a StatefulSet behind a load balancer.

Fields of JobSet: jobset.sigs.k8s.io, API jobset.x-k8s.io/v1alpha2. A host that fails makes its Job fail, and with it
the JobSet starts all hosts of the island again; the other islands are JobSets of their own and do not notice.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import yaml

from diloco_jax.runtime.records.files import HEALTH
from diloco_jax.runtime.records.signals import INTERRUPTED, WRONG_INPUT
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import dump
from diloco_jax.tools.budget.hosts import GIB
from diloco_jax.tools.launch import common
from diloco_jax.tools.launch.capacity import asked_of
from diloco_jax.tools.launch.common import IslandMachines
from diloco_jax.tools.launch.files import Plan
from diloco_jax.tools.launch.gke_scripts import cluster_script, regions_of, syncer_script
from diloco_jax.tools.launch.launcher import Guide, Launcher
from diloco_jax.tools.launch.needs import Needs, island_bytes, syncer_host
from diloco_jax.tools.launch.project import POD_ACCOUNT

Manifest: TypeAlias = dict[str, Any]

EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"  # all pods of a Job in one node pool, that is on one slice
TPU_PORT = 8471  # where the hosts of a slice find each other
LEARNER_GRACE_S = 60  # to leave politely; nodes of spot capacity give less
SYNCER_GRACE_S = 300  # to save the model
USER = 10001  # of the image
READABLE = 0o440
GIVE_UP = f"failed with exit code {WRONG_INPUT} "  # in the words of Kubernetes' Job controller
POLITE = (INTERRUPTED, 143)  # asked to end by SIGTERM, also when that came before the process could listen
START_MINUTES = 180  # until a process begins to touch its file: a token store may be copied first
# Before each start: no file of an earlier one tells that this one lives, a start after a failure waits for 2, 4, ... 64
# seconds, and the TPU runtime gets the large pages that it asks for.
BEFORE = f"""\
rm -rf {common.RUN_DIR}/{HEALTH}
echo always >/sys/kernel/mm/transparent_hugepage/enabled || true
n="$ATTEMPT"
[ "$n" -le 6 ] || n=6
[ "$n" -eq 0 ] || sleep "$((1 << n))"
"""
ALIVE = f"find {common.RUN_DIR}/{HEALTH} -name '*.alive' -mmin -{{minutes}} | grep -q ."
LATER_MINUTES = 5  # than its own watchdog, which says where a process hangs
READY = {"exec": {"command": ["sh", "-c", f"ls {common.RUN_DIR}/{HEALTH}/*.ready"]}}
LEARNER, JOB, MOUNT_CONFIG, MOUNT_CERTIFICATES, MOUNT_RUN = "learner", "host", "config", "certificates", "run"


def parts(config: RunConfig, slices: list[IslandMachines], needs: Needs) -> Plan:
    """Write manifests and scripts."""
    regions = regions_of(config, slices)
    files, settings = {"syncer.sh": syncer_script(config)}, dump(common.remote(config))
    for region in regions:
        here = [each for each in slices if each.region == region]
        folder = f"clusters/{region}"
        files[f"{folder}/cluster.sh"] = cluster_script(config, region, here)
        files[f"{folder}/common.yaml"] = manifests(*common_manifests(config, settings))
        files |= {f"{folder}/{each.name}.yaml": manifests(island(config, each, needs)) for each in here}
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


def common_manifests(config: RunConfig, text: str) -> tuple[Manifest, ...]:
    """Describe the namespace of the run, its account, and its settings as all containers read them."""
    namespace = _manifest("v1", "Namespace", {"name": config.cloud.namespace})
    account = _metadata(config, POD_ACCOUNT)
    account["annotations"] = {"iam.gke.io/gcp-service-account": config.cloud.service_account}
    metadata = _metadata(config, f"{config.name}-config")
    settings = _manifest("v1", "ConfigMap", metadata, data={"config.yaml": text})
    return namespace, _manifest("v1", "ServiceAccount", account), settings


def island(config: RunConfig, each: IslandMachines, needs: Needs) -> Manifest:
    """Describe the JobSet of an island.

    Three ends are told apart: the machine was taken away, or the island left politely: start again, uncounted; wrong
    input: never again; anything else: start again, `restarts_max` times.
    """
    taken_away = {"type": "DisruptionTarget", "status": "True"}
    ended = {"containerName": LEARNER, "operator": "In", "values": [WRONG_INPUT, *POLITE]}
    job = {
        "parallelism": each.topology.hosts,
        "completions": each.topology.hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": ended},
                {"action": "FailJob", "onPodConditions": [taken_away]},
            ]
        },
        "template": {"metadata": {"labels": _labels(config, each.name)}, "spec": _learner_pod(config, each, needs)},
    }
    reasons = {"onJobFailureReasons": ["PodFailurePolicy"]}
    wrong = {"name": "wrong_input", "action": "FailJobSet", **reasons, "onJobFailureMessagePatterns": [GIVE_UP]}
    disrupted = {"name": "disrupted", "action": "RestartJobSetAndIgnoreMaxRestarts", **reasons}
    spec = {
        "failurePolicy": {
            "maxRestarts": config.cloud.restarts_max,
            "restartStrategy": "BlockingRecreate",
            "rules": [wrong, disrupted],  # the first that applies
        },
        "replicatedJobs": [{"name": JOB, "replicas": 1, "template": {"spec": job}}],
    }
    metadata = _metadata(config, each.resource, each.name)
    metadata["annotations"] = {EXCLUSIVE: "cloud.google.com/gke-nodepool"}
    if config.cloud.queue:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = config.cloud.queue
    return _manifest("jobset.x-k8s.io/v1alpha2", "JobSet", metadata, spec=spec)


def _learner_pod(config: RunConfig, each: IslandMachines, needs: Needs) -> Manifest:
    topology = each.topology
    chips = {"google.com/tpu": topology.chips_per_host}
    selector = {
        "cloud.google.com/gke-tpu-accelerator": topology.generation.gke_accelerator,
        "cloud.google.com/gke-tpu-topology": topology.dims,
        "topology.kubernetes.io/zone": each.zone,
    }
    if label := asked_of(config.cloud, "gke").selector:
        selector[label[0]] = label[1]
    address = {"configMapKeyRef": {"name": f"{config.name}-syncer", "key": "address"}}
    given = [{"name": name, "value": value} for name, value in common.environment(config, each.name).items()]
    learner = _container(
        config,
        LEARNER,
        args=common.learner_words(each.name, "$(DILOCO_SYNCER)"),
        env=[{"name": "DILOCO_SYNCER", "valueFrom": address}, *given],
        ports=[{"name": "tpu", "containerPort": TPU_PORT}],
        resources={"requests": chips | _memory(island_bytes(needs, each.name)), "limits": chips},
        securityContext={"runAsUser": 0},  # TPU devices belong to root
        **_probes(config, READY),
    )
    attempt = {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"}}
    before = _container(
        config,
        "before",
        command=["sh", "-c", BEFORE],
        env=[{"name": "ATTEMPT", "valueFrom": attempt}],
        securityContext={"runAsUser": 0, "privileged": True},
    )
    # on the node's own disk, which outlives the pod; a new node finds states and programs in the bucket
    run = {"path": f"/var/lib/diloco/{each.resource}", "type": "DirectoryOrCreate"}
    return {
        "restartPolicy": "Never",
        "serviceAccountName": POD_ACCOUNT,
        "terminationGracePeriodSeconds": LEARNER_GRACE_S,
        "nodeSelector": selector,
        **({"priorityClassName": config.cloud.priority_class} if config.cloud.priority_class else {}),
        "initContainers": [before],
        "containers": [learner],
        "volumes": [*_volumes(config, each.name), {"name": MOUNT_RUN, "hostPath": run}],
    }


def _probes(config: RunConfig, ready: Manifest) -> Manifest:
    """Describe how Kubernetes asks a process if it lives: by the files that it touches as it goes on."""
    probes = {"readinessProbe": {**ready, "periodSeconds": 5, "timeoutSeconds": 5}}
    if not config.watchdog.least_s:  # nothing is to be ended
        return probes
    command = ALIVE.format(minutes=math.ceil(config.watchdog.start_s / 60) + LATER_MINUTES)
    alive = {"exec": {"command": ["sh", "-c", command]}, "periodSeconds": 60, "timeoutSeconds": 10}
    start = {**alive, "failureThreshold": START_MINUTES}
    return {"startupProbe": start, "livenessProbe": {**alive, "failureThreshold": 3}, **probes}


def _memory(num_bytes: float) -> dict[str, str]:
    return {"memory": f"{math.ceil(num_bytes / GIB)}Gi"} if num_bytes else {}


def syncer(config: RunConfig, needs: Needs) -> tuple[Manifest, Manifest]:
    """Describe the syncer's StatefulSet and Service."""
    machine = syncer_host(config, needs)
    labels, ports = _labels(config, "syncer"), common.ports(config)
    container = _container(
        config,
        "syncer",
        args=common.syncer_words(),
        env=[{"name": "DILOCO_CACHE", "value": f"{common.VOLUME}/cache"}, {"name": "DILOCO_LOG", "value": "json"}],
        ports=[{"name": f"port-{port}", "containerPort": port} for port in ports],
        resources={"requests": _memory(machine.request_bytes), "limits": _memory(machine.limit_bytes)},
        **_probes(config, {"tcpSocket": {"port": ports[0]}}),
    )
    before = _container(config, "before", command=["rm", "-rf", f"{common.RUN_DIR}/{HEALTH}"])  # of an earlier start
    pod = {
        "serviceAccountName": POD_ACCOUNT,
        "initContainers": [before],
        "terminationGracePeriodSeconds": SYNCER_GRACE_S,
        "nodeSelector": {"cloud.google.com/gke-nodepool": common.syncer_name(config)},
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER},
        "containers": [container],
        "volumes": _volumes(config, "syncer"),
    }
    disk = {
        "metadata": {"name": MOUNT_RUN},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "premium-rwo",
            "resources": {"requests": {"storage": f"{config.cloud.syncer_disk_gb}Gi"}},
        },
    }
    spec = {
        "serviceName": common.syncer_name(config),
        "replicas": 1,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
        "volumeClaimTemplates": [disk],
    }
    metadata = _metadata(config, common.syncer_name(config), "syncer")
    return _manifest("apps/v1", "StatefulSet", metadata, spec=spec), _service(config, labels)


def _service(config: RunConfig, labels: dict[str, str]) -> Manifest:
    """Describe the syncer's address, the same on every machine."""
    metadata = _metadata(config, common.syncer_name(config), "syncer")
    if not config.cloud.external:
        metadata["annotations"] = {
            "networking.gke.io/load-balancer-type": "Internal",
            "networking.gke.io/internal-load-balancer-allow-global-access": "true",  # for islands of other regions
        }
    spec = {
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Local",
        "loadBalancerSourceRanges": list(config.cloud.source_ranges),
        "selector": labels,
        "ports": [{"name": f"port-{p}", "port": p, "targetPort": p} for p in common.ports(config)],
    }
    return _manifest("v1", "Service", metadata, spec=spec)


def _manifest(version: str, kind: str, metadata: Manifest, **parts: Manifest) -> Manifest:
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **parts}


def _labels(config: RunConfig, part: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "diloco",
        "app.kubernetes.io/instance": config.name,
        "app.kubernetes.io/component": part,
    }


def _metadata(config: RunConfig, name: str, part: str = "run") -> Manifest:
    return {"name": name, "namespace": config.cloud.namespace, "labels": _labels(config, part)}


def _container(config: RunConfig, name: str, **more: Any) -> Manifest:
    mounts = [
        {"name": MOUNT_CONFIG, "mountPath": "/etc/diloco/config", "readOnly": True},
        {"name": MOUNT_CERTIFICATES, "mountPath": common.CERTIFICATES_PATH, "readOnly": True},
        {"name": MOUNT_RUN, "mountPath": common.VOLUME},
    ]
    return {"name": name, "image": config.cloud.image, **more, "volumeMounts": mounts}


def _volumes(config: RunConfig, name: str) -> list[Manifest]:
    return [
        {"name": MOUNT_CONFIG, "configMap": {"name": f"{config.name}-config"}},
        {"name": MOUNT_CERTIFICATES, "secret": {"secretName": f"{config.name}-{name}", "defaultMode": READABLE}},
    ]


_BEFORE = """\
You need quota for the slices above, `gcloud` with its `gke-gcloud-auth-plugin`, and `kubectl`. A cluster that is there
under the name `cloud.cluster` is used as it is."""
_LOSSES = """\
Nothing is to be done. A pod that is preempted gets SIGTERM, on which its island leaves politely; the JobSet starts the
island again as a whole when GKE has capacity for its node pool. The syncer comes back with its disk, and islands train
on meanwhile. An island whose status is `Completed` was drained, or the run is over; the syncer's pod then starts again
and again, until it is deleted."""


def guide(config: RunConfig, slices: list[IslandMachines]) -> Guide:
    """Write this way's words of README.md."""
    cloud, first, syncer = config.cloud, slices[0], common.syncer_name(config)

    def kubectl(region: str) -> str:
        return f"kubectl --context gke_{cloud.project}_{region}_{cloud.cluster} --namespace {cloud.namespace}"

    there, beside_syncer = kubectl(first.region), kubectl(common.syncer_region(config))
    looks = [f"{kubectl(region)} get jobsets,pods" for region in regions_of(config, slices)]
    return Guide(
        title="one JobSet per island on Google Kubernetes Engine",
        apis="container.googleapis.com compute.googleapis.com",
        before=_BEFORE,
        doctor=f"pod=$({there} get pod -o name -l app.kubernetes.io/component={first.name} | head -n 1)\n"
        f'{there} exec "$pod" -- \\\n'
        f'  diloco doctor {common.CONFIG_PATH} --island {first.name} --syncer "$syncer"',
        look="\n".join([*looks, f"{beside_syncer} logs statefulset/{syncer} --tail 20"]),
        losses=_LOSSES,
        disk=f"{beside_syncer} delete pvc run-{syncer}-0",
        leaves=", and clusters",
    )


LAUNCHER = Launcher("gke", (), parts, guide)
