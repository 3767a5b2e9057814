"""The memory that a run takes, from shapes alone: on chips, on the hosts of islands, and on the syncer's host."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax

from diloco_jax.core import codec
from diloco_jax.core.codec import Format
from diloco_jax.core.fragments import Fragment
from diloco_jax.core.outer import OuterConfig
from diloco_jax.settings.islands import IslandConfig
from diloco_jax.settings.resolved import ResolvedRun
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.exchange.outgoing_bytes import share_of
from diloco_jax.training.exchange.windows import Window, windows_of

PROCESS_BYTES = 1 << 30  # Python, JAX and its compiler
SYNCER_PROCESS_BYTES = 450e6  # likewise, without a program of a model
CONNECTION_BYTES = 16 << 20  # that gRPC and the system hold of each
DISK_COPIES = 1  # of a fragment: chunks of it, or the slices from which it is put together
HOST_COPIES = 2  # of a fragment that arrives: its payload decoded, and the sum with the value before
SHARD_PROCESS_BYTES = 350e6  # of each merge shard beside its share; docs/log.md, 2026-11-21


class Hbm(NamedTuple):
    """The parts of a chip's memory while the inner step runs, bytes."""

    parameters: float  # this chip's shards
    optimizer: float  # state of the inner optimizer
    anchors: float  # of all fragments, float32
    residuals: float  # of all fragments, float32
    staged: float  # copies of fragments on their way out
    temporaries: float  # activations and what else the step needs while it runs, the batch and the program's code

    @property
    def fixed(self) -> float:
        """Bytes that are held all the time, whatever the batch."""
        return sum(self) - self.temporaries


class HostMemory(NamedTuple):
    """The parts of the memory of each host of an island, bytes."""

    process: float  # Python, JAX and its compiler
    # the newest global model in float32, whole on every host, and the fragments that a welcome brings
    global_model_and_arriving: float
    staged_copies: float  # this host's share of encoded fragments on their way out
    state_while_given_away: float  # this host's share of a state that goes to a neighbour, or comes from one
    emulated_devices: float  # what chips would hold, where the host's processor stands in for them; without activations


class SyncerMemory(NamedTuple):
    """The parts of the memory of the syncer's host, bytes."""

    process: float  # Python, JAX and its compiler
    connections: float  # to learners, without the payloads
    values: float  # newest version of every fragment, float32
    outer_momentum: float  # or whatever else the outer optimizer keeps
    left_out_by_rounding: float  # of the steps so far, for the error feedback of wire.down; float32
    steps: float  # the newest encoded ones: sent to learners, and what late values are set right by
    older_values: float  # that late values are set right by where no steps travel
    fragment_in_merge: float  # the next state of one, and what late values of it have missed
    fragment_on_disk: float  # being written to a snapshot, or read from one
    payloads: float  # of learners, on their way or waiting to be merged
    shard_processes: float  # merge shards, beside their shares of all this


def num_parameters(blueprint: Blueprint) -> int:
    return sum(map(math.prod, blueprint.shapes.values()))


def chip_memory(run: ResolvedRun, blueprint: Blueprint) -> Hbm:
    """Add up a chip's memory in the inner step; the temporaries include the gradients, but not the activations."""
    config = run.config
    shards = jax.tree.map(_shard_bytes, blueprint.state_shapes, blueprint.state_shardings)
    parameters = sum(jax.tree.leaves(shards.params))
    optimizer = sum(jax.tree.leaves((shards.opt_state, shards.other)))
    if config.algorithm != "decoupled":
        return Hbm(parameters, optimizer, 0.0, 0.0, 0.0, parameters)
    windows = [windows_of(fragment, blueprint.tensors) for fragment in run.fragments]
    anchors = sum(anchor_bytes(blueprint, fragment) for fragment in run.fragments)
    residuals = sum(_residual_bytes(window, config.wire.up) for each in windows for window in each)
    rebase = config.adopt.mode == "rebase"
    staged = [sum(_staged_bytes(window, config.wire.up, rebase) for window in each) for each in windows]
    return Hbm(parameters, optimizer, anchors, residuals, _staged_at_once(run, staged), parameters)


