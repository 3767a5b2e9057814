"""The memory of a run, from shapes alone: on chips, on the hosts of islands, and on the syncer's machine."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from diloco_jax.core import codec
from diloco_jax.core.codec import Format
from diloco_jax.core.fragments import Fragment
from diloco_jax.core.outer import OuterConfig
from diloco_jax.runtime.island.adoptions import FREE_MAX
from diloco_jax.runtime.island.host import PLACED_MAX
from diloco_jax.settings.islands import IslandConfig, IslandsConfig
from diloco_jax.settings.resolved import ResolvedRun
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.convert.tensors import tensors
from diloco_jax.training.exchange.outgoing_bytes import share_of
from diloco_jax.training.exchange.windows import Window, windows_of

# Python, JAX and its compiler take this.
PROCESS_BYTES = 1 << 30
# A syncer compiles no program of a model.
SYNCER_PROCESS_BYTES = 450e6
# gRPC and the system buffer so much of each connection.
CONNECTION_BYTES = 16 << 20
# Copies of a fragment on its way to disk: its chunks, or the slices that form it.
DISK_COPIES = 1
# Arrays of a fragment beside the newest values: the one that is being decoded, and the free ones.
CPU_COPIES = 1 + FREE_MAX


class Hbm(NamedTuple):
    """The parts of a chip's memory while the inner step runs, bytes."""

    # This chip's shards of them.
    parameters: float
    # State of the inner optimizer.
    optimizer: float
    # Anchors of all fragments in float32.
    anchors: float
    # Rounding errors of all fragments in float32.
    residuals: float
    # Copies of fragments on their way out.
    staged: float
    # Activations and other values of a running step, the batch, and the program's code.
    temporaries: float
    # The frozen weights below adapters.
    base: float = 0.0
    # Values that wait for their adoption, in float32.
    arriving: float = 0.0
    # The mean gradient of all slices in float32, which the update reads while the next gradient may be allocated.
    mean_gradient: float = 0.0

    @property
    def fixed(self) -> float:
        """Return the bytes that are held all the time, independent of the batch."""
        return sum(self) - self.temporaries


class HostMemory(NamedTuple):
    """The parts of the memory of each host of an island, bytes."""

    # Python, JAX and its compiler.
    process: float
    # What the host's devices hold of the newest global model in float32, and the fragments that arrive after a hello.
    global_model_and_arriving: float
    # This host's share of encoded fragments on their way out.
    staged_copies: float
    # This host's share of a state on its way to or from another island.
    state_while_given_away: float
    # The memory of emulated devices, without activations.
    emulated_devices: float
    # Encoded deltas that arrive, and memory that is kept for the next ones.
    deltas: float
    # What the host's devices hold of a gradient, of its mean and of other slices' gradients, if an island has several.
    gradients_between_slices: float = 0.0
    # What they hold of the whole state, copied for a new leader or a returning slice.
    state_of_a_slice: float = 0.0


class SyncerMemory(NamedTuple):
    """The parts of the memory of the syncer's machine, bytes."""

    # Python, JAX and its compiler.
    process: float
    # Connections to learners, without payloads.
    connections: float
    # Newest version of every fragment in float32.
    values: float
    # State of the outer optimizer.
    outer_momentum: float
    # Rounding errors for the error feedback of wire.down in float32.
    left_out_by_rounding: float
    # Newest encoded differences: learners get them, and late values are corrected by them.
    steps: float
    # Older values that correct late ones if whole values travel.
    older_values: float
    # Next state of a fragment, and the correction of its late values.
    fragment_in_merge: float
    # A fragment on its way to or from a snapshot.
    fragment_on_disk: float
    # Learners' payloads that arrive or wait for their merge, and memory that is kept for the next ones.
    payloads: float


def num_parameters(blueprint: Blueprint) -> int:
    return sum(map(math.prod, blueprint.shapes.values()))


def base_parameters(blueprint: Blueprint) -> int:
    """Return the number of weights below adapters; 0 if the whole model is trained."""
    model = blueprint.model_config
    if not model.lora.rank:
        return 0
    return sum(math.prod(mapped.shape) for mapped in tensors(model))


