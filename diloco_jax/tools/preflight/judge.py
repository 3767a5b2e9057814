"""`diloco preflight`: it compiles the programs of a config's islands for their TPU slices, and reports problems.

It needs neither a TPU nor a network. Each kind of island, a slice with a mesh and a batch, is compiled once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from diloco_jax.settings.islands import AUTO
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.slices import Topology
from diloco_jax.sim.goodput.bandwidth import exchange_bytes, exchange_gbit_per_s
from diloco_jax.tools.budget.memory import Hbm, gradient_elements, num_parameters
from diloco_jax.tools.budget.needs import IslandKind, island_needs, kinds_of, link_needs
from diloco_jax.tools.preflight.compile import (
    MFU,
    Built,
    Compiled,
    Say,
    compile_island,
    needed_flops,
    program_hbm,
    step_hbm,
    weight_gathers,
)
from diloco_jax.tools.preflight.hlo import Collective
from diloco_jax.training.flops import model_flops
from diloco_jax.training.models.config import ModelConfig
from diloco_jax.training.models.options import DecoderConfig
from diloco_jax.training.models.protocol import config_from_args

GB = 1e9
# The share of a chip's memory that may be used.
ROOM = 0.9
# Settings of the decoder that trade computation or precision for memory: the default, and the value that saves memory.
SAVES = {"dtype": ("float32", "bfloat16"), "scan_layers": (False, "true"), "remat": ("none", "full")}
# If float32 anchors over float32 parameters reach this ratio, cutting along another axis is worth a try.
WASTE = 1.5
# With at least this number of token ids, logits should be computed in chunks.
CHUNK_FROM = 32_768


class Misfit(NamedTuple):
    """An inner step that does not fit its chips."""

    topology: Topology
    # The sizes of the mesh's axes.
    mesh: Mapping[str, int]
    # The sequences of one micro-batch on each chip.
    sequences: float
    model: ModelConfig
    # The parts of a chip's memory in the inner step, bytes.
    hbm: Hbm


def advise_hbm(case: Misfit) -> list[str]:
    """List what to change when the inner step does not fit; the change that helps most comes first."""
    limit = case.topology.generation.hbm_bytes
    advice = []
    if case.hbm.fixed > ROOM * limit / 2:
        advice += _share_state(case, limit)
    if case.hbm.temporaries > ROOM * limit - min(case.hbm.fixed, ROOM * limit / 2):
        advice += _less_activations(case)
    return advice or [_larger(case, limit, case.hbm.fixed + case.hbm.temporaries)]


def advise_anchors(hbm: Hbm, mesh: Mapping[str, int]) -> list[str]:
    """List what to change when anchors take much more memory than the parameters."""
    if hbm.anchors < WASTE * hbm.parameters or hbm.anchors < GB / 10:
        return []
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1)
    return [
        f"anchors take {hbm.anchors / GB:.1f} GB per chip, parameters {hbm.parameters / GB:.1f} GB: fragments cut "
        f"tensors along an axis that the mesh shards ({axes}), so that every chip holds them whole along it; try "
        "another fragments.split_axis, such as -1"
    ]


def _share_state(case: Misfit, limit: float) -> list[str]:
    """Advise to shard parameters, optimizer and anchors over more chips."""
    hbm, data = case.hbm, case.mesh["data"]
    if data > 1:
        fsdp, fixed = case.mesh["fsdp"] * data, hbm.fixed / GB
        return [
            f"{fixed:.1f} GB per chip are parameters, optimizer and anchors, and each of {data} groups of chips has a "
            "copy: "
            f"set islands.mesh.data to 1 and islands.mesh.fsdp to {fsdp} (or -1), which leaves about "
            f"{fixed / data:.1f} GB"
        ]
    return [_larger(case, limit, hbm.fixed)]


def _larger(case: Misfit, limit: float, needed: float) -> str:
    """Advise the smallest larger slice that leaves at least half of each chip's memory free."""
    generation, shape, chips = case.topology.generation, list(case.topology.shape), case.topology.chips
    # No slice has 2 chips.
    while needed * case.topology.chips / chips > ROOM * limit / 2 or chips in (2, case.topology.chips):
        shape[shape.index(min(shape))] *= 2
        chips *= 2
    if chips > generation.chips_max:
        return (
            f"{needed / GB:.1f} GB per chip are needed, and no {case.topology.name} slice is large enough: use a "
            "smaller model, or a generation with more memory"
        )
    larger = f"{case.topology.name}:{'x'.join(map(str, sorted(shape)))}"
    return (
        f"{needed / GB:.1f} GB per chip are needed: use fewer, larger islands, islands.topology {larger} with "
        "islands.mesh.fsdp -1"
    )


