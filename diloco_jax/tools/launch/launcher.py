"""Ways of launching: the plan of files and commands that they return, and the files that all ways have.

Every file of a plan has a template with its name below `templates/`, which shows what a machine will get.
"""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import dump
from diloco_jax.tools.launch import common
from diloco_jax.tools.launch.common import CERTIFICATES_PATH, IslandMachines, Site
from diloco_jax.tools.launch.needs import Needs, with_syncer_machine

HEADER = "#!/usr/bin/env bash\n"
# The Kubernetes service account of the pods.
POD_ACCOUNT = "diloco"
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_TEMPLATES.filters |= {"quote": shlex.quote, "json": json.dumps}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run's launch: the files to write and the commands to run."""

    # Texts by relative path; a text that starts with "#!" becomes an executable file.
    files: dict[str, str]
    # Command lines for bash, which run one after the other in the folder of the files.
    create: tuple[str, ...]
    # Command lines that delete everything that `create` has made.
    delete: tuple[str, ...]


def render(template: str, /, **values: Any) -> str:
    """Fill in a template; jinja2.UndefinedError if a value is missing."""
    return _TEMPLATES.get_template(f"{template}.j2").render(values)


class Launcher(NamedTuple):
    """A way of launching on Google Cloud."""

    # The argument of `diloco launch`.
    name: str
    # Settings of `cloud` that must not be empty, in addition to those that all ways need.
    needed: tuple[str, ...]
    # Returns the files and commands that only this way has.
    parts: Callable[[RunConfig, list[IslandMachines], Needs, bool], Plan]

    def slices(self, config: RunConfig, site: Site | None = None) -> list[IslandMachines]:
        """Check the config without loading the model, and return the islands' machines; ValueError as in `plan`."""
        return common.slices_of(config, self.name, self.needed, site and site.names)

    def plan(self, config: RunConfig, needs: Needs = None, site: Site | None = None) -> Plan:
        """Return all files and commands; ValueError names a wrong setting.

        Args:
          needs: the machines' needs; None if the model cannot be loaded here.
          site: the part of the run to launch, in a folder that gets its certificates from outside; None for all.
        """
        slices, syncer = self.slices(config, site), site is None or site.syncer
        config = with_syncer_machine(config, needs) if syncer else config
        own = self.parts(config, slices, needs, syncer)
        certificates = (common.make_certificates(config),) if site is None else ()
        create = (*certificates, "./project.sh create", *own.create)
        delete = (*own.delete, "./project.sh delete")
        regions = common.regions_of(config, slices, syncer=syncer)
        files = {
            "config.yaml": dump(common.remote(config)),
            "local.yaml": dump(local(config)),
            "variables.sh": variables(config),
            "project.sh": project_script(config, self.name, regions),
            **own.files,
            **({} if syncer else {"syncer.sh": render("sites/syncer.sh")}),
            "create.sh": render("create.sh", commands=create),
            "delete.sh": render("delete.sh", commands=delete),
            **({"README.md": self.readme(config, slices, regions, create)} if site is None else {}),
        }
        return Plan(files=files, create=create, delete=delete)

    def readme(
        self, config: RunConfig, slices: list[IslandMachines], regions: list[str], create: tuple[str, ...]
    ) -> str:
        """Return the text of README.md: the steps of the launch in their order, and how to watch the run."""
        cloud = config.cloud
        contexts = {region: f"gke_{cloud.project}_{region}_{cloud.cluster}" for region in regions}
        return render(
            f"{self.name}/README.md",
            way=self.name,
            name=config.name,
            project=cloud.project,
            image=cloud.image,
            bucket=cloud.bucket,
            namespace=cloud.namespace,
            slices=slices,
            first=slices[0],
            syncer_zone=common.syncer_zone(config),
            contexts=contexts,
            syncer_context=contexts[common.syncer_region(config)],
            create=create,
            config=common.CONFIG_PATH,
            port=cloud.port,
            ranges=cloud.source_ranges,
            slices_port=common.SLICES_PORT,
            unit="slice" if slices[0].slices else "island",
        )


def local(config: RunConfig) -> RunConfig:
    """Return the config for commands in the files' folder, such as `diloco status ADDRESS --config local.yaml`."""
    everywhere = common.remote(config)
    names = ("tls_ca", "tls_certificate", "tls_key", "token_file")
    here = {name: getattr(everywhere.transport, name).replace(CERTIFICATES_PATH, "certs") for name in names}
    return replace(everywhere, transport=replace(everywhere.transport, **here))


def variables(config: RunConfig) -> str:
    """Return the text of variables.sh, which all scripts read."""
    where = {"syncer_zone": common.syncer_zone(config), "syncer_region": common.syncer_region(config)}
    return render("variables.sh", run=config.name, cloud=config.cloud, **where)


def project_script(config: RunConfig, way: str, regions: list[str]) -> str:
    """Return the script for things that all machines share; NAT and permissions remain when the run is deleted."""
    return render(
        "project.sh", on_gke=way in common.ON_GKE, account=POD_ACCOUNT, nat_regions=regions if config.cloud.nat else []
    )
