"""`diloco preflight --search`: it finds the settings that fit and make an island's inner step cheapest.

A candidate is a shape of the mesh, a number of micro-batches and a remat policy. More micro-batches gather the weights
more often, and leave memory for a policy that recomputes less. A candidate is not compiled if it cannot fit by its
shapes alone, or cannot be cheaper than the best one so far. A formula chooses the kernel's tile, because the compiler's
text does not show what kernels compute. The estimated time of a step is

    max(FLOPs / peak, overlapped bytes / links) + bytes of collectives that devices wait for / links    seconds
"""

import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import jax

from diloco_jax.settings.compiler import options_of
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.slices import Topology
from diloco_jax.settings.text import dump
from diloco_jax.tools.budget.memory import Hbm
from diloco_jax.tools.budget.needs import IslandKind, outline
from diloco_jax.tools.preflight.compile import Compiled, Say, compile_island, needed_flops, step_hbm
from diloco_jax.tools.preflight.judge import GB, ROOM, Misfit, advise_hbm
from diloco_jax.training.flops import model_flops
from diloco_jax.training.models.attention import SPLASH_BLOCKS
from diloco_jax.training.models.layers import KEPT
from diloco_jax.training.models.moe import decoder_of
from diloco_jax.training.models.options import DecoderConfig
from diloco_jax.training.sharding import MESH_AXES, MeshConfig

# From few FLOPs and much memory to many FLOPs and little memory. `offload` is not among them, because it is not faster:
# moving a number to CPU memory and back takes about as long as recomputing it for a model of width 30,000 (32 GB/s and
# half of 918 TFLOP/s, v6e).
POLICIES = ("minimal", "mlp", "attention", "full")
# Numbers that are tried in addition to the config's.
MICRO_BATCHES = (1, 2, 4, 8)
# The overhead of a step of a kernel's grid, from JAX's documentation of Pallas for TPUs.
TILE_S = 0.35e-6
MESHES_MAX, COMPILES_MAX = 3, 100
# A candidate is compiled if it may take less than this share of the best one's time.
WORTH = 0.99
Found = dict[str, Any]


class Trial(NamedTuple):
    """Settings of the inner step that a search may compile."""

    # The config and the kind of islands with these settings.
    config: RunConfig
    kind: IslandKind
    # remat, splash_block, mesh and accumulate_steps.
    setting: Found
    # The least memory of each device: the state, and the activations that the policy keeps.
    least: Hbm


def search(config: RunConfig, kind: IslandKind, compiles_max: int, record: Path, say: Say) -> Found:
    """Compile candidates for one kind of islands, and find the cheapest one that fits.

    Args:
      compiles_max: the most candidates to compile.
      record: file that keeps the results, so that a repeated search does not compile them again.
      say: is called with a line about each compilation.

    Returns:
      tried (results in their order), best (None if nothing fits), limit_bytes, left (the number of candidates that
      remain to be compiled), advice, and ok.

    Raises:
      ValueError: the model is not a built-in decoder, or the record cannot be read.
    """
    topology, decoder = kind.topology, decoder_of(config.model)
    if decoder is None or topology is None:
        raise ValueError("preflight --search works only for the built-in decoders; see model.module")
    if not 1 <= compiles_max <= COMPILES_MAX:
        raise ValueError(f"--compiles is {compiles_max}; use 1 to {COMPILES_MAX}")
    limit, known, made, left = ROOM * topology.generation.hbm_bytes, _read(record), 0, 0
    tried: list[Found] = []
    # By mesh, the index of the policy that fits with fewer micro-batches.
    fewest: dict[str, int] = {}
    for candidate in _candidates(config, kind, topology, decoder):
        setting, at = candidate.setting, POLICIES.index(candidate.setting["remat"])
        mesh = str(setting["mesh"])
        if at >= fewest.get(mesh, len(POLICIES)) or not _may_be_best(setting, tried, limit, topology):
            continue
        there, island = candidate.config, candidate.kind.island
        key = json.dumps(
            [asdict(there), island, options_of(there, island), jax.__version__], default=str, sort_keys=True
        )
        if sum(candidate.least) > limit:
            found = _result(candidate.least)
        elif key not in known and made == compiles_max:
            left += 1
            continue
        else:
            if key not in known:
                made += 1
                say(f"{_spell(setting)}: program {made} of at most {compiles_max}")
                began = time.monotonic()
                known[key] = _measure(candidate, topology, compile_island(there, island, say, step_only=True))
                with record.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"key": key, **known[key]}) + "\n")
                say(f"  {known[key]['hbm_bytes'] / GB:.1f} of {limit / GB:.1f} GB, {time.monotonic() - began:.0f} s")
            found = known[key]
        tried.append({**setting, **found})
        if found["hbm_bytes"] <= limit:
            fewest[mesh] = at
    best = _best(tried, limit)
    smallest = min(tried, key=lambda each: float(each["hbm_bytes"]), default=None)
    advice = [] if best or left or smallest is None else _advise(config, kind, topology, smallest)
    return {"tried": tried, "best": best, "limit_bytes": limit, "left": left, "advice": advice, "ok": best is not None}