def anchor_bytes(blueprint: Blueprint, fragment: Fragment) -> float:
    """Return how much of each chip's memory the anchor of a fragment takes, or a value that arrived."""
    windows = windows_of(fragment, blueprint.tensors)
    return sum(4.0 * math.prod(window.value_sharding.shard_shape(window.shape)) for window in windows)


def host_memory(run: ResolvedRun, island: IslandConfig, blueprint: Blueprint, emulated: int) -> HostMemory:
    """Add up the memory of each host of an island.

    Every host has the whole global model, however many hosts share the chips' copy.

    Args:
      emulated: devices of the island that are emulated on its hosts' processors.
    """
    sizes = [fragment.num_elements for fragment in run.fragments]
    return HostMemory(
        PROCESS_BYTES,
        4.0 * (sum(sizes) + max(HOST_COPIES * max(sizes), sum(sizes))),
        _staged_at_once(run, run.payload_bytes(run.config.wire.up)) / island.hosts,
        blueprint.state_layout.num_bytes / island.hosts,
        sum(chip_memory(run, blueprint)) * emulated / island.hosts if emulated else 0.0,
    )


def syncer_memory(run: ResolvedRun) -> SyncerMemory:
    """Add up the memory of the syncer's host, its merge shards included."""
    config = run.config
    protocol, shards = config.protocol, config.syncer.shards
    model = 4.0 * sum(fragment.num_elements for fragment in run.fragments)
    largest = 4.0 * max(fragment.num_elements for fragment in run.fragments)
    rounds, older = config.wire.down != "float32", protocol.anchor_history - 1
    arrays = 1 + int(rounds) + outer_arrays(config.outer)
    payloads = max(1, protocol.overlap_steps) * max(run.payload_bytes(config.wire.up)) * config.islands.count
    return SyncerMemory(
        process=SYNCER_PROCESS_BYTES,
        connections=(config.transport.stripes + 1) * config.islands.count * CONNECTION_BYTES,
        values=model,
        outer_momentum=model * outer_arrays(config.outer),
        left_out_by_rounding=model if rounds else 0.0,
        steps=max(1, older) * sum(run.payload_bytes(config.wire.down)) if rounds else 0.0,
        older_values=0.0 if rounds else older * model,
        fragment_in_merge=(arrays + min(older, 1)) * largest,
        fragment_on_disk=DISK_COPIES * largest,
        payloads=payloads,
        shard_processes=shards * SHARD_PROCESS_BYTES if shards > 1 else 0.0,
    )


def outer_arrays(config: OuterConfig) -> int:
    """Count the numbers that an outer optimizer keeps per parameter; of the user's own as many as of Adam."""
    if config.module or config.optimizer == "adam":
        return 2
    return int(config.optimizer == "nesterov" and config.momentum > 0)


def _staged_at_once(run: ResolvedRun, sizes: Sequence[float]) -> float:
    """Add up the copies on their way out at one time: those that become due within the overlap, and one more."""
    protocol = run.config.protocol
    at_once = 1 + max(
        protocol.overlap_steps * phase.turns(run.plan.counts) // phase.cycle for phase in protocol.groups.phases
    )
    return sum(sorted(sizes, reverse=True)[:at_once])


def _shard_bytes(leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.NamedSharding) -> int:
    return math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _on_host(window: Window, format: Format) -> bool:
    """Tell if the host encodes this slice, because shards cut the format's blocks."""
    return codec.is_integer(format) and window.block_dim is None


def _residual_bytes(window: Window, format: Format) -> float:
    """Return the size of what rounding keeps back of a slice, on each chip."""
    if format == "float32" or _on_host(window, format):
        return 0.0
    return 4.0 * share_of(window, format).units * (codec.BLOCK if codec.is_integer(format) else 1)


def _staged_bytes(window: Window, format: Format, rebase: bool) -> float:
    """Add up what a chip holds of a slice on its way: the payload, the next residual, and for `rebase` the value."""
    elements = math.prod(window.local_shape)
    if format == "float32" or _on_host(window, format):
        sent = 4.0 * elements
    else:
        unit_bytes = 4.0 + codec.block_bytes(format) if codec.is_integer(format) else codec.element_bytes(format)
        sent = share_of(window, format).units * unit_bytes
    return sent + _residual_bytes(window, format) + (4.0 * elements if rebase else 0.0)
