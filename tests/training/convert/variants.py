"""Folders of public models as transformers and people make them: small, random, and in every way that a config has.

`make` writes one. Matrices are N(0, 1 / fan in), embeddings N(0, 0.7), and norms and biases are moved by N(0, 0.3) from
their usual values, so that logits have a standard deviation of 2 and more and nothing is near its initial value.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Edit = Callable[[dict[str, Any]], None]

# Both are in tokens; a sequence is 200 tokens longer than the window.
WINDOW, LENGTH = 16, 216
TOKENS = np.random.default_rng(0).integers(0, 331, (2, LENGTH)).astype(np.int32)
SIZES = {
    "vocab_size": 331, "hidden_size": 96, "intermediate_size": 104, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True},
}
GEMMA = {"sliding_window": WINDOW, "query_pre_attn_scalar": 24, "layer_types": None}
SLIDING, FULL = "sliding_attention", "full_attention"


class Variant(NamedTuple):
    """One folder."""

    name: str
    family: str
    # Arguments of the class in transformers.
    config: dict[str, Any] = {}
    # A change of config.json after it is saved.
    edit: Edit = lambda config: None
    # True if config.json is written as transformers 4 does.
    legacy: bool = False
    dtype: str = "float32"
    shard: str = "50GB"
    # "equal" or "other" is put into the files of a tied model.
    head: str = "as it is saved"
    # The message of the refusal.
    refused: str = ""
    # True if transformers cannot compute it either.
    theirs_fails: bool = False


def sets(**changes: Any) -> Edit:
    """Put keys into config.json."""
    return lambda config: config.update(changes)


def drops(*keys: str) -> Edit:
    """Take keys out of config.json."""
    return lambda config: [config.pop(key) for key in keys] and None


def rope(**changes: Any) -> dict[str, Any]:
    """Rotary settings as transformers 5 takes them."""
    return {"rope_parameters": {"rope_theta": 10000.0, **changes}}


LLAMA3 = rope(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3["rope_parameters"]["original_max_position_embeddings"] = 32
YARN = {"rope_type": "yarn", "factor": 4.0}
LONG = {"original_max_position_embeddings": 64}
TIED = {"tie_word_embeddings": True}
WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0}


def kinds(letters: str) -> dict[str, Any]:
    """The kinds of layers, by their first letters."""
    return {"layer_types": [{"s": SLIDING, "f": FULL}[letter] for letter in letters]}


def gemma_rope(full: dict[str, Any], local: dict[str, Any] | None = None) -> dict[str, Any]:
    """Rotary settings of Gemma 3."""
    local = local or {"rope_type": "default", "rope_theta": 10000.0}
    return {"rope_parameters": {FULL: {"rope_theta": 1e6, **full}, SLIDING: local}}


# The variants of each family; those that the suite always runs are in ALWAYS.
LIST = [
    Variant("llama", "llama"),
    Variant("llama_tied_legacy", "llama", {**TIED, **LLAMA3}, legacy=True),
    Variant("llama_odd", "llama", {"hidden_size": 98, "num_attention_heads": 7, "num_key_value_heads": 7} | TIED),
    Variant("llama_mqa", "llama", {"num_key_value_heads": 1}),
    Variant("llama_llama3", "llama", LLAMA3),
    Variant("llama_llama3_legacy", "llama", LLAMA3, legacy=True),
    Variant("llama_linear_legacy_type", "llama", rope(rope_type="linear", factor=4.0),
            lambda config: config["rope_scaling"].update(type=config["rope_scaling"].pop("rope_type")), legacy=True),
    Variant("llama_yarn", "llama", rope(**YARN, **LONG)),
    Variant("llama_yarn_nolen", "llama", rope(**YARN)),
    Variant("llama_yarn_nolen_legacy", "llama", rope(**YARN),
            lambda config: config["rope_scaling"].pop("original_max_position_embeddings"), legacy=True),
    Variant("llama_yarn_beta", "llama", rope(**YARN, **LONG, beta_fast=16.0, beta_slow=2.0)),
    Variant("llama_yarn_beta_equal", "llama", rope(**YARN, **LONG, beta_fast=4.0, beta_slow=4.0),
            refused="rope_slow 4.0 must be above 0 and below rope_fast"),
    Variant("llama_yarn_attn1", "llama", rope(**YARN, **LONG, attention_factor=1.0), refused="of yarn's options"),
    Variant("llama_yarn_trunc", "llama", rope(**YARN, **LONG, truncate=False), refused="of yarn's options"),
    Variant("llama_yarn_mscale", "llama", rope(**YARN, **LONG, mscale=0.7, mscale_all_dim=1.0),
            refused="of yarn's options"),
    Variant("llama_yarn_mscale_all", "llama", rope(**YARN, **LONG, mscale_all_dim=1.0)),
    Variant("llama_yarn_implicit_factor", "llama", rope(**YARN, **LONG),
            lambda config: config["rope_parameters"].update(factor=None)),
    Variant("llama_dynamic", "llama", rope(rope_type="dynamic", factor=2.0), refused="rope_type is 'dynamic'"),
    Variant("llama_longrope", "llama",
            rope(rope_type="longrope", short_factor=[1.0] * 8, long_factor=[2.0] * 8, **LONG),
            refused="rope_type is 'longrope'"),
    Variant("llama_partial_in_rope", "llama", rope(rope_type="default", partial_rotary_factor=0.5)),
    Variant("llama_partial_top", "llama", edit=sets(partial_rotary_factor=0.5), refused="partial_rotary_factor is 0.5"),
    Variant("llama_partial_linear", "llama", rope(rope_type="linear", factor=2.0, partial_rotary_factor=0.5),
            refused="partial_rotary_factor 1.0", theirs_fails=True),
    Variant("llama_attnbias", "llama", {"attention_bias": True}, refused="attention_bias is True"),
    Variant("llama_mlpbias", "llama", {"mlp_bias": True}, refused="mlp_bias is True"),
    Variant("llama_bf16_shard", "llama", dtype="bfloat16", shard="200KB"),
    Variant("llama_f16", "llama", dtype="float16"),
    Variant("llama_gelu", "llama", {"hidden_act": "gelu"}, refused="hidden_act is 'gelu'"),
    Variant("llama_gelu_new", "llama", {"hidden_act": "gelu_new"}, refused="hidden_act is 'gelu_new'"),
    Variant("llama_gelu_tanh", "llama", {"hidden_act": "gelu_pytorch_tanh"}),
    Variant("llama_relu2", "llama", {"hidden_act": "relu2"}),
    Variant("llama_relu", "llama", {"hidden_act": "relu"}, refused="hidden_act is 'relu'"),
    Variant("llama_swish", "llama", {"hidden_act": "swish"}, refused="hidden_act is 'swish'"),
    Variant("llama_other_act", "llama", edit=sets(hidden_activation="gelu_pytorch_tanh"),
            refused="unknown keys: hidden_activation"),
    Variant("llama_sw_ignored", "llama", edit=sets(sliding_window=WINDOW)),
    Variant("llama_tp", "llama", {"pretraining_tp": 2}),
    Variant("llama_full_dump", "llama", edit=sets(torchscript=False, pruned_heads={}, is_decoder=False, top_k=50)),
    Variant("tied_both_equal", "llama", TIED, head="equal"),
    Variant("tied_both_differ", "llama", TIED, head="other"),
    Variant("is_causal_false", "llama", edit=sets(is_causal=False), refused="is_causal is False"),
    Variant("is_causal_null", "llama", edit=sets(is_causal=None), refused="is_causal is None"),
    Variant("per_layer_config", "llama", edit=sets(per_layer_config={"1": {"intermediate_size": 48}}),
            refused="per_layer_config is", theirs_fails=True),
    Variant("quantization", "llama", edit=sets(quantization_config={"quant_method": "fp8"}),
            refused="unknown keys: quantization_config", theirs_fails=True),
    Variant("chunked_layer_types", "llama", edit=sets(layer_types=["chunked_attention"] * 4),
            refused="layer_types are chunked_attention", theirs_fails=True),
    Variant("yarn_orig_at_top", "llama", rope(**YARN, original_max_position_embeddings=256), edit=sets(**LONG)),
    Variant("llama3_orig_at_top", "llama", LLAMA3, sets(original_max_position_embeddings=128)),
    Variant("qwen2", "qwen2", {**WINDOWS, **kinds("sfsf"), **rope(**YARN, **LONG)}),
    Variant("qwen2_tied_legacy", "qwen2", {**TIED, **WINDOWS}, legacy=True),
    Variant("qwen2_mwl2", "qwen2", {**WINDOWS, "max_window_layers": 2}, refused="layer_types are full_attention, full"),
    Variant("qwen2_mwl0", "qwen2", {**WINDOWS, **TIED}),
    Variant("qwen2_mwl2_legacy", "qwen2", {**WINDOWS, "max_window_layers": 2}, drops("layer_types"), legacy=True,
            refused="layer_types are full_attention, full"),
    Variant("qwen2_mwl4_legacy", "qwen2", {**WINDOWS, "max_window_layers": 4}, drops("layer_types"), legacy=True),
    Variant("qwen2_sfsf", "qwen2", WINDOWS | kinds("sfsf")),
    Variant("qwen2_fsfs", "qwen2", WINDOWS | kinds("fsfs"), refused="all except every n-th"),
    Variant("qwen2_sssf", "qwen2", WINDOWS | kinds("sssf")),
    Variant("qwen2_swoff", "qwen2", {"sliding_window": WINDOW}),
    Variant("qwen2_swoff_types", "qwen2", edit=sets(**kinds("ssff")), refused="sliding_window is off",
            theirs_fails=True),
    Variant("qwen2_short_types", "qwen2", edit=sets(**kinds("sf")), refused="there must be 4", theirs_fails=True),
    Variant("legacy_layer_types", "qwen2", edit=sets(layer_types=["attention"] * 4)),
    Variant("unknown_layer_types", "qwen2", edit=sets(layer_types=["no_attention"] * 4),
            refused="layer_types are no_attention", theirs_fails=True),
    Variant("qwen2_headdim", "qwen2", {"head_dim": 24}),
    Variant("qwen2_yarn_shard", "qwen2", rope(**YARN, **LONG), shard="200KB"),
    Variant("qwen2_mrope_legacy", "qwen2", edit=sets(rope_scaling={"type": "mrope", "factor": 1.0}), legacy=True,
            refused="rope_type is 'mrope'", theirs_fails=True),
    Variant("qwen2_nosw_key", "qwen2", {**WINDOWS, "max_window_layers": 0}, drops("sliding_window")),
    Variant("qwen2_null_window", "qwen2", {"use_sliding_window": True, "sliding_window": None}),
    Variant("qwen3", "qwen3", {"head_dim": 24, **WINDOWS, **kinds("sssf")}),
    Variant("qwen3_tied_legacy", "qwen3", {**TIED, "head_dim": 24}, legacy=True),
    Variant("qwen3_hd128", "qwen3", {**TIED, "head_dim": 128}),
    Variant("qwen3_hd_missing", "qwen3", {"head_dim": 128}, drops("head_dim")),
    Variant("qwen3_bias", "qwen3", {"attention_bias": True}, refused="attention_bias is True"),
    Variant("qwen3_sw", "qwen3", {**WINDOWS, "max_window_layers": 1}, refused="all except every n-th"),
    Variant("qwen3_ssfs", "qwen3", {**WINDOWS, "num_hidden_layers": 4, **kinds("ssfs")}),
    Variant("qwen3_yarn_long", "qwen3", rope(**YARN, **LONG)),
    Variant("qwen3_linear_bf16", "qwen3", rope(rope_type="linear", factor=2.0), dtype="bfloat16"),
    Variant("is_causal_false_qwen3", "qwen3", edit=sets(is_causal=False), refused="is_causal is False"),
    Variant("rope_both", "qwen3", rope(rope_type="default"), sets(rope_scaling={**YARN, **LONG})),
    Variant("rope_both_theta", "qwen3", rope(rope_type="default", rope_theta=1e6),
            sets(rope_scaling={**YARN, **LONG, "rope_theta": 5e5})),
    Variant("gemma3", "gemma3_text", {**GEMMA, **kinds("sfsf"), "final_logit_softcapping": 5.0, **TIED}),
    Variant("gemma3_legacy", "gemma3_text",
            {**GEMMA, **kinds("ssfs"), **gemma_rope({"rope_type": "linear", "factor": 8.0})}, legacy=True),
    Variant("gemma3_p3_linear", "gemma3_text",
            {**GEMMA, **kinds("ssfs"), "tie_word_embeddings": False, "final_logit_softcapping": 7.0,
             **gemma_rope({"rope_type": "linear", "factor": 8.0})}),
    Variant("gemma3_irregular", "gemma3_text", {**GEMMA, **kinds("fssf")}, refused="all except every n-th"),
    Variant("gemma3_allfull", "gemma3_text", {**GEMMA, **kinds("ffff")}),
    Variant("gemma3_allslide", "gemma3_text", {**GEMMA, **kinds("ssss"), "tie_word_embeddings": False}),
    Variant("gemma3_slideonly_rope", "gemma3_text", {**GEMMA, **kinds("sssf")},
            lambda config: config["rope_parameters"].pop(FULL)),
    Variant("gemma3_fullonly_rope", "gemma3_text", {**GEMMA, **kinds("sssf")},
            lambda config: config["rope_parameters"].pop(SLIDING)),
    Variant("gemma3_both_rope", "gemma3_text", {**GEMMA, **kinds("sssf")},
            sets(rope_scaling={"rope_type": "linear", "factor": 8.0})),
    Variant("gemma3_attncap", "gemma3_text", {**GEMMA, "attn_logit_softcapping": 20.0},
            refused="attn_logit_softcapping is 20.0"),
    Variant("gemma3_bidir", "gemma3_text", {**GEMMA, "use_bidirectional_attention": True},
            refused="use_bidirectional_attention is True"),
    Variant("gemma3_bias", "gemma3_text", {**GEMMA, "attention_bias": True}, refused="attention_bias is True"),
    Variant("gemma3_localyarn", "gemma3_text",
            {**GEMMA, **gemma_rope({"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0})},
            refused="layers with a window have rope"),
    Variant("gemma3_fullyarn", "gemma3_text", {**GEMMA, **gemma_rope({**YARN, **LONG})},
            refused="rope_scaling yarn needs one base"),
    Variant("gemma3_fullllama3", "gemma3_text",
            {**GEMMA, **kinds("sssf"), **gemma_rope(LLAMA3["rope_parameters"])}),
    Variant("gemma3_silu_bf16", "gemma3_text", {**GEMMA, "hidden_activation": "silu"}, dtype="bfloat16"),
    Variant("gemma3_default_pattern", "gemma3_text", {**GEMMA, "num_hidden_layers": 7}),
    Variant("gemma3_null_window", "gemma3_text", GEMMA, sets(sliding_window=None), refused="sliding_window is off",
            theirs_fails=True),
    Variant("gemma3_null_window_allfull", "gemma3_text", {**GEMMA, **kinds("ffff")}, sets(sliding_window=None),
            refused="sliding_window is off", theirs_fails=True),
    Variant("olmo2", "olmo2", {**rope(rope_type="default", rope_theta=5e5)}),
    Variant("olmo2_legacy", "olmo2", {**TIED, "num_key_value_heads": 6}, legacy=True),
    Variant("olmo2_bias", "olmo2", {"attention_bias": True}, refused="attention_bias is True"),
    Variant("olmo2_hd", "olmo2", {"head_dim": 24}),
    Variant("olmo2_llama3", "olmo2", LLAMA3),
    Variant("mixtral", "mixtral", {"sliding_window": WINDOW}),
    Variant("mixtral_tied_legacy", "mixtral", TIED, legacy=True),
    Variant("mixtral_all", "mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3}),
    Variant("mixtral_jitter", "mixtral", {"router_jitter_noise": 0.1}),
    Variant("q3moe", "qwen3_moe", {"head_dim": 24, **WINDOWS}),
    Variant("q3moe_tied_legacy", "qwen3_moe", {**TIED, "norm_topk_prob": False}, legacy=True),
    Variant("q3moe_normF", "qwen3_moe", {"norm_topk_prob": False}),
    Variant("q3moe_mlponly", "qwen3_moe", {"mlp_only_layers": [1]}, refused="mlp_only_layers is .1."),
    Variant("q3moe_sparse2", "qwen3_moe", {"decoder_sparse_step": 2}, refused="decoder_sparse_step is 2"),
    Variant("q3moe_bias", "qwen3_moe", {"attention_bias": True}, refused="attention_bias is True"),
    Variant("q3moe_top1_bf16", "qwen3_moe", {**TIED, "num_experts_per_tok": 1}, dtype="bfloat16"),
    Variant("q3moe_layertypes", "qwen3_moe", edit=sets(**kinds("ffff"))),
    Variant("q2moe", "qwen2_moe", refused="model_type is 'qwen2_moe'"),
]  # fmt: skip
ALWAYS = (
    "llama", "llama_tied_legacy", "qwen2", "qwen2_tied_legacy", "qwen3", "qwen3_tied_legacy", "gemma3", "gemma3_legacy",
    "olmo2", "olmo2_legacy", "mixtral", "mixtral_tied_legacy", "q3moe", "q3moe_tied_legacy",
    "tied_both_differ", "rope_both", "yarn_orig_at_top",
)  # fmt: skip


def fill(model: Any, seed: int = 0) -> None:
    """Give all parameters of a model of transformers values like those of a trained one."""
    import torch

    rng = torch.Generator().manual_seed(seed)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=rng)
            if parameter is embedding:
                parameter.copy_(0.7 * noise)
            elif parameter.dim() < 2:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(noise * (2 if parameter is head else 1) * parameter.shape[-1] ** -0.5)


def legacy(config: dict[str, Any]) -> None:
    """Rewrite a config.json of transformers 5 as transformers 4 writes it."""
    found = config.pop("rope_parameters")
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.49.0"
    if FULL in found:
        config["rope_local_base_freq"] = found[SLIDING]["rope_theta"]
        found = found[FULL]
        config["sliding_window_pattern"] = config.pop("layer_types").index(FULL) + 1
    config["rope_theta"] = found.pop("rope_theta")
    config["rope_scaling"] = found if found["rope_type"] != "default" else None


def make(variant: Variant, folder: Path) -> None:
    """Write the folder of a variant with transformers."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    sizes = SIZES | EXPERTS.get(variant.family, {}) | variant.config
    if "head_dim" not in variant.config and sizes["hidden_size"] != SIZES["hidden_size"]:
        sizes["head_dim"] = None
    if variant.family == "gemma3_text":
        sizes.setdefault("hidden_activation", "gelu_pytorch_tanh")
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(variant.family, **sizes))
    fill(model)
    model.to(getattr(torch, variant.dtype)).save_pretrained(folder, max_shard_size=variant.shard)
    if variant.head != "as it is saved":
        file = folder / "model.safetensors"
        tensors = load_file(file)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone() * (2 if variant.head == "other" else 1)
        save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    if variant.legacy:
        legacy(config)
    variant.edit(config)
    (folder / "config.json").write_text(json.dumps(config))
