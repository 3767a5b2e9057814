"""GPU hosts: jobs of a Slurm cluster with a shared folder, or tasks of SkyPilot.

An island of N processes is a job with N tasks; Slurm places them and deals out the GPUs of its nodes. SkyPilot starts
one process on each node, which has all of its GPUs. Fields of tasks: sky/utils/schemas.py of SkyPilot 0.14.
"""

import math
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import yaml

from diloco_jax.runtime.records.signals import INTERRUPTED, WRONG_INPUT
from diloco_jax.settings.islands import IslandConfig
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import dump
from diloco_jax.tools.launch import common
from diloco_jax.tools.launch.launcher import HEADER, Plan, local, piece
from diloco_jax.tools.launch.needs import GIB, MARGIN, Needs, island_bytes, syncer_bytes

COORDINATOR_PORT = 8482
GPU_GIB = 16  # of a host's memory for each GPU, at least: what CUDA takes is in no forecast
CPUS = 8  # of the syncer, and of each process of an island


class GpuLauncher(NamedTuple):
    """A way of launching on GPU hosts."""

    name: str  # as `diloco launch` calls it
    parts: Callable[[RunConfig, Needs], Plan]  # writes the files and commands of this way alone

    def slices(self, config: RunConfig) -> list[IslandConfig]:
        """Check the config, and return the islands; ValueError if it does not say how many GPUs they have."""
        common.check_label("name", config.name)
        islands = [config.island(name) for name in config.islands.names]
        if alike := next((each.name for each in islands if not each.devices), ""):
            raise ValueError(f"{alike} does not say how many GPUs it has; set islands.devices, over all its hosts")
        if not config.cloud.bucket and common.BUCKET in dump(config):
            raise ValueError(f"a path names {common.BUCKET}, but cloud.bucket is empty; set it")
        if self.name == "sky" and not config.gpu.accelerator:
            raise ValueError("launch sky needs gpu.accelerator, such as H100; write it into the config")
        return islands

    def plan(self, config: RunConfig, needs: Needs = None) -> Plan:
        """Write all files and commands. Raises as `slices` does."""
        self.slices(config)
        own = self.parts(config, needs)
        create = (common.make_certificates(config), *own.create)
        told = {"way": self.name, "name": config.name, "port": config.cloud.port, "create": "\n".join(create)}
        exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in config.cloud.env.items())
        restarts = {"restarts": config.cloud.restarts_max, "wrong": WRONG_INPUT}
        here = 'cd "$(dirname "${BASH_SOURCE[0]}")"'
        return replace(
            own,
            create=create,
            files={
                "config.yaml": dump(local(config)),
                "variables.sh": piece("gpu_variables", exports=exports, setup=config.gpu.setup, **restarts),
                **own.files,
                "create.sh": "\n".join((HEADER + "set -euo pipefail", here, *create, "")),
                "delete.sh": "\n".join((HEADER + "set -euo pipefail", here, *own.delete, "")),
                "README.md": piece("gpu_readme", **told),
            },
        )


def _learner(island: IslandConfig, host: str, coordinator: str) -> str:
    place = f' --host "{host}" --coordinator "{coordinator}"' if island.hosts > 1 else ""
    return f'diloco learner config.yaml --island {island.name} --syncer "$SYNCER" --run-dir run{place}'


def _gib(num_bytes: float) -> int:
    return math.ceil(MARGIN * num_bytes / GIB)


def slurm(config: RunConfig, needs: Needs) -> Plan:
    """Write a batch script for the syncer and for each island."""

    def script(name: str, asks: tuple[str, ...], body: str) -> str:
        asked = (f"--job-name={config.name}-{name}", f"--output=logs/{name}.log", "--open-mode=append", "--requeue")
        lines = "".join(f"#SBATCH {each}\n" for each in (*asked, "--signal=TERM@90", *asks, *config.gpu.options))
        return f"{HEADER}{lines}set -euo pipefail\nsource variables.sh\n{body}"

    memory = (f"--mem={gib}G",) if (gib := _gib(syncer_bytes(needs))) else ()
    asks = ("--ntasks=1", f"--cpus-per-task={CPUS}", *memory)
    files = {"syncer.sbatch": script("syncer", asks, piece("gpu_syncer", port=config.cloud.port))}
    for name in config.islands.names:
        island = config.island(name)
        words = "exec " + _learner(island, "$SLURM_PROCID", "$COORDINATOR")
        gpus = island.devices // island.hosts
        asks = (f"--ntasks={island.hosts}", f"--gpus-per-task={gpus}", f"--cpus-per-task={CPUS}")
        each = max(GPU_GIB, _gib(island_bytes(needs, name) / gpus))
        asks += (f"--mem-per-gpu={each}G",)  # tasks of several islands may share a node
        files[f"{name}.sbatch"] = script(name, asks, piece("gpu_island", name=name, words=words))
    jobs = ",".join(f"{config.name}-{name.removesuffix('.sbatch')}" for name in files)
    start = tuple(f"sbatch {name}" for name in files)
    return Plan(files=files, create=("mkdir -p logs", "rm -f address", *start), delete=(f"scancel --me --name={jobs}",))


def sky(config: RunConfig, needs: Needs) -> Plan:
    """Write a task for the syncer and for each island."""
    image = {"image_id": f"docker:{config.cloud.image}"} if config.cloud.image else {}

    def task(name: str, run: str, resources: dict[str, Any], **more: Any) -> str:
        files = ["config.yaml", "variables.sh", *(f"certs/{each}" for each in common.certificate_files(name))]
        own = {
            "name": f"{config.name}-{name}",
            "resources": image | resources,
            "file_mounts": {f"~/diloco/{each}": each for each in files},
            "run": f"cd ~/diloco\nsource variables.sh\n{run}\n",
        }
        return yaml.safe_dump(own | more, sort_keys=False, width=1000)

    memory = {"memory": f"{gib}+"} if (gib := _gib(syncer_bytes(needs))) else {}
    ports = [int(port) for port in common.ports(config)]
    run = "exec diloco syncer config.yaml --run-dir run"
    files = {"syncer.sky.yaml": task("syncer", run, {"cpus": f"{CPUS}+", **memory, "ports": ports})}
    again = {"max_restarts_on_errors": 10, "recover_on_exit_codes": [INTERRUPTED, 143]}
    for name in config.islands.names:
        island = config.island(name)
        coordinator = f'$(head -n 1 <<<"$SKYPILOT_NODE_IPS"):{COORDINATOR_PORT}'
        run = "exec " + _learner(island, "$SKYPILOT_NODE_RANK", coordinator)
        gpus = {"accelerators": f"{config.gpu.accelerator}:{island.devices // island.hosts}"}
        asks = gpus | {"use_spot": config.cloud.capacity == "spot", "job_recovery": again}
        files[f"{name}.sky.yaml"] = task(name, run, asks, num_nodes=island.hosts, envs={"SYNCER": ""})
    syncer, address = f"{config.name}-syncer", f'"$(sky status --ip {config.name}-syncer):{config.cloud.port}"'
    launch = f"sky jobs launch --yes --detach-run --env SYNCER={address}"
    start = (f"{launch} {name}.sky.yaml" for name in config.islands.names)
    jobs = (f"sky jobs cancel --yes --name {config.name}-{name}" for name in config.islands.names)
    return Plan(
        files=files,
        create=(f"sky launch --yes --detach-run --cluster {syncer} syncer.sky.yaml", *start),
        delete=(*jobs, f"sky down --yes {syncer}"),
    )


SLURM, SKY = GpuLauncher("slurm", slurm), GpuLauncher("sky", sky)
