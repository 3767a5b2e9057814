"""config.json of public families: what each key decides, and that no value of it ends in anything but a sentence."""

import dataclasses
import json
import re
from typing import Any

import pytest

from diloco_jax.training.convert.families import from_hf, to_hf
from diloco_jax.training.convert.table import FAMILIES, REFUSED, ROPE
from tests.tools.export.folders import model_of
from tests.training.convert import page

# What PretrainedConfig of transformers 4.57 writes beside the keys of transformers 5, with its usual values.
OF_VERSION_4: dict[str, Any] = {
    "add_cross_attention": False, "bad_words_ids": None, "begin_suppress_tokens": None, "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None, "decoder_start_token_id": None, "diversity_penalty": 0.0, "do_sample": False,
    "early_stopping": False, "encoder_no_repeat_ngram_size": 0, "exponential_decay_length_penalty": None,
    "finetuning_task": None, "forced_bos_token_id": None, "forced_eos_token_id": None, "id2label": {"0": "LABEL_0"},
    "is_decoder": False, "is_encoder_decoder": False, "label2id": {"LABEL_0": 0}, "length_penalty": 1.0,
    "max_length": 20, "min_length": 0, "no_repeat_ngram_size": 0, "num_beam_groups": 1, "num_beams": 1,
    "num_return_sequences": 1, "output_attentions": False, "output_hidden_states": False, "output_scores": False,
    "prefix": None, "problem_type": None, "pruned_heads": {}, "remove_invalid_values": False, "return_dict": True,
    "repetition_penalty": 1.0, "return_dict_in_generate": False, "sep_token_id": None, "suppress_tokens": None,
    "task_specific_params": None, "temperature": 1.0, "tf_legacy_loss": False, "tie_encoder_decoder": False,
    "tokenizer_class": None, "top_k": 50, "top_p": 1.0, "torch_dtype": "bfloat16", "torchscript": False,
    "transformers_version": "4.57.6", "typical_p": 1.0, "use_bfloat16": False, "_name_or_path": "",
    "_attn_implementation_autoset": True, "initializer_range": 0.02, "attention_dropout": 0.0, "use_cache": True,
    "bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0, "architectures": ["X"], "auto_map": {"a": "b"},
}  # fmt: skip
OF_FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": {"hidden_activation": None, "attention_bias": False},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid", "sliding_window_size": 4096},
    "seed_oss": {"residual_dropout": 0.1, "attention_out_bias": False, "mlp_bias": False, "pretraining_tp": 1},
    "phi3": {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "original_max_position_embeddings": 128, "attention_bias": False},
    "olmoe": {"clip_qkv": None, "attention_bias": False, "output_router_logits": False},
    "llama": {"pretraining_tp": 1, "attention_bias": False, "mlp_bias": False},
    "gemma3_text": {"_sliding_window_pattern": 6, "attn_logit_softcapping": None, "cache_implementation": "hybrid"},
    "mixtral": {"output_router_logits": False, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0},
    "qwen3_moe": {
        "output_router_logits": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_window_layers": 48,
    },
    "qwen3_next": {"output_router_logits": False, "router_aux_loss_coef": 0.001, "full_attention_interval": 4},
    "qwen3_5_text": {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1},
}
ODD = (None, True, False, -1, 0, 1.5, 2**70, float("nan"), float("inf"), "x", [], ["x"], [None], {}, {"a": 1})


@pytest.mark.parametrize("name", FAMILIES)
def test_what_transformers_4_writes_is_understood(name: str) -> None:
    config = to_hf(model_of(name))
    assert from_hf(OF_VERSION_4 | OF_FAMILIES.get(name, {}) | config) == from_hf(config)


def keys_of(name: str) -> set[str]:
    return {*FAMILIES[name].known, *REFUSED, "text_config", "model_type"}


