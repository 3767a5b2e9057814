"""Virtual machines for the syncer and for islands: managed instance groups of Compute Engine, or the Cloud TPU API.

A machine runs a boot script when it starts. The script fetches everything that the container needs and starts it. Its
inputs are in the machine's metadata: diloco-image, -arguments, -secret, -config, -port (syncer), -hosts and
-environment (island). The metadata has no secrets; certificates come from Secret Manager, which the machine's account
can read.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from diloco_jax.runtime.records.signals import INTERRUPTED, TERMINATED, WRONG_INPUT
from diloco_jax.settings.run import RunConfig
from diloco_jax.tools.launch import common
from diloco_jax.tools.launch.common import VOLUME, IslandMachines, flags
from diloco_jax.tools.launch.launcher import Launcher, Plan, render
from diloco_jax.tools.launch.needs import Needs

# The user of the image.
USER = 10001
# The device name of the disk with the run's folder.
DISK = "diloco-run"
# The time that a container has to stop.
STOP_S = 60
# Each host of a slice writes its number in place of this into its arguments.
NUMBER = "{host}"
# The port of JAX's coordinator; JAX uses the same one on TPUs.
COORDINATOR_PORT = 8482

# A container with one of these exit statuses is not restarted.
FINAL = {"wrong input": WRONG_INPUT, "SIGTERM": INTERRUPTED, "SIGTERM before it could listen": TERMINATED}


def boot_script(name: str) -> str:
    """Return the script that starts the container of an island or of the syncer on its machine."""
    return render(
        name, final=FINAL, stop_s=STOP_S, volume=VOLUME, disk=DISK, user=USER, coordinator_port=COORDINATOR_PORT
    )


def parts(
    learner: str,
    island_script: Callable[[RunConfig, IslandMachines], str],
    steps: Sequence[str],
    config: RunConfig,
    slices: Sequence[IslandMachines],
    needs: Needs,
    with_syncer: bool,
) -> Plan:
    """Return the scripts of a way, and the commands that call them.

    Args:
        learner: template of the script that starts an island's container.
        island_script: returns the script of an island.
        steps: the verbs of the islands' scripts that a launch calls.
        with_syncer: whether the syncer is at this place, too.
    """
    scripts = {f"islands/{each.label}.sh": island_script(config, each) for each in slices}
    syncer, made, gone = dict[str, str](), tuple[str, ...](), tuple[str, ...]()
    if with_syncer:
        syncer = {"syncer.sh": syncer_script(config), "syncer-boot.sh": boot_script("vm/syncer-boot.sh")}
        made, gone = ("./syncer.sh create",), ("./syncer.sh delete",)
    environments = {f"islands/{each.name}.env": _lines(common.environment(config, each.name)) for each in slices}
    return Plan(
        files={learner.partition("/")[2]: boot_script(learner), **syncer, **scripts, **environments},
        create=(*made, *(f"{each} {verb}" for verb in steps for each in scripts)),
        delete=(*(f"{each} delete" for each in scripts), *gone),
    )


def _lines(environment: Mapping[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in environment.items())


def _metadata(words: list[str], secret: str) -> str:
    """Return a machine's metadata; values must not have commas, which separate entries."""
    return f"diloco-image=$IMAGE,diloco-secret=$RUN-{secret},diloco-arguments={' '.join(words)}"


def _learner(each: IslandMachines) -> list[str]:
    """Return the arguments of `diloco` on every host of an island; the script sets $syncer and $PORT."""
    learner = common.learner_words(each.name, "$syncer:$PORT")
    return [*learner, *common.slice_words(each, f"{{}}-host-{NUMBER}"), "--preemption", "gce"]


def syncer_script(config: RunConfig) -> str:
    cloud = config.cloud
    return render(
        "vm/syncer.sh",
        about=common.ABOUT_SYNCER,
        certificates=common.certificate_files("syncer"),
        external=cloud.external,
        private=cloud.private,
        port=cloud.port,
        source_ranges=cloud.source_ranges,
        machine=cloud.syncer_machine_type,
        disk=DISK,
        disk_gb=cloud.syncer_disk_gb,
        metadata=_metadata(common.syncer_words(), "syncer"),
    )


def group_script(config: RunConfig, each: IslandMachines) -> str:
    """Return the script of a managed instance group; a group with a workload policy is a slice.

    The script recreates the group after a preemption, because Compute Engine does not restart a spot slice itself.
    """
    return render(
        "gce/island.sh",
        island=each,
        certificates=common.certificate_files(each.name),
        flags=flags(*each.asked.flags),
        image_family=config.cloud.tpu_image_family,
        disk_gb=config.cloud.host_disk_gb,
        private=config.cloud.private,
        metadata=_metadata(_learner(each), each.name),
    )


GCE = Launcher("gce", ("tpu_image_family",), partial(parts, "gce/learner-boot.sh", group_script, ("create",)))


def resource_script(config: RunConfig, each: IslandMachines) -> str:
    """Return the script of a queued resource; it copies files and starts containers over ssh.

    Each island has a separate resource with one node. Several nodes of one resource would form a multislice job, where
    a host waits for the hosts of all other islands.
    """
    return render(
        "tpu-vm/island.sh",
        island=each,
        certificates=common.certificate_files(each.name),
        alpha=each.asked.alpha,
        flags=flags(*each.asked.flags),
        private=config.cloud.private,
        arguments=" ".join(_learner(each)),
    )


TPU_VM = Launcher("tpu-vm", (), partial(parts, "tpu-vm/learner.sh", resource_script, ("create", "start")))
