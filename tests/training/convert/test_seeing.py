"""Gemma 4 with its tower against transformers: the same logits of a text with two images, and the same files back."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from diloco_jax.training.convert.families import from_hf, to_hf
from diloco_jax.training.convert.weights import Weights, write_weights
from diloco_jax.training.models.config import SEEING_DECODER, ModelConfig
from diloco_jax.training.models.protocol import join_model, load_model
from tests.extras import absent
from tests.training.outlines import outline

torch = pytest.importorskip("torch", reason=absent("parity"))
transformers = pytest.importorskip("transformers", reason=absent("parity"))

pytestmark = [
    pytest.mark.extra("parity"),
    pytest.mark.filterwarnings("default"),  # theirs are theirs
]

# The largest difference of two logits, in standard deviations of all logits.
LIMIT = 2e-5
IMAGE, BEGIN, END = 95, 94, 93
VISION = {
    "head_dim": 12, "patch_size": 4, "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "position_embedding_size": 30,
}  # fmt: skip
TEXT = {
    "vocab_size": 96, "hidden_size": 40, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "global_head_dim": 24, "num_global_key_value_heads": 1, "sliding_window": 8,
    "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
    "pad_token_id": 3,
}  # fmt: skip
S, F = "sliding_attention", "full_attention"
# Like the larger models: images see themselves in layers with a window.
DENSE = {**TEXT, "layer_types": [S, S, F], "num_hidden_layers": 3, "attention_k_eq_v": True,
         "use_bidirectional_attention": "vision"}  # fmt: skip
# Like the E models: per-layer embeddings, and layers that use the keys and values of earlier ones.
SHARED = {**TEXT, "layer_types": [S, F, S, F], "num_hidden_layers": 4, "hidden_size_per_layer_input": 6,
          "num_kv_shared_layers": 2, "use_double_wide_mlp": True}  # fmt: skip
# Columns and rows of both images' patches, 6 and 10 soft tokens, and the place of the first one.
IMAGES, PLACES, PADDED = ((9, 6), (6, 15)), (20, 100), 90


def make(folder: Path, text: dict[str, Any], **vision: bool) -> Any:
    """A random model in transformers, far from its initial values; it is saved in a folder."""
    config = transformers.Gemma4Config(
        text_config=text, vision_config={**VISION, **vision}, audio_config=None, image_token_id=IMAGE,
        boi_token_id=BEGIN, eoi_token_id=END,
    )  # fmt: skip
    model = transformers.Gemma4ForConditionalGeneration._from_config(config, attn_implementation="eager")
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            noise = torch.randn(value.shape, generator=rng)
            if name.endswith(("_min", "_max")):
                value.copy_((1.5 + 0.3 * noise) * (-1 if name.endswith("_min") else 1))
            elif name.endswith("position_embedding_table"):
                value.copy_(0.7 * noise)
            elif name.endswith("k_norm.weight"):
                # With larger keys, attention of random models takes one token, and rounding decides which.
                value.copy_(0.4 + 0.1 * noise)
            elif value.dim() < 2:
                value.copy_(("bias" not in name) + 0.3 * noise)
            elif "embed_tokens" in name:
                value.copy_(0.7 * noise)
            else:
                value.copy_(noise * value.shape[-1] ** -0.5)
    model.tie_weights()
    model.eval().save_pretrained(folder)
    return model


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    tokens = rng.integers(4, 90, (1, 200)).astype(np.int32)
    positions = np.full((1, 2, PADDED, 2), -1, np.int32)
    for image, (columns, rows), start in zip(positions[0], IMAGES, PLACES, strict=True):
        image[: columns * rows] = [(x, y) for y in range(rows) for x in range(columns)]
        count = columns * rows // 9
        tokens[0, start - 1 : start + count + 1] = [BEGIN, *[IMAGE] * count, END]
    return {
        "tokens": tokens,
        "patches": rng.integers(0, 256, (1, 2, PADDED, 48), np.uint8),
        "patch_positions": positions,
    }


def logits_of_theirs(model: Any) -> np.ndarray:
    arrays = batch()
    tokens = torch.tensor(arrays["tokens"], dtype=torch.long)
    with torch.no_grad():
        found = model(
            input_ids=tokens, mm_token_type_ids=(tokens == IMAGE).long(),
            pixel_values=torch.tensor(arrays["patches"][0] / np.float32(255)),
            image_position_ids=torch.tensor(arrays["patch_positions"][0], dtype=torch.long),
        )  # fmt: skip
    return found.logits.numpy()


def logits_of_ours(model: ModelConfig, values: dict[str, np.ndarray]) -> np.ndarray:
    graphdef, params, _ = outline(lambda: load_model(model.module, model.args, 0))
    assert {path: value.shape for path, value in values.items()} == {path: v.shape for path, v in params.items()}
    program = jax.jit(lambda params, arrays: join_model(graphdef, params)(**arrays))
    return np.asarray(program(values, batch()))


@pytest.mark.parametrize(
    ("text", "vision", "scan"),
    [(DENSE, {"standardize": True}, False), (SHARED, {"use_clipped_linears": True}, True)],
    ids=["dense", "shared"],
)
def test_a_folder_computes_what_it_does_in_transformers_and_returns(
    text: dict[str, Any], vision: dict[str, bool], scan: bool, tmp_path: Path
) -> None:
    theirs = make(tmp_path / "theirs", text, **vision)
    weights = Weights(tmp_path / "theirs")
    model = weights.model(images=True)
    model = replace(model, args={**model.args, "scan_layers": scan})
    assert model.module == SEEING_DECODER
    values, want = dict(weights.read(model)), logits_of_theirs(theirs)
    error = float(np.abs(logits_of_ours(model, values) - want).max() / want.std())
    print(f"seeing | {vision} | {want.std():.2f} | {error:.1e}")
    assert want.std() > 0.5 and error <= LIMIT

    (tmp_path / "ours").mkdir()
    described = to_hf(model)
    write_weights(tmp_path / "ours", model, values.items(), "float32", described["model_type"])
    (tmp_path / "ours" / "config.json").write_text(json.dumps(described))
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    back = transformers.Gemma4ForConditionalGeneration.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    np.testing.assert_array_equal(logits_of_theirs(back.eval()), want)
    assert from_hf(described, images=True) == replace(
        model, args={k: model.args[k] for k in model.args if k != "scan_layers"}
    )

    # Without images, the same folder is the model of its text, as before.
    plain = weights.model()
    plain = replace(plain, args={**plain.args, "scan_layers": scan})
    assert plain.module == ModelConfig().module
    text_values = dict(weights.read(plain))
    assert text_values.keys() == {path for path in values if not path.startswith("tower/")}
    assert all(np.array_equal(values[path], text_values[path]) for path in text_values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_config": None}, r"vision_config NoneType; only models of gemma4 have a tower"),
        ({"vision_config": {"hidden_activation": "silu"}}, r"hidden_activation is 'silu', but the tower supports only"),
        ({"vision_config": {"num_key_value_heads": 4}}, r"num_key_value_heads is 4, but the tower supports only 12"),
        ({"vision_config": {"windows": 4}}, r"vision_config has unknown keys: windows"),
        ({"vision_config": {"rope_parameters": {"rope_type": "yarn"}}}, r"rope_type is 'yarn', but the tower"),
        ({"vision_config": {"num_hidden_layers": 10**12}}, r"num_layers is 1000000000000; use at most 10000"),
        ({"vision_config": {"rms_norm_eps": -1.0}}, r"norm_epsilon -1.0 must be in \(0, 1\)"),
        ({"vision_config": {"rope_parameters": {"rope_theta": 0}}}, r"rope_theta 0.0 above 0 and finite"),
    ],
)
def test_a_tower_of_another_kind_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_hf(to_hf(ModelConfig(preset="gemma4-seeing-tiny")) | changes, images=True)


@pytest.mark.parametrize("name", ["gemma4-seeing-tiny", "gemma4-e-seeing-tiny"])
def test_presets_survive_their_config_json(name: str) -> None:
    described = to_hf(ModelConfig(preset=name))
    assert to_hf(from_hf(described, images=True)) == described
    args = ModelConfig(preset="gemma4-seeing-tiny").args
    args["kinds"] = {"local": {"window": 32}, "global": {**args["kinds"]["global"], "see_images": True}}
    with pytest.raises(ValueError, match=r"see_images is true in 2 layers, .* in all 4 layers with a window"):
        to_hf(ModelConfig(module=SEEING_DECODER, args=args))