def _less_activations(case: Misfit) -> list[str]:
    """Advise fewer sequences per chip and keeping less of each layer, because activations grow with both."""
    advice = _kept_less(case.model)
    if case.sequences > 1:
        advice.append(
            "a larger optimizer.accumulate_steps, or a smaller islands.batch_size "
            f"(now {case.sequences:g} sequences per chip at a time)"
        )
    else:
        advice.append(f"islands.mesh.tensor {2 * case.mesh['tensor']}, so that chips share one sequence")
    return [f"activations take {case.hbm.temporaries / GB:.1f} GB per chip: set {', or '.join(advice)}"]


def _kept_less(model: ModelConfig) -> list[str]:
    """List the settings of the built-in decoder that would save memory and are not yet set."""
    if model.module != ModelConfig().module:
        return []
    config = config_from_args(DecoderConfig, model.args)
    advice = [f"model.args.{name} {better}" for name, (now, better) in SAVES.items() if getattr(config, name) == now]
    if config.vocab_size >= CHUNK_FROM and not config.loss_chunk:
        advice.append("model.args.loss_chunk, a divisor of vocab_size")
    return advice


# Gathering this share of the parameters at once undoes their sharding.
WHOLE_MODEL = 0.9
# The same limit for weights that are gathered for all layers, before the loop over layers.
ALL_LAYERS = 0.5


def preflight(config: RunConfig, slices: Sequence[str], say: Say) -> dict[str, Any]:
    """Compile a config's programs and report problems; large models take minutes.

    Args:
      slices: slices to compile for, instead of the islands' own.
      say: is called with a line about each program.

    Returns:
      rows (one per program), islands (one per kind), not_compiled (one per kind without a slice), problems, advice, and
      ok.

    Raises:
      ValueError: an island has no slice, or as `compile_island`.
    """
    result: dict[str, Any] = {"rows": [], "islands": [], "not_compiled": [], "problems": [], "advice": []}
    if not slices:
        result["not_compiled"] = [_not_compiled(kind) for kind in kinds_of(config) if not kind.topology]
    for there, kind in cases_of(config, slices):
        _judge(there, kind, compile_island(there, kind.island, say), result)
    result["ok"] = not result["problems"]
    result["syncer_gbit_per_s"] = [
        sum(len(each["islands"]) * each["wire"]["gbit_per_s"][at] for each in result["islands"]) for at in (0, 1)
    ]
    return result


def cases_of(config: RunConfig, slices: Sequence[str]) -> list[tuple[RunConfig, IslandKind]]:
    """List the kinds of islands on a slice, with the config on each slice; ValueError if no island has one that fits.

    GPUs and CPUs have no compiler here, so islands on them are left out if others have a slice.
    """
    configs = [_moved(config, name) for name in dict.fromkeys(slices)] or [config]
    every = [(there, kind) for there in configs for kind in kinds_of(there)]
    cases = [(there, kind) for there, kind in every if kind.topology]
    if not cases:
        raise ValueError(
            f"{every[0][1].names[0]} names no TPU slice; add --topology v5p:2x2x1, or set islands.topology and "
            "islands.devices auto"
        )
    return cases


def _not_compiled(kind: IslandKind) -> dict[str, Any]:
    """Return a kind of islands that has no slice, with the reason in words."""
    what = f"{kind.chips} GPUs ({kind.island.accelerator})" if kind.island.accelerator else f"{kind.chips} devices"
    why = "preflight compiles for TPUs only; diloco plan estimates the memory of other devices"
    return {"islands": list(kind.names), "on": what, "why": why}


