"""Compilation of an island's programs for a TPU slice on a machine without one, with libtpu's compiler.

The compiler describes the slice's devices, and programs are lowered for shapes, so nothing is allocated.
"""

import importlib.util
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from diloco_jax.core.fragments import Fragment
from diloco_jax.protocol.releases import install_hint
from diloco_jax.settings.compiler import options_of
from diloco_jax.settings.islands import IslandConfig
from diloco_jax.settings.resolved import ResolvedRun, resolve
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.slices import Topology
from diloco_jax.tools.budget.memory import Hbm, anchor_bytes, chip_memory
from diloco_jax.tools.preflight.hlo import Collective, Program, read_program
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.data.order import example
from diloco_jax.training.data.sample import batch_shapes
from diloco_jax.training.flops import ModelFlops

Say = Callable[[str], None]
GIB = 2**30
# The programs of a whole step, and of the gradient of a slice's part if an island has several slices.
STEPS = ("step", "gradient")
# Model FLOPs utilisation in the pessimistic and in the optimistic estimate of a step's time.
MFU = (0.3, 0.5)

# Without these variables, libtpu on a machine without a TPU waits for services that do not exist, or prints warnings.
QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

# The compiler's messages when a program does not fit give the size of the temporaries alone, or of everything.
_WANTED_TEMPORARIES = re.compile(r"HLO temporaries \(([\d.]+)([KMG])\) exceeds")
_WANTED_IN_ALL = re.compile(r"\b[Uu]sed ([\d.]+)([KMG]) of [\d.]+[KMG] hbm")
_UNITS = {"K": 2**10, "M": 2**20, "G": GIB}


class Memory(NamedTuple):
    """A program's share of each chip's memory, bytes."""

    arguments: float
    outputs: float
    # The part of the outputs that is stored in place of arguments.
    aliased: float
    # Memory that the program needs only while it runs.
    temporaries: float
    # The code of the program.
    code: float


class Built(NamedTuple):
    """A compiled program, or one that did not fit into memory."""

    # create, step, gradient, update, stage, adopt or rebase.
    kind: str
    # The fragments that share the program; none for programs of whole states and steps.
    fragments: tuple[int, ...]
    # Seconds of compilation, lowering included.
    compile_s: float
    # Seconds of processor time, summed over all cores.
    cpu_s: float
    # The program's memory; if the compiler refused it, the arguments and the temporaries that the message gives.
    memory: Memory
    # The program's work; None if the compiler refused it.
    program: Program | None
    # FLOPs of the compiler's cost analysis, which counts loops once, summed over all devices.
    compiler_flops: float

    @property
    def name(self) -> str:
        """Return the name of the program for people."""
        return f"{self.kind} {self.fragments[0]}" if self.fragments else self.kind


class Compiled(NamedTuple):
    """All programs of one kind of island."""

    blueprint: Blueprint
    run: ResolvedRun
    # The memory of each chip, from shapes alone.
    held: Hbm
    # The distinct programs, in the order that an island needs them.
    programs: tuple[Built, ...]

    @property
    def step(self) -> Built:
        """Return the program with the model's computation: the step, or the gradient of a slice's part."""
        return next(built for built in self.programs if built.kind in STEPS)


def slice_devices(topology: Topology) -> Sequence[jax.Device]:
    """Return the compiler's devices of a slice; ValueError if libtpu is missing or does not know the slice."""
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(f"there is no TPU compiler here, libtpu is missing; {install_hint('tpu')}")
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    # JAX must not wait for a TPU that this machine may have, or occupy it.
    jax.config.update("jax_platforms", "cpu")
    options: dict[str, Any] = dict(topology.generation.libtpu_options)
    if topology.hosts == 1 and topology.chips != 4:
        options["chips_per_host_bounds"] = (*topology.shape, 1, 1)[:3]
    try:
        known = topologies.get_topology_desc(platform="tpu", topology_name=str(topology), **options)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"libtpu does not know the slice '{topology}': {str(error).splitlines()[0]}; use one that Google Cloud "
            "offers, such as v5p:2x2x1 or v5p:4x4x4"
        ) from error
    devices: Sequence[jax.Device] = known.devices
    return devices


def compile_island(config: RunConfig, island: IslandConfig, say: Say, *, step_only: bool = False) -> Compiled:
    """Compile all programs of an island, or only its inner step; ValueError if the compiler fails on one.

    An island of several slices has a gradient of a part and an update with the mean instead of the step
    (training/parts.py).

    Args:
      say: is called with a line about each program before it is compiled.
      step_only: compile only the inner step.
    """
    topology = island.slice
    assert topology is not None, "only an island with a slice can be compiled"
    options: dict[str, str | bool] = {**options_of(config, island)}
    blueprint = Blueprint(config.model, config.optimizer, island.mesh, slice_devices(topology), seed=config.seed)
    run = resolve(config, blueprint.shapes, blueprint.kinds)
    held = chip_memory(run, blueprint)
    programs = []
    if not step_only:
        say(f"{topology}: creating the state")
        programs.append(build("create", lambda: blueprint.create.lower().compile(options), 0))
    slices = config.islands.slices
    share = island.batch_size // slices
    what = "the inner step" if slices == 1 else "the gradient of a slice's part"
    say(f"{topology}: {what} of {share} sequences, which takes longest")
    shapes = batch_shapes(example(config.of_island(island.name).data, config.train.seq_len), share)
    state = held.parameters + held.optimizer
    if slices == 1:
        programs.append(build("step", lambda: blueprint.lower_step(shapes).compile(options), state + held.base))
    else:
        given = held.parameters + held.base
        programs.append(build("gradient", lambda: blueprint.lower_part(shapes).compile(options), given))
    if slices > 1 and not step_only:
        say(f"{topology}: the update with the mean gradient of {slices} slices")
        given = state + held.mean_gradient
        programs.append(build("update", lambda: blueprint.lower_update().compile(options), given))
    if config.algorithm == "decoupled" and not step_only:
        say(f"{topology}: staging and adoption of {len(run.fragments)} fragments")
        programs += exchange_programs(config, blueprint, run.fragments)
    return Compiled(blueprint, run, held, tuple(programs))


