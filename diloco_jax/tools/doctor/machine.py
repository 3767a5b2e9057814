"""Checks of `diloco doctor` on this machine alone: data, memory, disk, devices, limits."""

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from diloco_jax.protocol.corpora import SEPARATE
from diloco_jax.runtime.local import check_input, machine
from diloco_jax.runtime.local.machine import chip_of, count_of
from diloco_jax.runtime.model.arithmetic import make_setup
from diloco_jax.runtime.model.evaluation import Scorer
from diloco_jax.runtime.syncer.listening import files_allowed
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.slices import Topology
from diloco_jax.tools.budget.figures import size
from diloco_jax.tools.budget.memory import num_parameters
from diloco_jax.tools.budget.needs import IslandKind, LinkNeeds, outline, outlines, syncer_needs
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.data.corpus import load_source
from diloco_jax.training.data.order import eval_batches

Status = Literal["ok", "warn", "fail"]
MEMORY = Path("/proc/meminfo")
TCP = Path("/proc/sys/net/ipv4")
PCI = Path("/sys/bus/pci/devices")
# Folder with a file of each GPU, which NVIDIA's driver writes.
NVIDIA = "proc/driver/nvidia/gpus"
# Open files of a process besides its connections.
FILES_OF_PROCESS = 256
# TCP windows limit a link whose measured rate is above this share of what they allow.
WINDOW_SHARE = 0.7
# Shorter round trips do not limit a connection.
FAR_S = 0.005


class Check(NamedTuple):
    """The result of one check."""

    name: str
    # fail: a run would not work, or not for long. warn: a run would work, but the user should know.
    status: Status
    found: str
    # The remedy; "" if there is nothing to do.
    fix: str = ""


def of_error(name: str, error: Exception, fix: str = "") -> Check:
    """Return a failed check for an error of the form "problem; remedy" or "problem: remedy"."""
    text = str(error)
    for separator in ("; ", ": "):
        found, _, remedy = text.rpartition(separator)
        if found:
            return Check(name, "fail", found, remedy)
    return Check(name, "fail", text, fix)


def mbit(bytes_per_s: float) -> str:
    """Format a rate in Mbit/s."""
    value = bytes_per_s * 8 / 1e6
    return f"{value:,.0f} Mbit/s" if value >= 100 else f"{value:.3g} Mbit/s"


def check_parts(config: RunConfig, island: str) -> Check:
    """Check the run's programs, trackers, callbacks and schedule, and public weights if this role reads them.

    The syncer reads initial weights, and islands those below adapters.
    """
    try:
        check_input.check_parts(config, weights=bool(island) == bool(config.model.lora.rank))
    except ValueError as error:
        return of_error("run", error)
    return Check("run", "ok", "programs, trackers, callbacks, the schedule and initial weights are usable")


def check_data(config: RunConfig) -> Check:
    """Check that the corpus can be read, is long enough, and fits the model's vocabulary."""
    if not (config.shares_corpus or config.data.corpus):
        return Check("data", "ok", "every island has a separate corpus; `--island NAME` checks it where it is")
    try:
        check_input.check_tokenizer(config)
        source = load_source(config.data, config.train.seq_len)
        next(eval_batches(source, config.train.eval_batch_size, 1))
    except (ValueError, OSError) as error:
        return of_error("data", error, "correct data.path or data.module on this machine")
    windows = len(source.train)
    share = config.planned_steps * config.train.batch_size / windows
    read = f"reads them {share:.1f} times" if share > 1 else f"reads {share:.2%} of them"
    where = config.data.module or ", ".join(part.path for part in config.data.sources.values())
    return Check("data", "ok", f"{where}: {windows:,} training windows, the run {read}")


def check_memory(need_bytes: float | None, path: Path = MEMORY) -> Check:
    """Compare this machine's free memory with the need of this process, None if it is unknown."""
    try:
        rows = dict(line.split(":", 1) for line in path.read_text(encoding="ascii").splitlines())
        free = int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        needed = "an unknown amount" if need_bytes is None else f"about {size(need_bytes)}"
        return Check("memory", "ok", f"this process needs {needed}; the free memory is unknown")
    if need_bytes is None:
        return Check("memory", "ok", f"{size(free)} available; the need depends on the model that the loops bring")
    found = f"{size(free)} available, about {size(need_bytes)} needed"
    if free < need_bytes:
        return Check("memory", "fail", found, "use a machine with more memory, or end other processes")
    if free <= 1.5 * need_bytes:
        return Check("memory", "warn", found, "leave more room, because the estimate is rough")
    return Check("memory", "ok", found)


