"""Virtual machines: islands as managed instance groups of Compute Engine or by the Cloud TPU API, and the syncer.

Machines run them when they start: they fetch what the container needs, and start it. A machine is told what to do by
its metadata: diloco-image, -arguments, -secret, -config, -ports (of the syncer), -hosts and -environment (of an
island). Nothing secret is among them; certificates come from Secret Manager, to which the machine's account has access.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from shlex import quote

from diloco_jax.runtime.records.signals import INTERRUPTED, WRONG_INPUT
from diloco_jax.settings.run import RunConfig
from diloco_jax.tools.launch import common
from diloco_jax.tools.launch.common import VOLUME, IslandMachines, asked_of, flags
from diloco_jax.tools.launch.launcher import HEADER, Launcher, Plan, piece, script, slice_policy
from diloco_jax.tools.launch.needs import Needs

USER = 10001  # of the image
DISK = "diloco-run"  # device name of the disk with the run's folder
STOP_S = 60  # for a container to end in good order
COORDINATOR_PORT = 8482  # of JAX, as it would choose by itself on a TPU

_FINAL = {"wrong input": WRONG_INPUT, "SIGTERM": INTERRUPTED, "SIGTERM before it could listen": 143}
_VALUES = {"stop": STOP_S, "volume": VOLUME, "disk": DISK, "user": USER, "port": COORDINATOR_PORT}
_VALUES |= {"done": ", ".join(_FINAL), "final": " | ".join(map(str, _FINAL.values()))}
# TPU devices belong to root, and locked memory must not be limited
_TPU_FLAGS = '--user root --privileged --env-file "$HOME/config/environment"'
_SYNCER_FLAGS = f"--user {USER} --env DILOCO_LOG=json --env DILOCO_CACHE={VOLUME}/cache"


def _starts(flags: str, *parts: str) -> str:
    """Write a script that starts a container with these flags of docker."""
    return HEADER + "\n".join(piece(part, flags=flags, **_VALUES) for part in (*parts, "container"))


# of every host of a TPU slice in a managed instance group
LEARNER_AT_BOOT = _starts(_TPU_FLAGS, "learner_at_boot", "metadata", "secret", "hosts", "docker")
SYNCER_AT_BOOT = _starts(_SYNCER_FLAGS, "syncer_at_boot", "metadata", "secret", "disk")
# of a TPU VM, to which the files were copied
LEARNER_BY_HAND = _starts(_TPU_FLAGS, "learner_by_hand", "metadata", "given", "docker")


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


def _certificates(name: str) -> dict[str, list[str]]:
    """Write how the machines of an island, or of the syncer, get their certificates, and lose them."""
    files = " ".join(common.certificate_files(name))
    return {
        "certificates": [piece("certificates", name=name, files=files)],
        "no_certificates": [piece("no_certificates", name=name)],
    }


def _told(words: list[str], secret: str) -> str:
    """Write a machine's metadata. No value has a comma, which would divide it."""
    return f"diloco-image=$IMAGE,diloco-secret=$RUN-{secret},diloco-arguments={' '.join(words)}"


def syncer_script(config: RunConfig) -> str:
    cloud, ports = config.cloud, common.port_range(config)
    body = piece(
        "vm_syncer",
        **_certificates("syncer"),
        subnet="" if cloud.external else ' --subnet "$SUBNETWORK"',
        ports=ports,
        ranges=",".join(cloud.source_ranges),
        disk_gb=cloud.syncer_disk_gb,
        machine=cloud.syncer_machine_type,
        address="--address" if cloud.external else "--private-network-ip",
        private=flags("--no-address" * cloud.private),
        disk=DISK,
        told=_told(common.syncer_words(), "syncer"),
        port_range=ports.replace("-", ":"),
    )
    return script(common.ABOUT_SYNCER, body)


def group_script(config: RunConfig, each: IslandMachines) -> str:
    """Write the script of a managed instance group; one with a workload policy is a slice.

    It is made anew after a preemption: Compute Engine does not start a slice of spot capacity again by itself.
    """
    name, region, several = each.resource, each.region, each.topology.hosts > 1
    policy, no_policy = slice_policy(each)
    as_slice = f' "--workload-policy=projects/$PROJECT/regions/{region}/resourcePolicies/{name}"'
    body = piece(
        "group",
        **_certificates(each.name),
        name=name,
        machine=quote(each.topology.machine_type),
        kind=flags(*asked_of(config.cloud, "gce").flags),
        image=config.cloud.tpu_image_family,
        disk_gb=config.cloud.host_disk_gb,
        region=region,
        zone=each.zone,
        private=flags("--no-address" * config.cloud.private),
        told=_told([*common.learner_words(each.name, "$syncer:$PORT"), "--preemption", "gce"], each.name),
        hosts=each.topology.hosts,
        environment=f"islands/{each.name}.env",
        policy=[policy] * several,
        no_policy=[no_policy] * several,
        as_slice=as_slice * several,
    )
    return script(str(each), body, depth=1)


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
    asked, private = asked_of(config.cloud, "tpu-vm"), config.cloud.private
    body = piece(
        "queued_resource",
        resources=f"gcloud{' alpha' * asked.alpha} compute tpus queued-resources",
        name=each.resource,
        zone=each.zone,
        accelerator=quote(each.topology.accelerator_type),
        runtime=quote(each.topology.generation.runtime_version),
        private=flags("--internal-ips" * private),
        kind=flags(*asked.flags),
        island=each.name,
        there=f'--zone {each.zone} --project "$PROJECT" --worker=all' + flags("--internal-ip" * private),
        files=" ".join(f"certs/{file}" for file in common.certificate_files(each.name)),
        environment=f"islands/{each.name}.env",
        words=" ".join([*common.learner_words(each.name, "$syncer:$PORT"), "--preemption", "gce"]),
    )
    return script(str(each), body, depth=1)


TPU_VM = Launcher(
    "tpu-vm",
    (),
    partial(parts, {"learner.sh": LEARNER_BY_HAND}, resource_script, ("create", "start")),
)
