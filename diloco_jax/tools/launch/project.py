"""The ground that all machines of a run stand on: access to the bucket, a way out, and ports between hosts."""

from __future__ import annotations

from diloco_jax.settings.run import RunConfig
from diloco_jax.tools.launch.common import IslandMachines
from diloco_jax.tools.launch.files import IN_PROJECT, Resource, command, script, verbs

BUCKET_USER = "roles/storage.objectUser"
WORKLOAD_USER = "roles/iam.workloadIdentityUser"
MEMBER = "--member=serviceAccount:$SERVICE_ACCOUNT"
POD_ACCOUNT = "diloco"  # Kubernetes service account


def project_script(config: RunConfig, way: str, regions: list[str]) -> str:
    """Write what is done once for all machines; NAT and permissions stay when the run is deleted."""
    create = [_allow(("gcloud", "storage", "buckets"), "gs://$BUCKET", MEMBER, BUCKET_USER)]
    delete = [":"]
    if way == "gke":  # pods are this account in Google Cloud
        member = f"--member=serviceAccount:$PROJECT.svc.id.goog[$NAMESPACE/{POD_ACCOUNT}]"
        create.append(_allow(("gcloud", "iam", "service-accounts"), "$SERVICE_ACCOUNT", member, WORKLOAD_USER))
    else:  # GKE makes the rules for its nodes itself
        rule = Resource(("gcloud", "compute", "firewall-rules"), "$RUN-hosts")
        tags = ("--source-tags", "$RUN-hosts", "--target-tags", "$RUN-hosts")
        # JAX's coordinator and TPU runtime have ports that are known, the leader's own is any that is free
        create.append(rule.make("--network", "$NETWORK", "--direction=INGRESS", "--allow=tcp", *tags))
        delete = [rule.delete()]
    for region in regions if config.cloud.nat else []:
        where = ("--region", region)
        router = Resource(("gcloud", "compute", "routers"), "$NAT", where)
        nat = Resource(("gcloud", "compute", "routers", "nats"), "$NAT", ("--router", "$NAT", *where))
        create += [
            router.make("--network", "$NETWORK"),
            nat.make("--auto-allocate-nat-external-ips", "--nat-all-subnet-ip-ranges"),
        ]
    return script("What all machines of the run share.", verbs({"create": create, "delete": delete}))


def slice_policy(each: IslandMachines) -> tuple[Resource, str]:
    """Return the workload policy by which hosts become one slice, and the command that makes it."""
    policy = Resource(("gcloud", "compute", "resource-policies"), each.resource, ("--region", each.region))
    shape = f"--accelerator-topology={each.topology.dims}"
    return policy, policy.make("--type=HIGH_THROUGHPUT", shape, kind=("workload-policy",))


def _allow(group: tuple[str, ...], name: str, member: str, role: str) -> str:
    return command(*group, "add-iam-policy-binding", name, *IN_PROJECT, member, f"--role={role}", "--format=none")
