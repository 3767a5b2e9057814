"""Public models by name: known sizes, and what is refused."""

import math
from typing import Any

import pytest

from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import dump, parse_text
from diloco_jax.training.convert.families import from_hf, to_hf
from diloco_jax.training.convert.tensors import tensors
from diloco_jax.training.flops import model_flops
from diloco_jax.training.models.config import ModelConfig

# Numbers of parameters, as the model cards on the Hub count them.
SIZES = {
    "llama3.1-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma3-1b": 999_885_952,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "mixtral-8x7b": 46_702_792_704,
    "gpt-oss-20b": 20_914_757_184,
}


@pytest.mark.parametrize("name", SIZES)
def test_presets_have_the_size_of_the_public_model(name: str) -> None:
    assert sum(math.prod(each.shape) for each in tensors(ModelConfig(preset=name))) == SIZES[name]


def test_flops_of_gpt_oss_are_those_of_its_active_parameters_and_windows() -> None:
    """Each token uses 4 of 32 experts; half of the 24 layers see 128 tokens, the others half of the sequence."""
    attention = 2880 * 64 * (64 + 8 + 8) + 64 * 64 * 2880
    weights = 24 * (attention + 2880 * 32 + 4 * 3 * 2880 * 2880) + 201088 * 2880
    # The model card counts 3.6 billion active parameters.
    assert round(weights / 1e9, 1) == 3.6
    seen = 12 * (128 - 128**2 / (2 * 4096)) + 12 * 4096 / 2
    found = model_flops(ModelConfig(preset="gpt-oss-20b"), {}, batch=2, seq_len=4096)
    assert found.flops == pytest.approx(3 * 2 * 4096 * (2 * weights + 4 * 64 * 64 * seen))


def test_own_arguments_replace_those_of_a_preset_and_survive_a_file() -> None:
    config = RunConfig(model=ModelConfig(preset="mixtral-tiny", args={"num_layers": 1, "remat": "full"}))
    assert config.model.module.endswith("MoeDecoder") and config.model.args["routing"] == "dropless"
    assert (config.model.args["num_layers"], config.model.args["remat"], config.model.args["dim"]) == (1, "full", 96)
    assert parse_text(dump(config), "run") == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; the families are llama, "),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; the decoder has silu, "),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'; the decoder has"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "lacks 'short_factor'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "lacks 'factor'"),
        ({"is_causal": False}, "is_causal is False, but the decoder supports only True"),
        ({"num_attention_heads": None}, "lacks 'num_attention_heads'"),
        ({"num_attention_heads": "many"}, "config.json of llama"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; use 1 to"),
        ({"vocab_size": "large"}, "vocab_size is 'large'; it must be a whole number"),
    ],
)
def test_a_config_of_another_kind_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_hf(to_hf(ModelConfig(preset="llama3.2-1b")) | changes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "model.args.embed_scale is True, but models of llama"),
        ({"preset": "gemma3-1b", "args": {"attention_cap": 50.0}}, "model.args.attention_cap is 50.0"),
        ({"module": "my.models:Net"}, "'my.models:Net', which has no family"),
        ({"preset": "qwen3-06b"}, "did you mean qwen3-0.6b?"),
        ({"preset": "qwen3-0.6b", "module": "own"}, "the islands bring the model"),
    ],
)
def test_what_no_family_has_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tensors(ModelConfig(**settings))