def exchange_programs(config: RunConfig, blueprint: Blueprint, fragments: Sequence[Fragment]) -> list[Built]:
    """Compile the programs that stage and adopt fragments; fragments may share a program."""
    exchange = blueprint.exchange(config.wire.up, config.adopt.mode == "rebase")
    made: dict[int, Built] = {}
    began = _clocks()
    for kind, fragment, compiled in exchange.programs(fragments):
        key = id(compiled)
        known = made.get(key) or _describe(kind, compiled, began)
        made[key] = known._replace(fragments=(*known.fragments, fragment.fragment_id))
        began = _clocks()
    return list(made.values())


def build(kind: str, compile: Callable[[], jax.stages.Compiled], arguments: float) -> Built:
    """Compile one program; if it does not fit, describe it from the compiler's message.

    Args:
      arguments: bytes of the program's arguments on each chip.

    Raises:
      ValueError: the compiler fails for another reason than memory.
    """
    began = _clocks()
    try:
        return _describe(kind, compile(), began)
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if "RESOURCE_EXHAUSTED" not in text:
            raise ValueError(f"the compiler refuses the program '{kind}': {text[:500]}") from error
        return Built(kind, (), *_since(began), _wanted(text, arguments), None, 0.0)


def _wanted(text: str, arguments: float) -> Memory:
    """Read the memory that a program would need from the compiler's message."""
    if temporaries := _WANTED_TEMPORARIES.search(text):
        return Memory(arguments, 0, 0, float(temporaries[1]) * _UNITS[temporaries[2]], 0)
    in_all = _WANTED_IN_ALL.search(text)
    wanted = float(in_all[1]) * _UNITS[in_all[2]] if in_all else math.inf
    return Memory(arguments, 0, 0, max(0.0, wanted - arguments), 0)


def _describe(kind: str, compiled: jax.stages.Compiled, began: tuple[float, float]) -> Built:
    taken_s = _since(began)
    taken: Any = compiled.memory_analysis()
    memory = Memory(
        taken.argument_size_in_bytes,
        taken.output_size_in_bytes,
        taken.alias_size_in_bytes,
        taken.temp_size_in_bytes,
        taken.generated_code_size_in_bytes,
    )
    program = read_program(compiled.as_text() or "")
    cost: Any = compiled.cost_analysis() or {}
    return Built(kind, (), *taken_s, memory, program, cost.get("flops", 0.0) * program.devices)


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(began: tuple[float, float]) -> tuple[float, float]:
    wall_s, cpu_s = _clocks()
    return wall_s - began[0], cpu_s - began[1]


def step_hbm(compiled: Compiled) -> Hbm:
    """Return the memory per chip while the inner step runs; the temporaries are those of the compiled step.

    Those of a part include its gradient.
    """
    held, memory = compiled.held, compiled.step.memory
    temporaries = memory.arguments + memory.outputs - memory.aliased + memory.temporaries + memory.code
    given = held.parameters + held.base + (held.optimizer if compiled.step.kind == "step" else 0.0)
    return held._replace(temporaries=max(0.0, temporaries - given))


def program_hbm(built: Built, compiled: Compiled, hbm: Hbm) -> float:
    """Return each chip's memory in bytes while a program runs, including the island's other memory."""
    memory = built.memory
    own = memory.temporaries + memory.code
    if built.kind == "create":
        return own + memory.outputs
    if built.kind in STEPS:
        return hbm.fixed + hbm.temporaries
    if built.kind == "update":
        # `fixed` already includes the state and the mean gradient.
        return hbm.fixed + own + memory.outputs - memory.aliased
    if built.kind == "stage":
        # `fixed` already includes the program's arguments, and its outputs as the staged copies.
        return hbm.fixed + own
    # the value that arrived, beside the anchor that it replaces
    new = anchor_bytes(compiled.blueprint, compiled.run.fragments[built.fragments[0]])
    return hbm.fixed + own + new + memory.outputs - memory.aliased


def needed_flops(flops: ModelFlops, step: Built) -> float:
    """Return the model FLOPs that are comparable with the compiled ones, without attention if a kernel computes it."""
    return flops.flops - flops.masked if step.program and step.program.kernels else flops.flops


class Gathers(NamedTuple):
    """Collectives that give each chip whole weights, or gradients of whole weights."""

    # None if there are no such collectives.
    largest: Collective | None
    # The elements of all gathers that join a weight of all layers at once.
    stacked_elements: int
    # The number of all-reduces, which replace gathers on some slices.
    all_reduces: int
    # The number of both kinds that run in a loop while devices compute nothing.
    waited_for: int


def weight_gathers(built: Built, blueprint: Blueprint) -> Gathers:
    """Find the collectives that gather sharded weights: their results have the shape of a weight, or of one layer.

    Other collectives join activations. If weights are not sharded, all-reduces of whole gradients are correct and are
    not counted.
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
    """Return all shapes whose dimensions are whole, or divided by `parts`, the size of the tensor axis."""
    return {
        _sorted(choice)
        for shape in shapes
        for choice in product(*({size, size // parts} if size % parts == 0 else {size} for size in shape))
    }
