"""The memory that a run needs, from shapes alone: on chips, on the hosts of islands, and on the syncer's host."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax

from diloco_jax.core import codec
from diloco_jax.core.codec import Format
from diloco_jax.core.fragments import Fragment, FragmentPlan
from diloco_jax.core.outer import OuterConfig
from diloco_jax.settings.islands import IslandConfig
from diloco_jax.settings.run import RunConfig
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.exchange.outgoing_bytes import share_of
from diloco_jax.training.exchange.windows import Window, windows_of

# Python, JAX and its compiler.
PROCESS_BYTES = 1 << 30
# The same without programs of a model.
SYNCER_PROCESS_BYTES = 450e6
# Buffers of gRPC and the system for one connection.
CONNECTION_BYTES = 16 << 20
# Copies of a fragment that is written to or read from disk: its chunks or its slices.
DISK_COPIES = 1
# Copies of a fragment that arrives: the decoded payload, and its sum with the previous value.
HOST_COPIES = 2
# A merge shard's process beside its share of the model; docs/log.md, 2026-11-21.
SHARD_PROCESS_BYTES = 350e6


class Hbm(NamedTuple):
    """The parts of a chip's memory while the inner step runs, bytes."""

    # This chip's shards of the parameters.
    parameters: float
    # The inner optimizer's state.
    optimizer: float
    # Float32 anchors and residuals of all fragments.
    anchors: float
    residuals: float
    # Staged copies of fragments.
    staged: float
    # Activations, the batch, the program's code, and other memory that the step needs while it runs.
    temporaries: float

    @property
    def fixed(self) -> float:
        """Return the bytes that are used all the time, independent of the batch."""
        return sum(self) - self.temporaries


class HostMemory(NamedTuple):
    """The parts of the memory of each host of an island, bytes."""

    # Python, JAX and its compiler.
    process: float
    # The newest global model in float32, whole on every host, and the fragments that arrive with a welcome.
    global_model_and_arriving: float
    # This host's share of encoded outgoing fragments.
    staged_copies: float
    # This host's share of a state that is sent to a neighbour or received from one.
    state_while_given_away: float
    # The memory of emulated chips on this host, without activations.
    emulated_devices: float


class SyncerMemory(NamedTuple):
    """The parts of the memory of the syncer's host, bytes."""

    # Python, JAX and its compiler.
    process: float
    # Connections to learners, without payloads.
    connections: float
    # The newest version of every fragment, float32.
    values: float
    # The outer optimizer's state.
    outer_momentum: float
    # The residuals of the error feedback of wire.down, float32.
    left_out_by_rounding: float
    # The newest encoded steps, which are sent to learners, and which correct late values.
    steps: float
    # Older versions, which correct late values if no steps travel.
    older_values: float
    # The next state of one fragment, and the correction of its late values.
    fragment_in_merge: float
    # A fragment that is written to a snapshot or read from one.
    fragment_on_disk: float
    # The learners' payloads that are arriving or waiting to be merged.
    payloads: float
    # The processes of merge shards, without their shares of the model.
    shard_processes: float


def num_parameters(blueprint: Blueprint) -> int:
    return sum(map(math.prod, blueprint.shapes.values()))


def payload_bytes(plan: FragmentPlan, format: Format) -> tuple[int, ...]:
    """Return the size of each fragment on the wire."""
    return tuple(codec.encoded_size(fragment.shapes, format) for fragment in plan.fragments)


def chip_memory(config: RunConfig, blueprint: Blueprint, plan: FragmentPlan) -> Hbm:
    """Return a chip's memory in the inner step; the temporaries are only the gradients, without activations."""
    shards = jax.tree.map(_shard_bytes, blueprint.state_shapes, blueprint.state_shardings)
    parameters = sum(jax.tree.leaves(shards.params))
    optimizer = sum(jax.tree.leaves((shards.opt_state, shards.other)))
    if config.algorithm != "decoupled":
        return Hbm(parameters, optimizer, 0.0, 0.0, 0.0, parameters)
    windows = [windows_of(fragment, blueprint.tensors) for fragment in plan.fragments]
    anchors = sum(anchor_bytes(blueprint, fragment) for fragment in plan.fragments)
    residuals = sum(_residual_bytes(window, config.wire.up) for each in windows for window in each)
    rebase = config.adopt.mode == "rebase"
    staged = [sum(_staged_bytes(window, config.wire.up, rebase) for window in each) for each in windows]
    return Hbm(parameters, optimizer, anchors, residuals, _staged_at_once(config, plan, staged), parameters)