def chip_memory(run: ResolvedRun, blueprint: Blueprint) -> Hbm:
    """Add up a chip's memory in the inner step; the temporaries include the gradients, but not the activations."""
    config = run.config
    shards = jax.tree.map(_shard_bytes, blueprint.state_shapes, blueprint.state_shardings)
    parameters = sum(jax.tree.leaves(shards.params))
    optimizer = sum(jax.tree.leaves((shards.opt_state, shards.other)))
    base = sum(_shard_bytes(leaf, leaf.sharding) for leaf in blueprint.frozen.values())
    if config.algorithm != "decoupled":
        return Hbm(parameters, optimizer, 0.0, 0.0, 0.0, parameters, base)
    windows = [windows_of(fragment, blueprint.tensors, blueprint.orders) for fragment in run.fragments]
    anchors = [anchor_bytes(blueprint, fragment) for fragment in run.fragments]
    residuals = sum(_residual_bytes(window, config.wire.up) for each in windows for window in each)
    rebase = config.adopt.mode == "rebase"
    staged = [sum(_staged_bytes(window, config.wire.up, rebase) for window in each) for each in windows]
    arriving = sum(sorted(anchors, reverse=True)[:PLACED_MAX])
    on_way = _staged_at_once(run, staged)
    several = config.islands.slices > 1
    mean = sum(_shard_bytes(leaf, leaf.sharding, 4) for leaf in blueprint.tensors.values()) if several else 0
    return Hbm(parameters, optimizer, sum(anchors), residuals, on_way, parameters, base, arriving, mean)


def anchor_bytes(blueprint: Blueprint, fragment: Fragment) -> float:
    """Return the bytes of a fragment's anchor, or of an arrived value, on each chip."""
    windows = windows_of(fragment, blueprint.tensors, blueprint.orders)
    return sum(4.0 * math.prod(window.value_sharding.shard_shape(window.shape)) for window in windows)


class HeldElements(NamedTuple):
    """Elements of a fragment on one host of an island, and those of them that other hosts pass on to it."""

    on_host: float
    # It sends as many to other hosts.
    passed: float


@functools.lru_cache(maxsize=1 << 14)
def held_elements(blueprint: Blueprint, fragment: Fragment, hosts: int) -> HeldElements:
    """Count what the devices of one host hold of a fragment; hosts follow each other in the order of the mesh."""
    if hosts == 1:
        return HeldElements(fragment.num_elements, 0.0)
    sizes, on_host, passed = tuple(blueprint.mesh.shape.items()), 0.0, 0.0
    for window in windows_of(fragment, blueprint.tensors, blueprint.orders):
        shard = math.prod(window.value_sharding.shard_shape(window.shape))
        axes = jax.tree.leaves(tuple(window.value_sharding.spec))
        distinct, others = _shards_of_hosts(sizes, frozenset(axes), hosts)
        on_host, passed = on_host + distinct * shard, passed + others * shard
    return HeldElements(on_host, passed)


def gradient_copies(islands: IslandsConfig) -> float:
    """Return the most memory of a slice for gradients, as a multiple of one gradient in float32.

    If k slices compute P parts, a slice keeps its own parts, the mean, its chunk of the others' parts, and their sum:

        ceil(P / k) + 1 + (P - ceil(P / k) + 1) / k

    That is 3 while no slice is missing. With `keep`, P stays when slices are lost.
    """
    parts = islands.slices
    left = islands.slices_least if islands.slices_batch == "keep" else parts
    own = math.ceil(parts / left)
    return own + 1 + (parts - own + 1) / left


def gradient_elements(blueprint: Blueprint, hosts: int) -> int:
    """Count the elements of a gradient on the devices of one host, each once.

    A gradient is sharded as the step shards the parameters, whatever the split of fragments (training/parts.py).
    """
    return sum(_elements_on_host(blueprint, leaf.shape, leaf.sharding, hosts) for leaf in blueprint.tensors.values())


def moments_on_host(blueprint: Blueprint, hosts: int) -> float:
    """Return the bytes of the state without parameters that the devices of one host hold."""
    shapes, layouts = blueprint.state_shapes, blueprint.state_shardings
    pairs = zip(
        jax.tree.leaves((shapes.opt_state, shapes.other)),
        jax.tree.leaves((layouts.opt_state, layouts.other)),
        strict=True,
    )
    return sum(leaf.dtype.itemsize * _elements_on_host(blueprint, leaf.shape, layout, hosts) for leaf, layout in pairs)


def _elements_on_host(
    blueprint: Blueprint, shape: tuple[int, ...], sharding: jax.sharding.NamedSharding, hosts: int
) -> int:
    axes = frozenset(jax.tree.leaves(tuple(sharding.spec)))
    distinct, _ = _shards_of_hosts(tuple(blueprint.mesh.shape.items()), axes, hosts)
    return distinct * math.prod(sharding.shard_shape(shape))


