"""Virtual machines: islands as managed instance groups of Compute Engine or by the Cloud TPU API, and the syncer.

Machines run them when they start: they fetch what the container needs, and start it. A machine is told what to do by
its metadata: diloco-image, -arguments, -secret, -config, -ports (of the syncer), -hosts and -environment (of an
island). Nothing secret is among them; certificates come from Secret Manager, to which the machine's account has access.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from diloco_jax.runtime.records.signals import INTERRUPTED, WRONG_INPUT
from diloco_jax.settings.run import RunConfig
from diloco_jax.tools.launch import common
from diloco_jax.tools.launch.common import VOLUME, IslandMachines, asked_of
from diloco_jax.tools.launch.files import HEADER, IN_PROJECT, Plan, Resource, command, piece, script, verbs
from diloco_jax.tools.launch.launcher import Launcher, slice_policy
from diloco_jax.tools.launch.needs import Needs

IMAGE_PROJECT = "ubuntu-os-accelerator-images"
VM = ("gcloud", "compute", "tpus", "tpu-vm")
HOME = "diloco"  # folder on the TPU VM
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


def group_script(config: RunConfig, each: IslandMachines) -> str:
    """Write the script of a managed instance group; one with a workload policy is a slice.

    It is made anew after a preemption: Compute Engine does not start a slice of spot capacity again by itself.
    """
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
        metadata(words, each.name) + f",diloco-hosts={topology.hosts}",
        "--metadata-from-file=startup-script=learner-boot.sh,diloco-config=config.yaml,"
        f"diloco-environment=islands/{each.name}.env",
    )
    as_slice = (f"--workload-policy=projects/$PROJECT/regions/{each.region}/resourcePolicies/{name}",)
    make_group = group.make(
        *("--template", name, "--size", str(topology.hosts)),
        *("--default-action-on-vm-failure=do-nothing", *(as_slice if several else ())),
    )
    create = [
        make_secret(each.name),
        'syncer="$(./syncer.sh address)"',
        make_template,
        *([make_policy] if several else []),
        make_group,
    ]
    made = [group, template, *([policy] if several else []), secret_of(each.name)]
    return script(str(each), verbs({"create": create, "delete": [thing.delete() for thing in made]}), depth=1)


GCE = Launcher(
    "gce",
    ("tpu_image_family",),
    partial(parts, {"learner-boot.sh": LEARNER_AT_BOOT}, group_script, ("create",)),
)


def resource_script(config: RunConfig, each: IslandMachines) -> str:
    """Write the script of a queued resource, whose files are copied and containers started over ssh.

    Each island has its own, never one with several nodes: those would be told to be one multislice job, and a host
    would wait for the hosts of all other islands.
    """
    name, zone = each.resource, ("--zone", each.zone)
    generation = each.topology.generation
    asked = asked_of(config.cloud, "tpu-vm")
    group = ("compute", "tpus", "queued-resources")
    resource = Resource(("gcloud", *(("alpha",) if asked.alpha else ()), *group), name, zone)
    make = resource.make(
        *("--node-id", name, "--accelerator-type", each.topology.accelerator_type),
        *("--runtime-version", generation.runtime_version),
        *("--network", "$NETWORK", "--subnetwork", "$SUBNETWORK", "--tags", "$RUN-hosts"),
        *(("--internal-ips",) if config.cloud.private else ()),
        *("--service-account", "$SERVICE_ACCOUNT", f"--scopes={SCOPES}", *asked.flags),
    )
    state = resource.look("--format=value(state.state)")
    everywhere = (*zone, *IN_PROJECT, "--worker=all", *(("--internal-ip",) if config.cloud.private else ()))
    files = [f"certs/{file}" for file in common.certificate_files(each.name)]
    words = ["sudo", "bash", f"{HOME}/learner.sh", "$IMAGE", *common.learner_words(each.name, "$syncer:$PORT")]
    start = [
        # a resource that lost its capacity never gets it back, and must be made anew
        piece("wait", state=state, island=each.name).rstrip(),
        'syncer="$(./syncer.sh address)"',
        command(*VM, "ssh", name, *everywhere, "--command", f"mkdir -p {HOME}/config && mkdir -p -m 700 {HOME}/certs"),
        command(*VM, "scp", *files, f"{name}:{HOME}/certs/", *everywhere),
        command(*VM, "scp", "config.yaml", f"{name}:{HOME}/config/", *everywhere),
        command(*VM, "scp", f"islands/{each.name}.env", f"{name}:{HOME}/config/environment", *everywhere),
        command(*VM, "scp", "learner.sh", f"{name}:{HOME}/", *everywhere),
        command(*VM, "ssh", name, *everywhere, "--command", " ".join([*words, "--preemption", "gce"])),
    ]
    functions = {
        "create": [make],
        "start": start,
        "logs": [command(*VM, "ssh", name, *everywhere, "--command", "sudo docker logs --tail 20 diloco")],
        "delete": [resource.delete("--force")],
    }
    return script(str(each), verbs(functions), depth=1)


TPU_VM = Launcher(
    "tpu-vm",
    (),
    partial(parts, {"learner.sh": LEARNER_BY_HAND}, resource_script, ("create", "start")),
)
