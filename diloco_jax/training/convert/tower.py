"""Conversion of Gemma 4's vision tower: its settings in config.json, and the names of its tensors."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from diloco_jax.training.convert.keys import check_keys
from diloco_jax.training.convert.table import HARMLESS
from diloco_jax.training.models.tower import TowerConfig

TOWER, TO_TEXT = "model.vision_tower", "model.embed_vision.embedding_projection.weight"
# Our names of a block's linear maps, and theirs.
LINEAR = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
NORMS = {
    "norm_q": "self_attn.q_norm",
    "norm_k": "self_attn.k_norm",
    "norm_attention": "input_layernorm",
    "norm_attention_out": "post_attention_layernorm",
    "norm_mlp": "pre_feedforward_layernorm",
    "norm_mlp_out": "post_feedforward_layernorm",
}
# From our argument to the key of vision_config with the kind of its value.
KEYS = {
    "dim": ("hidden_size", "count"),
    "num_layers": ("num_hidden_layers", "count"),
    "num_heads": ("num_attention_heads", "count"),
    "head_dim": ("head_dim", "count"),
    "mlp_dim": ("intermediate_size", "count"),
    "patch_size": ("patch_size", "count"),
    "pool": ("pooling_kernel_size", "count"),
    "positions": ("position_embedding_size", "count"),
    "norm_epsilon": ("rms_norm_eps", "number"),
    "clipped": ("use_clipped_linears", "switch"),
    "standardize": ("standardize", "switch"),
}
KEY_HEADS, ACTIVATION, ROPE, THETA = "num_key_value_heads", "hidden_activation", "rope_parameters", "rope_theta"
GELU, AXIAL = "gelu_pytorch_tanh", "axial"
# Keys that transformers does not read.
UNREAD = {"max_position_embeddings", "default_output_length", "global_head_dim"}
BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class TowerTensor(NamedTuple):
    """One of our parameters with the corresponding tensors in the files."""

    # The path in the tower.
    path: str
    shape: tuple[int, ...]
    # The names of their tensors; for a stack in the order of its layers and, within a layer, of its bounds.
    hf: tuple[str, ...]
    # The shape of each tensor in `hf`.
    hf_shape: tuple[int, ...]
    # True if their tensors are matrices [out, in], and ours [in, out].
    transposed: bool


def read_tower(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of our tower for a vision_config; ValueError names a key that the tower does not support."""
    where = "gemma4, vision_config"
    kinds = {**dict(KEYS.values()), KEY_HEADS: "count", ACTIVATION: "text", ROPE: "object"}
    check_keys(config, kinds, HARMLESS | UNREAD, where)
    keys = {key: value for key, value in config.items() if value is not None}
    rope = keys.get(ROPE, {})
    check_keys(rope, {"rope_type": "text", THETA: "number"}, (), f"{where}, {ROPE}")
    usual = TowerConfig()
    args = {ours: keys.get(theirs, getattr(usual, ours)) for ours, (theirs, _) in KEYS.items()}
    args["rope_theta"] = float(rope.get(THETA, usual.rope_theta))
    for key, value, wanted in (
        (ACTIVATION, keys.get(ACTIVATION, GELU), GELU),
        (KEY_HEADS, keys.get(KEY_HEADS, usual.num_heads), args["num_heads"]),
        ("rope_type", rope.get("rope_type", AXIAL), AXIAL),
    ):
        if value != wanted and (key, value) != ("rope_type", "default"):
            raise ValueError(f"config.json of {where}: {key} is {value!r:.80}, but the tower supports only {wanted!r}")
    return {ours: value for ours, value in args.items() if value != getattr(usual, ours)}


def write_tower(c: TowerConfig) -> dict[str, Any]:
    """Return the vision_config of our tower."""
    found: dict[str, Any] = {"model_type": "gemma4_vision", ACTIVATION: GELU, KEY_HEADS: c.num_heads}
    found |= {theirs: getattr(c, ours) for ours, (theirs, _) in KEYS.items()}
    return {**found, ROPE: {"rope_type": AXIAL, THETA: c.rope_theta}}


def tower_tensors(c: TowerConfig) -> Iterator[TowerTensor]:
    """Yield all parameters of a vision tower with the corresponding tensors in the files."""
    pixels, table, wide = 3 * c.patch_size**2, (2, c.positions, c.dim), (c.dim,)
    yield _matrix("project/kernel", (f"{TOWER}.patch_embedder.input_proj.weight",), (), (pixels, c.dim))
    name = f"{TOWER}.patch_embedder.position_embedding_table"
    yield TowerTensor("embed_positions", table, (name,), table, transposed=False)
    yield _matrix("to_text/kernel", (TO_TEXT,), (), (c.dim, c.text_dim))
    for name in ("std_bias", "std_scale") if c.standardize else ():
        yield TowerTensor(name, wide, (f"{TOWER}.{name}",), wide, transposed=False)
    if c.scan_layers:
        yield from _blocks(c, "blocks", range(c.num_layers), (c.num_layers,))
    else:
        for layer in range(c.num_layers):
            yield from _blocks(c, f"blocks/{layer}", range(layer, layer + 1), ())


def _blocks(c: TowerConfig, where: str, layers: range, stack: tuple[int, ...]) -> Iterator[TowerTensor]:
    """Yield the parameters of one of our blocks; a stacked block corresponds to several of theirs."""

    def names(*ends: str) -> tuple[str, ...]:
        return tuple(f"{TOWER}.encoder.layers.{layer}.{end}" for layer in layers for end in ends)

    heads, wide, narrow = c.num_heads * c.head_dim, (c.dim, c.mlp_dim), (c.mlp_dim, c.dim)
    shapes = {"out": (heads, c.dim), "gate": wide, "up": wide, "down": narrow}
    for ours, theirs in LINEAR.items():
        shape = shapes.get(ours, (c.dim, heads))
        yield _matrix(f"{where}/{ours}/kernel", names(f"{theirs}.linear.weight"), stack, shape)
        if c.clipped:
            bounds = names(*(f"{theirs}.{bound}" for bound in BOUNDS))
            yield TowerTensor(f"{where}/{ours}/bounds", (*stack, len(BOUNDS)), bounds, (), transposed=False)
    for ours, theirs in NORMS.items():
        width = (c.head_dim if ours in ("norm_q", "norm_k") else c.dim,)
        yield TowerTensor(f"{where}/{ours}/scale", stack + width, names(f"{theirs}.weight"), width, transposed=False)


def _matrix(path: str, hf: tuple[str, ...], stack: tuple[int, ...], shape: tuple[int, int]) -> TowerTensor:
    return TowerTensor(path, stack + shape, hf, shape[::-1], transposed=True)
