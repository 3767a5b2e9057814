"""Every flag of gcloud that the scripts use, by command.

Source of each: the command's page below docs.cloud.google.com/sdk/gcloud/reference/, such as
.../compute/instance-groups/managed/create, and `gcloud help` of version 528, whose parser took all of them
(test_scripts.py). How they go together: /compute/docs/tpus/create-tpu-mig-multi-host-slice (workload policy and group),
/tpu/docs/spot-compute (spot templates), /tpu/docs/queued-resources, /kubernetes-engine/docs/how-to/tpus (node pools),
/secret-manager/docs/creating-and-accessing-secrets.
"""

EVERYWHERE = {"project", "format", "quiet"}  # docs.cloud.google.com/sdk/gcloud/reference: flags of all commands

FLAGS: dict[str, set[str]] = {
    "compute addresses create": {"region", "subnet"},
    "compute addresses delete": {"region"},
    "compute addresses describe": {"region"},
    "compute disks create": {"zone", "type", "size"},
    "compute disks describe": {"zone"},
    "compute firewall-rules create": {"network", "direction", "allow", "source-ranges", "source-tags", "target-tags"},
    "compute firewall-rules delete": set(),
    "compute firewall-rules describe": set(),
    "compute instance-groups managed create": {
        *("zone", "template", "size", "workload-policy", "default-action-on-vm-failure"),
    },
    "compute instance-groups managed delete": {"zone"},
    "compute instance-groups managed describe": {"zone"},
    "compute routers create": {"region", "network"},
    "compute routers describe": {"region"},
    "compute routers nats create": {
        *("router", "region", "auto-allocate-nat-external-ips", "nat-all-subnet-ip-ranges"),
    },
    "compute routers nats describe": {"router", "region"},
    "iam service-accounts add-iam-policy-binding": {"member", "role"},
    "storage buckets add-iam-policy-binding": {"member", "role"},
    "compute instance-templates create": {
        *("machine-type", "maintenance-policy", "provisioning-model", "instance-termination-action", "image-family"),
        *("image-project", "boot-disk-size", "region", "network", "subnet", "service-account", "scopes", "metadata"),
        *("metadata-from-file", "tags", "no-address", "reservation", "reservation-affinity"),
    },
    "compute instance-templates delete": set(),
    "compute instance-templates describe": set(),
    "compute instances create": {
        *("zone", "machine-type", "maintenance-policy", "image-family", "image-project", "subnet", "address", "tags"),
        *("private-network-ip", "service-account", "scopes", "disk", "metadata", "metadata-from-file", "no-address"),
    },
    "compute instances delete": {"zone"},
    "compute instances describe": {"zone"},
    "compute resource-policies create workload-policy": {"region", "type", "accelerator-topology"},
    "compute resource-policies delete": {"region"},
    "compute resource-policies describe": {"region"},
    "compute tpus queued-resources create": {
        *("zone", "node-id", "accelerator-type", "runtime-version", "network", "subnetwork", "service-account"),
        *("scopes", "spot", "tags", "internal-ips", "reserved"),
    },
    "alpha compute tpus queued-resources create": {
        *("zone", "node-id", "accelerator-type", "runtime-version", "network", "subnetwork", "service-account"),
        *("scopes", "tags", "provisioning-model", "max-run-duration"),
    },
    "alpha compute tpus queued-resources describe": {"zone"},
    "compute tpus queued-resources delete": {"zone", "force"},
    "compute tpus queued-resources describe": {"zone"},
    "compute tpus tpu-vm scp": {"zone", "worker", "internal-ip"},
    "compute tpus tpu-vm ssh": {"zone", "worker", "command", "internal-ip"},
    "container clusters create": {
        *("location", "network", "subnetwork", "enable-ip-alias", "num-nodes", "release-channel", "machine-type"),
        *("service-account", "workload-pool", "enable-private-nodes"),
    },
    "container clusters describe": {"location"},
    "container clusters get-credentials": {"location"},
    "container node-pools create": {
        *("cluster", "location", "node-locations", "machine-type", "num-nodes", "tpu-topology", "spot", "disk-size"),
        *("service-account", "workload-metadata", "reservation", "reservation-affinity", "flex-start", "min-nodes"),
        *("max-nodes", "enable-autoscaling", "location-policy", "no-enable-autorepair"),
        "placement-policy",  # .../kubernetes-engine/docs/concepts/tpu-ironwood
    },
    "container node-pools delete": {"cluster", "location"},
    "container node-pools describe": {"cluster", "location"},
    "secrets add-iam-policy-binding": {"member", "role"},
    "secrets create": {"replication-policy", "data-file"},
    "secrets delete": set(),
    "secrets describe": set(),
}


def command_of(words: list[str]) -> str:
    """Name the command among those above; "" if it is none of them."""
    text = " ".join(words[1:]) + " "
    return max((name for name in FLAGS if text.startswith(name + " ")), key=len, default="")


def flags_of(words: list[str]) -> set[str]:
    """Return the names of its flags."""
    return {word.removeprefix("--").partition("=")[0] for word in words if word.startswith("--")}