@pytest.mark.parametrize(("number", "name"), list(enumerate(FAMILIES)), ids=FAMILIES)
def test_any_value_of_any_key_is_read_or_refused_with_a_sentence(number: int, name: str) -> None:
    """Wrong kinds of values never end in an exception of Python.

    A key gets all values in the first family that has it, and every fifth value in the others: other ones in each.
    """
    config = json.loads(json.dumps(to_hf(model_of(name))))
    rope = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0}
    earlier = {key for each in list(FAMILIES)[:number] for key in keys_of(each)}
    for key in sorted(keys_of(name)):
        for value in ODD[number % 5 :: 5] if key in earlier else ODD:
            check_sentence(config | {key: value})
    for value in ODD[number % 5 :: 5] if number else ODD:
        for key in ROPE:
            check_sentence(config | {"rope_scaling": {**rope, key: value}})
        for kind in ("full_attention", "sliding_attention"):
            check_sentence(config | {"rope_parameters": {kind: value}})


def check_sentence(config: dict[str, Any]) -> None:
    try:
        from_hf(config)
    except ValueError as error:
        assert str(error).startswith(("config.json", "model.args")), (config, error)


LINEAR = {"rope_type": "linear", "factor": 2.0}
SLIDING, FULL = "sliding_attention", "full_attention"
UNCUT = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "truncate": False}
# transformers turns four numbers of a head here, by angles for three.
THREE_TURNED = {"head_dim": 12, "partial_rotary_factor": 0.25, "layer_types": [FULL, FULL]}
TWO_LONGROPES = {
    "rope_parameters": {
        kind: {"rope_type": "longrope", "original_max_position_embeddings": 64, "short_factor": [each] * 4,
               "long_factor": [2.0] * 4}
        for kind, each in ((FULL, 1.0), (SLIDING, 1.5))
    }
}  # fmt: skip
# Layers without a window are wider.
MIXED = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
MIXED |= {"sliding_window": 8, "head_dim": 8, "global_head_dim": 16}
SCALED_WINDOWS = {"rope_parameters": {FULL: {"rope_theta": 1e6}, SLIDING: {"rope_theta": 1e4, **LINEAR}}}


