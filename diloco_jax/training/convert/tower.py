"""Names of the vision tower's tensors in public files of Gemma 4."""

from collections.abc import Iterator
from typing import NamedTuple

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
BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class TowerTensor(NamedTuple):
    """One of our parameters with the tensors of the files that it corresponds to."""

    # The path in the tower.
    path: str
    shape: tuple[int, ...]
    # The names of their tensors; for a stack in the order of its layers and, within a layer, of its bounds.
    hf: tuple[str, ...]
    # The shape of each tensor in `hf`.
    hf_shape: tuple[int, ...]
    # True if their tensors are matrices [out, in], and ours [in, out].
    transposed: bool


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
    """Yield the parameters of one of our blocks, which may be a stack of theirs."""

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
