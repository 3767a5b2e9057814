"""`diloco preflight --search`: the settings with which an island's inner step is cheapest among those that fit.

Every way to share the mesh is compiled with policies of remat, the cheapest first, until one fits. The kernel's tile is
chosen by a formula, as no text of the compiler shows what kernels compute. To compare candidates, a step takes

    max(FLOPs / peak, overlapped bytes / links) + bytes of collectives that devices wait for / links    seconds
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax

from diloco_jax.settings.compiler import options_of
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.slices import Topology
from diloco_jax.settings.text import dump
from diloco_jax.tools.budget.needs import IslandKind
from diloco_jax.tools.preflight.advice import GB, ROOM
from diloco_jax.tools.preflight.compile import Compiled, Say, compile_island
from diloco_jax.tools.preflight.programs import step_hbm
from diloco_jax.training.flops import model_flops
from diloco_jax.training.models.attention import SPLASH_BLOCKS
from diloco_jax.training.models.moe import decoder_of
from diloco_jax.training.models.options import DecoderConfig
from diloco_jax.training.sharding import MeshConfig

POLICIES = ("minimal", "offload", "mlp", "attention", "full")  # from few FLOPs and much memory to the contrary
TILE_S = 0.35e-6  # overhead of a step of a kernel's grid, by JAX's documentation of Pallas for TPUs
MESHES_MAX, COMPILES_MAX = 3, 100
Found = dict[str, Any]


def search(config: RunConfig, kind: IslandKind, compiles_max: int, record: Path, say: Say) -> Found:
    """Compile candidates for one kind of islands, at most so many; `say` is told of each.

    Args:
      record: file with what was found, a line each; what it has is not compiled again.

    Returns:
      tried (in their order), best (None if nothing fits), limit_bytes, and ok: whether there is a best one.

    Raises:
      ValueError: the model is no built-in decoder, or as `compile_island`.
    """
    topology, decoder = kind.topology, decoder_of(config.model)
    if decoder is None or topology is None:
        raise ValueError("preflight --search knows the options of the built-in decoders only; see model.module")
    if not 1 <= compiles_max <= COMPILES_MAX:
        raise ValueError(f"--compiles is {compiles_max}; use 1 to {COMPILES_MAX}")
    limit, tried = ROOM * topology.generation.hbm_bytes, []
    block = best_block(decoder, config.train.seq_len, topology) if decoder.attention == "splash" else 0
    lines = record.read_text("utf-8").splitlines() if record.exists() else []
    known: dict[str, Found] = {each["key"]: each for each in map(json.loads, lines)}
    for mesh in _meshes(kind):
        for policy in POLICIES:
            setting = {"remat": policy, "splash_block": block}
            there = replace(config, model=replace(config.model, args={**config.model.args, **setting}))
            island = kind.island._replace(mesh=mesh)
            key = json.dumps([asdict(there), island, options_of(there, island), jax.__version__], default=str)
            if key not in known and compiles_max:
                compiles_max -= 1
                say(f"remat {policy}, mesh {mesh}; {compiles_max} more may be compiled")
                compiled = compile_island(there, island, say, step_only=True)
                known[key] = {"key": key, **setting, **_measure(there, topology, island.batch_size, compiled)}
                with record.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(known[key]) + "\n")
            if key in known:
                tried.append({name: value for name, value in known[key].items() if name != "key"})
                if tried[-1]["hbm_bytes"] <= limit:
                    break
    fitting = [each for each in tried if each["hbm_bytes"] <= limit]
    best = min(fitting, key=lambda each: float(each["seconds"]), default=None)
    return {"tried": tried, "best": best, "limit_bytes": limit, "ok": best is not None}


def best_config(config: RunConfig, best: Mapping[str, Any]) -> str:
    """Return the text of the config with the settings that were found."""
    islands = replace(config.islands, mesh=replace(config.islands.mesh, **best["mesh"]))
    args = {**config.model.args, "remat": best["remat"], "splash_block": best["splash_block"]}
    return dump(replace(config, model=replace(config.model, args=args), islands=islands))


def best_block(decoder: DecoderConfig, seq_len: int, topology: Topology) -> int:
    """Return the tile of the splash kernel with the least time, by FLOPs, reads of keys and values, and overhead."""

    def seconds(size: int) -> float:
        tiles = (seq_len // size) * (seq_len // size + 1) / 2
        read_s = 4 * size * decoder.head_dim / (topology.generation.hbm_gb_per_s * 1e9 or math.inf)
        return tiles * (max(4 * size * size * decoder.head_dim / topology.generation.peak_flops, read_s) + TILE_S)

    return min((size for size in SPLASH_BLOCKS if seq_len % size == 0), key=seconds, default=0)


def _meshes(kind: IslandKind) -> list[MeshConfig]:
    """List ways to share the mesh between `data` and `fsdp`: the config's own, then those that are most like it."""
    data, fsdp, expert, tensor = kind.island.mesh.sizes(kind.chips)
    splits = [n for n in (2**k for k in range(15)) if data * fsdp % n == 0 and n != fsdp]
    chosen = [fsdp, *sorted(splits, key=lambda n: abs(math.log2(n / fsdp)))][:MESHES_MAX]
    return [replace(kind.island.mesh, data=data * fsdp // n, fsdp=n, expert=expert, tensor=tensor) for n in chosen]


def _measure(config: RunConfig, topology: Topology, batch: int, compiled: Compiled) -> Found:
    """Return mesh, bytes, FLOPs and estimated seconds of a step on each device."""
    [step], decoder = compiled.programs, decoder_of(config.model)
    assert decoder is not None, "search checks it"
    found: Found = {"mesh": dict(compiled.blueprint.mesh.shape), "hbm_bytes": sum(step_hbm(compiled))}
    if step.program is None:
        return {**found, "hbm_bytes": math.inf, "flops": math.inf, "waited_bytes": math.inf, "seconds": math.inf}
    # What is masked is as much as is not: one third of it in each layer is a pass of causal attention.
    masked = model_flops(config.model, compiled.blueprint.shapes, batch, config.train.seq_len).masked
    kernels = step.program.kernels * masked / (3 * decoder.num_layers * topology.devices)
    flops = step.program.matrix_flops + kernels * (1 + decoder.splash_block / config.train.seq_len)
    links = topology.generation.ici_gb_per_s * 1e9 / 2 / topology.generation.devices_per_chip or math.inf
    moved = [(each.overlapped, each.times * each.num_bytes) for each in step.program.collectives]
    waited, beside = (sum(size for overlapped, size in moved if overlapped == which) for which in (False, True))
    seconds = max(flops / topology.generation.peak_flops, beside / links) + waited / links
    return {**found, "flops": flops, "waited_bytes": waited, "seconds": seconds}


def describe_search(result: Mapping[str, Any]) -> str:
    """Write the result of `search` as text."""
    lines = [f"  {'remat':<11}{'mesh':<22}{'per device':>12}{'FLOPs':>11}{'waited for':>12}{'estimate':>11}"]
    for each in result["tried"]:
        mesh = " ".join(f"{axis} {size}" for axis, size in each["mesh"].items() if size > 1)
        fits = f"{each['seconds']:.3g} s" if each["hbm_bytes"] <= result["limit_bytes"] else "too large"
        sizes = f"{each['hbm_bytes'] / GB:>9.1f} GB{each['flops']:>11.3g}{each['waited_bytes'] / GB:>9.2f} GB{fits:>11}"
        lines.append(f"  {each['remat']:<11}{mesh:<22}{sizes}")
    best = result["best"]
    chosen = best and f"remat {best['remat']}, splash_block {best['splash_block']}, mesh {best['mesh']}"
    return "\n".join(
        [*lines, "", f"cheapest: {chosen}" if best else "nothing fits; diloco preflight says what to change"]
    )
