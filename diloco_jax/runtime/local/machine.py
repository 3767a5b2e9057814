"""Devices of this machine, and how a local run shares them among islands.

The devices are found without JAX, which would reserve them. The help of `islands.devices` says what an island gets. If
there are fewer GPUs than islands, several islands share a GPU and its memory equally. TPU chips all belong to one
process. The run reports when devices are emulated.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, MutableMapping, Sequence
from math import floor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from diloco_jax.settings.run import RunConfig

# Emulated devices of an island with `islands.devices: auto`.
EMULATED_DEVICES = 2
# Name and command of the process that drives all islands.
CONTROLLER = "islands"
# The value of --syncer of an island that reads the address from its standard input.
AT_INPUT = "-"
# JAX's name of the backend that pathwaysutils registers, and the port of its server.
PROXY, PROXY_PORT = "proxy", 29000
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
MEMORY_SETTINGS = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE")
# Share of a GPU's memory for all of its islands together. By default JAX takes 0.75 for each process.
SHARED_MEMORY = 0.9
CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
GOOGLE_PCI = "0x1ae0"
TPU_PCI = {"0x0027": "v2 or v3", "0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "tpu7x"}
TPU_SETTINGS = ("TPU_NAME", "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE")


class Machine(NamedTuple):
    """Accelerators of this machine that JAX may use."""

    # Names of NVIDIA GPUs in CUDA_VISIBLE_DEVICES.
    gpus: tuple[str, ...] = ()
    # TPU chips on the PCI bus.
    tpu_chips: int = 0
    # Whether the user has set the share of a GPU's memory that a process may take.
    memory_chosen: bool = False
    # Whether there may be accelerators of an unknown kind, which JAX finds itself.
    unknown: bool = False
    # Why an accelerator is not used; "" if all are.
    unused: str = ""

    @property
    def emulates(self) -> bool:
        return not (self.gpus or self.tpu_chips or self.unknown)


def chip_of(device: Path) -> str:
    """Return the TPU generation of a PCI device; "" if it is something else."""
    try:
        vendor = (device / "vendor").read_text(encoding="ascii").strip()
        number = (device / "device").read_text(encoding="ascii").strip()
    except OSError:
        return ""
    return TPU_PCI.get(number, "") if vendor == GOOGLE_PCI else ""


def need_proxy(platforms: str) -> None:
    """Check that JAX will look for Pathways' proxy; ValueError otherwise.

    Args:
        platforms: the value of JAX_PLATFORMS, or of the JAX option with this name.
    """
    if PROXY not in platforms.split(","):
        raise ValueError(
            f"islands.pathways is set, but JAX_PLATFORMS is {platforms!r}, so JAX would not use Pathways: set "
            f"JAX_PLATFORMS={PROXY} and JAX_BACKEND_TARGET=grpc://HOST:{PROXY_PORT} in the environment, or set "
            "islands.pathways to false"
        )


def look(environment: Mapping[str, str], root: Path = Path("/"), *, cuda: bool | None = None) -> Machine:
    """Find the accelerators that the kernel lists and that JAX_PLATFORMS and CUDA_VISIBLE_DEVICES allow.

    Args:
        cuda: whether JAX can use NVIDIA GPUs; None checks for JAX's plugin.
    """
    asked = set(filter(None, environment.get("JAX_PLATFORMS", "").split(",")))
    if asked - {"cpu", "cuda", "gpu", "tpu"}:
        return Machine(unknown=True)
    chips = sum(bool(chip_of(device)) for device in (root / "sys/bus/pci/devices").glob("*"))
    files = [path.name.removeprefix("nvidia") for path in (root / "dev").glob("nvidia[0-9]*")]
    gpus = _visible(sorted(files, key=int), environment.get(VISIBLE_GPUS))
    signs = any(any((root / "dev").glob(name)) for name in ("accel[0-9]*", "vfio/[0-9]*", "kfd"))
    signs = signs or any(environment.get(name) for name in TPU_SETTINGS)
    unused = ""
    if gpus and not (any(map(importlib.util.find_spec, CUDA_PLUGINS)) if cuda is None else cuda):
        unused = f"{count_of(len(gpus), 'GPU')} here, but JAX has no CUDA plugin: pip install 'jax[cuda13]'"
        gpus = ()
    elif asked == {"cpu"} and (gpus or chips or signs):
        unused = "JAX_PLATFORMS is cpu"
    gpus = gpus if not asked or asked & {"cuda", "gpu"} else ()
    chips = chips if not asked or "tpu" in asked else 0
    unknown = signs and asked != {"cpu"} and not gpus and not chips
    memory_chosen = any(environment.get(name) for name in MEMORY_SETTINGS)
    return Machine(gpus, chips, memory_chosen, unknown, unused)


def _visible(gpus: Sequence[str], chosen: str | None) -> tuple[str, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES allows; CUDA stops at the first name that is not a GPU."""
    if chosen is None or not gpus:
        return tuple(gpus)
    names = []
    for name in (part.strip() for part in chosen.split(",")):
        if not name or (name.lstrip("-").isdigit() and name not in gpus):
            break
        names.append(name)
    return tuple(names)


