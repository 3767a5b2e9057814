"""Machine types for the syncer: the smallest one whose memory does."""

from typing import NamedTuple

GIB = 2.0**30
MARGIN = 1.1  # the forecast of a process's memory is right to 10 %

# GiB of memory by machine type, ascending: docs.cloud.google.com/compute/docs/general-purpose-machines (N2, C3) and
# /memory-optimized-machines (M3).
MACHINE_GIB = {
    "n2-standard-8": 32, "n2-standard-16": 64, "n2-standard-32": 128, "n2-highmem-32": 256, "n2-highmem-48": 384,
    "n2-highmem-64": 512, "n2-highmem-80": 640, "n2-highmem-96": 768, "n2-highmem-128": 864, "c3-highmem-176": 1408,
    "m3-ultramem-64": 1952, "m3-ultramem-128": 3904,
}  # fmt: skip
# Memory that GKE keeps, by steps in GiB: docs.cloud.google.com/kubernetes-engine/docs/concepts/plan-node-sizes
_KEPT = ((4, 0.25), (8, 0.20), (16, 0.10), (128, 0.06), (float("inf"), 0.02))
_OTHERS_GIB = 1.1  # its threshold for evictions, and GKE's own pods


class SyncerMachine(NamedTuple):
    """The host of a syncer."""

    machine_type: str
    request_bytes: float  # what its process asks for; 0 if that is not known
    limit_bytes: float  # what the machine can give it; 0 if the machine is not on the list


def allocatable(gib: float) -> float:
    """Return how many bytes of a machine with so many GiB GKE leaves to pods."""
    kept, below = _OTHERS_GIB, 0.0
    for until, share in _KEPT:
        kept += share * max(0.0, min(gib, until) - below)
        below = until
    return (gib - kept) * GIB


def host_for(machine_type: str, need_bytes: float) -> SyncerMachine:
    """Choose the host of a syncer.

    Args:
        machine_type: the one wanted; "" for the smallest that does.
        need_bytes: memory that the syncer takes, all of its processes; 0 if that is not known.

    Raises:
        ValueError: no machine on the list is large enough.
    """
    request = need_bytes * MARGIN
    if machine_type:
        gib = MACHINE_GIB.get(machine_type, 0)
        return SyncerMachine(machine_type, request, allocatable(gib) if gib else 0.0)
    for name, gib in MACHINE_GIB.items():
        if allocatable(gib) >= request:
            return SyncerMachine(name, request, allocatable(gib))
    raise ValueError(
        f"the syncer needs {request / GIB:.0f} GiB of memory, more than {name} has; lower protocol.anchor_history, or "
        "name a larger machine in cloud.syncer_machine_type"
    )