def check_disk(need_bytes: int | None, run_dir: Path) -> Check:
    """Compare the free space at the run's folder with the need of its snapshots, including one being written.

    Args:
        need_bytes: None if it is unknown.
    """
    there = next(folder for folder in [run_dir.absolute(), *run_dir.absolute().parents] if folder.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        wrong = "may not be written" if there.is_dir() else "is not a folder"
        return Check(
            "disk", "fail", f"{there} {wrong}", "correct its permissions, or choose another --run-dir or runs_dir"
        )
    free = shutil.disk_usage(there).free
    found = f"{size(free)} free at {there}, "
    if need_bytes is None:
        return Check("disk", "ok", f"{found}the size of snapshots depends on the model that the loops bring")
    found += f"snapshots take up to {size(need_bytes)}" if need_bytes else "and no snapshots (protocol.snapshot_every)"
    if free < need_bytes:
        fix = "free space, choose another --run-dir or runs_dir, or lower checkpoints.keep"
        return Check("disk", "fail", found, fix)
    if free < 2 * need_bytes:
        return Check("disk", "warn", found, "leave more room, because logs and tapes grow too")
    return Check("disk", "ok", found)


def check_environment(environment: Mapping[str, str], *, emulated: bool) -> Check:
    """Check that no variable of a multislice job is set, because these would join islands into one JAX job."""
    names = sorted(name for name in environment if name.startswith("MEGASCALE_"))
    if not names:
        return Check("environment", "ok", "no MEGASCALE_* variable")
    fix = "unset them, and start each island as a separate slice: an island is never part of a multislice job"
    return Check("environment", "warn" if emulated else "fail", f"{', '.join(names)} set", fix)


def check_accelerators(config: RunConfig | None, environment: Mapping[str, str], root: Path = Path("/")) -> Check:
    """Name the accelerators of this machine without opening them, and check that a local run can share them.

    Args:
        config: the config of a run whose islands all run on this machine; None for other runs.
        environment: JAX_PLATFORMS is ignored, because `doctor` keeps its own process on the CPU with it.
        root: folder with the system's `dev`, `proc` and `sys`.
    """
    chosen = {name: value for name, value in environment.items() if name != "JAX_PLATFORMS"}
    devices = machine.look(chosen, root)
    names = _gpu_names(devices.gpus, root) + _chip_names(devices.tpu_chips, root)
    listed = ", ".join(f"{count} {name}" for name, count in Counter(names).items())
    text = listed or ("of a kind that only JAX can name" if devices.unknown else "no GPU or TPU here")
    if config is not None:
        try:
            shares = machine.check(config, devices)
        except ValueError as error:
            return of_error("accelerators", error)
        text = f"{listed}: {shares}" if listed else shares
    if devices.unused:
        reason, _, fix = devices.unused.partition(": ")
        return Check("accelerators", "warn", reason if config is None else text, fix)
    cores = count_of(os.cpu_count() or 1, "processor")
    return Check("accelerators", "ok", text if listed or devices.unknown else f"{text}; {cores}")


def _gpu_names(gpus: Sequence[str], root: Path) -> list[str]:
    """Return the models of NVIDIA GPUs as their driver names them; "NVIDIA GPU" for one that it does not name."""
    known: dict[str, str] = {}
    for file in (root / NVIDIA).glob("*/information"):
        with contextlib.suppress(OSError, ValueError):
            lines = (line.split(":", 1) for line in file.read_text(encoding="utf-8").splitlines() if ":" in line)
            facts = {name.strip(): value.strip() for name, value in lines}
            known[facts.get("Device Minor", "")] = facts.get("Model", "NVIDIA GPU")
    return [known.get(gpu, "NVIDIA GPU") for gpu in gpus]


def _chip_names(count: int, root: Path) -> list[str]:
    if not count:
        return []
    chips = (chip_of(device) for device in sorted((root / "sys/bus/pci/devices").glob("*")))
    return [f"TPU {chip}" for chip in chips if chip]


def islands_memory(config: RunConfig) -> float:
    """Return the estimated memory of all processes of all islands, if they run on one machine."""
    kinds = outlines(config)
    return sum(
        sum(each.needs.host) * each.kind.island.hosts * each.kind.slices * len(each.kind.names) for each in kinds
    )


def check_chips(expected: Topology | None, pci: Path = PCI) -> Check:
    """Compare this machine's TPU chips with islands.topology; they are counted on the PCI bus without opening them."""
    chips = [name for device in pci.glob("*") if (name := chip_of(device))]
    kinds = ", ".join(sorted(set(chips)))
    seen = f"{len(chips)} TPU chips on this machine ({kinds})" if chips else "no TPU chip on this machine"
    if expected is None:
        return Check("devices", "ok", f"{seen}; islands.topology is not set, so there is nothing to compare")
    want = f"{expected} has {expected.chips_per_host} {expected.name} per host"
    if len(chips) == expected.chips_per_host and set(chips) == {expected.name}:
        return Check("devices", "ok", f"{seen}; {want}")
    fix = "correct islands.topology, or run on a machine of that slice"
    if not chips:
        fix += "; in a container the chips must be passed through"
    return Check("devices", "fail", f"{seen}, but {want}", fix)


def check_files(connections: int) -> Check:
    """Compare the hard limit of open files, which a syncer uses, with the need of its connections."""
    limit, need = files_allowed(), connections + FILES_OF_PROCESS
    found = f"{limit} open files allowed, up to {need} needed"
    if limit < need:
        fix = f"raise the limit: ulimit -Hn {2 * need} as root, or LimitNOFILE of its service"
        return Check("open files", "fail", found, fix)
    return Check("open files", "ok", found)


def check_windows(bytes_per_s: float, rtt_s: float, stripes: int, folder: Path = TCP) -> Check:
    """Check whether the kernel's TCP windows limit the rate that was measured over all connections."""
    name = "TCP buffers"
    try:
        windows = {key: int((folder / key).read_text(encoding="ascii").split()[2]) for key in ("tcp_rmem", "tcp_wmem")}
    except (OSError, ValueError, IndexError):
        return Check(name, "ok", "the kernel's limits are unknown")
    least = min(windows, key=lambda key: windows[key])
    window = windows[least]
    found = f"net.ipv4.{least} allows {size(window)} per connection"
    if not rtt_s or rtt_s < FAR_S:
        return Check(name, "ok", found)
    limit = stripes * window / rtt_s
    found += f", so {mbit(limit)} with {stripes} stripes at {rtt_s * 1e3:.0f} ms"
    if bytes_per_s < WINDOW_SHARE * limit:
        return Check(name, "ok", found)
    fix = f"raise transport.stripes to {min(16, 2 * stripes)}, or the third number of net.ipv4.tcp_rmem and tcp_wmem"
    return Check(name, "warn", f"{found}: this limits the link ({mbit(bytes_per_s)})", fix)


class ProcessPart(NamedTuple):
    """The needs and settings of one process of a run; unknown ones are None, if the islands' loops bring the model."""

    # Parameters of the model.
    parameters: int | None
    # The settings that learners and syncer must share.
    settings: Mapping[str, str]
    # The shapes of its model, for an island with frozen weights below adapters; else None.
    adapted: Blueprint | None
    # The traffic of one learner.
    links: LinkNeeds | None
    # Estimated memory of this process on its machine.
    memory_bytes: float | None
    # Size of the run's folder on this machine; 0 without snapshots.
    disk_bytes: int | None


def part_of(config: RunConfig, island: str = "") -> ProcessPart:
    """Return the part of an island's process, by default the syncer's; ValueError if the model cannot be loaded."""
    if config.model.own:
        return ProcessPart(None, {}, None, None, None, None)
    planned = outline(config, IslandKind(config.island(island), (island,), config.islands.slices))
    agreed = planned.run.fingerprint(_corpus(config))
    # A separate corpus is compared only with those of its name.
    settings = {what: value for what, value in agreed if not value.startswith(SEPARATE)}
    # Only the syncer runs the user's outer optimizer and evaluation.
    if not island:
        make_setup(planned.run)
        Scorer(config.evaluation)
    own = (planned.needs.host, planned.needs.disk_bytes) if island else syncer_needs(planned.run)
    adapted = planned.blueprint if island and planned.blueprint.frozen else None
    return ProcessPart(num_parameters(planned.blueprint), settings, adapted, planned.links, sum(own[0]), own[1])


def _corpus(config: RunConfig) -> str:
    """Name the corpus that this machine would read; "" if it cannot, or none. `check_data` reports that."""
    if not (config.shares_corpus or config.data.corpus):
        return ""
    try:
        return load_source(config.data, config.train.seq_len).corpus
    except (ValueError, OSError):
        return ""
