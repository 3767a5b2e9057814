"""`diloco preflight`: compiles what the islands of a config will run for their TPU slices, and judges what came out.

No TPU and no network are needed. Every kind of island, a slice with a mesh and a batch, is looked at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from diloco_jax.settings.islands import AUTO
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.slices import Topology
from diloco_jax.tools.budget.memory import Hbm, num_parameters
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
ROOM = 0.9  # of a chip's memory, at most, that is planned to be taken
# Settings of the decoder that trade computation or precision for memory: as they are by default, what saves memory.
SAVES = {"dtype": ("float32", "bfloat16"), "scan_layers": (False, "true"), "remat": ("none", "full")}
WASTE = 1.5  # anchors over parameters, both float32, from which cutting elsewhere is worth a try
CHUNK_FROM = 32_768  # token ids from which logits deserve to be computed in chunks


class Misfit(NamedTuple):
    """An inner step that does not fit its chips."""

    topology: Topology  # the slice
    mesh: Mapping[str, int]  # sizes of the mesh's axes
    sequences: float  # on each chip at a time, those of one micro-batch
    model: ModelConfig  # which model
    hbm: Hbm  # what takes a chip's memory in the inner step, bytes


def advise_hbm(case: Misfit) -> list[str]:
    """List what to change when the inner step does not fit, what helps most first."""
    limit = case.topology.generation.hbm_bytes
    advice = []
    if case.hbm.fixed > ROOM * limit / 2:
        advice += _share_state(case, limit)
    if case.hbm.temporaries > ROOM * limit - min(case.hbm.fixed, ROOM * limit / 2):
        advice += _less_activations(case)
    return advice or [_larger(case, limit, case.hbm.fixed + case.hbm.temporaries)]


def advise_anchors(hbm: Hbm, mesh: Mapping[str, int]) -> list[str]:
    """List what to change when anchors are larger than parameters that are sharded in the same way."""
    if hbm.anchors < WASTE * hbm.parameters or hbm.anchors < GB / 10:
        return []
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1)
    return [
        f"anchors take {hbm.anchors / GB:.1f} GB per chip, parameters {hbm.parameters / GB:.1f} GB: fragments cut "
        f"tensors along an axis that the mesh shards ({axes}), and lie whole along it on every chip; try another "
        "fragments.split_axis, such as -1"
    ]


def _share_state(case: Misfit, limit: float) -> list[str]:
    """Advise to divide what is held all the time, by sharding it over more chips."""
    hbm, data = case.hbm, case.mesh["data"]
    if data > 1:
        fsdp, fixed = case.mesh["fsdp"] * data, hbm.fixed / GB
        return [
            f"{fixed:.1f} GB per chip are parameters, optimizer and anchors, whole on each of {data} groups of chips: "
            f"set islands.mesh.data to 1 and islands.mesh.fsdp to {fsdp} (or -1), which leaves about "
            f"{fixed / data:.1f} GB"
        ]
    return [_larger(case, limit, hbm.fixed)]


def _larger(case: Misfit, limit: float, needed: float) -> str:
    """Advise the smallest larger slice where what is held takes less than half of a chip's memory."""
    generation, shape, chips = case.topology.generation, list(case.topology.shape), case.topology.chips
    while needed * case.topology.chips / chips > ROOM * limit / 2 or chips in (2, case.topology.chips):  # none has 2
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
    """Advise fewer sequences per chip, and to keep less of each layer: activations grow with both."""
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
    """List the settings of the built-in decoder that trade memory for something else, and are not yet set."""
    if model.module != ModelConfig().module:
        return []
    config = config_from_args(DecoderConfig, model.args)
    advice = [f"model.args.{name} {better}" for name, (now, better) in SAVES.items() if getattr(config, name) == now]
    if config.vocab_size >= CHUNK_FROM and not config.loss_chunk:
        advice.append("model.args.loss_chunk, a divisor of vocab_size")
    return advice


WHOLE_MODEL = 0.9  # share of the parameters whose gathering at once undoes their sharding
ALL_LAYERS = 0.5  # the same for weights that are joined over all layers, before the loop over layers


