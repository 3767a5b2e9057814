"""The Cloud TPU API: a queued resource per island, files copied and containers started over ssh.

One queued resource per island, never one with several nodes: those would be told to be one multislice job, and a host
would wait for the hosts of all other islands.
"""

from __future__ import annotations

from diloco_jax.launch import boot, common, readme, syncer_vm
from diloco_jax.launch.common import Dump, Slice
from diloco_jax.launch.plan import Plan, command, script, sequence_files, unless_there, verbs
from diloco_jax.launch.syncer_vm import IN_PROJECT, SCOPES
from diloco_jax.runtime.settings import RunConfig

WAY = "tpu-vm"
NEEDED = ("project", "image", "network", "service_account")
RESOURCE = ("gcloud", "compute", "tpus", "queued-resources")
VM = ("gcloud", "compute", "tpus", "tpu-vm")
HOME = "diloco"  # folder on the TPU VM


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
        "learner.sh": boot.learner_by_hand(),
        **syncer_vm.files(config),
        **{f"islands/{each.name}.sh": island_script(config, each) for each in slices},
    }
    scripts = [f"islands/{each.name}.sh" for each in slices]
    create = (
        common.certificates_command(config),
        "./syncer.sh create",
        *(f"{each} create" for each in scripts),
        *(f"{each} start" for each in scripts),
    )
    delete = (*(f"{each} delete" for each in scripts), "./syncer.sh delete")
    files |= sequence_files(create, delete)
    files["README.md"] = readme.tpu_vm(config, slices, create)
    return Plan(files=files, create=create, delete=delete)


def island_script(config: RunConfig, each: Slice) -> str:
    """What is done for one island."""
    name, zone = each.resource, ("--zone", each.zone)
    generation = each.topology.generation
    make = command(
        *(*RESOURCE, "create", name, *zone, *IN_PROJECT, "--node-id", name),
        *("--accelerator-type", each.topology.accelerator_type, "--runtime-version", generation.runtime_version),
        *("--network", "$NETWORK", "--subnetwork", "$SUBNETWORK"),
        *("--service-account", "$SERVICE_ACCOUNT", f"--scopes={SCOPES}", *(("--spot",) if config.cloud.spot else ())),
    )
    look = (*RESOURCE, "describe", name, *zone, *IN_PROJECT)
    everywhere = (*zone, *IN_PROJECT, "--worker=all")
    files = [f"certs/{file}" for file in common.certificate_files(each.name)]
    words = ["sudo", "bash", f"{HOME}/learner.sh", "$IMAGE", *common.learner_words(each.name, "$syncer:$PORT")]
    start = [
        _wait(command(*look, "--format=value(state.state)"), each),
        'syncer="$(./syncer.sh address)"',
        command(*VM, "ssh", name, *everywhere, "--command", f"mkdir -p {HOME}/config && mkdir -p -m 700 {HOME}/certs"),
        command(*VM, "scp", *files, f"{name}:{HOME}/certs/", *everywhere),
        command(*VM, "scp", "config.yaml", f"{name}:{HOME}/config/", *everywhere),
        command(*VM, "scp", "learner.sh", f"{name}:{HOME}/", *everywhere),
        command(*VM, "ssh", name, *everywhere, "--command", " ".join([*words, "--preemption", "gce"])),
    ]
    functions = {
        "create": [unless_there(look, make)],
        "start": start,
        "logs": [command(*VM, "ssh", name, *everywhere, "--command", "sudo docker logs --tail 20 diloco")],
        "delete": [f"if have {command(*look)}; then\n  " + _delete(name, zone) + "\nfi"],
    }
    return script(str(each), verbs(functions), depth=1)


def _wait(state: str, each: Slice) -> str:
    """Until there is capacity for the island; a resource that lost it never gets it back, and must be made anew."""
    return f"""\
while true; do
  state="$({state})"
  case "$state" in
    ACTIVE) break ;;
    FAILED | SUSPENDED | SUSPENDING | DELETING)
      echo "{each.name} is $state; make it anew: $0 delete && $0 create && $0 start" >&2
      exit 1
      ;;
  esac
  echo "{each.name} is $state; waiting for ACTIVE"
  sleep 30
done"""


def _delete(name: str, zone: tuple[str, ...]) -> str:
    return command(*RESOURCE, "delete", name, *zone, *IN_PROJECT, "--force", "--quiet")
