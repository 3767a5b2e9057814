"""Compute Engine: a managed instance group of TPU hosts per island, the syncer a virtual machine.

A group with a workload policy is one slice. It is made anew after a preemption: Compute Engine does not start a slice
of spot capacity again by itself.
"""

from __future__ import annotations

from diloco_jax.launch import boot, common, readme, syncer_vm
from diloco_jax.launch.common import Dump, Slice
from diloco_jax.launch.plan import Plan, command, script, sequence_files, unless_there, verbs
from diloco_jax.launch.syncer_vm import IN_PROJECT, SCOPES
from diloco_jax.runtime.settings import RunConfig

WAY = "gce"
NEEDED = ("project", "image", "network", "service_account", "tpu_image_family")
IMAGE_PROJECT = "ubuntu-os-accelerator-images"


def plan(config: RunConfig, dump: Dump) -> Plan:
    """Scripts.

    Args:
        config: the run's settings.
        dump: writes settings as YAML.

    Raises:
        ValueError: a setting is missing, or a name cannot be used.
    """
    slices = common.slices_of(config, WAY, NEEDED)
    files = {
        **common.config_files(config, dump),
        "learner-boot.sh": boot.learner_at_boot(),
        **syncer_vm.files(config),
        **{f"islands/{each.name}.sh": island_script(config, each) for each in slices},
    }
    scripts = [f"islands/{each.name}.sh" for each in slices]
    create = (common.certificates_command(config), "./syncer.sh create", *(f"{each} create" for each in scripts))
    delete = (*(f"{each} delete" for each in scripts), "./syncer.sh delete")
    files |= sequence_files(create, delete)
    files["README.md"] = readme.gce(config, slices, create)
    return Plan(files=files, create=create, delete=delete)


def island_script(config: RunConfig, each: Slice) -> str:
    """What is done for one island."""
    topology, name = each.topology, each.resource
    policy = ("gcloud", "compute", "resource-policies")
    template = ("gcloud", "compute", "instance-templates")
    group = ("gcloud", "compute", "instance-groups", "managed")
    region, zone = ("--region", each.region), ("--zone", each.zone)
    several = topology.hosts > 1
    kind = ("--provisioning-model=SPOT", "--instance-termination-action=STOP") if config.cloud.spot else ()
    words = [*common.learner_words(each.name, "$syncer:$PORT"), "--preemption", "gce"]
    make_template = command(
        *(*template, "create", name, *IN_PROJECT, "--machine-type", topology.machine_type, *kind),
        *("--maintenance-policy=TERMINATE", "--image-family", config.cloud.tpu_image_family),
        *(f"--image-project={IMAGE_PROJECT}", f"--boot-disk-size={config.cloud.host_disk_gb}GB"),
        *(*region, "--network", "$NETWORK", "--subnet", "$SUBNETWORK"),
        *("--service-account", "$SERVICE_ACCOUNT", f"--scopes={SCOPES}"),
        syncer_vm.metadata(words, each.name),
        "--metadata-from-file=startup-script=learner-boot.sh,diloco-config=config.yaml",
    )
    make_policy = unless_there(
        (*policy, "describe", name, *region, *IN_PROJECT),
        command(
            *(*policy, "create", "workload-policy", name, *region, *IN_PROJECT),
            *("--type=HIGH_THROUGHPUT", f"--accelerator-topology={topology.dims}"),
        ),
    )
    as_slice = (f"--workload-policy=projects/$PROJECT/regions/{each.region}/resourcePolicies/{name}",)
    make_group = command(
        *(*group, "create", name, *zone, *IN_PROJECT, "--template", name, "--size", str(topology.hosts)),
        *("--default-action-on-vm-failure=do-nothing", *(as_slice if several else ())),
    )
    create = [
        syncer_vm.make_secret(each.name),
        'syncer="$(./syncer.sh address)"',
        unless_there((*template, "describe", name, *IN_PROJECT), make_template),
        *([make_policy] if several else []),
        unless_there((*group, "describe", name, *zone, *IN_PROJECT), make_group),
    ]
    delete = [
        syncer_vm.if_there(*group, name=name, where=zone),
        syncer_vm.if_there(*template, name=name, where=()),
        *([syncer_vm.if_there(*policy, name=name, where=region)] if several else []),
        syncer_vm.if_there("gcloud", "secrets", name=f"$RUN-{each.name}", where=()),
    ]
    return script(str(each), verbs({"create": create, "delete": delete}), depth=1)