def _moved(config: RunConfig, slice_name: str) -> RunConfig:
    """Return the config with all islands on the named slice."""
    each = {name: replace(own, topology=None, devices=None, hosts=None) for name, own in config.islands.each.items()}
    islands = replace(
        config.islands,
        topology=str(Topology.parse(slice_name, config.islands.generations)),
        devices=AUTO,
        hosts=1,
        each=each,
    )
    return replace(config, islands=islands)


def _judge(config: RunConfig, kind: IslandKind, compiled: Compiled, result: dict[str, Any]) -> None:
    """Add one kind of islands to the result: its rows, its figures, its problems and advice."""
    topology = kind.topology
    assert topology is not None, "cases_of has checked that the island has a slice"
    step = compiled.step
    needs = island_needs(compiled.run, kind, compiled.blueprint)
    hbm, limit = step_hbm(compiled), topology.generation.hbm_bytes
    sizes, parameters = dict(compiled.blueprint.mesh.shape), num_parameters(compiled.blueprint)
    shapes, seq_len = compiled.blueprint.shapes, config.train.seq_len
    flops = model_flops(config.model, shapes, kind.part_size, seq_len, config.data.soft_tokens)
    compiled_flops = step.program.matrix_flops * topology.devices if step.program else None
    step_s = tuple(flops.flops / (topology.peak_flops * mfu) for mfu in MFU)
    gathers = weight_gathers(step, compiled.blueprint)
    links = link_needs(compiled.run)
    rows = [_row(topology, built, program_hbm(built, compiled, hbm), limit) for built in compiled.programs]
    largest = gathers.largest
    result["rows"] += rows
    result["islands"].append(
        {
            "topology": str(topology),
            "islands": list(kind.names),
            "chips": topology.chips,
            "hosts": topology.hosts,
            "mesh": sizes,
            "batch_size": kind.island.batch_size,
            "slices": kind.slices,
            "part_size": kind.part_size,
            "exchange": _exchange(compiled, kind, step_s),
            "seq_len": config.train.seq_len,
            "parameters": parameters,
            "hbm": hbm._asdict(),
            "hbm_limit_bytes": limit,
            "model_flops": flops.flops,
            "model_flops_are": flops.how,
            "masked_flops": flops.masked,
            "compiled_flops": compiled_flops,
            "flops_ratio": needed_flops(flops, step) / compiled_flops if compiled_flops else None,
            "kernels": step.program.kernels if step.program else None,
            "unread_loops": list(step.program.unread_loops) if step.program else [],
            "step_s": list(step_s),
            "largest_all_gather": largest and _gather(largest, parameters),
            "weight_all_reduces": gathers.all_reduces,
            "synchronous_gathers": gathers.waited_for,
            "loop_collectives": _in_loops(step),
            "collective_bytes": step.program.collective_bytes if step.program else None,
            "host_bytes": sum(needs.host),
            "host_limit_bytes": needs.host_limit_bytes,
            "wire": {
                **links.per_step,
                "gbit_per_s": [links.rounds(seconds).planned_gbit_per_s for seconds in step_s],
            },
        }
    )
    problems = [*_memory_problems(rows, result["islands"][-1]), *program_problems(topology, compiled.programs)]
    if not all(row["fits"] for row in rows):
        at_once = compiled.blueprint.layout.batch_parts * config.optimizer.accumulate_steps
        case = Misfit(topology, sizes, kind.part_size / at_once, config.model, hbm)
        result["advice"] += [f"{topology}: {line}" for line in advise_hbm(case)]
    result["advice"] += [f"{topology}: {line}" for line in advise_anchors(hbm, sizes)]
    if gathers.waited_for:
        result["advice"].append(
            f"{topology}: devices wait for {gathers.waited_for} gathers of weights, or all-reduces of whole ones, in "
            "the loop over layers; options of the compiler can overlap them with computation (cloud.xla_flags, "
            "settings/generations.yaml), and with mesh.fsdp one dimension of the slice shards are larger"
        )
    if largest is not None and largest.elements >= WHOLE_MODEL * parameters and len(compiled.blueprint.shapes) > 1:
        problems.append("the inner step gathers the whole model at once, which undoes its sharding")
    if gathers.stacked_elements >= ALL_LAYERS * parameters:
        problems.append("the inner step gathers the weights of all layers before its loop over them")
    result["problems"] += [f"{topology}: {problem}" for problem in problems]


