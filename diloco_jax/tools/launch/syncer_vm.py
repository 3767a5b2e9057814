"""The syncer on a virtual machine of its own, for islands in Compute Engine and on TPU VMs, and scripts for both.

Machines run them when they start: they fetch what the container needs, and start it. A machine is told what to do by
its metadata: diloco-image, -arguments, -secret, -config, -ports (of the syncer), -hosts and -environment (of an
island). Nothing secret is among them; certificates come from Secret Manager, to which the machine's account has access.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence

from diloco_jax.runtime.records.signals import INTERRUPTED, WRONG_INPUT
from diloco_jax.settings.run import RunConfig
from diloco_jax.tools.launch import common
from diloco_jax.tools.launch.common import VOLUME, IslandMachines
from diloco_jax.tools.launch.files import HEADER, Plan, Resource, piece, script, verbs
from diloco_jax.tools.launch.needs import Needs

SCOPES = "cloud-platform"  # what the machine may do is decided by its account
SECRET_READER = "roles/secretmanager.secretAccessor"
USER = 10001  # of the image
DISK = "diloco-run"  # device name of the disk with the run's folder
STOP_S = 60  # for a container to end in good order
COORDINATOR_PORT = 8482  # of JAX, as it would choose by itself on a TPU

_FINAL = {"wrong input": WRONG_INPUT, "SIGTERM": INTERRUPTED, "SIGTERM before it could listen": 143}
# TPU devices belong to root, and locked memory must not be limited
_TPU_FLAGS = '--user root --privileged --env-file "$HOME/config/environment"'
_SYNCER_FLAGS = f"--user {USER} --env DILOCO_LOG=json --env DILOCO_CACHE={VOLUME}/cache"
_HOME_AT_BOOT = "export HOME=/var/lib/diloco\n"


def _script(about: str, *parts: str, flags: str) -> str:
    done, final = ", ".join(_FINAL), " | ".join(map(str, _FINAL.values()))
    lines = (*parts, piece("container", flags=flags, stop=STOP_S, volume=VOLUME, done=done, final=final))
    return HEADER + f"# {about}\nset -euo pipefail\n" + "\n".join(lines)


# of every host of a TPU slice in a managed instance group
LEARNER_AT_BOOT = _script(
    "Starts an island's container on a TPU host, at every start of the host.",
    *(_HOME_AT_BOOT, piece("metadata"), piece("secret"), piece("hosts", port=COORDINATOR_PORT), piece("docker")),
    flags=_TPU_FLAGS,
)
SYNCER_AT_BOOT = _script(
    "Starts the syncer's container, at every start of its machine. The run's folder is on a disk of its own.",
    *(_HOME_AT_BOOT, piece("metadata"), piece("secret"), piece("disk", disk=DISK, user=USER)),
    flags=_SYNCER_FLAGS,
)
# of a TPU VM, to which the files were copied
LEARNER_BY_HAND = _script(
    "Starts an island's container on a TPU VM: learner.sh IMAGE ARGUMENT... Run as root.",
    'HOME="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\nexport HOME\n',
    piece("metadata"),
    'image="$1"\narguments=("${@:2}")\nmkdir -p "$HOME/var"\n',
    piece("docker"),
    flags=_TPU_FLAGS,
)


def parts(
    learner: Mapping[str, str],
    island_script: Callable[[RunConfig, IslandMachines], str],
    steps: Sequence[str],
    config: RunConfig,
    slices: Sequence[IslandMachines],
    needs: Needs,
) -> Plan:
    """Write the scripts of a way: files that start learners, and the verbs of islands' scripts that a launch calls."""
    scripts = {f"islands/{each.name}.sh": island_script(config, each) for each in slices}
    syncer = {"syncer.sh": syncer_script(config), "syncer-boot.sh": SYNCER_AT_BOOT}
    environments = {f"islands/{each.name}.env": _lines(common.environment(config, each.name)) for each in slices}
    return Plan(
        files={**learner, **syncer, **scripts, **environments},
        create=("./syncer.sh create", *(f"{each} {verb}" for verb in steps for each in scripts)),
        delete=(*(f"{each} delete" for each in scripts), "./syncer.sh delete"),
    )


def _lines(environment: Mapping[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in environment.items())


def secret_of(name: str) -> Resource:
    """Name the secret with the certificates of an island, or of the syncer."""
    return Resource(("gcloud", "secrets"), f"$RUN-{name}")


def make_secret(name: str) -> str:
    """Give the machines of an island, or of the syncer, its certificates."""
    secret, files = secret_of(name), common.certificate_files(name)
    packed = f"tar -cz -C certs {' '.join(map(shlex.quote, files))} |\n  "  # as the scripts unpack them
    made = secret.make("--replication-policy=automatic", "--data-file=-", after=packed)
    return f"{made}\n{common.allow(secret.group, secret.name, SECRET_READER)}"


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
            *("--disk", f"name={name},device-name={DISK},auto-delete=no"),
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
