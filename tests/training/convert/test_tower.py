"""The vision tower against transformers: the same embeddings from the same weights, and the same names of tensors."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from diloco_jax.training.convert.tensors import Mapped
from diloco_jax.training.convert.tower import tower_tensors
from diloco_jax.training.models.protocol import join_model
from diloco_jax.training.models.tower import TowerConfig, VisionTower
from tests.extras import absent
from tests.training.outlines import outline

torch = pytest.importorskip("torch", reason=absent("parity"))
transformers = pytest.importorskip("transformers", reason=absent("parity"))

pytestmark = [
    pytest.mark.extra("parity"),
    pytest.mark.usefixtures("quick_compiler"),
    pytest.mark.filterwarnings("default"),  # theirs are theirs
]

# The largest difference of two embeddings, in standard deviations of all embeddings.
LIMIT = 2e-5
# Columns and rows of each image, and the patches that they are padded to: 6, 2 and 7 soft tokens of 7.
IMAGES, PADDED = ((9, 6), (3, 6), (21, 3)), 63
COMMON = {"head_dim": 12, "patch_size": 4}
THEIRS = {
    **COMMON, "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 2, "position_embedding_size": 30,
}  # fmt: skip
OURS = {**COMMON, "dim": 48, "mlp_dim": 56, "num_layers": 3, "num_heads": 2, "positions": 30, "text_dim": 40}
TEXT = {
    "layer_types": ["full_attention"],
    "vocab_size": 32, "hidden_size": 40, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "head_dim": 8, "global_head_dim": 8, "vocab_size_per_layer_input": 32,
    "hidden_size_per_layer_input": 0, "pad_token_id": 0, "num_kv_shared_layers": 0,
}  # fmt: skip


def batch() -> tuple[np.ndarray, np.ndarray]:
    """Random patches and positions; padding has random pixels, which nothing may read."""
    positions = np.full((len(IMAGES), PADDED, 2), -1, np.int32)
    for image, (columns, rows) in zip(positions, IMAGES, strict=True):
        image[: columns * rows] = [(x, y) for y in range(rows) for x in range(columns)]
    return np.random.default_rng(1).uniform(size=(len(IMAGES), PADDED, 48)).astype(np.float32), positions


def make(clipped: bool, standardize: bool) -> Any:
    """Gemma 4 in transformers with a small tower, far from its initial values."""
    vision = {**THEIRS, "use_clipped_linears": clipped, "standardize": standardize}
    config = transformers.Gemma4Config(text_config=TEXT, vision_config=vision, audio_config=None)
    model = transformers.Gemma4ForConditionalGeneration._from_config(config, attn_implementation="eager")
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            noise = torch.randn(value.shape, generator=rng)
            if name.endswith(("_min", "_max")):
                value.copy_((1.5 + 0.3 * noise) * (-1 if name.endswith("_min") else 1))
            elif name.endswith("position_embedding_table"):
                value.copy_(0.7 * noise)
            elif value.dim() < 2:
                value.copy_(("bias" not in name) + 0.3 * noise)
            else:
                value.copy_(noise * value.shape[-1] ** -0.5)
    return model.eval()


def load(folder: Path, config: TowerConfig) -> Any:
    """Our tower with the weights of a folder, which has no other tensors of a tower; they return bit for bit."""
    files = load_file(folder / "model.safetensors")
    theirs = {name: value for name, value in files.items() if "vision" in name}
    values, back = {}, {}
    for path, shape, hf, hf_shape, transposed in tower_tensors(config):
        mapped = Mapped(hf, path, shape, hf_shape, turned=transposed)
        values[path] = np.empty(shape, np.float32)
        for name, piece in zip(hf, mapped.to_hf(values[path]), strict=True):
            piece[...] = theirs[name]
        back |= dict(zip(hf, mapped.to_hf(values[path]), strict=True))
    assert back.keys() == theirs.keys()
    assert all(back[name].shape == theirs[name].shape and np.all(back[name] == theirs[name]) for name in theirs)
    graphdef, params, _ = outline(lambda: VisionTower(config, rngs=nnx.Rngs(0)))
    assert {path: value.shape for path, value in values.items()} == {path: v.shape for path, v in params.items()}
    return join_model(graphdef, {path: jnp.asarray(value) for path, value in values.items()})


def run(tower: Any, model: Any) -> tuple[np.ndarray, np.ndarray]:
    """The embeddings of all soft tokens, ours and theirs."""
    patches, positions = batch()
    ours, real = jax.jit(lambda p, x: tower(p, x))(patches, positions)
    assert real.sum(1).tolist() == [columns * rows // 9 for columns, rows in IMAGES]
    with torch.no_grad():
        places = torch.tensor(positions, dtype=torch.long)
        found = model.model.get_image_features(torch.tensor(patches), places).pooler_output
    return np.asarray(ours, np.float32)[np.asarray(real)], torch.cat(found).float().numpy()


@pytest.mark.parametrize(
    ("clipped", "standardize", "scan", "computed"),
    [(False, False, False, True), (True, False, True, False), (False, True, True, False), (True, True, True, True)],
    ids=["plain", "clipped", "standardized", "both"],
)
def test_embeddings_are_those_of_transformers(
    clipped: bool, standardize: bool, scan: bool, computed: bool, tmp_path: Path
) -> None:
    """Each option has tensors; what they compute is compared without options and with both."""
    model = make(clipped, standardize)
    model.save_pretrained(tmp_path)
    config = TowerConfig(**OURS, clipped=clipped, standardize=standardize, scan_layers=scan)
    tower = load(tmp_path, config)
    if not computed:
        return
    ours, want = run(tower, model)
    error = float(np.abs(ours - want).max() / want.std())
    print(f"tower | {clipped=}, {standardize=}, {scan=} | {want.std():.2f} | {error:.1e}")
    assert want.std() > 0.5 and error <= LIMIT
    if not clipped:
        return
    # Rounding differs, so each result in bfloat16 is held against the one in float32.
    short, theirs = run(load(tmp_path, replace(config, dtype="bfloat16")), model.to(torch.bfloat16))
    rms = [float(np.sqrt(np.mean((found - want) ** 2)) / want.std()) for found in (short, theirs)]
    print(f"tower | {clipped=}, {standardize=}, bfloat16 | ours {rms[0]:.1e}, theirs {rms[1]:.1e}")
    assert rms[0] < 1.2 * rms[1] < 0.06
