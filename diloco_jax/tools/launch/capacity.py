"""The place where islands' machines come from, in the words of each way of launching.

Flags: `gcloud help` of 528; core/capacity.py of AI-Hypercomputer/xpk; below docs.cloud.google.com
/tpu/docs/request-using-flex-start and /kubernetes-engine/docs/concepts/dws. Compute Engine has none for slices.
"""

from typing import NamedTuple

from diloco_jax.settings.cloud import CloudConfig

LONGEST = "7d"  # of flex-start


class Asked(NamedTuple):
    """A request for machines."""

    flags: tuple[str, ...] = ()  # of the command that makes them
    selector: tuple[str, str] | None = None  # label that their nodes have, on GKE
    alpha: bool = False  # only the alpha version of the command knows these flags


RESERVED = ("--reservation-affinity=specific", "--reservation")
FLEXIBLE = ("--flex-start", "--enable-autoscaling", "--min-nodes=0", "--location-policy=ANY")
WAYS = {
    ("gke", "spot"): Asked(("--spot",), ("cloud.google.com/gke-spot", "true")),
    ("gke", "reservation"): Asked(RESERVED, ("cloud.google.com/reservation-name", "")),
    ("gke", "flex-start"): Asked(
        (*FLEXIBLE, "--reservation-affinity=none", "--no-enable-autorepair"),
        ("cloud.google.com/gke-flex-start", "true"),
    ),
    ("gce", "spot"): Asked(("--provisioning-model=SPOT", "--instance-termination-action=STOP")),
    ("gce", "reservation"): Asked(RESERVED),
    ("tpu-vm", "spot"): Asked(("--spot",)),
    ("tpu-vm", "reservation"): Asked(("--reserved",)),
    ("tpu-vm", "flex-start"): Asked(("--provisioning-model=flex-start", f"--max-run-duration={LONGEST}"), alpha=True),
}


def asked_of(cloud: CloudConfig, way: str) -> Asked:
    """Return how this way asks for the machines of an island.

    Raises:
        ValueError: this way cannot ask for such machines, or has no queue.
    """
    if way != "gke" and (unknown := next((name for name in ("queue", "priority_class") if getattr(cloud, name)), "")):
        raise ValueError(
            f"cloud.{unknown} is {getattr(cloud, unknown)!r}, but only launch gke has queues; leave it out"
        )
    if cloud.capacity == "on-demand":
        return Asked()
    asked = WAYS.get((way, cloud.capacity))
    if asked is None:
        able = " and ".join(name for name, capacity in WAYS if capacity == cloud.capacity)
        raise ValueError(f"cloud.capacity is {cloud.capacity}, which launch {way} cannot ask for; only {able} can")
    flags = asked.flags
    if flags[-1] == "--reservation":
        flags = (*flags, cloud.reservation)
    selector = asked.selector and (asked.selector[0], asked.selector[1] or cloud.reservation.rpartition("/")[2])
    return asked._replace(flags=flags, selector=selector)
