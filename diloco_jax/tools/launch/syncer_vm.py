"""The syncer on a virtual machine of its own, for islands in Compute Engine and on TPU VMs."""

from collections.abc import Callable, Mapping, Sequence

from diloco_jax.settings.run import RunConfig
from diloco_jax.tools.launch import boot, common
from diloco_jax.tools.launch.common import IslandMachines
from diloco_jax.tools.launch.files import IN_PROJECT, Plan, Resource, command, script, verbs
from diloco_jax.tools.launch.needs import Needs

SCOPES = "cloud-platform"  # what the machine may do is decided by its account
SECRET_READER = "roles/secretmanager.secretAccessor"


def parts(
    learner: Mapping[str, str],
    island_script: Callable[[RunConfig, IslandMachines], str],
    steps: Sequence[str],
    config: RunConfig,
    slices: Sequence[IslandMachines],
    needs: Needs,
) -> Plan:
    """Write the scripts of a way whose syncer is a virtual machine.

    Args:
      learner: script that starts a learner's container, by its file's name.
      steps: verbs of the islands' scripts, in the order in which a launch calls them.
    """
    scripts = {f"islands/{each.name}.sh": island_script(config, each) for each in slices}
    syncer = {"syncer.sh": syncer_script(config), "syncer-boot.sh": boot.SYNCER_AT_BOOT}
    environments = {f"islands/{each.name}.env": _lines(common.environment(config, each.name)) for each in slices}
    return Plan(
        files={**learner, **syncer, **scripts, **environments},
        create=("./syncer.sh create", *(f"{each} {verb}" for verb in steps for each in scripts)),
        delete=(*(f"{each} delete" for each in scripts), "./syncer.sh delete"),
    )


def _lines(environment: Mapping[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in environment.items())


def doctor(config: RunConfig, island: IslandMachines) -> str:
    """Write the command that runs `diloco doctor` in the container of one of an island's hosts."""
    asked = f"diloco doctor {common.CONFIG_PATH} --island {island.name} --syncer ADDRESS:{config.cloud.port}"
    return f"sudo docker exec diloco {asked}"


def delete_disk(config: RunConfig) -> str:
    """Write the command that deletes the disk with the run's folder."""
    where = f"--zone {common.syncer_zone(config)} --project {config.cloud.project}"
    return f"gcloud compute disks delete {common.syncer_name(config)} {where}"


def secret_of(name: str) -> Resource:
    """Name the secret with the certificates of an island, or of the syncer."""
    return Resource(("gcloud", "secrets"), f"$RUN-{name}")


def make_secret(name: str) -> str:
    """Give the machines of an island, or of the syncer, its certificates."""
    secret, read = secret_of(name), boot.secret_command(common.certificate_files(name))
    member = "--member=serviceAccount:$SERVICE_ACCOUNT"
    return "\n".join(
        [
            secret.make("--replication-policy=automatic", "--data-file=-", after=f"{read} |\n  "),
            command(
                *(*secret.group, "add-iam-policy-binding", secret.name, *IN_PROJECT, member),
                *(f"--role={SECRET_READER}", "--format=none"),
            ),
        ]
    )


def metadata(words: list[str], secret: str) -> str:
    """Write what a machine is told, as a flag. No value has a comma, which would divide it."""
    arguments = " ".join(words)
    return f"--metadata=diloco-image=$IMAGE,diloco-secret=$RUN-{secret},diloco-arguments={arguments}"


def syncer_script(config: RunConfig) -> str:
    name, zone, region = "$RUN-syncer", ("--zone", "$SYNCER_ZONE"), ("--region", "$SYNCER_REGION")
    external = config.cloud.external
    subnet = () if external else ("--subnet", "$SUBNETWORK")
    alone = ("--no-address",) if config.cloud.private else ()
    address = Resource(("gcloud", "compute", "addresses"), name, region)
    disk = Resource(("gcloud", "compute", "disks"), name, zone)
    machine = Resource(("gcloud", "compute", "instances"), name, zone)
    rule = Resource(("gcloud", "compute", "firewall-rules"), name)
    told = metadata(common.syncer_words(), "syncer") + f",diloco-ports={common.port_range(config).replace('-', ':')}"
    create = [
        make_secret("syncer"),
        address.make(place=subnet),
        rule.make(
            *("--network", "$NETWORK", "--direction=INGRESS"),
            *("--allow", f"tcp:{common.port_range(config)}", "--target-tags", name),
            f"--source-ranges={','.join(config.cloud.source_ranges)}",
        ),
        disk.make("--type=pd-ssd", f"--size={config.cloud.syncer_disk_gb}GB"),
        machine.make(
            *("--machine-type", config.cloud.syncer_machine_type, "--maintenance-policy=MIGRATE"),
            *("--image-family=cos-stable", "--image-project=cos-cloud", "--subnet", "$SUBNETWORK"),
            *("--address" if external else "--private-network-ip", "$(address)", *alone, "--tags", name),
            *("--service-account", "$SERVICE_ACCOUNT", f"--scopes={SCOPES}"),
            *("--disk", f"name={name},device-name={boot.DISK},auto-delete=no"),
            told,
            "--metadata-from-file=startup-script=syncer-boot.sh,diloco-config=config.yaml",
        ),
    ]
    functions = {
        "address": [address.look("--format=value(address)")],
        "create": create,
        "delete": [each.delete() for each in (machine, rule, address, secret_of("syncer"))],
    }
    return script(common.ABOUT_SYNCER, verbs(functions))