def limit_jax(environment: MutableMapping[str, str], machine: Machine) -> None:
    """Keep JAX from searching accelerators that are not here: libtpu prints warnings without a TPU.

    The user's choice stays. JAX searches itself if there may be accelerators of an unknown kind.
    """
    if environment.get("JAX_PLATFORMS") or machine.unknown or machine.tpu_chips:
        return
    environment["JAX_PLATFORMS"] = "cuda,cpu" if machine.gpus else "cpu"


def settings_of(config: RunConfig, name: str, machine: Machine, place: int = 0) -> dict[str, str]:
    """Return the environment variables that give a process of a local run its devices.

    Args:
        name: `syncer`, an island, the process that drives all islands, or the trainer.
        place: number of the process among those of its island; the hosts of slice 0 come first.

    Raises:
        ValueError: the machine does not have the devices that the islands need.
    """
    own = config.island(name)
    if name != "syncer" and not machine.emulates:
        return _gpu_settings(config, name, machine, place) if machine.gpus else {}
    if name == "syncer":
        devices = 1
    elif own.topology:
        # Slices are not emulated, so the process keeps the devices that JAX finds.
        return {}
    elif name == CONTROLLER:
        devices = sum(emulated_devices(config, each) for each in config.islands.names)
    else:
        devices = emulated_devices(config, name) // _hosts(config, name)
    # The CPU client's thread pool must hold every device of two programs, or their rendezvous deadlocks.
    threads = 2 * max(devices, os.cpu_count() or 1)
    return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "NPROC": str(threads)}