@pytest.mark.parametrize(
    ("name", "changes", "family"),
    [
        ("gemma3_text", {**SCALED_WINDOWS, "layer_types": [SLIDING, SLIDING, SLIDING]}, "gemma3_text"),
        ("gemma3_text", {**SCALED_WINDOWS, "layer_types": [SLIDING, FULL, SLIDING]}, "gemma3_text"),
        # Without a mixture in any layer, the model is one of the family without mixtures.
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2], "num_experts_per_tok": 3, "norm_topk_prob": False}, "qwen3"),
        ("qwen2_moe", {"decoder_sparse_step": 4, "num_experts_per_tok": 3, "qkv_bias": True}, "qwen2"),
        ("qwen3_moe", {"mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 8}, "qwen3_moe"),
        ("gemma4_text", {**MIXED, "layer_types": [FULL, SLIDING, FULL]}, "gemma4_text"),
        ("olmo3", {**TWO_LONGROPES, "layer_types": [FULL, SLIDING, FULL]}, "olmo3"),
    ],
    ids=[
        "gemma3_local",
        "gemma3_mixed",
        "qwen3_dense",
        "qwen2_dense",
        "qwen3_windows",
        "gemma4_full_first",
        "longropes",
    ],
)
def test_what_is_read_can_be_written_again(name: str, changes: dict[str, Any], family: str) -> None:
    config = to_hf(model_of(name), name) | changes
    config["num_hidden_layers"] = 3
    model = from_hf(config)
    written = to_hf(model, name)
    assert written["model_type"] == family
    assert to_hf(from_hf(written), family) == written


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        # transformers divides by these numbers.
        (
            "gemma2",
            {"final_logit_softcapping": 0.0},
            "final_logit_softcapping is 0.0; it must be a finite number above",
        ),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping is 0; it must be a finite number above 0"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0, so that no token would see itself; correct it, or"),
        ("llama", {"hidden_act": None}, "lacks 'hidden_act', or has null for it; copy it again"),
        ("gemma2", {"tie_word_embeddings": None}, "lacks 'tie_word_embeddings', or has null for it; copy it again"),
        ("gemma3_text", {"rope_parameters": LINEAR}, "rope_parameters has factor, rope_type for all layers, where"),
        ("olmo3", {"rope_parameters": {"rope_theta": 1e4, FULL: LINEAR}}, "rope_parameters has rope_theta for all"),
        ("olmo3", {"rope_parameters": {SLIDING: UNCUT}}, "yarn's truncate is false in full_attention or sliding_atten"),
        (
            "qwen3_next",
            THREE_TURNED,
            "rope_fraction is 0.25; it must be in (0, 1], and rotate an even number of the 12 num",
        ),
        ("gemma3_text", {"rope_scaling": UNCUT}, "truncate is false in full_attention or sliding_attention, where"),
    ],
)
def test_a_refusal_names_what_is_wrong(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        from_hf(to_hf(model_of(name), name) | changes)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "smolvlm", "text_config": {"model_type": "llama"}},
         "model_type is 'smolvlm', with a text model of the family llama inside, which is read only from gemma3, "
         "mistral3, internvl, gemma4, gemma4_unified, qwen3_5, qwen3_5_moe; save the text model alone with "
         "transformers, as LlamaForCausalLM; the families are llama, mistral,"),
        ({"model_type": "qwen3_vl", "text_config": {"model_type": "qwen3_vl_text"}},
         "model_type is 'qwen3_vl', with a text model of type 'qwen3_vl_text' inside; the families are llama,"),
        # A known kind of model, with an unknown text.
        ({"model_type": "internvl", "text_config": {"model_type": "internlm2"}},
         "model_type is 'internvl', with a text model of type 'internlm2' inside; the families are llama,"),
        ({"model_type": "internvl"}, "model_type is 'internvl'; the families are llama,"),
        ({"model_type": ["x"], "text_config": {"model_type": 1}}, "model_type is ['x']; the families are llama,"),
    ],
    ids=["smolvlm", "qwen3_vl", "internvl", "no_text", "odd"],
)  # fmt: skip
def test_the_refusal_of_a_model_names_the_text_model_inside(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        from_hf(config)


def test_gated_deltanet_is_the_same_in_transformers_only_with_silu() -> None:
    """There, hidden_act is also the activation of its convolution."""
    config = to_hf(model_of("qwen3_next"), "qwen3_next") | {"layer_types": ["linear_attention", FULL]}
    delta = from_hf(config)
    with pytest.raises(ValueError, match=r"activation is 'gelu', but the convolution of gated DeltaNet has silu here"):
        from_hf(config | {"hidden_act": "gelu_pytorch_tanh"})
    with pytest.raises(ValueError, match=r"activation is 'relu2', but the convolution of gated DeltaNet"):
        to_hf(dataclasses.replace(delta, args={**delta.args, "activation": "relu2"}))
    assert from_hf(config | {"hidden_act": "relu2", "layer_types": [FULL, FULL]}).args["activation"] == "relu2"


def test_qwen_has_a_window_of_4096_if_none_is_named() -> None:
    config = to_hf(model_of("qwen2")) | {"use_sliding_window": True, "max_window_layers": 0}
    assert from_hf(config).args["window"] == 4096
    assert "window" not in from_hf(config | {"sliding_window": None}).args
    assert "window" not in from_hf(config | {"use_sliding_window": False}).args


def test_the_outer_config_of_a_model_that_sees_is_checked_too() -> None:
    text = to_hf(model_of("gemma3_text")) | {"final_logit_softcapping": 30.0}
    seeing = {"model_type": "gemma3", "text_config": text, "vision_config": {}, "image_token_index": 7}
    assert "logit_cap" not in from_hf(seeing).args and from_hf(text).args["logit_cap"] == 30.0
    assert from_hf(seeing | {"tie_word_embeddings": False}).args["tie_embeddings"] is False
    for wrong in ({"is_causal": False}, {"quantization_config": {}}, {"tie_word_embeddings": 1}):
        with pytest.raises(ValueError, match=f"config.json of gemma3.* {next(iter(wrong))}"):
            from_hf(seeing | wrong)


def test_the_page_lists_the_families_of_the_table() -> None:
    table, errors = page.listed()
    assert table == page.rows(dict.fromkeys(FAMILIES, 0.0) | errors), "docs/models.md is old: ./scripts/bless_families"
    assert all(0 < error <= page.LIMIT for error in errors.values())