def _read(record: Path) -> dict[str, Found]:
    """Read the results in a record, by key."""
    lines = record.read_text("utf-8").splitlines() if record.exists() else []
    try:
        each = [json.loads(line) for line in lines]
        return {one["key"]: {name: one[name] for name in _result(Hbm(*[0.0] * 6))} for one in each}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--search: {record} is not a file of a search's results; name another one") from error


def _candidates(config: RunConfig, kind: IslandKind, topology: Topology, decoder: DecoderConfig) -> Iterator[Trial]:
    """Yield the candidates in the order of trials: the config's mesh first, then by micro-batches, then by FLOPs."""
    block = best_block(decoder, config.train.seq_len, topology) if decoder.attention == "splash" else 0
    for mesh in _meshes(kind, topology):
        on_mesh = kind._replace(island=kind.island._replace(mesh=mesh))
        needs = outline(config, on_mesh)
        parts = needs.blueprint.layout.batch_parts
        for count in sorted({*MICRO_BATCHES, config.optimizer.accumulate_steps}):
            if kind.part_size % (parts * count):
                continue
            tokens = kind.part_size // (parts * count) * config.train.seq_len
            optimizer = replace(config.optimizer, accumulate_steps=count)
            for policy in POLICIES:
                options = {"remat": policy, "splash_block": block}
                model = replace(config.model, args={**config.model.args, **options})
                sizes = dict(needs.blueprint.mesh.shape)
                yield Trial(
                    replace(config, model=model, optimizer=optimizer),
                    on_mesh,
                    {**options, "mesh": sizes, "accumulate_steps": count},
                    needs.needs.hbm._replace(temporaries=_kept_bytes(decoder, policy, sizes["tensor"]) * tokens),
                )


def _kept_bytes(decoder: DecoderConfig, policy: str, tensor: int) -> float:
    """Return the least bytes per token that a policy keeps of all layers for the backward pass."""
    kept = 0.0
    for number in range(decoder.num_layers):
        layer = decoder.of_kind(decoder.kind(number))
        mixed, keys = layer.num_heads * layer.head_dim, 2 * layer.num_kv_heads * layer.head_dim
        # Experts keep the contents of their slots, which are not counted.
        gated = 0 if layer.num_experts else 2 * layer.mlp_dim
        sizes = {"attention": mixed, "qkv": mixed + keys, "out": layer.dim, "gated": gated}
        kept += layer.dim + sum(sizes[name] for name in KEPT.get(policy, ())) / tensor
    return kept * jax.numpy.dtype(decoder.dtype).itemsize


def _may_be_best(setting: Found, tried: list[Found], limit: float, topology: Topology) -> bool:
    """Return whether a candidate may fit and may be cheaper than the best so far.

    It needs at least as much memory as a candidate whose mesh shards parameters over more devices, and at least the
    FLOPs of the policies before its policy.
    """
    policy, best = POLICIES.index(setting["remat"]), _best(tried, limit)
    for each in tried:
        alike = all(each[name] == setting[name] for name in ("remat", "accumulate_steps"))
        if alike and each["mesh"]["fsdp"] >= setting["mesh"]["fsdp"] and each["hbm_bytes"] > limit:
            return False
    least = max((each["flops"] for each in tried if POLICIES.index(each["remat"]) <= policy), default=0)
    return best is None or bool(least / topology.generation.peak_flops < WORTH * best["seconds"])


def _best(tried: list[Found], limit: float) -> Found | None:
    fitting = [each for each in tried if each["hbm_bytes"] <= limit]
    return min(fitting, key=lambda each: float(each["seconds"]), default=None)


def _advise(config: RunConfig, kind: IslandKind, topology: Topology, smallest: Found) -> list[str]:
    """List what to change when nothing fits, from the candidate that needs the least memory."""
    mesh = smallest["mesh"]
    parts = math.prod(size for axis, size in mesh.items() if axis != "tensor") * smallest["accumulate_steps"]
    model = replace(config.model, args={**config.model.args, "remat": smallest["remat"]})
    return advise_hbm(Misfit(topology, mesh, kind.part_size / parts, model, Hbm(**smallest["hbm"])))


def best_config(config: RunConfig, best: Mapping[str, Any]) -> str:
    """Return the text of the config with the best settings."""
    islands = replace(config.islands, mesh=replace(config.islands.mesh, **best["mesh"]))
    optimizer = replace(config.optimizer, accumulate_steps=best["accumulate_steps"])
    args = {**config.model.args, "remat": best["remat"], "splash_block": best["splash_block"]}
    return dump(replace(config, model=replace(config.model, args=args), islands=islands, optimizer=optimizer))


