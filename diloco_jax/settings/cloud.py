"""Settings of a run on Google Cloud, for `diloco launch`: what the islands' own settings do not say."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field

PORT_MAX = 65535
DISK_MIN_GB, DISK_MAX_GB = 50, 65_536
PLAIN = (  # become words of scripts
    "project", "image", "network", "subnetwork", "service_account", "tpu_image_family", "syncer_zone",
    "syncer_machine_type",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudConfig:
    """The place where the run's machines are made; an island's zone and slice are islands.zone and islands.topology."""

    project: str = ""
    """Google Cloud project."""
    image: str = ""
    """Container image with this package, such as us-docker.pkg.dev/PROJECT/diloco/diloco:1; the Dockerfile makes it."""
    network: str = "default"
    """VPC network that all machines are in."""
    subnetwork: str = ""
    """Subnetwork, of the same name in every region; empty: named like the network, as in auto mode."""
    service_account: str = ""
    """E-mail address of the account that virtual machines run as; for gce and tpu-vm."""
    tpu_image_family: str = ""
    """Image family of TPU hosts in project ubuntu-os-accelerator-images; for gce."""
    spot: bool = False
    """Use spare capacity for the islands: cheaper, and taken away at any time."""
    xla_flags: dict[str, str] = field(default_factory=dict)
    """Options of XLA's compiler, {xla_name: value}, added to those of the slice's generation; "" takes one away."""
    syncer_zone: str = ""
    """Zone of the syncer; empty: that of the first island."""
    syncer_machine_type: str = "n2-standard-32"
    """Machine type of the syncer's host."""
    syncer_disk_gb: int = 500
    """Size in GB of the disk with the run's folder, which outlives the syncer's machine."""
    host_disk_gb: int = 200
    """Size in GB of the boot disk of TPU hosts, on which an island saves its state; for gke and gce."""
    port: int = 50051
    """Where the syncer listens; merge shards take the ports that follow."""
    source_ranges: tuple[str, ...] = ("10.0.0.0/8",)
    """Addresses, as ranges, that may reach the syncer."""
    external: bool = False
    """Give the syncer an address on the internet, for islands outside of its network."""
    cluster: str = "diloco"
    """Name of the GKE cluster, in each region that has islands."""
    namespace: str = "diloco"
    """Kubernetes namespace."""
    restarts_max: int = 1000
    """How often GKE starts an island again that failed by itself; preemptions and maintenance do not count."""

    def __post_init__(self) -> None:
        if not 1 <= self.port <= PORT_MAX:
            raise ValueError(f"cloud.port is {self.port}; use 1 to {PORT_MAX}")
        for name in ("syncer_disk_gb", "host_disk_gb"):
            if not DISK_MIN_GB <= getattr(self, name) <= DISK_MAX_GB:
                raise ValueError(f"cloud.{name} is {getattr(self, name)}; use {DISK_MIN_GB} to {DISK_MAX_GB}")
        if self.restarts_max < 0:
            raise ValueError(f"cloud.restarts_max is {self.restarts_max}; use at least 0")
        if not self.source_ranges:
            raise ValueError(
                "cloud.source_ranges is empty, so no learner could connect; write ranges such as 10.0.0.0/8"
            )
        networks = [_network(text) for text in self.source_ranges]
        if self.external and all(network.is_private for network in networks):
            raise ValueError(
                f"cloud.external is true, but cloud.source_ranges {', '.join(self.source_ranges)} are private "
                "addresses, which nobody on the internet has; write those that the islands come from"
            )
        for name in PLAIN:
            value = getattr(self, name)
            if not re.fullmatch(r"[A-Za-z0-9._:/@-]*", value) or value.startswith("-"):
                raise ValueError(f"cloud.{name} is {value!r}; use letters, digits and . _ : / @ - only")


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise ValueError(f"cloud.source_ranges has {text!r}: {error}; write a range such as 10.0.0.0/8") from error
