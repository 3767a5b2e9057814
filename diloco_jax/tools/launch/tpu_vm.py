"""The Cloud TPU API: a queued resource per island, files copied and containers started over ssh.

One queued resource per island, never one with several nodes: those would be told to be one multislice job, and a host
would wait for the hosts of all other islands.
"""

from functools import partial

from diloco_jax.settings.run import RunConfig
from diloco_jax.tools.launch import common, syncer_vm
from diloco_jax.tools.launch.common import IslandMachines, asked_of
from diloco_jax.tools.launch.files import IN_PROJECT, Resource, command, piece, script, verbs
from diloco_jax.tools.launch.launcher import Launcher
from diloco_jax.tools.launch.syncer_vm import SCOPES

VM = ("gcloud", "compute", "tpus", "tpu-vm")
HOME = "diloco"  # folder on the TPU VM


def island_script(config: RunConfig, each: IslandMachines) -> str:
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
        _wait(state, each),
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


def _wait(state: str, each: IslandMachines) -> str:
    """Wait for capacity for the island; a resource that lost it never gets it back, and must be made anew."""
    return piece("wait", state=state, island=each.name).rstrip()


LAUNCHER = Launcher(
    "tpu-vm",
    (),
    partial(syncer_vm.parts, {"learner.sh": syncer_vm.LEARNER_BY_HAND}, island_script, ("create", "start")),
)
