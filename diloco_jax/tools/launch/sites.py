"""The ways of launching, and runs whose islands are at several providers: a folder for each, from one config.

`diloco launch TARGET` makes the syncer and all islands at its target. An island with `islands.each.NAME.provider` is
made by that provider. Then each provider has a folder with what `diloco launch` writes for its islands alone, and the
folder above has certificates, one README and the scripts that give each folder its certificates and the syncer's
address.
"""

import re
from collections.abc import Mapping
from dataclasses import fields, replace

from diloco_jax.settings import providers
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import dump
from diloco_jax.tools.launch import common, gke, gpu, pathways, vms
from diloco_jax.tools.launch.common import Site
from diloco_jax.tools.launch.launcher import Launcher, Plan, local, render
from diloco_jax.tools.launch.needs import Needs
from diloco_jax.transport.link import split_address
from diloco_jax.transport.trust.security import is_loopback

GOOGLE = (gke.LAUNCHER, pathways.LAUNCHER, vms.GCE, vms.TPU_VM)
WAYS: dict[str, Launcher | gpu.GpuLauncher] = {way.name: way for way in (*GOOGLE, gpu.SLURM, gpu.SKY)}
OF_GOOGLE = tuple(way.name for way in GOOGLE)
# The remedy for a syncer that islands of other providers cannot reach.
FIXED = "set transport.address to HOST:PORT where all islands reach the syncer"


def check_sites(config: RunConfig, way: str) -> None:
    """Check a config for a target without loading the model; ValueError names a wrong setting."""
    sites = divide(config, way)
    for provider, site in sites.items():
        alone = site.syncer and len(sites) == 1
        WAYS[provider].slices(_there(config, provider, site), None if alone else site)


def plan_sites(config: RunConfig, way: str, needs: Needs = None) -> Plan:
    """Return all files and commands of a launch; ValueError names a wrong setting.

    Args:
      needs: the machines' needs; None if the model cannot be loaded here.
    """
    sites = divide(config, way)
    if len(sites) == 1:
        return WAYS[way].plan(config, needs)
    fixed = address_of(config, way)
    plans = {name: WAYS[name].plan(_there(config, name, site), needs, site) for name, site in sites.items()}
    first, *others = (_here(name, f"{name}/create.sh") for name in sites)
    create = (common.make_certificates(config), "./share.sh certificates", first, "./share.sh address", *others)
    # The syncer ends last, so that islands can leave.
    delete = tuple(_here(name, f"{name}/delete.sh") for name in reversed(sites))
    files = {f"{name}/{file}": text for name, plan in plans.items() for file, text in plan.files.items()}
    shared = {
        "local.yaml": dump(local(config)),
        "variables.sh": render("sites/variables.sh", run=config.name, port=config.cloud.port),
        "share.sh": render(
            "sites/share.sh",
            certificates={name: _certificates(site) for name, site in sites.items()},
            address=fixed or _asked(config, way),
            others=[name for name in sites if name != way],
        ),
        "create.sh": render("create.sh", commands=create),
        "delete.sh": render("delete.sh", commands=delete),
        "README.md": _readme(config, way, sites, create, fixed),
    }
    return Plan(files=shared | files, create=create, delete=delete)


def divide(config: RunConfig, way: str) -> dict[str, Site]:
    """Divide the islands among providers; the one with the syncer comes first.

    Raises:
      ValueError: an island has a setting that its provider does not use, or Pathways would drive islands elsewhere.
    """
    islands: dict[str, list[str]] = {way: []}
    for name in config.islands.names:
        if way == "pathways" and (other := config.place(name).provider):
            raise ValueError(
                f"islands.each.{name}.provider is {other}, but launch pathways has one process for all islands; remove "
                "the provider, or launch gke"
            )
        provider = config.place(name).provider or way
        if (own := config.islands.each.get(name)) is not None:
            providers.check(name, {each.name: getattr(own, each.name) for each in fields(own)}, provider)
        islands.setdefault(provider, []).append(name)
    return {name: Site(tuple(names), syncer=name == way) for name, names in islands.items()}