def emulated_devices(config: RunConfig, name: str) -> int:
    """Count the devices that are emulated for an island, over all its hosts."""
    hosts = _hosts(config, name)
    return config.island(name).devices or hosts * max(1, EMULATED_DEVICES // hosts)


def _hosts(config: RunConfig, name: str) -> int:
    # The data-parallel trainer is one process.
    return config.island(name).hosts if config.algorithm == "decoupled" else 1


def _slices(config: RunConfig) -> int:
    return config.islands.slices if config.algorithm == "decoupled" else 1


def _gpu_settings(config: RunConfig, name: str, machine: Machine, place: int) -> dict[str, str]:
    shares = gpu_shares(config, machine)
    if name not in shares:
        # A learner with another name was started by the user, who chose its devices.
        return {}
    gpus, processes = shares[name], _slices(config) * _hosts(config, name)
    if len(gpus) % processes:
        raise ValueError(
            f"{name}: {processes} processes cannot share {count_of(len(gpus), 'GPU')} equally; change islands.hosts or "
            "islands.slices"
        )
    each = len(gpus) // processes
    settings = {VISIBLE_GPUS: ",".join(gpus[place * each : (place + 1) * each])}
    together = max(sum(gpu in others for others in shares.values()) for gpu in gpus)
    if together > 1 and not machine.memory_chosen:
        settings[MEMORY_SETTINGS[0]] = f"{memory_share(together):.2f}"
    return settings


def memory_share(islands: int) -> float:
    """Return the share of a GPU's memory for each of so many islands on it."""
    return floor(100 * SHARED_MEMORY / islands) / 100


def gpu_shares(config: RunConfig, machine: Machine) -> dict[str, tuple[str, ...]]:
    """Share the GPUs among the processes that train; ValueError if the config needs more GPUs."""
    gpus, baseline = machine.gpus, config.algorithm == "data_parallel"
    names = ("",) if baseline else config.islands.names
    # The devices of an island are those of one of its slices.
    wanted = [_slices(config) * config.island(name).devices for name in names]
    if sum(wanted) > len(gpus):
        raise ValueError(
            f"islands.devices asks for {count_of(sum(wanted), 'device')} in all, but this machine has "
            f"{count_of(len(gpus), 'GPU')}; set islands.devices to auto to share what is here, lower it, or set "
            "JAX_PLATFORMS=cpu in the environment to emulate devices"
        )
    if baseline or config.islands.controller == "single":
        return {"trainer" if baseline else CONTROLLER: gpus[: sum(wanted)] if all(wanted) else gpus}
    free, open_ = len(gpus) - sum(wanted), wanted.count(0)
    if open_ and free < open_ and any(wanted):
        raise ValueError(
            f"{count_of(len(gpus), 'GPU')} here, and some islands need {sum(wanted)} of them, so none is left for "
            "islands with devices auto; give all islands a number of devices, or none"
        )
    if open_ and free < open_:
        return {name: (gpus[index % len(gpus)],) for index, name in enumerate(names)}
    counts = [count or free // open_ for count in wanted]
    starts = [sum(counts[:index]) for index in range(len(names))]
    return {name: gpus[start : start + count] for name, start, count in zip(names, starts, counts, strict=True)}


def check(config: RunConfig, machine: Machine) -> str:
    """Describe the devices of a local run; ValueError, with the setting to change, if they do not fit the config."""
    trains = config.islands.names if config.algorithm == "decoupled" else ("trainer",)
    count = len(trains)
    if machine.unknown:
        return "islands run on what JAX finds here"
    if machine.tpu_chips and not machine.gpus:
        chips = count_of(machine.tpu_chips, "TPU chip")
        if count > 1 and config.islands.controller == "processes":
            raise ValueError(
                f"{count} islands cannot share the {chips} of this machine as processes: "
                "one process has them all; set islands.controller to single, or islands.count to 1"
            )
        return f"{chips} for {count_of(count, 'island')}"
    if machine.gpus:
        return _check_gpus(config, machine)
    numbers = sorted({emulated_devices(config, name) for name in trains})
    for name in trains:
        if slice_ := config.island(name).topology:
            raise ValueError(
                f"{name} is to have islands.topology {slice_}, but no TPU is here, and slices are not emulated; "
                "correct islands.topology, or run on a machine of that slice"
            )
        config.check_mesh(config.island(name)._replace(devices=emulated_devices(config, name)))
    each = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    why = f"no GPU or TPU is used ({machine.unused})" if machine.unused else "no GPU or TPU here"
    if config.islands.command:
        # The program need not use JAX.
        program = " ".join(config.islands.command)
        return f"{why}: {count_of(count, 'island')} of {program!r}; JAX has {each} emulated CPU devices in each"
    return f"{why}: {count_of(count, 'island')} on emulated CPU devices, {each} each"


def _check_gpus(config: RunConfig, machine: Machine) -> str:
    shares = gpu_shares(config, machine)
    for name, gpus in shares.items():
        _gpu_settings(config, name, machine, place=0)
        if name in config.islands.names:
            config.check_mesh(config.island(name)._replace(devices=len(gpus) // _slices(config)))
    used = {gpu for gpus in shares.values() for gpu in gpus}
    idle = f"; {len(machine.gpus) - len(used)} idle" if len(machine.gpus) > len(used) else ""
    have = count_of(len(used), "GPU")
    if len(shares) > len(used):
        most = max(sum(gpu in gpus for gpus in shares.values()) for gpu in used)
        return f"{have}, shared by {len(shares)} islands: {memory_share(most):.0%} of a GPU's memory for each{idle}"
    sizes = sorted({len(gpus) for gpus in shares.values()})
    if len(shares) == 1:
        return f"{have} for {next(iter(shares))}{idle}"
    each = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    return f"{have}, {each} for each of {len(shares)} islands{idle}"


def count_of(number: int, what: str) -> str:
    """Return a number with a noun in singular or plural: 1 GPU, 2 GPUs."""
    return f"{number} {what}" + "s" * (number != 1)