def preflight(config: RunConfig, slices: Sequence[str], say: Say) -> dict[str, Any]:
    """Compile and judge, which takes minutes for large models: on each of these slices, or the islands' own.

    Returns rows (one per program), islands (one per kind), problems, advice, and ok. Raises as `compile_island`.
    """
    result: dict[str, Any] = {"rows": [], "islands": [], "problems": [], "advice": []}
    for there, kind in cases_of(config, slices):
        _judge(there, kind, compile_island(there, kind.island, say), result)
    result["ok"] = not result["problems"]
    result["syncer_gbit_per_s"] = [
        sum(len(each["islands"]) * each["wire"]["gbit_per_s"][at] for each in result["islands"]) for at in (0, 1)
    ]
    return result


def cases_of(config: RunConfig, slices: Sequence[str]) -> list[tuple[RunConfig, IslandKind]]:
    """List the kinds of islands, each with the run's config on its slice; ValueError if none is named, or fits."""
    configs = [_moved(config, name) for name in dict.fromkeys(slices)] or [config]
    cases = [(there, kind) for there in configs for kind in kinds_of(there)]
    if bare := next((kind.names[0] for _, kind in cases if not kind.topology), ""):
        raise ValueError(
            f"{bare} names no TPU slice; add --topology v5p:2x2x1, or set islands.topology and islands.devices auto"
        )
    return cases


def _moved(config: RunConfig, slice_name: str) -> RunConfig:
    """Move all islands of a run to this slice."""
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
    """Add what came out for one kind of island to the result."""
    topology, island = kind.topology, kind.island
    assert topology is not None, "cases_of checks it"
    step = next(built for built in compiled.programs if built.kind == "step")
    needs = island_needs(compiled.run, kind, compiled.blueprint)
    hbm, limit = step_hbm(compiled), topology.generation.hbm_bytes
    sizes = dict(compiled.blueprint.mesh.shape)
    parameters = num_parameters(compiled.blueprint)
    flops = model_flops(config.model, compiled.blueprint.shapes, island.batch_size, config.train.seq_len)
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
            "batch_size": island.batch_size,
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
                **links.per_step,  # and the rates that these steps need
                "gbit_per_s": [links.rounds(seconds).planned_gbit_per_s for seconds in step_s],
            },
        }
    )
    problems = [*_memory_problems(rows, result["islands"][-1]), *program_problems(topology, compiled.programs)]
    if not all(row["fits"] for row in rows):
        at_once = compiled.blueprint.layout.batch_parts * config.optimizer.accumulate_steps
        case = Misfit(topology, sizes, island.batch_size / at_once, config.model, hbm)
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


def _gather(largest: Collective, parameters: int) -> dict[str, Any]:
    share = largest.elements / parameters
    sizes = {"elements": largest.elements, "bytes": largest.num_bytes}
    return {**sizes, "kind": largest.kind, "share_of_parameters": share}


def _in_loops(step: Built) -> dict[str, int]:
    """Count the runs of collectives in loops: those that devices wait for, and those beside which they compute."""
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
            "every host keeps the global model in float32, what arrives, and its share of what leaves, "
            f"{needed / GB:.0f} GB, but has {limit / GB:.0f} GB; use a smaller model or hosts with more memory"
        )
    return problems


def program_problems(topology: Topology, programs: Sequence[Built]) -> list[str]:
    """List collectives and transfers where none may be."""
    problems = []
    for built in programs:
        program, name = built.program, built.name
        if program is None:
            continue
        if built.fragments and program.collectives:
            kinds = ", ".join(f"{n} {kind}" for kind, n in program.collective_counts.items())
            problems.append(f"'{name}' has collectives ({kinds}); fragments must leave and enter without any")
        if program.host_transfers:
            problems.append(
                f"'{name}' exchanges data with the host while it runs ({program.host_transfers[0]}); remove callbacks "
                "from the model"
            )
        if program.devices != topology.devices:
            problems.append(
                f"'{name}' runs on {program.devices} devices, but an island has {topology.devices}; islands may not "
                "share programs"
            )
    return problems