def address_of(config: RunConfig, way: str) -> str:
    """Return the syncer's address for islands of other providers; "" if a command asks the target for it.

    Raises:
      ValueError: those islands would not reach the syncer.
    """
    address, cloud = config.transport.address, config.cloud
    host, port = split_address(address)
    if not is_loopback(address) and host not in ("0.0.0.0", "::"):
        if port != cloud.port:
            raise ValueError(
                f"transport.address is {address}, but the syncer listens at port {cloud.port} (cloud.port); write the "
                "same port in both"
            )
        return address
    elsewhere = next(name for name in config.islands.names if config.place(name).provider not in (None, way))
    where = f"{elsewhere} is at {config.place(elsewhere).provider} and the syncer at {way}"
    if way in OF_GOOGLE and not cloud.external:
        raise ValueError(
            f"{where}, whose address is internal (cloud.external is false); set cloud.external to true and "
            f"cloud.source_ranges to the islands' addresses, or {FIXED}"
        )
    if way == "slurm":
        raise ValueError(
            f"{where}, but transport.address is {address}, where only the syncer's own machine reaches it; {FIXED}, or "
            "launch another target, which has the syncer then"
        )
    return ""


def _there(config: RunConfig, provider: str, site: Site) -> RunConfig:
    """Return the config for the files of one provider, whose syncer or first island determines the zone."""
    zones = [zone for name in site.names if (zone := config.island(name).zone)]
    if provider not in OF_GOOGLE or config.cloud.syncer_zone:
        return config
    if not zones:
        raise ValueError(
            f"the syncer is at {provider}, where no island is, so its zone is unknown; set cloud.syncer_zone"
        )
    return replace(config, cloud=replace(config.cloud, syncer_zone=zones[0]))


def _here(provider: str, script: str) -> str:
    """Return the command that runs a provider's script; Slurm's may have to run on a login node elsewhere."""
    if provider != "slurm":
        return script
    return f'if command -v sbatch >/dev/null; then {script}; else echo "copy slurm/ to a login node: {script}"; fi'


def _certificates(site: Site) -> list[str]:
    owners = [*site.names, *(["syncer"] if site.syncer else [])]
    return list(dict.fromkeys(file for name in owners for file in common.certificate_files(name)))


def _asked(config: RunConfig, way: str) -> str:
    """Return an argument for bash that asks the syncer's provider for its address."""
    return gpu.sky_address(config) if way == "sky" else f'"$({way}/syncer.sh address):{config.cloud.port}"'


def _readme(config: RunConfig, way: str, sites: Mapping[str, Site], create: tuple[str, ...], fixed: str) -> str:
    cloud = config.cloud
    paths = sorted({each.data.path for each in config.corpora.values() if each.data.path and "://" in each.data.path})
    images = {name: image for name in config.islands.names if (image := config.place(name).image)}
    return render(
        "sites/README.md",
        name=config.name,
        way=way,
        sites=sites,
        islands={name: _describe(config, name) for name in config.islands.names},
        others={name: site for name, site in sites.items() if name != way},
        google=[name for name in sites if name in OF_GOOGLE],
        create=create,
        port=cloud.port,
        ranges=cloud.source_ranges if way in OF_GOOGLE else (),
        fixed=fixed,
        address=fixed or re.sub('^"|"$', "", _asked(config, way)),
        images=sorted({images[name] for name in images if (config.place(name).provider or way) != "slurm"}),
        syncer_image=cloud.image,
        data=[path.replace(common.BUCKET, cloud.bucket) for path in paths],
        bucket=cloud.bucket,
        states=config.checkpoints.states,
    )


def _describe(config: RunConfig, name: str) -> str:
    """Return an island's machines in words."""
    island, place = config.island(name), config.place(name)
    if island.slice:
        return f"{name}: {place.capacity} {island.slice} in {island.zone}"
    gpus = f"{island.devices} GPUs ({place.accelerator})" if place.accelerator else f"{island.devices} GPUs"
    hosts = f"{island.hosts} host{'s' * (island.hosts > 1)}"
    return f"{name}: {gpus} on {hosts}" + (f" in {place.region}" if place.region else "")
