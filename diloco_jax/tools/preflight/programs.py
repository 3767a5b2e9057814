"""The memory, traffic and gathers of an island's compiled programs."""

from itertools import product
from typing import NamedTuple

from diloco_jax.tools.budget.memory import Hbm, anchor_bytes
from diloco_jax.tools.preflight.compile import Built, Compiled
from diloco_jax.tools.preflight.hlo import Collective
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.flops import ModelFlops

MFU = (0.3, 0.5)  # a plan's pessimist and optimist


def step_hbm(compiled: Compiled) -> Hbm:
    """Add up the memory per chip while the inner step runs; what the compiled step takes beside the state is exact."""
    memory = next(built for built in compiled.programs if built.kind == "step").memory
    held = compiled.held
    temporaries = memory.arguments + memory.outputs - memory.aliased + memory.temporaries + memory.code
    return held._replace(temporaries=max(0.0, temporaries - held.parameters - held.optimizer))


def program_hbm(built: Built, compiled: Compiled, hbm: Hbm) -> float:
    """Add up each chip's memory while a program runs, with what the island holds beside it."""
    memory = built.memory
    own = memory.temporaries + memory.code
    if built.kind == "create":
        return own + memory.outputs
    if built.kind == "step":
        return hbm.fixed + hbm.temporaries
    if built.kind == "stage":  # its arguments are held already, and its outputs are the staged copies
        return hbm.fixed + own
    # the value that arrived, beside the anchor that it replaces
    new = anchor_bytes(compiled.blueprint, compiled.plan.fragments[built.fragments[0]])
    return hbm.fixed + own + new + memory.outputs - memory.aliased


def needed_flops(flops: ModelFlops, step: Built) -> float:
    """Return the model FLOPs to compare the compiled ones with: a kernel for attention keeps its own from both."""
    return flops.flops - flops.masked if step.program and step.program.kernels else flops.flops


class Gathers(NamedTuple):
    """Collectives that give each chip whole weights, or gradients of whole weights."""

    largest: Collective | None  # the largest one, None if there is none
    stacked_elements: int  # elements of gathers that join a weight of all layers at once, summed
    all_reduces: int  # how many of them are all-reduces, by which the compiler replaces gathers on some slices
    waited_for: int  # how many of both kinds run in a loop, and devices compute nothing meanwhile


def weight_gathers(built: Built, blueprint: Blueprint) -> Gathers:
    """Find the gatherings of sharded weights: results with the shape of a weight, or of one layer of it.

    Others join activations. Where weights are not sharded, all-reduces of whole gradients are as they should be.
    """
    if built.program is None:
        return Gathers(None, 0, 0, 0)
    mesh = blueprint.mesh.shape
    kinds = ("all-gather", "all-reduce") if mesh["fsdp"] * mesh["expert"] > 1 else ("all-gather",)
    stacked = {_sorted(blueprint.shapes[path]) for path in blueprint.stacked if blueprint.shapes[path][0] > 1}
    layers = {_sorted(blueprint.shapes[path][1:]) for path in blueprint.stacked}
    known = _split({_sorted(shape) for shape in blueprint.shapes.values()} | layers, mesh["tensor"])
    all_layers = _split(stacked, mesh["tensor"]) - _split(layers, mesh["tensor"])
    largest, at_once, all_reduces, waited_for = None, 0, 0, 0
    for each in built.program.collectives:
        weights = tuple(t for t in each.results if _sorted(t.dims) in known and len(_sorted(t.dims)) > 1)
        if each.kind not in kinds or not weights:
            continue
        gather = Collective(each.kind, weights, each.times)
        if largest is None or gather.elements > largest.elements:
            largest = gather
        at_once += sum(t.elements for t in weights if _sorted(t.dims) in all_layers)
        all_reduces += each.times if each.kind == "all-reduce" else 0
        waited_for += each.times if each.times > 1 and not each.overlapped else 0
    return Gathers(largest, at_once, all_reduces, waited_for)


def _sorted(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(size for size in shape if size > 1))


def _split(shapes: set[tuple[int, ...]], parts: int) -> set[tuple[int, ...]]:
    """Add shapes with each dimension whole, or as one of the parts over which the tensor axis may share it out."""
    return {
        _sorted(choice)
        for shape in shapes
        for choice in product(*({size, size // parts} if size % parts == 0 else {size} for size in shape))
    }