@functools.cache
def _shards_of_hosts(sizes: tuple[tuple[str, int], ...], axes: frozenset[str], hosts: int) -> tuple[int, float]:
    """Return the most shards that one host holds, and the most that it gets from other hosts.

    Of a shard with r holders each holder gets the part 1 - 1/r from the others (runtime/island/blocks.py).

    Args:
        sizes: Name and size of each axis of the mesh.
        axes: Those that shard the array.
    """
    places = np.indices([size for _, size in sizes]).reshape(len(sizes), -1)
    numbers = np.zeros(places.shape[1], int)
    for (name, size), place in zip(sizes, places, strict=True):
        if name in axes:
            numbers = numbers * size + place
    host = np.arange(len(numbers)) * hosts // len(numbers)
    held = np.unique(np.stack([host, numbers]), axis=1)
    others = 1 - 1 / np.bincount(held[1])[held[1]]
    return int(np.bincount(held[0]).max()), float(np.bincount(held[0], others).max())


def host_memory(
    run: ResolvedRun, island: IslandConfig, blueprint: Blueprint, emulated: int, slices: int = 1
) -> HostMemory:
    """Add up the memory of each host of an island; a host has what its devices hold of the global model.

    Args:
        emulated: number of devices that the island's hosts emulate.
        slices: number of slices of the island, whose hosts are alike.
    """
    hosts, several = island.hosts, slices > 1
    sizes = [held_elements(blueprint, fragment, hosts).on_host for fragment in run.fragments]
    gradient = 4.0 * gradient_elements(blueprint, hosts) if several else 0.0
    return HostMemory(
        PROCESS_BYTES,
        4.0 * (sum(sizes) + max(CPU_COPIES * max(sizes), sum(sizes))),
        _staged_at_once(run, run.payload_bytes(run.config.wire.up)) / hosts,
        blueprint.state_layout.num_bytes / hosts,
        sum(chip_memory(run, blueprint)) * emulated / hosts if emulated else 0.0,
        run.version_bytes
        * max(size / fragment.num_elements for size, fragment in zip(sizes, run.fragments, strict=True)),
        gradient_copies(run.config.islands) * gradient,
        # Parameters are sharded like their gradient.
        gradient + moments_on_host(blueprint, hosts) if several else 0.0,
    )


def syncer_memory(run: ResolvedRun) -> SyncerMemory:
    """Return the memory of the syncer's machine."""
    config = run.config
    protocol = config.protocol
    model = 4.0 * sum(fragment.num_elements for fragment in run.fragments)
    largest = 4.0 * max(fragment.num_elements for fragment in run.fragments)
    rounds, older = config.wire.down != "float32", protocol.anchor_history - 1
    arrays = 1 + int(rounds) + outer_arrays(config.outer)
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
        payloads=run.contribution_bytes,
    )


def outer_arrays(config: OuterConfig) -> int:
    """Count the numbers that an outer optimizer keeps per parameter; the user's optimizer counts as Adam."""
    if config.module or config.optimizer == "adam":
        return 2
    return int(config.optimizer == "nesterov" and config.momentum > 0)


def _staged_at_once(run: ResolvedRun, sizes: Sequence[float]) -> float:
    """Add up the copies on their way out at one time: those due within the overlap, and one more."""
    protocol = run.config.protocol
    at_once = 1 + max(
        protocol.overlap_steps * phase.turns(run.plan.counts) // phase.cycle for phase in protocol.groups.phases
    )
    return sum(sorted(sizes, reverse=True)[:at_once])


def _shard_bytes(leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.NamedSharding, width: int = 0) -> int:
    """Return the bytes of an array on each chip, with `width` bytes per element or those of its dtype."""
    return math.prod(sharding.shard_shape(leaf.shape)) * (width or leaf.dtype.itemsize)


def _on_host(window: Window, format: Format) -> bool:
    """Tell whether the host encodes this slice, because shards cut the blocks of the format."""
    return codec.is_integer(format) and window.block_dim is None


def _residual_bytes(window: Window, format: Format) -> float:
    """Return the bytes of a slice's rounding error on each chip."""
    if format == "float32" or _on_host(window, format):
        return 0.0
    return 4.0 * share_of(window, format).units * (codec.BLOCK if codec.is_integer(format) else 1)


def _staged_bytes(window: Window, format: Format, rebase: bool) -> float:
    """Add up a chip's bytes of a slice on its way: payload, next rounding error, and for `rebase` the value."""
    elements = math.prod(window.local_shape)
    if format == "float32" or _on_host(window, format):
        sent = 4.0 * elements
    else:
        # One element takes a whole unit: a block, or an element in formats without blocks.
        sent = float(share_of(window, format).units * codec.encoded_size([(1,)], format))
    return sent + _residual_bytes(window, format) + (4.0 * elements if rebase else 0.0)
