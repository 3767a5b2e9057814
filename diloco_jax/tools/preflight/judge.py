"""`diloco preflight`: compiles what the islands of a config will run for their TPU slices, and judges what came out.

No TPU and no network are needed. Every kind of island, a slice with a mesh and a batch, is looked at once.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from diloco_jax.settings.islands import AUTO
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.slices import Topology
from diloco_jax.tools.budget.memory import num_parameters
from diloco_jax.tools.budget.needs import IslandKind, island_needs, kinds_of, link_needs
from diloco_jax.tools.preflight.advice import GB, Misfit, advise_anchors, advise_hbm
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

WHOLE_MODEL = 0.9  # share of the parameters whose gathering at once undoes their sharding
ALL_LAYERS = 0.5  # the same for weights that are joined over all layers, before the loop over layers


def preflight(config: RunConfig, slices: Sequence[str], say: Say) -> dict[str, Any]:
    """Compile and judge; takes minutes for large models.

    Args:
      slices: names such as v5p:4x4x8, on each of which every island is tried; none: the islands' own.

    Returns:
      rows (one per program), islands (one per kind), problems, advice, and ok: whether there is no problem.

    Raises:
      ValueError: libtpu is missing, no slice is named, a slice is unknown, or model, mesh or batch do not fit it.
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
    needs = island_needs(config, kind, compiled.blueprint, compiled.plan)
    hbm, limit = step_hbm(compiled), topology.generation.hbm_bytes
    sizes = dict(compiled.blueprint.mesh.shape)
    parameters = num_parameters(compiled.blueprint)
    flops = model_flops(config.model, compiled.blueprint.shapes, island.batch_size, config.train.seq_len)
    compiled_flops = step.program.matrix_flops * topology.devices if step.program else None
    step_s = tuple(flops.flops / (topology.peak_flops * mfu) for mfu in MFU)
    gathers = weight_gathers(step, compiled.blueprint)
    links = link_needs(config, compiled.plan)
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
    if island["host_bytes"] > island["host_limit_bytes"]:
        problems.append(
            "every host keeps the global model in float32, what arrives, and its share of what leaves, "
            f"{island['host_bytes'] / GB:.0f} GB, but has {island['host_limit_bytes'] / GB:.0f} GB; use a smaller "
            "model or hosts with more memory"
        )
    return problems


def program_problems(topology: Topology, programs: Sequence[Built]) -> list[str]:
    """List collectives and transfers where none may be."""
    problems = []
    for built in programs:
        if built.program is None:
            continue
        if built.fragments and built.program.collectives:
            kinds = ", ".join(f"{n} {kind}" for kind, n in built.program.collective_counts.items())
            problems.append(f"'{built.name}' has collectives ({kinds}); fragments must leave and enter without any")
        if built.program.host_transfers:
            problems.append(
                f"'{built.name}' exchanges data with the host while it runs ({built.program.host_transfers[0]}); "
                "remove callbacks from the model"
            )
        if built.program.devices != topology.devices:
            problems.append(
                f"'{built.name}' runs on {built.program.devices} devices, but an island has {topology.devices}; "
                "islands may not share programs"
            )
    return problems
