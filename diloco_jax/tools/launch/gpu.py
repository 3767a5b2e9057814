"""GPU machines: jobs of a Slurm cluster with a shared folder, or tasks of SkyPilot.

An island of N processes is a Slurm job with N tasks; Slurm places them and assigns the GPUs. An island of several
slices is one job too, with a node for each host and a step for each slice, so slices keep their addresses when they
restart. SkyPilot starts one process on each node, and it gets all GPUs of the node. Fields of tasks:
sky/utils/schemas.py of SkyPilot 0.14.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from diloco_jax.runtime.records.signals import ASKED_TO_END, INTERRUPTED, TERMINATED, WRONG_INPUT
from diloco_jax.settings.islands import IslandConfig
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import dump
from diloco_jax.tools.launch import common
from diloco_jax.tools.launch.common import Site
from diloco_jax.tools.launch.launcher import Plan, local, render
from diloco_jax.tools.launch.needs import GIB, MARGIN, Needs, island_bytes, syncer_bytes

COORDINATOR_PORT = 8482
# The least CPU memory for each GPU, because the forecast does not include CUDA's memory.
GPU_GIB = 16
# Processors of the syncer, and of each process of an island.
CPUS = 8


class GpuLauncher(NamedTuple):
    """A way of launching on GPU machines."""

    # The argument of `diloco launch`.
    name: str
    # Returns the files and commands that only this way has.
    parts: Callable[[RunConfig, Needs, Site], Plan]

    def slices(self, config: RunConfig, site: Site | None = None) -> list[IslandConfig]:
        """Check the config, and return the islands; ValueError if a setting is missing, such as the number of GPUs."""
        common.check_label("name", config.name)
        common.check_slices(config, self.name)
        islands = [config.island(name) for name in (config.islands.names if site is None else site.names)]
        if alike := next((each.name for each in islands if not each.devices), ""):
            raise ValueError(f"{alike} has no number of GPUs; set islands.devices to the GPUs of all its hosts")
        if not config.cloud.bucket and common.BUCKET in dump(config):
            raise ValueError(f"a path contains {common.BUCKET}, but cloud.bucket is empty; set it")
        if self.name == "sky" and not all(each.accelerator for each in islands):
            raise ValueError("launch sky needs gpu.accelerator, such as H100; write it into the config")
        return islands

    def plan(self, config: RunConfig, needs: Needs = None, site: Site | None = None) -> Plan:
        """Return all files and commands; raises as `slices`.

        Args:
          needs: the machines' needs; None if the model cannot be loaded here.
          site: the part of the run to launch, in a folder that gets its certificates from outside; None for all.
        """
        self.slices(config, site)
        own = self.parts(config, needs, site or Site(config.islands.names, syncer=True))
        create, settings = own.create, local(config)
        if site is None:
            create = (common.make_certificates(config), *create)
        else:
            # Machines outside of Google Cloud may have no access to its bucket.
            states = config.checkpoints.states.replace(common.BUCKET, config.cloud.bucket)
            settings = replace(settings, checkpoints=replace(settings.checkpoints, states=states))
        said = {"name": config.name, "port": config.cloud.port, "slices": config.islands.slices, "create": create}
        readme = render("gpu/README.md", way=self.name, **said)
        return replace(
            own,
            create=create,
            files={
                "config.yaml": dump(settings),
                "variables.sh": render(
                    "gpu/variables.sh",
                    environment=config.cloud.env,
                    setup=config.gpu.setup,
                    restarts=config.cloud.restarts_max,
                    wrong_input=WRONG_INPUT,
                ),
                **own.files,
                "create.sh": render("gpu/commands.sh", commands=create),
                "delete.sh": render("gpu/commands.sh", commands=own.delete),
                **({"README.md": readme} if site is None else {}),
            },
        )


def _gib(num_bytes: float) -> int:
    return math.ceil(MARGIN * num_bytes / GIB)


def slurm(config: RunConfig, needs: Needs, site: Site) -> Plan:
    """Return a batch script for the syncer and for each island, and the commands that submit them."""
    everywhere = {"run": config.name, "cpus": CPUS, "options": config.gpu.options}
    files = {}
    if site.syncer:
        memory_gib = _gib(syncer_bytes(needs))
        files["syncer.sbatch"] = render(
            "slurm/syncer.sbatch", **everywhere, name="syncer", port=config.cloud.port, memory_gib=memory_gib
        )
    for name in site.names:
        island = config.island(name)
        gpus, slices = island.devices // island.hosts, config.islands.slices
        files[f"{name}.sbatch"] = render(
            "slurm/island.sbatch" if slices == 1 else "slurm/slices.sbatch",
            **everywhere,
            name=name,
            hosts=island.hosts,
            slices=slices,
            restarts=config.cloud.restarts_max,
            final={"wrong input": WRONG_INPUT, "asked to end": INTERRUPTED, "the same, at once": TERMINATED},
            gpus=gpus,
            memory_gib=max(GPU_GIB, _gib(island_bytes(needs, name) / gpus)),
        )
    jobs = ",".join(f"{config.name}-{name.removesuffix('.sbatch')}" for name in files)
    start = tuple(f"sbatch {name}" for name in files)
    # An earlier syncer's job may have written the address.
    forget = ("rm -f address",) if site.syncer else ()
    return Plan(files=files, create=("mkdir -p logs", *forget, *start), delete=(f"scancel --me --name={jobs}",))


def sky(config: RunConfig, needs: Needs, site: Site) -> Plan:
    """Return a task for the syncer and for each island, and the commands that start them."""
    files = {}
    if site.syncer:
        files["syncer.sky.yaml"] = render(
            "sky/syncer.sky.yaml",
            run=config.name,
            image=config.cloud.image,
            infra="",
            cpus=CPUS,
            memory_gib=_gib(syncer_bytes(needs)),
            port=config.cloud.port,
            certificates=common.certificate_files("syncer"),
        )
    for name in site.names:
        island, place = config.island(name), config.place(name)
        files[f"{name}.sky.yaml"] = render(
            "sky/island.sky.yaml",
            run=config.name,
            image=place.image,
            infra=place.region,
            name=name,
            hosts=island.hosts,
            gpus=island.devices // island.hosts,
            accelerator=place.accelerator,
            spot=place.capacity == "spot",
            polite=list(ASKED_TO_END),
            coordinator_port=COORDINATOR_PORT,
            certificates=common.certificate_files(name),
        )
    syncer = common.syncer_name(config)
    address = sky_address(config) if site.syncer else '"$(cat address)"'
    # Requests wait at SkyPilot's server, so one island without capacity does not keep the others from their request.
    launch = f"sky jobs launch --yes --async --env SYNCER={address}"
    start = (f"{launch} {name}.sky.yaml" for name in site.names)
    jobs = (f"sky jobs cancel --yes --name {config.name}-{name}" for name in site.names)
    made, gone = (f"sky launch --yes --detach-run --cluster {syncer} syncer.sky.yaml",), (f"sky down --yes {syncer}",)
    return Plan(
        files=files,
        create=(*(made if site.syncer else ()), *start),
        delete=(*jobs, *(gone if site.syncer else ())),
    )


def sky_address(config: RunConfig) -> str:
    """Return an argument for bash that is the address of a syncer on SkyPilot's machine."""
    return f'"$(sky status --ip {common.syncer_name(config)}):{config.cloud.port}"'


SLURM, SKY = GpuLauncher("slurm", slurm), GpuLauncher("sky", sky)
