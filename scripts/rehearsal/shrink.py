"""Rules that shrink a config for slices until two cores can run it; all other settings stay unchanged."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from diloco_jax.settings.islands import IslandConfig, IslandOverride
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.slices import Topology
from diloco_jax.settings.text import flat
from diloco_jax.tools.launch import common
from diloco_jax.training.data.config import DataConfig
from diloco_jax.training.sharding import MeshConfig
from diloco_jax.transport.trust.certificates import settings

AXES = ("data", "fsdp", "expert", "tensor")
ISLANDS_MAX, HOSTS_MAX, STRIPES_MAX, SEQ_LEN, BATCH_PER_DEVICE = 4, 2, 2, 64, 2
# A model of these sizes has fewer than 2 million parameters.
SIZES_MAX = {
    "dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "mlp_dim": 256, "num_experts": 2,
    "experts_per_token": 2, "expert_dim": 64, "per_layer_dim": 16, "vocab_size": 256, "per_layer_vocab": 256,
    "loss_chunk": 128, "seq_len_max": 64,
}  # fmt: skip
# A rehearsal has at least this many snapshots.
SNAPSHOTS = 12
BUCKET = "gs://rehearsal"


def shrink(config: RunConfig, steps: int, root: Path) -> RunConfig:
    """Make the config of a rehearsal of `steps` global steps in the folder `root`; ValueError without a syncer."""
    if config.algorithm != "decoupled" or config.model.own:
        raise ValueError(
            "only a run of islands and a syncer with a built-in model can be rehearsed; choose another config"
        )
    names = config.islands.names[:ISLANDS_MAX]
    each = {name: _island(config, config.island(name)) for name in names}
    args = _smaller(config.model.args)
    every = config.protocol.snapshot_every
    return replace(
        config,
        islands=replace(
            config.islands, count=len(names), topology="", mesh=MeshConfig(data=-1), each=each, batch_size=0, zone="",
            standby=False, restarts_max=config.cloud.restarts_max,
        ),
        syncer=replace(config.syncer, restarts_max=config.cloud.restarts_max),
        train=replace(
            config.train, steps=steps, tokens=0, batch_size=sum(island.batch_size or 0 for island in each.values()),
            seq_len=SEQ_LEN, eval_every=0, final_eval_batches=8,
        ),
        model=replace(config.model, args=args),
        optimizer=replace(config.optimizer, warmup_steps=min(config.optimizer.warmup_steps, steps // 20)),
        data=DataConfig(format="store", path=f"{BUCKET}/corpus"),
        protocol=replace(config.protocol, snapshot_every=every and max(1, min(every, steps // SNAPSHOTS))),
        checkpoints=replace(config.checkpoints, states=f"{BUCKET}/states"),
        transport=replace(
            common.remote(config).transport, stripes=min(config.transport.stripes, STRIPES_MAX),
            **settings(root / "certs"),
        ),
        trackers=(),
    )  # fmt: skip


def _smaller(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a small model with the first kinds of layers."""
    found = dict(args)
    for key, value in args.items():
        if key == "kinds":
            found[key] = {kind: _smaller(options) for kind, options in value.items()}
        elif key == "pattern":
            found[key] = list(dict.fromkeys(value))[: SIZES_MAX["num_layers"]]
        else:
            found[key] = min(value, SIZES_MAX.get(key, value))
    return found


def changes(config: RunConfig, made: RunConfig) -> list[str]:
    """List every setting that differs."""
    before, after = dict(flat(asdict(config))), dict(flat(asdict(made)))
    keys = (key for key in {**before, **after} if before.get(key) != after.get(key))
    return [
        f"{key} {before.get(key, '-')} -> {after.get(key, '-')}" for key in keys if after.get(key) not in (None, {}, 1)
    ]


def _island(config: RunConfig, island: IslandConfig) -> IslandOverride:
    """Return an island with fewer hosts and devices; the two longest axes of its mesh keep 2 devices."""
    chips = Topology.parse(island.topology).chips if island.topology else island.devices or 4
    sizes = dict(zip(AXES, island.mesh.sizes(chips), strict=True))
    longest = sorted((axis for axis in AXES if sizes[axis] > 1), key=lambda axis: -sizes[axis])[:2]
    mesh: dict[str, Any] = {axis: 2 if axis in longest else 1 for axis in AXES}
    devices = 2 ** len(longest)
    share = island.batch_size * config.islands.count / config.train.batch_size
    return IslandOverride(
        devices=devices, hosts=min(island.hosts, HOSTS_MAX, devices), topology="", zone=island.zone,
        mesh=MeshConfig(**mesh, rules=island.mesh.rules), batch_size=max(1, round(BATCH_PER_DEVICE * share)) * devices,
    )  # fmt: skip
