"""TPU slices by name: how many chips and hosts they have, what a chip can do, and what Google Cloud calls them.

    Topology.parse("v5p:4x4x8")    128 chips, 32 hosts, accelerator type v5p-256

Figures per chip: docs.cloud.google.com/tpu/docs/v5p and /v6e; machine types: the same pages and the tables of xpk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

CHIPS_PER_HOST = 4  # of every slice with more than one host


@dataclass(frozen=True, slots=True)
class Generation:
    """A TPU generation."""

    name: str  # as it begins a topology
    peak_flops: float  # bfloat16 operations per second and chip
    hbm_bytes: float  # memory per chip
    hbm_bytes_per_s: float  # its bandwidth
    dims: int  # dimensions of the network between chips
    chips_max: int  # of the largest slice
    cores_per_chip: int  # what the number in an accelerator type counts, per chip
    gke_accelerator: str  # value of the node label cloud.google.com/gke-tpu-accelerator
    machine_family: str  # machine types are FAMILY-Nt, N chips
    runtime_version: str  # software of the Cloud TPU API
    host_bytes: float  # memory of a host with 4 chips
    shapes: tuple[str, ...] = ()  # the slices that there are; empty: not listed


V6E_SHAPES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
GENERATIONS = {
    "v5p": Generation(
        "v5p", 459e12, 95e9, 2765e9, 3, 6144, 2, "tpu-v5p-slice", "ct5p-hightpu", "v2-alpha-tpuv5", 448e9
    ),
    "v6e": Generation(
        "v6e", 918e12, 32e9, 1638e9, 2, 256, 1, "tpu-v6e-slice", "ct6e-standard", "v2-alpha-tpuv6e", 720e9, V6E_SHAPES
    ),
}

# Dense bfloat16 operations per second of a device, by what JAX calls it; GPUs: NVIDIA's data sheets.
DEVICE_PEAK_FLOPS = {
    **dict.fromkeys(("TPU v5", "TPU v5p"), GENERATIONS["v5p"].peak_flops),
    **dict.fromkeys(("TPU v6 lite", "TPU v6e"), GENERATIONS["v6e"].peak_flops),
    **dict.fromkeys(("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"), 312e12),
    **dict.fromkeys(("NVIDIA H100 80GB HBM3", "NVIDIA H200"), 989e12),
}


@dataclass(frozen=True, slots=True)
class Topology:
    """A slice: one island's chips."""

    generation: Generation  # of its chips
    shape: tuple[int, ...]  # chips along each dimension

    @classmethod
    def parse(cls, text: str) -> Topology:
        """Read a name such as "v5p:4x4x8" or "v6e:16x16".

        Raises:
          ValueError: no such generation, a wrong number of dimensions, or no slice of this shape.
        """
        name, _, dims = text.partition(":")
        generation = GENERATIONS.get(name)
        if generation is None:
            raise ValueError(
                f"topology '{text}': no generation '{name}'; write {' or '.join(GENERATIONS)}, then :AxB.."
            )
        sizes = dims.split("x")
        if len(sizes) != generation.dims or not all(size.isdecimal() and int(size) for size in sizes):
            example = {2: "v6e:4x4", 3: "v5p:2x2x1"}[generation.dims]
            raise ValueError(f"topology '{text}' needs {generation.dims} sizes of at least 1, such as {example}")
        topology = cls(generation, tuple(map(int, sizes)))
        if topology.chips > generation.chips_max:
            raise ValueError(
                f"topology '{text}' has {topology.chips} chips; a {name} slice has at most {generation.chips_max}"
            )
        if topology.chips % topology.chips_per_host:
            raise ValueError(
                f"topology '{text}' has {topology.chips} chips, which is no number of whole hosts; use a "
                f"multiple of {CHIPS_PER_HOST}"
            )
        if generation.shapes and topology.dims not in generation.shapes:
            raise ValueError(f"topology '{text}' is no {name} slice; choose {name}: {', '.join(generation.shapes)}")
        return topology

    def __str__(self) -> str:
        return f"{self.generation.name}:{self.dims}"

    @property
    def dims(self) -> str:
        """Write the shape as Google Cloud does: 4x4x8."""
        return "x".join(map(str, self.shape))

    @property
    def chips(self) -> int:
        """Count the chips of the slice; JAX has a device for each."""
        return math.prod(self.shape)

    @property
    def chips_per_host(self) -> int:
        """Count the chips of each host: 1 and 8 chips of a v6e may be on one host, all else has 4 on each."""
        alone = {1, 8} if self.generation.name == "v6e" else set[int]()
        return self.chips if self.chips in alone else CHIPS_PER_HOST

    @property
    def hosts(self) -> int:
        """Count the processes of an island on this slice."""
        return self.chips // self.chips_per_host

    @property
    def accelerator_type(self) -> str:
        """Return the name in the Cloud TPU API: v5p counts cores, v6e chips."""
        return f"{self.generation.name}-{self.chips * self.generation.cores_per_chip}"

    @property
    def machine_type(self) -> str:
        """Return the machine type of its hosts in Compute Engine and GKE."""
        return f"{self.generation.machine_family}-{self.chips_per_host}t"

    @property
    def peak_flops(self) -> float:
        """Return bfloat16 operations per second of the whole slice."""
        return self.chips * self.generation.peak_flops
