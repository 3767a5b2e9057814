"""The rules by which a config for slices becomes one that two cores bear. What no rule names stays as it is."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from diloco_jax.runtime.model.global_model import make_setup
from diloco_jax.settings.islands import IslandConfig, IslandOverride
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.slices import Topology
from diloco_jax.tools.launch import common
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.data.config import DataConfig
from diloco_jax.training.sharding import MeshConfig
from diloco_jax.transport.trust.certificates import settings

AXES = ("data", "fsdp", "expert", "tensor")
ISLANDS_MAX, HOSTS_MAX, DEVICES_MAX, SHARDS_MAX, STRIPES_MAX = 4, 2, 4, 2, 2
PARAMETERS_MAX = 2_000_000
SIZES_MAX = {"dim": 64, "num_layers": 12, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "num_experts": 4}
OF_TOKENS_MAX = {"vocab_size": 256, "loss_chunk": 128, "seq_len_max": 64}  # ids are bytes
SEQ_LEN, BATCH_PER_DEVICE, WIDER = 64, 2, 4  # an MLP is so much wider than the model, at most
SNAPSHOTS, FILES_KEPT = 12, 3
BUCKET = "gs://rehearsal"


class Shrunk(NamedTuple):
    """A config that can be rehearsed, and what was changed, in words."""

    config: RunConfig
    rules: list[str]


def shrink(config: RunConfig, steps: int, root: Path) -> Shrunk:
    """Make the config of a rehearsal.

    Args:
        steps: global steps that take the time that the rehearsal shall last.
        root: the rehearsal's folder; its certificates are below `certs`.

    Raises:
        ValueError: the config is of no run that islands and a syncer train, or its model cannot be made so small.
    """
    if config.algorithm != "decoupled" or config.model.own:
        raise ValueError("only a run of islands and a syncer with a model of the config can be rehearsed")
    names = config.islands.names[:ISLANDS_MAX]
    whole = [config.island(name) for name in names]
    each = {island.name: _island(config, island) for island in whole}
    devices = prod(max(1, getattr(next(iter(each.values())).mesh, axis)) for axis in AXES)
    args = dict(config.model.args)
    small = _model(args)
    islands = replace(
        config.islands, count=len(names), topology="", devices="auto", hosts=1, mesh=MeshConfig(data=-1), each=each,
        batch_size=0, zone="", restarts_max=1000, restart_delay_s=1.0,
    )  # fmt: skip
    every = config.protocol.snapshot_every
    protocol = replace(config.protocol, snapshot_every=max(1, min(every or steps, steps // SNAPSHOTS)))
    train = replace(
        config.train, steps=steps, tokens=0, batch_size=len(names) * devices * BATCH_PER_DEVICE, seq_len=SEQ_LEN,
        eval_every=0, final_eval_batches=8,
    )  # fmt: skip
    optimizer = replace(config.optimizer, warmup_steps=min(config.optimizer.warmup_steps, steps // 20))
    shards, stripes = min(max(config.syncer.shards, SHARDS_MAX), SHARDS_MAX), min(config.transport.stripes, STRIPES_MAX)
    remote = common.remote(config).transport
    certificates = settings(root / "certs")
    made = replace(
        config, islands=islands, train=train, protocol=protocol, optimizer=optimizer,
        model=replace(config.model, args=small),
        data=DataConfig(format="store", path=f"{BUCKET}/corpus"),
        syncer=replace(config.syncer, shards=shards, restarts_max=1000, restart_delay_s=1.0),
        transport=replace(remote, stripes=stripes, **certificates),
        trackers=(),
    )  # fmt: skip
    count = _parameters(made)
    if count > PARAMETERS_MAX:
        raise ValueError(f"the shrunk model has {count:,} parameters, the limit is {PARAMETERS_MAX:,}")
    first, tiny = whole[0], each[names[0]]
    rules = [
        f"islands {config.islands.count} -> {len(names)}, each {first.topology or first.devices} on {first.hosts} hosts"
        f" -> {tiny.devices} emulated devices on {tiny.hosts} (at most {DEVICES_MAX} and {HOSTS_MAX})",
        f"mesh {_axes(first.mesh)} -> {_axes(tiny.mesh)}: the two longest axes keep 2",
        *(f"model.args.{key} {args[key]} -> {small[key]}" for key in small if small[key] != args.get(key)),
        f"{count:,} parameters (at most {PARAMETERS_MAX:,})",
        f"train.seq_len {config.train.seq_len} -> {SEQ_LEN}, batch {config.train.batch_size} -> {train.batch_size}"
        f" ({BATCH_PER_DEVICE} per device), steps {config.train.steps} -> {steps}",
        f"optimizer.warmup_steps {config.optimizer.warmup_steps} -> {optimizer.warmup_steps}: 5 % of the run at most",
        f"protocol.snapshot_every {every} -> {protocol.snapshot_every}: at least {SNAPSHOTS} of them",
        f"syncer.shards {config.syncer.shards} -> {shards}, transport.stripes {config.transport.stripes} -> {stripes}",
        f"data {config.data.format} {config.data.path} -> store {BUCKET}/corpus, a fake of Google Cloud Storage",
    ]
    return Shrunk(made, rules)


def _island(config: RunConfig, island: IslandConfig) -> IslandOverride:
    """Return an island with as many hosts, devices and mesh axes as this machine bears."""
    chips = Topology.parse(island.topology).chips if island.topology else island.devices or DEVICES_MAX
    sizes = dict(zip(AXES, island.mesh.sizes(chips), strict=True))
    longest = sorted((axis for axis in AXES if sizes[axis] > 1), key=lambda axis: -sizes[axis])[:2]
    mesh = MeshConfig(**{axis: 2 if axis in longest else 1 for axis in AXES}, rules=island.mesh.rules)
    devices = 2 ** len(longest)
    share = config.train.batch_size // config.islands.count
    batch = max(1, round(BATCH_PER_DEVICE * island.batch_size / share)) * devices if island.batch_size else 0
    return IslandOverride(
        devices=devices, hosts=min(island.hosts, HOSTS_MAX, devices), topology="", mesh=mesh, batch_size=batch,
        zone=island.zone,
    )  # fmt: skip


def _model(args: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the same model with small sizes."""
    small = {key: min(value, SIZES_MAX[key]) if key in SIZES_MAX else value for key, value in args.items()}
    width = small.get("dim", 0)
    small |= {key: min(args[key], WIDER * width) for key in ("mlp_dim",) if key in args}
    small |= {key: min(args[key], most) for key, most in OF_TOKENS_MAX.items() if key in args}
    if "experts_per_token" in args:
        small["experts_per_token"] = min(args["experts_per_token"], 2)
    return small


def _parameters(config: RunConfig) -> int:
    blueprint = Blueprint(config.model, config.optimizer, MeshConfig(), 1, seed=config.seed)
    plan = config.fragments.plan(blueprint.shapes, blueprint.kinds, config.protocol.num_fragments)
    make_setup(config, plan)
    return sum(prod(shape) for shape in blueprint.shapes.values())


def _axes(mesh: MeshConfig) -> str:
    return ", ".join(f"{axis} {getattr(mesh, axis)}" for axis in AXES if getattr(mesh, axis) != 1)
