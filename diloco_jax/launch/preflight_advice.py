"""What to change when an island does not fit: settings by name, with what they would bring."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from diloco_jax.launch.preflight_budget import Hbm
from diloco_jax.runtime.islands import IslandConfig
from diloco_jax.training.models.decoder import DecoderConfig
from diloco_jax.training.models.protocol import ModelConfig, config_from_args
from diloco_jax.training.topology import Topology

GB = 1e9
ROOM = 0.9  # of a chip's memory, at most, that is planned to be taken
BATCH_AXES = ("data", "fsdp")
SAVES = {
    "dtype": ("float32", "bfloat16"),
    "scan_layers": (False, "true"),
}  # of the decoder: as it is, what saves memory


class Situation(NamedTuple):
    """What does not fit, and where.

    Attributes:
      topology: the slice.
      island: its mesh and batch.
      mesh: sizes of the mesh's axes.
      model: which model.
      seq_len: tokens per sequence.
      hbm: what takes a chip's memory in the inner step, bytes.
    """

    topology: Topology
    island: IslandConfig
    mesh: Mapping[str, int]
    model: ModelConfig
    seq_len: int
    hbm: Hbm


def advise_hbm(case: Situation) -> list[str]:
    """What to change when the inner step does not fit, what helps most first."""
    limit = case.topology.generation.hbm_bytes
    advice = []
    if case.hbm.fixed > ROOM * limit / 2:
        advice += _share_state(case, limit)
    if case.hbm.temporaries > ROOM * limit - min(case.hbm.fixed, ROOM * limit / 2):
        advice += _less_activations(case)
    return advice or [_larger(case, limit, case.hbm.fixed + case.hbm.temporaries)]


def _share_state(case: Situation, limit: float) -> list[str]:
    """State that is held all the time is divided by sharding it over more chips."""
    hbm, data = case.hbm, case.mesh["data"]
    if data > 1:
        fsdp = case.mesh["fsdp"] * data
        return [
            f"{hbm.fixed / GB:.1f} GB per chip are parameters, optimizer and anchors, whole on each of {data} groups "
            f"of chips: set islands.mesh.data to 1 and islands.mesh.fsdp to {fsdp} (or -1), which leaves about "
            f"{hbm.fixed / data / GB:.1f} GB"
        ]
    return [_larger(case, limit, hbm.fixed)]


def _larger(case: Situation, limit: float, needed: float) -> str:
    """The smallest larger slice on which what is held takes less than half of a chip's memory, if there is one."""
    generation, shape, chips = case.topology.generation, list(case.topology.shape), case.topology.chips
    while needed * case.topology.chips / chips > ROOM * limit / 2 or chips == case.topology.chips:
        shape[shape.index(min(shape))] *= 2
        chips *= 2
    if chips > generation.chips_max:
        return (
            f"{needed / GB:.1f} GB per chip are needed, and no {generation.name} slice is large enough: use a smaller "
            "model, or a generation with more memory"
        )
    return (
        f"{needed / GB:.1f} GB per chip are needed: use fewer, larger islands, islands.topology {generation.name}:"
        f"{'x'.join(map(str, sorted(shape)))} with islands.mesh.fsdp -1"
    )


def _less_activations(case: Situation) -> list[str]:
    """Activations grow with the sequences per chip, and with what is kept of each layer."""
    advice = _kept_less(case.model)
    each = case.island.batch_size / math.prod(case.mesh.get(axis, 1) for axis in BATCH_AXES)
    if each > 1:
        advice.append(f"a smaller islands.batch_size (now {each:g} sequences of {case.seq_len} tokens per chip)")
    else:
        advice.append(f"islands.mesh.tensor {2 * case.mesh['tensor']}, so that chips share one sequence")
    return [f"activations take {case.hbm.temporaries / GB:.1f} GB per chip: set {', or '.join(advice)}"]


def _kept_less(model: ModelConfig) -> list[str]:
    """Settings of the built-in decoder that trade memory for something else, and are not yet set."""
    if model.module != ModelConfig().module:
        return []
    config = config_from_args(DecoderConfig, model.args)
    return [f"model.args.{name} {better}" for name, (now, better) in SAVES.items() if getattr(config, name) == now]
