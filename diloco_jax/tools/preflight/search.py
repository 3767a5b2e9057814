"""`diloco preflight --search`: the settings with which an island's inner step is cheapest among those that fit.

Each candidate, a way to share the mesh and a policy of remat, is compiled; what came out is kept in a file, and is not
compiled again. The kernel's tiles are chosen by a formula, as the compiler's text does not show what a kernel computes:

    seconds = (matrix FLOPs + those of kernels) / peak + synchronous collective bytes / bandwidth of the links

The overlapped collectives count for what they take longer than the FLOPs. An estimate to compare candidates by, and no
prediction of a step.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from diloco_jax.settings.compiler import options_of
from diloco_jax.settings.islands import IslandConfig
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import dump
from diloco_jax.tools.budget.needs import IslandKind
from diloco_jax.tools.preflight.advice import ROOM
from diloco_jax.tools.preflight.compile import Compiled, Say, compile_island
from diloco_jax.tools.preflight.programs import step_hbm
from diloco_jax.training.flops import model_flops
from diloco_jax.training.models.attention import SPLASH_BLOCKS
from diloco_jax.training.models.moe import decoder_of
from diloco_jax.training.models.options import DecoderConfig
from diloco_jax.training.sharding import MeshConfig

# Policies from few FLOPs and much memory to the contrary; as soon as one fits a mesh, the rest only compute more.
POLICIES = ("minimal", "offload", "mlp", "attention", "full")
TILE_S = 0.35e-6  # overhead of a step of a kernel's grid, by JAX's documentation of Pallas for TPUs
MESHES_MAX = 3
COMPILES_MAX = 100


class Found(NamedTuple):
    """The outcome of one candidate."""

    remat: str
    mesh: dict[str, int]
    splash_block: int
    hbm_bytes: float  # per device in the inner step
    flops: float  # per device and step, kernels estimated
    synchronous_bytes: float  # of collectives that devices wait for
    seconds: float  # by the formula above; infinite if it does not fit


def search(config: RunConfig, kind: IslandKind, compiles_max: int, record: Path, say: Say) -> dict[str, Any]:
    """Compile candidates for one kind of islands, at most so many; `say` is told of each.

    Args:
      record: file with what was found, a line each; those that it has are not compiled again.

    Returns:
      tried (in their order), best (None if nothing fits), limit_bytes, and ok: whether there is a best one.

    Raises:
      ValueError: the model is no built-in decoder, or as `compile_island`.
    """
    topology, decoder = kind.topology, decoder_of(config.model)
    if not 1 <= compiles_max <= COMPILES_MAX:
        raise ValueError(f"--compiles is {compiles_max}; use 1 to {COMPILES_MAX}")
    if decoder is None or topology is None:
        raise ValueError("preflight --search knows the options of the built-in decoders only; see model.module")
    limit = ROOM * topology.generation.hbm_bytes
    block = best_block(decoder, config.train.seq_len, kind) if decoder.attention == "splash" else 0
    known = _read(record)
    tried: list[Found] = []
    for mesh in meshes(config, kind):
        for policy in POLICIES:
            there, island = _with(config, kind.island, policy, block, mesh)
            key = _key(there, island)
            if key not in known and compiles_max <= 0:
                continue
            if key not in known:
                compiles_max -= 1
                say(f"remat {policy}, mesh {_axes(mesh)}: {compiles_max} more candidates may be compiled")
                found = _judge(there, kind._replace(island=island), compile_island(there, island, say, step_only=True))
                with record.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"key": key, **found._asdict()}) + "\n")
                known[key] = found
            tried.append(known[key])
            if tried[-1].hbm_bytes <= limit:
                break
    fitting = [each for each in tried if each.hbm_bytes <= limit]
    best = min(fitting, key=lambda each: each.seconds, default=None)
    return {
        "tried": [each._asdict() for each in tried],
        "best": best and best._asdict(),
        "limit_bytes": limit,
        "ok": best is not None,
    }


def best_config(config: RunConfig, best: Mapping[str, Any]) -> str:
    """Return the text of the config with the settings that were found."""
    mesh = replace(config.islands.mesh, **best["mesh"])
    args = {**config.model.args, "remat": best["remat"], "splash_block": best["splash_block"]}
    there = replace(config, model=replace(config.model, args=args), islands=replace(config.islands, mesh=mesh))
    return dump(there)


def meshes(config: RunConfig, kind: IslandKind) -> list[MeshConfig]:
    """List ways to share the mesh between `data` and `fsdp`: the config's own, then those that are most like it."""
    own = kind.island.mesh
    data, fsdp, expert, tensor = own.sizes(kind.chips)
    splits = [(data * fsdp // n, n) for n in (2**k for k in range(15)) if (data * fsdp) % n == 0]
    others = sorted((pair for pair in splits if pair[1] != fsdp), key=lambda pair: abs(math.log2(pair[1] / fsdp)))
    chosen = [(data, fsdp), *others][:MESHES_MAX]
    return [replace(own, data=d, fsdp=f, expert=expert, tensor=tensor) for d, f in chosen]


def best_block(decoder: DecoderConfig, seq_len: int, kind: IslandKind) -> int:
    """Return the tile of the splash kernel with the least time, by FLOPs, reads of keys and values, and overhead."""
    topology = kind.topology
    assert topology is not None, "searched on slices"
    peak, read_per_s = topology.generation.peak_flops, topology.generation.hbm_gb_per_s * 1e9

    def seconds(size: int) -> float:
        tiles = (seq_len // size) * (seq_len // size + 1) / 2
        read_s = 4 * size * decoder.head_dim / read_per_s if read_per_s else 0.0
        return tiles * (max(4 * size * size * decoder.head_dim / peak, read_s) + TILE_S)

    return min((size for size in SPLASH_BLOCKS if seq_len % size == 0), key=seconds, default=0)


def _judge(config: RunConfig, kind: IslandKind, compiled: Compiled) -> Found:
    step, topology = compiled.programs[0], kind.topology
    assert topology is not None, "searched on slices"
    hbm, args = sum(step_hbm(compiled)), config.model.args
    mesh = {axis: size for axis, size in compiled.blueprint.mesh.shape.items()}
    if step.program is None:
        return Found(args["remat"], mesh, args["splash_block"], hbm, math.inf, math.inf, math.inf)
    whole = model_flops(config.model, compiled.blueprint.shapes, kind.island.batch_size, config.train.seq_len).masked
    decoder = decoder_of(config.model)
    assert decoder is not None, "search checks it"
    per_kernel = whole / 3 / decoder.num_layers / topology.devices  # a forward pass of causal attention
    tile = args["splash_block"] / config.train.seq_len
    flops = step.program.matrix_flops + step.program.kernels * per_kernel * (1 + tile)
    moved = [(each.overlapped, each.times * each.num_bytes) for each in step.program.collectives]
    waited, beside = (sum(size for overlapped, size in moved if overlapped == which) for which in (False, True))
    links = topology.generation.ici_gb_per_s * 1e9 / 2 / topology.generation.devices_per_chip or math.inf
    compute_s = flops / topology.generation.peak_flops
    seconds = max(compute_s, beside / links) + waited / links
    return Found(args["remat"], mesh, args["splash_block"], hbm, flops, waited, seconds)


def _with(
    config: RunConfig, island: IslandConfig, remat: str, block: int, mesh: MeshConfig
) -> tuple[RunConfig, IslandConfig]:
    args = {**config.model.args, "remat": remat, "splash_block": block}
    return replace(config, model=replace(config.model, args=args)), island._replace(mesh=mesh)


def _key(config: RunConfig, island: IslandConfig) -> str:
    """Return what tells one compilation from another."""
    parts = [config.model.module, config.model.args, asdict(config.optimizer), config.train.seq_len, config.wire.up]
    parts += [asdict(config.fragments), asdict(config.protocol), str(island.slice), asdict(island.mesh)]
    parts += [island.batch_size, options_of(config, island), jax.__version__]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _read(record: Path) -> dict[str, Found]:
    """Read what was found before; a last line that was cut off is left out."""
    found: dict[str, Found] = {}
    for line in record.read_text(encoding="utf-8").splitlines() if record.exists() else ():
        try:
            values = json.loads(line)
            found[values.pop("key")] = Found(**values)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return found


def _axes(mesh: MeshConfig) -> str:
    return ", ".join(f"{axis} {getattr(mesh, axis)}" for axis in ("data", "fsdp", "expert", "tensor"))


def describe_search(result: Mapping[str, Any]) -> str:
    """Write the result of `search` as text."""
    lines = [f"  {'remat':<12}{'mesh':<26}{'per chip':>10}{'FLOPs':>12}{'waited for':>13}{'estimate':>11}"]
    lines += list(_rows(result["tried"], result["limit_bytes"]))
    best = result["best"]
    if not best:
        return "\n".join([*lines, "", "nothing fits; see the advice of diloco preflight"])
    chosen = f"remat {best['remat']}, splash_block {best['splash_block']}, islands.mesh {best['mesh']}"
    return "\n".join([*lines, "", f"cheapest: {chosen}"])


def _rows(tried: Sequence[Mapping[str, Any]], limit: float) -> Iterator[str]:
    for each in tried:
        mesh = " ".join(f"{axis} {size}" for axis, size in each["mesh"].items() if size > 1)
        fits = f"{each['seconds']:.3g} s" if each["hbm_bytes"] <= limit else "too large"
        yield (
            f"  {each['remat']:<12}{mesh:<26}{each['hbm_bytes'] / 1e9:>7.1f} GB{each['flops']:>12.3g}"
            f"{each['synchronous_bytes'] / 1e9:>10.2f} GB{fits:>11}"
        )
