"""What an island needs of its chips, its hosts and its share of the WAN, against what there is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

from diloco_jax.core.codec import encoded_size
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.launch.preflight_compile import Built, Compiled
from diloco_jax.launch.preflight_hlo import Collective
from diloco_jax.runtime.settings import RunConfig
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.topology import Topology

MFU = (0.3, 0.5)  # a plan's pessimist and optimist
HOST_COPIES = 2  # of a fragment that arrives: its payload decoded, and the sum with what was there


class Hbm(NamedTuple):
    """What takes a chip's memory while the inner step runs, bytes.

    Attributes:
      parameters: this chip's shards.
      optimizer: state of the inner optimizer.
      anchors: of all fragments, float32.
      residuals: of all fragments, float32.
      staged: copies of fragments on their way out.
      temporaries: activations and what else the step needs while it runs, the batch and the program's code.
    """

    parameters: float
    optimizer: float
    anchors: float
    residuals: float
    staged: float
    temporaries: float

    @property
    def fixed(self) -> float:
        """Held all the time, whatever the batch."""
        return self.parameters + self.optimizer + self.anchors + self.residuals + self.staged


def step_hbm(config: RunConfig, compiled: Compiled) -> Hbm:
    """Memory per chip while the inner step runs."""
    memory = next(built for built in compiled.programs if built.kind == "step").memory
    state = compiled.parameters + compiled.optimizer
    temporaries = memory.arguments - state + memory.outputs - memory.aliased + memory.temporaries + memory.code
    return Hbm(
        compiled.parameters,
        compiled.optimizer,
        sum(compiled.anchors),
        sum(compiled.residuals),
        staged_at_once(config, compiled.staged),
        max(0.0, temporaries),
    )


def program_hbm(built: Built, compiled: Compiled, hbm: Hbm) -> float:
    """Bytes of each chip's memory while a program runs, with what the island holds beside it."""
    memory = built.memory
    own = memory.temporaries + memory.code
    if built.kind == "create":
        return own + memory.outputs
    if built.kind == "step":
        return hbm.fixed + hbm.temporaries
    if built.kind == "stage":  # its arguments are held already, and its outputs are the staged copies
        return hbm.fixed + own
    new = compiled.anchors[built.fragments[0]]  # the value that arrived, beside the anchor that it replaces
    return hbm.fixed + own + new + memory.outputs - memory.aliased


def staged_at_once(config: RunConfig, sizes: Sequence[float]) -> float:
    """Of copies on their way out, those at one time: what becomes due within the overlap, and one more.

    Args:
      config: of the run.
      sizes: of a copy of each fragment.
    """
    protocol = config.protocol
    at_once = protocol.overlap_steps * protocol.num_fragments // protocol.sync_every + 1
    return sum(sorted(sizes, reverse=True)[:at_once])


def num_parameters(blueprint: Blueprint) -> int:
    """Of the model."""
    return sum(map(math.prod, blueprint.shapes.values()))


def host_bytes(plan: FragmentPlan) -> float:
    """What each host of an island keeps in its memory: the newest global model in float32, and what arrives.

    Every host has the whole model, however many hosts share the chips' copy.
    """
    sizes = [fragment.num_elements for fragment in plan.fragments]
    return 4.0 * (sum(sizes) + HOST_COPIES * max(sizes))


def host_limit(topology: Topology) -> float:
    """Memory of each host; those with fewer or more than four chips have it in proportion."""
    return topology.generation.host_bytes * topology.chips_per_host / 4


def wire(config: RunConfig, compiled: Compiled, step_s: tuple[float, float]) -> dict[str, Any]:
    """What an island sends and gets.

    Args:
      config: of the run.
      compiled: the island.
      step_s: slowest and fastest inner step that are planned for.

    Returns:
      bytes per global step up and down, of the largest fragment up, and the rates that these steps need, Gbit/s.
    """
    shapes = [fragment.shapes for fragment in compiled.plan.fragments]
    up, down = ([encoded_size(each, way) for each in shapes] for way in (config.wire.up, config.wire.down))
    per_step = [sum(sizes) / config.protocol.sync_every for sizes in (up, down)]
    return {
        "up_bytes_per_step": per_step[0],
        "down_bytes_per_step": per_step[1],
        "fragment_bytes_max": max(up),
        "gbit_per_s": [8e-9 * max(per_step) / seconds for seconds in step_s],
    }


# ---- gathers --------------------------------------------------------------------------------------------------------


class Gathers(NamedTuple):
    """Collectives that give each chip whole weights, or gradients of whole weights.

    Attributes:
      largest: the largest one, None if there is none.
      stacked_elements: elements of gathers that join a weight of all layers at once, summed.
      all_reduces: how many of them are all-reduces, by which the compiler replaces gathers on some slices.
    """

    largest: Collective | None
    stacked_elements: int
    all_reduces: int


def weight_gathers(built: Built, blueprint: Blueprint) -> Gathers:
    """The gatherings of sharded weights: results with the shape of a weight, or of one layer of it.

    Others join activations. Where weights are not sharded, all-reduces of whole gradients are as they should be.
    """
    if built.program is None:
        return Gathers(None, 0, 0)
    mesh = blueprint.mesh.shape
    kinds = ("all-gather", "all-reduce") if mesh["fsdp"] * mesh["expert"] > 1 else ("all-gather",)
    stacked = {_sorted(blueprint.shapes[path]) for path in blueprint.stacked if blueprint.shapes[path][0] > 1}
    layers = {_sorted(blueprint.shapes[path][1:]) for path in blueprint.stacked}
    known = _split({_sorted(shape) for shape in blueprint.shapes.values()} | layers, mesh["tensor"])
    all_layers = _split(stacked, mesh["tensor"]) - _split(layers, mesh["tensor"])
    largest, at_once, all_reduces = None, 0, 0
    for each in built.program.collectives:
        weights = tuple(t for t in each.results if _sorted(t.dims) in known and len(_sorted(t.dims)) > 1)
        if each.kind not in kinds or not weights:
            continue
        gather = Collective(each.kind, weights, each.times)
        if largest is None or gather.elements > largest.elements:
            largest = gather
        at_once += sum(t.elements for t in weights if _sorted(t.dims) in all_layers)
        all_reduces += each.times if each.kind == "all-reduce" else 0
    return Gathers(largest, at_once, all_reduces)


def _sorted(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(size for size in shape if size > 1))


def _split(shapes: set[tuple[int, ...]], parts: int) -> set[tuple[int, ...]]:
    """With each dimension whole, or as one of the parts over which the tensor axis may share it out."""
    return {
        _sorted(choice)
        for shape in shapes
        for choice in product(*({size, size // parts} if size % parts == 0 else {size} for size in shape))
    }
