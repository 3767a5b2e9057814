"""Each public family against transformers: the same logits from the same weights, theirs in ours and ours in theirs."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.training.convert.families import FAMILIES, from_hf, tensors, to_hf
from diloco_jax.training.convert.weights import Weights
from diloco_jax.training.models.config import ModelConfig, presets
from diloco_jax.training.models.moe import decoder_of
from diloco_jax.training.models.protocol import Params, join_model, load_model, split_model

torch = pytest.importorskip("torch", reason="the extra parity is not installed")
transformers = pytest.importorskip("transformers", reason="the extra parity is not installed")
safetensors = pytest.importorskip("safetensors.numpy")

pytestmark = [
    pytest.mark.usefixtures("quick_compiler"),
    pytest.mark.filterwarnings("default"),  # theirs are theirs
]

SIZES = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "attention_factor": None}
LOCAL = {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 32}, "head_dim": 16},
    "qwen2": {"rope_scaling": YARN | {"original_max_position_embeddings": 64}, "tie_word_embeddings": True},
    "qwen3": LOCAL | {"head_dim": 16},
    "olmo2": {"rope_theta": 5e5},
    "gemma3_text": {
        "num_hidden_layers": 4, "sliding_window": 7, "sliding_window_pattern": 3, "query_pre_attn_scalar": 24,
        "head_dim": 16, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "final_logit_softcapping": 30.0,
    },
    "mixtral": {"num_local_experts": 4, "sliding_window": 9},
    "qwen3_moe": {
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": False, "head_dim": 16
    },
}  # fmt: skip
STACKED = ("qwen3", "gemma3_text", "mixtral")  # run with scan_layers
TOKENS = np.random.default_rng(0).integers(0, 97, (2, 40)).astype(np.int32)  # longer than any window


def logits_of_theirs(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()


def drawn(params: Params) -> Params:
    """Every parameter, the norms' too, away from what it begins with; matrices keep activations at about 1."""
    rng = np.random.default_rng(5)
    size = {path: 0.5 if len(v.shape) < 2 or v.shape[0] == 97 else v.shape[-2] ** -0.5 for path, v in params.items()}
    noise = {path: size[path] * rng.normal(size=v.shape) for path, v in params.items()}
    return {path: jnp.asarray(("scale" in path) * v + noise[path], jnp.float32) for path, v in params.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers_both_ways(name: str, tmp_path: Path) -> None:
    theirs = transformers.AutoConfig.for_model(name, **{**SIZES, **MODELS[name]})
    described = from_hf(theirs.to_dict())
    model = ModelConfig(module=described.module, args={**described.args, "scan_layers": name in STACKED})
    made = tensors(model)
    graphdef, params = split_model(load_model(model.module, model.args, 0))
    assert {m.path: m.shape for m in made} == {path: value.shape for path, value in params.items()}
    logits = jax.jit(lambda p: join_model(graphdef, p)(jnp.asarray(TOKENS)))  # type: ignore[operator]

    ours = drawn(params)
    files = {n: a for m in made for n, a in zip(m.hf, m.to_hf(np.asarray(ours[m.path])), strict=True)}
    files = {n: np.ascontiguousarray(a) for n, a in files.items()}
    (tmp_path / "ours").mkdir()
    safetensors.save_file(files, tmp_path / "ours" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "ours" / "config.json").write_text(json.dumps(to_hf(model)))
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values()), info
    want = logits_of_theirs(loaded)
    assert want.std() > 0.5
    first = np.abs(logits(ours) - want).max()

    torch.manual_seed(0)
    for parameter in loaded.parameters():  # other values, as transformers writes them
        parameter.data.add_(0.3 * torch.randn_like(parameter) * parameter.data.std())
    loaded.save_pretrained(tmp_path / "theirs")
    found = safetensors.load_file(tmp_path / "theirs" / "model.safetensors")
    assert from_hf(json.loads((tmp_path / "theirs" / "config.json").read_text())) == described
    assert sorted(found) == sorted(files)
    back = {m.path: jnp.asarray(m.to_ours([found[n] for n in m.hf])) for m in made}
    second = np.abs(logits(back) - logits_of_theirs(loaded)).max()
    print(f"parity {name}: ours in theirs {first:.1e}, theirs in ours {second:.1e}")
    assert max(first, second) <= 1e-4

    other = ModelConfig(module=model.module, args={**model.args, "scan_layers": name not in STACKED})
    layers = decoder_of(model).num_layers  # type: ignore[union-attr]
    turned = {m.path: m.to_ours([found[n] for n in m.hf]) for m in tensors(other)}
    stack, single = (back, turned) if name in STACKED else (turned, back)
    for path in stack.keys() - single.keys():
        each = [single[path.replace("blocks/", f"blocks/{i}/")] for i in range(layers)]
        np.testing.assert_array_equal(stack[path], np.stack(each))


def test_of_a_model_that_sees_the_text_is_read(tmp_path: Path) -> None:
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    text = {**SIZES, **MODELS["gemma3_text"], "num_hidden_layers": 1}
    seeing = {"vision_config": tower | {"image_size": 28, "patch_size": 14}, "mm_tokens_per_image": 4}
    theirs = transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(text_config=text, **seeing))
    theirs.save_pretrained(tmp_path)
    weights = Weights(tmp_path)
    model = from_hf(weights.config)
    graphdef, _ = split_model(load_model(model.module, model.args, 0))
    ours = {path: jnp.asarray(value) for path, value in weights.read(model)}
    logits = join_model(graphdef, ours)(jnp.asarray(TOKENS))  # type: ignore[operator]
    assert np.abs(logits - logits_of_theirs(theirs)).max() <= 1e-4


@pytest.mark.parametrize("name", presets())
def test_presets_are_what_configs_of_transformers_say(name: str) -> None:
    model = ModelConfig(preset=name)
    described = to_hf(model)
    theirs = transformers.AutoConfig.for_model(**described)
    assert theirs.architectures == [described["architectures"][0]]
    assert decoder_of(from_hf(theirs.to_dict())) == decoder_of(model)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_usual_config_of_each_family_is_understood(name: str) -> None:
    theirs = transformers.AutoConfig.for_model(name)
    saved = json.loads(theirs.to_json_string())  # without what is the default
    assert from_hf(saved) == from_hf(theirs.to_dict()) == from_hf(to_hf(from_hf(saved)))
