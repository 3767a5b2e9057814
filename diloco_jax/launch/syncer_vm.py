"""The syncer on a virtual machine of its own, for islands in Compute Engine and on TPU VMs."""

from __future__ import annotations

from diloco_jax.launch import boot, common
from diloco_jax.launch.plan import command, script, unless_there, verbs
from diloco_jax.runtime.settings import RunConfig

SCOPES = "cloud-platform"  # what the machine may do is decided by its account
IN_PROJECT = ("--project", "$PROJECT")
SECRET_READER = "roles/secretmanager.secretAccessor"


def files(config: RunConfig) -> dict[str, str]:
    """syncer.sh, and the script that its machine runs."""
    return {"syncer.sh": syncer_script(config), "syncer-boot.sh": boot.syncer_at_boot()}


def make_secret(name: str) -> str:
    """Gives the machines of an island, or of the syncer, its certificates."""
    secret = f"$RUN-{name}"
    read = boot.secret_command(common.certificate_files(name))
    make = f"{read} |\n  " + command(
        *("gcloud", "secrets", "create", secret, *IN_PROJECT, "--replication-policy=automatic", "--data-file=-")
    )
    return "\n".join(
        [
            unless_there(("gcloud", "secrets", "describe", secret, *IN_PROJECT), make),
            command(
                *("gcloud", "secrets", "add-iam-policy-binding", secret, *IN_PROJECT),
                *("--member=serviceAccount:$SERVICE_ACCOUNT", f"--role={SECRET_READER}", "--format=none"),
            ),
        ]
    )


def metadata(words: list[str], secret: str) -> str:
    """What a machine is told, as a flag. No value has a comma, which would divide it."""
    arguments = " ".join(words)
    return f"--metadata=diloco-image=$IMAGE,diloco-secret=$RUN-{secret},diloco-arguments={arguments}"


def if_there(*noun: str, name: str, where: tuple[str, ...]) -> str:
    """Deletes something if it is there."""
    there = command(*noun, "describe", name, *where, *IN_PROJECT)
    return f"if have {there}; then\n  {command(*noun, 'delete', name, *where, *IN_PROJECT, '--quiet')}\nfi"


def syncer_script(config: RunConfig) -> str:
    """What is done for the syncer's machine."""
    zone, region = ("--zone", "$SYNCER_ZONE"), ("--region", "$SYNCER_REGION")
    subnet = () if config.cloud.external else ("--subnet", "$SUBNETWORK")
    address = ("gcloud", "compute", "addresses")
    disk, machine = ("gcloud", "compute", "disks"), ("gcloud", "compute", "instances")
    rule = ("gcloud", "compute", "firewall-rules")
    size = f"{config.cloud.syncer_disk_gb}GB"
    own = "--address" if config.cloud.external else "--private-network-ip"
    told = metadata(common.syncer_words(), "syncer") + f",diloco-ports={common.port_range(config).replace('-', ':')}"
    make = command(
        *(*machine, "create", "$RUN-syncer", *zone, *IN_PROJECT),
        *("--machine-type", config.cloud.syncer_machine_type, "--maintenance-policy=MIGRATE"),
        *("--image-family=cos-stable", "--image-project=cos-cloud", "--subnet", "$SUBNETWORK"),
        *(own, "$(address)", "--tags", "$RUN-syncer"),
        *("--service-account", "$SERVICE_ACCOUNT", f"--scopes={SCOPES}"),
        *("--disk", f"name=$RUN-syncer,device-name={boot.DISK},auto-delete=no"),
        told,
        "--metadata-from-file=startup-script=syncer-boot.sh,diloco-config=config.yaml",
    )
    create = [
        make_secret("syncer"),
        unless_there(
            (*address, "describe", "$RUN-syncer", *region, *IN_PROJECT),
            command(*address, "create", "$RUN-syncer", *region, *subnet, *IN_PROJECT),
        ),
        unless_there(
            (*rule, "describe", "$RUN-syncer", *IN_PROJECT),
            command(
                *(*rule, "create", "$RUN-syncer", *IN_PROJECT, "--network", "$NETWORK", "--direction=INGRESS"),
                *("--allow", f"tcp:{common.port_range(config)}", "--target-tags", "$RUN-syncer"),
                f"--source-ranges={','.join(config.cloud.source_ranges)}",
            ),
        ),
        unless_there(
            (*disk, "describe", "$RUN-syncer", *zone, *IN_PROJECT),
            command(*disk, "create", "$RUN-syncer", *zone, *IN_PROJECT, "--type=pd-ssd", f"--size={size}"),
        ),
        unless_there((*machine, "describe", "$RUN-syncer", *zone, *IN_PROJECT), make),
    ]
    delete = [
        if_there(*machine, name="$RUN-syncer", where=zone),
        if_there(*rule, name="$RUN-syncer", where=()),
        if_there(*address, name="$RUN-syncer", where=region),
        if_there("gcloud", "secrets", name="$RUN-syncer", where=()),
    ]
    functions = {
        "address": [command(*address, "describe", "$RUN-syncer", *region, *IN_PROJECT, "--format=value(address)")],
        "create": create,
        "delete": delete,
    }
    about = "The syncer. `delete` leaves its disk, from which the same run goes on when it is made again."
    return script(about, verbs(functions))
