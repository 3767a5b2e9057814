"""A way of launching: its result, files and the commands that use them, and those files that all ways write."""

import re
import shlex
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import dump
from diloco_jax.tools.launch import common
from diloco_jax.tools.launch.common import CERTIFICATES_PATH, IslandMachines, asked_of
from diloco_jax.tools.launch.needs import Needs, with_host

HEADER = "#!/usr/bin/env bash\n"
PIECES, README, GUIDES = (Path(__file__).with_name(name) for name in ("pieces.txt", "readme.md", "guides.toml"))
POD_ACCOUNT = "diloco"  # Kubernetes service account


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run's launch, as data."""

    files: dict[str, str]  # relative path -> text. Those that begin with "#!" are made executable.
    create: tuple[str, ...]  # command lines of bash, run in the folder of the files, one by one
    delete: tuple[str, ...]  # the same, to take away what they made


def piece(name: str, /, **values: object) -> str:
    """Return a part of a script from pieces.txt, with values in place of their names between two @.

    A list has other parts, which take the place of a line.
    """
    text = re.split(rf"(?m)^#= {name}\n", PIECES.read_text(encoding="utf-8"))[1].partition("\n#= ")[0].rstrip() + "\n"
    for key, value in values.items():
        if isinstance(value, list):
            text = text.replace(f"@{key}@\n", "".join(value))
        text = text.replace(f"@{key}@", str(value))
    return text


def script(comment: str, body: str, *, depth: int = 0) -> str:
    """Write a script that runs in the folder of the files and stops at the first failure.

    One that has functions is called as SCRIPT VERB, and the verb is one of them.
    """
    names = " | ".join(re.findall(r"(?m)^(\w+)\(\) \{$", body))
    about = "".join(f"# {line}\n" for line in comment.splitlines())
    choice = piece("choice", names=names) if names else ""
    return HEADER + piece("script", about=[about], up="/.." * depth, body=[body.rstrip() + "\n"], choice=[choice])


def sequence_files(create: Sequence[str], delete: Sequence[str]) -> dict[str, str]:
    """Write create.sh and delete.sh, which run a plan's commands."""
    keeps = "Takes away what create.sh made, but for the disk with the run's folder, clusters and certificates.\n"
    return {
        "create.sh": script("Makes and starts everything. May be run again: what is there stays.", "\n".join(create)),
        # one that cannot be deleted must not keep the others
        "delete.sh": script(
            keeps + "Goes on after a failure, and ends with status 1 if there was one.",
            "failed=0\n" + "\n".join(f"{{ {line}; }} || failed=1" for line in delete) + '\nexit "$failed"',
        ),
    }


class Launcher(NamedTuple):
    """A way of launching on Google Cloud."""

    name: str  # as `diloco launch` calls it
    needed: tuple[str, ...]  # settings of `cloud` that must not be empty, beside those of all ways
    parts: Callable[[RunConfig, list[IslandMachines], Needs], Plan]  # writes the files and commands of this way alone

    def slices(self, config: RunConfig) -> list[IslandMachines]:
        """Check the config as far as that takes no time, and return the islands' machines. Raises as `plan` does."""
        asked_of(config.cloud, self.name)
        return common.slices_of(config, self.name, self.needed)

    def plan(self, config: RunConfig, needs: Needs = None) -> Plan:
        """Write all files and commands, with what machines need if that is known; ValueError names a wrong setting."""
        slices, config = self.slices(config), with_host(config, needs)
        own = self.parts(config, slices, needs)
        create = (common.make_certificates(config), "./project.sh create", *own.create)
        delete = (*own.delete, "./project.sh delete")
        regions = common.regions_of(config, slices)
        files = {
            "config.yaml": dump(common.remote(config)),
            "local.yaml": dump(local(config)),
            "variables.sh": variables(config),
            "project.sh": project_script(config, self.name, regions),
            **own.files,
            **sequence_files(create, delete),
            "README.md": self.readme(config, slices, regions, create),
        }
        return Plan(files=files, create=create, delete=delete)

    def readme(
        self, config: RunConfig, slices: list[IslandMachines], regions: list[str], create: tuple[str, ...]
    ) -> str:
        """Write README.md: what to do in which order, and how to look at the run."""
        cloud, first = config.cloud, slices[0]
        kubectl = "kubectl --context gke_{0.project}_{1}_{0.cluster} --namespace {0.namespace}"
        doctor = f"diloco doctor {common.CONFIG_PATH} --island {first.name} --syncer ADDRESS:{cloud.port}"
        values = {
            "name": config.name,
            "project": cloud.project,
            "first": first.name,
            "resource": first.resource,
            "where": f"--zone {first.zone} --project {cloud.project}",
            "syncer_zone": common.syncer_zone(config),
            "config": common.CONFIG_PATH,
            "there": kubectl.format(cloud, first.region),
            "beside_syncer": kubectl.format(cloud, common.syncer_region(config)),
            "pods": "\n".join(f"{kubectl.format(cloud, region)} get jobsets,pods" for region in regions),
            "in_container": f"sudo docker exec diloco {doctor}",
        }
        guide = tomllib.loads(GUIDES.read_text(encoding="utf-8"))[self.name]
        return README.read_text(encoding="utf-8").format(
            way=self.name,
            image=cloud.image,
            bucket=cloud.bucket,
            islands="\n".join(f"* {each}" for each in slices) + f"\n* syncer in {common.syncer_zone(config)}",
            create="\n".join(create),
            port=cloud.port,
            ports=common.port_range(config),
            ranges=", ".join(cloud.source_ranges),
            **values | {key: text.format(**values) for key, text in guide.items()},
        )


def local(config: RunConfig) -> RunConfig:
    """Make the settings for commands in the folder of the files: `diloco status ADDRESS --config local.yaml`."""
    everywhere = common.remote(config)
    names = ("tls_ca", "tls_certificate", "tls_key", "token_file")
    here = {name: getattr(everywhere.transport, name).replace(CERTIFICATES_PATH, "certs") for name in names}
    return replace(everywhere, transport=replace(everywhere.transport, **here))


def variables(config: RunConfig) -> str:
    """Write variables.sh, which all scripts read."""
    cloud = asdict(config.cloud)
    cloud["subnetwork"] = config.cloud.subnetwork or config.cloud.network
    words = {name: shlex.quote(value) for name, value in cloud.items() if isinstance(value, str)}
    zone, region = common.syncer_zone(config), common.syncer_region(config)
    return piece("variables", **words | {"run": config.name, "port": cloud["port"], "zone": zone, "region": region})


def project_script(config: RunConfig, way: str, regions: list[str]) -> str:
    """Write what is done once for all machines; NAT and permissions stay when the run is deleted."""
    if way == "gke":
        create, delete = piece("pod_account", account=POD_ACCOUNT), "  :\n"
    else:  # GKE makes the rules for its nodes itself
        create, delete = piece("hosts_rule"), piece("no_hosts_rule")
    nat = [piece("nat", region=region) for region in regions if config.cloud.nat]
    return script("What all machines of the run share.", piece("project", create=[create, *nat], delete=[delete]))


def slice_policy(each: IslandMachines) -> tuple[str, str]:
    """Write how the workload policy is made by which hosts become one slice, and how it is taken away."""
    values = {"name": each.resource, "region": each.region, "dims": each.topology.dims}
    return piece("policy", **values), piece("no_policy", **values)