def anchor_bytes(blueprint: Blueprint, fragment: Fragment) -> float:
    """Return the bytes on each chip of a fragment's anchor, or of a value that arrived."""
    windows = windows_of(fragment, blueprint.tensors)
    return sum(4.0 * math.prod(window.value_sharding.shard_shape(window.shape)) for window in windows)


def host_memory(
    config: RunConfig, island: IslandConfig, blueprint: Blueprint, plan: FragmentPlan, emulated: int
) -> HostMemory:
    """Return the memory of each host of an island.

    Every host has the whole global model, for any number of hosts.

    Args:
      emulated: the number of the island's devices that its hosts' processors emulate.
    """
    sizes = [fragment.num_elements for fragment in plan.fragments]
    return HostMemory(
        PROCESS_BYTES,
        4.0 * (sum(sizes) + max(HOST_COPIES * max(sizes), sum(sizes))),
        _staged_at_once(config, plan, payload_bytes(plan, config.wire.up)) / island.hosts,
        blueprint.state_layout.num_bytes / island.hosts,
        sum(chip_memory(config, blueprint, plan)) * emulated / island.hosts if emulated else 0.0,
    )


def syncer_memory(config: RunConfig, plan: FragmentPlan) -> SyncerMemory:
    """Return the memory of the syncer's host, including its merge shards."""
    protocol, shards = config.protocol, config.syncer.shards
    model = 4.0 * sum(fragment.num_elements for fragment in plan.fragments)
    largest = 4.0 * max(fragment.num_elements for fragment in plan.fragments)
    rounds, older = config.wire.down != "float32", protocol.anchor_history - 1
    arrays = 1 + int(rounds) + outer_arrays(config.outer)
    payloads = max(1, protocol.overlap_steps) * max(payload_bytes(plan, config.wire.up)) * config.islands.count
    return SyncerMemory(
        process=SYNCER_PROCESS_BYTES,
        connections=(config.transport.stripes + 1) * config.islands.count * CONNECTION_BYTES,
        values=model,
        outer_momentum=model * outer_arrays(config.outer),
        left_out_by_rounding=model if rounds else 0.0,
        steps=max(1, older) * sum(payload_bytes(plan, config.wire.down)) if rounds else 0.0,
        older_values=0.0 if rounds else older * model,
        fragment_in_merge=(arrays + min(older, 1)) * largest,
        fragment_on_disk=DISK_COPIES * largest,
        payloads=payloads,
        shard_processes=shards * SHARD_PROCESS_BYTES if shards > 1 else 0.0,
    )


def outer_arrays(config: OuterConfig) -> int:
    """Return the numbers that an outer optimizer keeps per parameter; the user's own counts like Adam."""
    if config.module or config.optimizer == "adam":
        return 2
    return int(config.optimizer == "nesterov" and config.momentum > 0)


def _staged_at_once(config: RunConfig, plan: FragmentPlan, sizes: Sequence[float]) -> float:
    """Return the size of the staged copies that exist at one time: those due within the overlap, and one more."""
    protocol = config.protocol
    at_once = 1 + max(
        protocol.overlap_steps * phase.turns(plan.counts) // phase.cycle for phase in protocol.groups.phases
    )
    return sum(sorted(sizes, reverse=True)[:at_once])


def _shard_bytes(leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.NamedSharding) -> int:
    return math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _on_host(window: Window, format: Format) -> bool:
    """Return whether the host encodes this slice, because shards cut the format's blocks."""
    return codec.is_integer(format) and window.block_dim is None


def _residual_bytes(window: Window, format: Format) -> float:
    """Return the bytes of a slice's residual on each chip."""
    if format == "float32" or _on_host(window, format):
        return 0.0
    return 4.0 * share_of(window, format).units * (codec.BLOCK if codec.is_integer(format) else 1)


def _staged_bytes(window: Window, format: Format, rebase: bool) -> float:
    """Return the bytes on a chip of a staged slice: the payload, the next residual, and the value for `rebase`."""
    elements = math.prod(window.local_shape)
    if format == "float32" or _on_host(window, format):
        sent = 4.0 * elements
    else:
        unit_bytes = 4.0 + codec.block_bytes(format) if codec.is_integer(format) else codec.element_bytes(format)
        sent = share_of(window, format).units * unit_bytes
    return sent + _residual_bytes(window, format) + (4.0 * elements if rebase else 0.0)
