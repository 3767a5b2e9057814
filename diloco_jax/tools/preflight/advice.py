"""Advice for an island that does not fit: settings by name, with what they would bring."""

from collections.abc import Mapping
from typing import NamedTuple

from diloco_jax.settings.slices import Topology
from diloco_jax.tools.budget.memory import Hbm
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
    return [
        f"anchors take {hbm.anchors / GB:.1f} GB per chip, parameters {hbm.parameters / GB:.1f} GB: fragments cut "
        f"tensors along an axis that the mesh shards ({', '.join(f'{a} {n}' for a, n in mesh.items() if n > 1)}), "
        "and lie whole along it on every chip; try another fragments.split_axis, such as -1"
    ]


def _share_state(case: Misfit, limit: float) -> list[str]:
    """Advise to divide what is held all the time, by sharding it over more chips."""
    hbm, data = case.hbm, case.mesh["data"]
    if data > 1:
        fsdp = case.mesh["fsdp"] * data
        return [
            f"{hbm.fixed / GB:.1f} GB per chip are parameters, optimizer and anchors, whole on each of {data} groups "
            f"of chips: set islands.mesh.data to 1 and islands.mesh.fsdp to {fsdp} (or -1), which leaves about "
            f"{hbm.fixed / data / GB:.1f} GB"
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
    return (
        f"{needed / GB:.1f} GB per chip are needed: use fewer, larger islands, islands.topology {case.topology.name}:"
        f"{'x'.join(map(str, sorted(shape)))} with islands.mesh.fsdp -1"
    )


def _less_activations(case: Misfit) -> list[str]:
    """Advise fewer sequences per chip, and to keep less of each layer: activations grow with both."""
    advice = _kept_less(case.model)
    if case.sequences > 1:
        advice.append(
            f"a larger optimizer.accumulate_steps, or a smaller islands.batch_size (now {case.sequences:g} sequences "
            "per chip at a time)"
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
