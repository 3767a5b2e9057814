"""The needs of a run's machines before anything is paid for, and the smallest machine type for the syncer."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from diloco_jax.settings.cloud import AUTO
from diloco_jax.settings.run import RunConfig
from diloco_jax.tools.budget.figures import size
from diloco_jax.tools.budget.needs import outlines, syncer_needs

GB, GIB = 1e9, 2.0**30
# The result of `needs_of`; None if the model cannot be loaded here.
Needs: TypeAlias = Mapping[str, Any] | None
# The forecast of a process's memory is right to 10 %.
MARGIN = 1.1

# GiB of memory by machine type, ascending: docs.cloud.google.com/compute/docs/general-purpose-machines (N2, C3) and
# /memory-optimized-machines (M3).
MACHINE_GIB = {
    "n2-standard-8": 32, "n2-standard-16": 64, "n2-standard-32": 128, "n2-highmem-32": 256, "n2-highmem-48": 384,
    "n2-highmem-64": 512, "n2-highmem-80": 640, "n2-highmem-96": 768, "n2-highmem-128": 864, "c3-highmem-176": 1408,
    "m3-ultramem-64": 1952, "m3-ultramem-128": 3904,
}  # fmt: skip
# Memory that GKE reserves: (up to this many GiB, share), from
# docs.cloud.google.com/kubernetes-engine/docs/concepts/plan-node-sizes
_KEPT = ((4, 0.25), (8, 0.20), (16, 0.10), (128, 0.06), (float("inf"), 0.02))
# The threshold of GKE for evictions, and its own pods.
_OTHERS_GIB = 1.1


class SyncerMachine(NamedTuple):
    """The machine of a syncer."""

    machine_type: str
    # Memory that its process requests; 0 if unknown.
    request_bytes: float
    # Memory that the machine can give to it; 0 if the machine is not on the list.
    limit_bytes: float


def allocatable(gib: float) -> float:
    """Return the bytes that GKE leaves to pods on a machine with `gib` GiB."""
    kept, below = _OTHERS_GIB, 0.0
    for until, share in _KEPT:
        kept += share * max(0.0, min(gib, until) - below)
        below = until
    return (gib - kept) * GIB


def needs_of(config: RunConfig) -> dict[str, Any]:
    """Return the needs of hosts, chips, disks and links; ValueError if the model cannot be loaded here."""
    found = list(outlines(config))
    memory, disk_bytes = syncer_needs(found[0].run)
    return {
        "islands": [each.as_dict() for each in found],
        "link": found[0].links.per_step,
        "syncer": {"memory": memory._asdict(), "disk_bytes": disk_bytes},
    }


def syncer_machine(config: RunConfig, needs: Needs) -> SyncerMachine:
    """Return the syncer's machine: the config's, or the smallest one that has enough memory.

    Raises:
      ValueError: no machine type has enough memory, or the need is unknown.
    """
    machine, request = config.cloud.syncer_machine_type, MARGIN * syncer_bytes(needs)
    if machine and machine != AUTO:
        gib = MACHINE_GIB.get(machine, 0)
        return SyncerMachine(machine, request, allocatable(gib) if gib else 0.0)
    if machine and needs is None:
        raise ValueError(
            "cloud.syncer_machine_type is auto, but the model cannot be loaded here, so its size is unknown; name a "
            "machine type"
        )
    for name, gib in MACHINE_GIB.items():
        if allocatable(gib) >= request:
            return SyncerMachine(name, request, allocatable(gib))
    raise ValueError(
        f"the syncer needs {request / GIB:.0f} GiB of memory, more than {name} has; lower protocol.anchor_history, or "
        "name a larger machine in cloud.syncer_machine_type"
    )


def syncer_bytes(needs: Needs) -> float:
    """Return the memory that the syncer needs, in bytes; 0 if unknown."""
    return float(sum(needs["syncer"]["memory"].values())) if needs else 0.0


def island_bytes(needs: Needs, name: str) -> float:
    """Return the memory that each host of an island needs, in bytes; 0 if unknown."""
    kinds = needs["islands"] if needs else ()
    return next((_on_host(kind) for kind in kinds if name in kind["islands"]), 0.0)


def _on_host(kind: Mapping[str, Any]) -> float:
    """Return the memory that a host needs, without emulated devices, because launched hosts have accelerators."""
    return float(sum(kind["host"].values()) - kind["host"]["emulated_devices"])


def with_syncer_machine(config: RunConfig, needs: Needs) -> RunConfig:
    """Return the config with the syncer's machine type filled in."""
    machine = syncer_machine(config, needs).machine_type
    return replace(config, cloud=replace(config.cloud, syncer_machine_type=machine))


def describe_needs(config: RunConfig, needs: Needs) -> Iterator[str]:
    """Yield lines for people: what machines need, and warnings if the config gives them too little."""
    if needs is None:
        return
    cloud, syncer, machine = config.cloud, needs["syncer"], syncer_machine(config, needs)
    for each in needs["islands"]:
        names = each["islands"]
        whose = names[0] + (f" and {len(names) - 1} like it" if len(names) > 1 else "")
        of_host, of_hbm = (
            f" of {size(limit)}" if (limit := each[f"{where}_limit_bytes"]) else "" for where in ("host", "hbm")
        )
        yield (
            f"{whose}: {size(_on_host(each))}{of_host} on each host, "
            f"{size(each['hbm_held_bytes'])}{of_hbm} on each chip, without activations"
        )
        yield from _too_small("host_disk_gb", cloud.host_disk_gb, each["disk_bytes"])
    yield (
        f"syncer ({machine.machine_type}): {size(sum(syncer['memory'].values()))} of memory, "
        f"{size(syncer['disk_bytes'])} on a disk of {cloud.syncer_disk_gb} GB"
    )
    if 0 < machine.limit_bytes < machine.request_bytes:
        yield (
            f"warning: the syncer's process may need {size(machine.request_bytes)}, but {machine.machine_type} leaves "
            f"it {size(machine.limit_bytes)}; remove cloud.syncer_machine_type"
        )
    yield from _too_small("syncer_disk_gb", cloud.syncer_disk_gb, syncer["disk_bytes"])
    if not config.protocol.snapshot_every:
        yield ("warning: protocol.snapshot_every is 0, so nothing is saved before the end; set it to 250, for example")
    link = needs["link"]
    yield (
        f"links: each learner moves {size(link['up_bytes_per_step'])} up and {size(link['down_bytes_per_step'])} down "
        "per global step"
    )


def _too_small(setting: str, have_gb: int, need: float) -> Iterator[str]:
    if need > have_gb * GB:
        yield f"warning: saved states need {size(need)}, but cloud.{setting} is {have_gb}; raise it"