def _exchange(compiled: Compiled, kind: IslandKind, step_s: Sequence[float]) -> dict[str, Any] | None:
    """Return what a host exchanges with other slices per step, and the rates that steps need; None without others."""
    if kind.slices == 1:
        return None
    elements = gradient_elements(compiled.blueprint, kind.island.hosts)
    return {
        "bytes": exchange_bytes(elements, kind.slices),
        "gbit_per_s": [exchange_gbit_per_s(elements, kind.slices, seconds) for seconds in step_s],
    }


def _gather(largest: Collective, parameters: int) -> dict[str, Any]:
    share = largest.elements / parameters
    sizes = {"elements": largest.elements, "bytes": largest.num_bytes}
    return {**sizes, "kind": largest.kind, "share_of_parameters": share}


def _in_loops(step: Built) -> dict[str, int]:
    """Count the runs of collectives in loops: those that devices wait for, and those that overlap with computation."""
    counts = {"synchronous": 0, "overlapped": 0}
    for each in step.program.collectives if step.program else ():
        counts["overlapped" if each.overlapped else "synchronous"] += each.times if each.times > 1 else 0
    return counts


def _row(topology: Topology, built: Built, hbm_bytes: float, limit: float) -> dict[str, Any]:
    program = built.program
    return {
        "topology": str(topology),
        "program": built.name,
        "fragments": list(built.fragments),
        "compile_s": built.compile_s,
        "cpu_s": built.cpu_s,
        "hbm_bytes": hbm_bytes,
        "hbm_limit_bytes": limit,
        "memory": built.memory._asdict(),
        "flops": program.matrix_flops * topology.devices if program else None,
        "compiler_flops": built.compiler_flops if program else None,
        "collectives": program.collective_counts if program else None,
        "host_transfers": list(program.host_transfers) if program else None,
        "fits": program is not None and hbm_bytes <= limit,
    }


def _memory_problems(rows: Sequence[dict[str, Any]], island: dict[str, Any]) -> list[str]:
    problems = []
    for row in rows:
        if not row["fits"]:
            refused = "; the compiler refuses it" if row["flops"] is None else ""
            problems.append(
                f"'{row['program']}' needs {row['hbm_bytes'] / GB:.1f} GB of a chip's memory, which has "
                f"{row['hbm_limit_bytes'] / GB:.0f} GB{refused}"
            )
    needed, limit = island["host_bytes"], island["host_limit_bytes"]
    if needed > limit:
        problems.append(
            "every host needs memory for what its devices hold of the global model in float32, of arriving fragments "
            f"and of outgoing ones, {needed / GB:.0f} GB, but has {limit / GB:.0f} GB; use a smaller model or "
            "hosts with more memory"
        )
    return problems


def program_problems(topology: Topology, programs: Sequence[Built]) -> list[str]:
    """List the programs with collectives, transfers to the CPU or devices that they must not have."""
    problems = []
    for built in programs:
        program, name = built.program, built.name
        if program is None:
            continue
        if built.fragments and program.collectives:
            kinds = ", ".join(f"{n} {kind}" for kind, n in program.collective_counts.items())
            problems.append(f"'{name}' has collectives ({kinds}); staging and adoption must not have any")
        if program.host_transfers:
            problems.append(
                f"'{name}' exchanges data with the CPU while it runs ({program.host_transfers[0]}); remove callbacks "
                "from the model"
            )
        if program.devices != topology.devices:
            problems.append(
                f"'{name}' runs on {program.devices} devices, but an island has {topology.devices}; islands may not "
                "share programs"
            )
    return problems
