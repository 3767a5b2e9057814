"""TPU slices by name: how many chips and hosts they have, what a chip can do, and what Google Cloud calls them.

    Topology.parse("v5p:4x4x8")    128 chips, 32 hosts, accelerator type v5p-256

The table of generations, with its sources, is generations.yaml beside this file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from pydantic import TypeAdapter

CHIPS_PER_HOST = 4  # of every slice with more than one host


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A TPU generation; what only some ways of launching need may stay empty."""

    dims: int
    """Dimensions of the network between chips, 2 or 3."""
    chips_max: int
    """Chips of the largest slice."""
    peak_tflops: float
    """Dense bfloat16 operations of a chip, TFLOP/s."""
    hbm_gb: float
    """Memory of a chip, GB."""
    host_gb: float
    """Memory of a host with 4 chips, GB."""
    hbm_gb_per_s: float = 0.0
    """Bandwidth of a chip's memory, GB/s; 0: not known."""
    ici_gb_per_s: float = 0.0
    """Bandwidth of a chip's links to others, all of them and both ways together, GB/s; 0: not known."""
    cores_per_chip: int = 1
    """Cores that the number in an accelerator type counts per chip."""
    devices_per_chip: int = 1
    """Devices that JAX has for a chip; they share its memory and its peak."""
    shapes: tuple[str, ...] = ()
    """Slices that there are, such as 2x2x1; empty and no cube: any."""
    cube: int = 0
    """Slices whose sizes are all multiples of this are there too; 0: none."""
    alone: tuple[int, ...] = ()
    """Numbers of chips, other than 4, that lie on one host."""
    accelerator: str = ""
    """Beginning of accelerator types in the Cloud TPU API; empty: the generation's name."""
    gke_accelerator: str = ""
    """Value of the node label cloud.google.com/gke-tpu-accelerator."""
    gke_policy: bool = False
    """GKE places hosts of a slice by a workload policy, in place of a pool's topology."""
    machine_family: str = ""
    """Beginning of machine types, which are FAMILY-Nt with N chips."""
    runtime_version: str = ""
    """Software of the Cloud TPU API; empty: it does not have this generation."""
    device_kinds: tuple[str, ...] = ()
    """Names that JAX gives to its devices."""
    libtpu_options: dict[str, str] = field(default_factory=dict)
    """Arguments with which libtpu describes a slice, beside its name."""
    compiler_options: dict[str, str] = field(default_factory=dict)
    """Options of the compiler, by name, with which islands run and preflight compiles."""

    def __post_init__(self) -> None:
        if self.dims not in (2, 3) or min(self.chips_max, self.cores_per_chip, self.devices_per_chip) < 1:
            raise ValueError(
                f"a TPU generation has dims {self.dims}, chips_max {self.chips_max}, cores_per_chip "
                f"{self.cores_per_chip} and devices_per_chip {self.devices_per_chip}; use 2 or 3, then at least 1"
            )
        if not all(0 < each < math.inf for each in (self.peak_tflops, self.hbm_gb, self.host_gb)):
            raise ValueError(
                f"a TPU generation has peak_tflops {self.peak_tflops}, hbm_gb {self.hbm_gb} and host_gb "
                f"{self.host_gb}; use finite numbers above 0"
            )

    @property
    def hbm_bytes(self) -> float:
        return self.hbm_gb * 1e9 / self.devices_per_chip

    @property
    def peak_flops(self) -> float:
        """Return bfloat16 operations per second of one device."""
        return self.peak_tflops * 1e12 / self.devices_per_chip


GENERATIONS = TypeAdapter(dict[str, Generation]).validate_python(
    yaml.safe_load(Path(__file__).with_name("generations.yaml").read_text("utf-8"))
)

# Dense bfloat16 operations per second of a device, by what JAX calls it; GPUs: NVIDIA's data sheets.
DEVICE_PEAK_FLOPS = {
    **{kind: each.peak_flops for each in GENERATIONS.values() for kind in each.device_kinds},
    **dict.fromkeys(("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"), 312e12),
    **dict.fromkeys(("NVIDIA H100 80GB HBM3", "NVIDIA H200"), 989e12),
}


@dataclass(frozen=True, slots=True)
class Topology:
    """A slice: one island's chips."""

    name: str  # of its generation
    generation: Generation  # of its chips
    shape: tuple[int, ...]  # chips along each dimension

    @classmethod
    def parse(cls, text: str, own: Mapping[str, Generation] | None = None) -> Topology:
        """Read a name such as v5p:4x4x8, of a generation of the table or of islands.generations; ValueError if none."""
        known = {**GENERATIONS, **(own or {})}
        written, _, dims = text.partition(":")
        name = written if written in known else written.lower()
        if name not in known:
            raise ValueError(
                f"topology '{text}': no generation '{written}'; write {', '.join(known)}, then :AxB.., or describe it "
                "in islands.generations"
            )
        generation = known[name]
        sizes = dims.split("x")
        if len(sizes) != generation.dims or not all(size.isdecimal() and int(size) for size in sizes):
            example = {2: "4x4", 3: "2x2x1"}[generation.dims]
            raise ValueError(f"topology '{text}' needs {generation.dims} sizes of at least 1, such as {name}:{example}")
        topology = cls(name, generation, tuple(map(int, sizes)))
        topology._check(text)
        return topology

    def _check(self, text: str) -> None:
        generation, name = self.generation, self.name
        if self.chips > generation.chips_max:
            raise ValueError(
                f"topology '{text}' has {self.chips} chips; a {name} slice has at most {generation.chips_max}"
            )
        if self.chips % self.chips_per_host:
            raise ValueError(
                f"topology '{text}' has {self.chips} chips, which is no number of whole hosts; use a multiple of "
                f"{CHIPS_PER_HOST}"
            )
        listed = generation.shapes or generation.cube
        cubes = generation.cube and not any(size % generation.cube for size in self.shape)
        if listed and not cubes and self.dims not in generation.shapes:
            larger = f", or sizes that are multiples of {generation.cube}" if generation.cube else ""
            raise ValueError(
                f"topology '{text}' is no {name} slice; choose {name}: {', '.join(generation.shapes)}{larger}"
            )

    def __str__(self) -> str:
        return f"{self.name}:{self.dims}"

    @property
    def dims(self) -> str:
        """Write the shape as Google Cloud does: 4x4x8."""
        return "x".join(map(str, self.shape))

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    @property
    def devices(self) -> int:
        """Count the devices that JAX has on the slice."""
        return self.chips * self.generation.devices_per_chip

    @property
    def chips_per_host(self) -> int:
        """Count the chips of each host: what the generation can have on a host alone, else 4."""
        return self.chips if self.chips in self.generation.alone else CHIPS_PER_HOST

    @property
    def hosts(self) -> int:
        """Count the processes of an island on this slice."""
        return self.chips // self.chips_per_host

    @property
    def host_bytes(self) -> float:
        """Return the memory of each host; those with fewer or more than four chips have it in proportion."""
        return self.generation.host_gb * 1e9 * self.chips_per_host / CHIPS_PER_HOST

    @property
    def accelerator_type(self) -> str:
        """Return the name in the Cloud TPU API: some generations count cores, some chips."""
        return f"{self.generation.accelerator or self.name}-{self.chips * self.generation.cores_per_chip}"

    @property
    def machine_type(self) -> str:
        """Return the machine type of its hosts in Compute Engine and GKE."""
        return f"{self.generation.machine_family}-{self.chips_per_host}t"

    @property
    def peak_flops(self) -> float:
        """Return bfloat16 operations per second of the whole slice."""
        return self.devices * self.generation.peak_flops
