"""Compute Engine: a managed instance group of TPU hosts per island, the syncer a virtual machine.

A group with a workload policy is one slice. It is made anew after a preemption: Compute Engine does not start a slice
of spot capacity again by itself.
"""

from functools import partial

from diloco_jax.settings.run import RunConfig
from diloco_jax.tools.launch import common, syncer_vm
from diloco_jax.tools.launch.common import IslandMachines, asked_of
from diloco_jax.tools.launch.files import Resource, script, verbs
from diloco_jax.tools.launch.launcher import Launcher, slice_policy
from diloco_jax.tools.launch.syncer_vm import SCOPES

IMAGE_PROJECT = "ubuntu-os-accelerator-images"


def island_script(config: RunConfig, each: IslandMachines) -> str:
    topology, name = each.topology, each.resource
    region, zone = ("--region", each.region), ("--zone", each.zone)
    policy, make_policy = slice_policy(each)
    template = Resource(("gcloud", "compute", "instance-templates"), name)
    group = Resource(("gcloud", "compute", "instance-groups", "managed"), name, zone)
    several = topology.hosts > 1
    kind = asked_of(config.cloud, "gce").flags
    words = [*common.learner_words(each.name, "$syncer:$PORT"), "--preemption", "gce"]
    make_template = template.make(
        *("--machine-type", topology.machine_type, *kind),
        *("--maintenance-policy=TERMINATE", "--image-family", config.cloud.tpu_image_family),
        *(f"--image-project={IMAGE_PROJECT}", f"--boot-disk-size={config.cloud.host_disk_gb}GB"),
        *(*region, "--network", "$NETWORK", "--subnet", "$SUBNETWORK"),
        *("--service-account", "$SERVICE_ACCOUNT", f"--scopes={SCOPES}"),
        *("--tags", "$RUN-hosts", *(("--no-address",) if config.cloud.private else ())),
        syncer_vm.metadata(words, each.name) + f",diloco-hosts={topology.hosts}",
        "--metadata-from-file=startup-script=learner-boot.sh,diloco-config=config.yaml,"
        f"diloco-environment=islands/{each.name}.env",
    )
    as_slice = (f"--workload-policy=projects/$PROJECT/regions/{each.region}/resourcePolicies/{name}",)
    make_group = group.make(
        *("--template", name, "--size", str(topology.hosts)),
        *("--default-action-on-vm-failure=do-nothing", *(as_slice if several else ())),
    )
    create = [
        syncer_vm.make_secret(each.name),
        'syncer="$(./syncer.sh address)"',
        make_template,
        *([make_policy] if several else []),
        make_group,
    ]
    made = [group, template, *([policy] if several else []), syncer_vm.secret_of(each.name)]
    return script(str(each), verbs({"create": create, "delete": [thing.delete() for thing in made]}), depth=1)


LAUNCHER = Launcher(
    "gce",
    ("tpu_image_family",),
    partial(syncer_vm.parts, {"learner-boot.sh": syncer_vm.LEARNER_AT_BOOT}, island_script, ("create",)),
)
