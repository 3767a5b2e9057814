"""TPU slices by name: their chips and hosts, what a chip can do, and Google Cloud's names for them.

    Topology.parse("v5p:4x4x8")    128 chips, 32 hosts, accelerator type v5p-256

The table of generations, with its sources, is generations.yaml beside this file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from pydantic import TypeAdapter

# Every host of a slice with more than one host has this number of chips.
CHIPS_PER_HOST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A TPU generation. Settings that only some ways of launching need may stay empty."""

    dims: int
    """Dimensions of the network between chips, 2 or 3. Set it to 3 for a torus of three dimensions; a topology then has
    three sizes, as 4x4x8 does."""
    chips_max: int
    """Chips of the largest slice. Set it to the vendor's limit. Larger topologies are refused before anything is
    created."""
    peak_tflops: float
    """Dense bfloat16 operations of a chip, TFLOP/s. Set it to the data sheet's value without sparsity; the step times
    of plan and preflight follow from it."""
    hbm_gb: float
    """Memory of a chip, GB. Set it to the data sheet's value; preflight and plan compare a step's memory with it."""
    host_gb: float
    """Memory of a machine with 4 chips, GB. Set it to the machine type's memory; plan and launch compare the need of an
    island's processes with it."""
    hbm_gb_per_s: float = 0.0
    """Bandwidth of a chip's memory, GB/s; 0: unknown. Set it if you use preflight --search, which then includes the
    reads of attention in its choice of tiles."""
    ici_gb_per_s: float = 0.0
    """Bandwidth of all of a chip's links to other chips, both directions together, GB/s; 0: unknown. Set it if you use
    preflight --search, which otherwise estimates that communication takes no time."""
    cores_per_chip: int = 1
    """Cores per chip in the number of an accelerator type. Set it to 2 if accelerator types count two cores for each
    chip, as v5p-256 does for 128 chips; a wrong number requests a slice of another size."""
    devices_per_chip: int = 1
    """JAX devices per chip; they share its memory and its peak. Set it to 2 if JAX shows two devices for each chip, as
    on TPU7x."""
    shapes: tuple[str, ...] = ()
    """Available slices, such as 2x2x1; if this and cube are empty: any. Set it to have a wrong topology refused before
    anything is created."""
    cube: int = 0
    """Slices whose sizes are all multiples of this number are available too; 0: none. Set it if larger slices consist
    of cubes, such as 4 for v5p."""
    alone: tuple[int, ...] = ()
    """Numbers of chips, other than 4, that fit on one host. Set it if a slice on a single host may have another number
    of chips than 4. It determines the number of processes of an island."""
    accelerator: str = ""
    """First part of accelerator types in the Cloud TPU API; empty: the generation's name. Set it for launch tpu-vm if
    the name differs, as v5litepod does for v5e."""
    gke_accelerator: str = ""
    """Value of the node label cloud.google.com/gke-tpu-accelerator. Set it for launch gke and pathways, which refuse a
    generation without it."""
    pathways: str = ""
    """Name in the instance types of Pathways; empty: Pathways does not offer this generation. Set it for launch
    pathways, which refuses a generation without it."""
    gke_policy: bool = False
    """GKE places the hosts of a slice by a workload policy instead of a pool's topology. Set it if GKE's documentation
    requires a workload policy, as for TPU7x."""
    machine_family: str = ""
    """First part of machine types, which are FAMILY-Nt with N chips. Set it for launch gke, gce and pathways, which
    refuse a generation without it."""
    runtime_version: str = ""
    """Software version for the Cloud TPU API; empty: the API does not offer this generation. Set it for launch tpu-vm,
    which refuses a generation without it."""
    device_kinds: tuple[str, ...] = ()
    """JAX's names of its devices. Leave it empty: only the built-in table uses it, for MFU. Set islands.peak_tflops for
    your own generation."""
    libtpu_options: dict[str, str] = field(default_factory=dict)
    """Arguments that describe a slice to libtpu, beside its name. Set it if preflight reports that libtpu does not know
    the slice; v4 needs chip_config_name: megacore."""
    compiler_options: dict[str, str] = field(default_factory=dict)
    """Options of the compiler by name, for islands and preflight. Set it to options that the vendor recommends for
    large models, and run diloco preflight first: it fails if libtpu does not know an option."""

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

# Dense bfloat16 operations per second of a device, by JAX's name of it. GPUs are from NVIDIA's data sheets.
DEVICE_PEAK_FLOPS = {
    **{kind: each.peak_flops for each in GENERATIONS.values() for kind in each.device_kinds},
    **dict.fromkeys(("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"), 312e12),
    **dict.fromkeys(("NVIDIA H100 80GB HBM3", "NVIDIA H200"), 989e12),
}


def gpu_peak_flops(accelerator: str) -> float | None:
    """Return bfloat16 operations per second of a GPU by SkyPilot's name, such as A100-80GB; None if unknown."""
    model = accelerator.partition("-")[0]
    return next((peak for kind, peak in DEVICE_PEAK_FLOPS.items() if model in re.split("[ -]", kind)), None)


@dataclass(frozen=True, slots=True)
class Topology:
    """A TPU slice: the chips of one island."""

    # Name of the generation, such as v5p.
    name: str
    generation: Generation
    # Chips along each dimension.
    shape: tuple[int, ...]

    @classmethod
    def parse(cls, text: str, own: Mapping[str, Generation] | None = None) -> Topology:
        """Read a name such as v5p:4x4x8 of a known generation or of one in islands.generations; ValueError if there is
        none."""
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
                f"topology '{text}' has {self.chips} chips, which do not fill whole hosts; use a multiple of "
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
        """Return the shape in Google Cloud's notation: 4x4x8."""
        return "x".join(map(str, self.shape))

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    @property
    def devices(self) -> int:
        """Return the number of JAX devices on the slice."""
        return self.chips * self.generation.devices_per_chip

    @property
    def chips_per_host(self) -> int:
        """Return the chips of each host: all of them if the generation fits them on one host, else 4."""
        return self.chips if self.chips in self.generation.alone else CHIPS_PER_HOST

    @property
    def hosts(self) -> int:
        """Return the number of processes of an island on this slice."""
        return self.chips // self.chips_per_host

    @property
    def host_bytes(self) -> float:
        """Return the memory of each host in bytes; hosts have memory in proportion to their chips."""
        return self.generation.host_gb * 1e9 * self.chips_per_host / CHIPS_PER_HOST

    @property
    def accelerator_type(self) -> str:
        """Return the name in the Cloud TPU API, which counts cores for some generations and chips for others."""
        return f"{self.generation.accelerator or self.name}-{self.chips * self.generation.cores_per_chip}"

    @property
    def machine_type(self) -> str:
        """Return the machine type of its hosts in Compute Engine and GKE."""
        return f"{self.generation.machine_family}-{self.chips_per_host}t"

    @property
    def peak_flops(self) -> float:
        """Return bfloat16 operations per second of the whole slice."""
        return self.devices * self.generation.peak_flops
