"""How much memory a run takes, from shapes alone: chips, hosts of islands, and the syncer."""

from __future__ import annotations

import math
from typing import Any

import jax

from diloco_jax.core import codec
from diloco_jax.core.codec import Format
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.launch.preflight_budget import Hbm, host_bytes, host_limit, staged_at_once
from diloco_jax.runtime.doctor_need import SyncerMemory, syncer_memory
from diloco_jax.runtime.islands import IslandConfig
from diloco_jax.runtime.settings import RunConfig
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.topology import Topology
from diloco_jax.training.windows import Window, windows_of

SHARD_PROCESS_BYTES = 350e6  # of each merge shard beside its share; docs/log.md, 2026-11-21


def chip_bytes(config: RunConfig, blueprint: Blueprint, plan: FragmentPlan) -> Hbm:
    """What takes a chip's memory in the inner step; of the temporaries only the gradients, not the activations.

    Args:
      config: of the run.
      blueprint: of the island; that of a mesh which is not there is enough.
      plan: of the fragments.
    """
    shards = jax.tree.map(_shard_bytes, blueprint.state_shapes, blueprint.state_shardings)
    parameters = sum(jax.tree.leaves(shards.params))
    optimizer = sum(jax.tree.leaves(shards.opt_state))
    if config.algorithm != "decoupled":
        return Hbm(parameters, optimizer, 0.0, 0.0, 0.0, parameters)
    windows = [windows_of(fragment, blueprint.tensors) for fragment in plan.fragments]
    anchors = sum(4.0 * math.prod(w.value_sharding.shard_shape(w.shape)) for each in windows for w in each)
    residuals = sum(_residual_bytes(window, config.wire.up) for each in windows for window in each)
    rebase = config.adopt.mode == "rebase"
    staged = [sum(_staged_bytes(window, config.wire.up, rebase) for window in each) for each in windows]
    return Hbm(parameters, optimizer, anchors, residuals, staged_at_once(config, staged), parameters)


def island_memory(config: RunConfig, island: IslandConfig, blueprint: Blueprint, plan: FragmentPlan) -> dict[str, Any]:
    """Bytes per chip, and per host of the island.

    Args:
      config: of the run.
      island: resolved.
      blueprint: of the island.
      plan: of the fragments.
    """
    hbm = chip_bytes(config, blueprint, plan)
    payloads = [codec.encoded_size(fragment.shapes, config.wire.up) for fragment in plan.fragments]
    topology = Topology.parse(island.topology) if island.topology else None
    return {
        "hbm": hbm._asdict(),
        "hbm_held_bytes": hbm.fixed,
        "hbm_limit_bytes": topology.generation.hbm_bytes if topology else None,
        "host": {
            "global_model_and_arriving": host_bytes(plan),
            "staged_copies": staged_at_once(config, payloads) / island.hosts,
            "state_while_given_away": blueprint.state_layout.num_bytes / island.hosts,
        },
        "host_limit_bytes": host_limit(topology) if topology else None,
    }


def syncer_bytes(config: RunConfig, plan: FragmentPlan, shards: int) -> dict[str, float]:
    """What the syncer's host holds, by what it is for.

    Args:
      config: of the run.
      plan: of the fragments.
      shards: merge shards, 0 for none.
    """
    up = [codec.encoded_size(fragment.shapes, config.wire.up) for fragment in plan.fragments]
    memory: SyncerMemory = syncer_memory(config, 4 * sum(f.num_elements for f in plan.fragments), up)
    return {**memory._asdict(), "shard_processes": shards * SHARD_PROCESS_BYTES if shards > 1 else 0.0}


def _shard_bytes(leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.NamedSharding) -> int:
    return math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _on_host(window: Window, format: Format) -> bool:
    """Whether the host encodes this slice, because shards cut the format's blocks."""
    return codec.is_integer(format) and window.block_dim is None


def _residual_bytes(window: Window, format: Format) -> float:
    """What rounding keeps back of a slice, on each chip."""
    if format == "float32" or _on_host(window, format):
        return 0.0
    elements = window.num_blocks * codec.BLOCK if codec.is_integer(format) else math.prod(window.local_shape)
    return 4.0 * elements


def _staged_bytes(window: Window, format: Format, rebase: bool) -> float:
    """What a chip holds of a slice that is on its way: what it sends, the next residual, and for `rebase` the value."""
    elements = math.prod(window.local_shape)
    if codec.is_integer(format) and not _on_host(window, format):
        sent = window.num_blocks * (4.0 + codec.block_bytes(format))
    else:
        sent = elements * (2.0 if format == "bfloat16" else 4.0)
    return sent + _residual_bytes(window, format) + (4.0 * elements if rebase else 0.0)