def best_block(decoder: DecoderConfig, seq_len: int, topology: Topology) -> int:
    """Return the splash kernel's tile with the least estimated time: FLOPs, reads of keys and values, and overhead."""

    def seconds(size: int) -> float:
        tiles = (seq_len // size) * (seq_len // size + 1) / 2
        read_s = 4 * size * decoder.head_dim / (topology.generation.hbm_gb_per_s * 1e9 or math.inf)
        return tiles * (max(4 * size * size * decoder.head_dim / topology.generation.peak_flops, read_s) + TILE_S)

    return min((size for size in SPLASH_BLOCKS if seq_len % size == 0), key=seconds, default=0)


def _meshes(kind: IslandKind, topology: Topology) -> list[MeshConfig]:
    """List divisions of the mesh into `data` and `fsdp`: the config's first, then the ones most like it.

    Each axis covers whole dimensions of the slice, because chips can use only a part of their links if an axis cuts a
    dimension.
    """
    data, fsdp, expert, tensor = kind.island.mesh.sizes(kind.chips)
    dims = (*topology.shape, topology.generation.devices_per_chip)
    along = {math.prod(some) for count in range(len(dims) + 1) for some in combinations(dims, count)}
    splits = [n for n in along if data * fsdp % n == 0 and n != fsdp]
    chosen = [fsdp, *sorted(splits, key=lambda n: (abs(math.log2(n / fsdp)), n))][:MESHES_MAX]
    return [replace(kind.island.mesh, data=data * fsdp // n, fsdp=n, expert=expert, tensor=tensor) for n in chosen]


def _result(hbm: Hbm, flops: float = 0.0, needed: float = 0.0, waited: float = 0.0, seconds: float = math.inf) -> Found:
    """Return a candidate's result; the FLOPs are 0 if it was not compiled, or if the compiler refused it."""
    sizes = {"hbm": hbm._asdict(), "hbm_bytes": sum(hbm)}
    return {**sizes, "flops": flops, "needed": needed, "waited_bytes": waited, "seconds": seconds}


def _measure(candidate: Trial, topology: Topology, compiled: Compiled) -> Found:
    """Return bytes, FLOPs and estimated seconds of a step on each device."""
    config, [step], hbm = candidate.config, compiled.programs, step_hbm(compiled)
    decoder = decoder_of(config.model)
    assert decoder is not None, "search has checked that the model is a built-in decoder"
    if step.program is None:
        return _result(hbm)
    batch, count = candidate.kind.part_size, config.optimizer.accumulate_steps
    shapes, seq_len = compiled.blueprint.shapes, config.train.seq_len
    flops = model_flops(config.model, shapes, batch, seq_len, config.data.soft_tokens)
    # The masked FLOPs equal the unmasked ones. One third of them, per layer, is the forward pass of causal attention.
    kernels = step.program.kernels * flops.masked / (3 * decoder.num_layers * topology.devices * count)
    compute = step.program.matrix_flops + kernels * (1 + decoder.splash_block / config.train.seq_len)
    links = topology.generation.ici_gb_per_s * 1e9 / 2 / topology.generation.devices_per_chip or math.inf
    moved = [(each.overlapped, each.times * each.num_bytes) for each in step.program.collectives]
    waited, beside = (sum(size for overlapped, size in moved if overlapped == which) for which in (False, True))
    seconds = max(compute / topology.generation.peak_flops, beside / links) + waited / links
    needed = needed_flops(flops, step) / (step.program.matrix_flops * topology.devices)
    return _result(hbm, compute, needed, waited, seconds)


def _spell(setting: Found) -> str:
    mesh = " ".join(f"{axis} {setting['mesh'][axis]}" for axis in MESH_AXES if setting["mesh"][axis] > 1)
    return f"remat {setting['remat']}, mesh {mesh or 'one chip'}, accumulate_steps {setting['accumulate_steps']}"


def describe_search(result: Mapping[str, Any]) -> str:
    """Format the result of `search` as text."""
    limit, best = result["limit_bytes"], result["best"]
    lines = [
        f"  {'remat, mesh, micro-batches':<50}{'per device':>14}{'FLOPs':>11}{'needed':>8}{'waited for':>12}"
        f"{'estimate':>11}"
    ]
    for each in result["tried"]:
        held = f"{each['hbm_bytes'] / GB:.1f} GB"
        verdict = f"{each['seconds']:.3g} s" if each["hbm_bytes"] <= limit else "too large"
        if each["flops"]:
            waited = f"{each['waited_bytes'] / GB:.2f} GB"
            figures = f"{held:>14}{each['flops']:>11.3g}{each['needed']:>8.0%}{waited:>12}"
        else:
            # The candidate was not compiled, or the compiler refused it, so the size is a lower bound.
            figures = f"{f'>= {held}':>14}{'':31}"
        lines.append(f"  {_spell(each):<50}{figures}{verdict:>11}")
    if best:
        lines += ["", f"cheapest: {_spell(best)}, splash_block {best['splash_block']}"]
    elif not result["left"]:
        lines += ["", f"nothing fits into {limit / GB:.1f} GB, 90 % of a chip's memory:"]
        lines += [f"  {line}" for line in result["advice"]]
    if result["left"]:
        lines += ["", f"up to {result['left']} candidates remain: run it again, or with a larger --compiles"]
    return "\n".join(lines)
