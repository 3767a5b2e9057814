"""Folders of public models as transformers and people make them: small and random (cases.py lists them).

`make` writes one. Matrices are N(0, 1 / fan in), embeddings N(0, 0.7), and norms and biases are moved by N(0, 0.3) from
their usual values, so that logits have a standard deviation of 2 and more and nothing is near its initial value. The
states of gated DeltaNet remember 20 to 100 tokens.
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
# The first results of a state are tiny wherever a query and its own key are almost orthogonal. With the usual epsilon,
# the norm of results would amplify their rounding in float32.
LINEAR_SIZES = {
    "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 10, "linear_value_head_dim": 14,
    "rms_norm_eps": 1e-2,
}  # fmt: skip
LINEAR_EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56
}  # fmt: skip
# The sizes that only some families have.
OWN_SIZES = {
    "mixtral": {"num_local_experts": 4},
    "granitemoe": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
    },
    # Most gates reach this limit.
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": WINDOW, "swiglu_limit": 0.7},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True},
    "qwen3_5_text": LINEAR_SIZES,
    "qwen3_5_moe_text": LINEAR_SIZES | LINEAR_EXPERTS,
    "qwen3_next": LINEAR_SIZES | LINEAR_EXPERTS,
}
GEMMA = {"sliding_window": WINDOW, "query_pre_attn_scalar": 24, "layer_types": None}
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


class Variant(NamedTuple):
    """One folder."""

    name: str
    family: str
    # Arguments of the class in transformers.
    config: dict[str, Any] = {}
    # A change of config.json after it is saved.
    edit: Edit = lambda config: None
    # True if a layer's experts are in one tensor, as transformers holds them, instead of one for each.
    merged: bool = False
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
    return {"layer_types": [{"s": SLIDING, "f": FULL, "l": LINEAR}[letter] for letter in letters]}


def gemma_rope(full: dict[str, Any], local: dict[str, Any] | None = None) -> dict[str, Any]:
    """Rotary settings of Gemma 3."""
    local = local or {"rope_type": "default", "rope_theta": 10000.0}
    return {"rope_parameters": {FULL: {"rope_theta": 1e6, **full}, SLIDING: local}}


def fill(model: Any, seed: int = 0) -> None:
    """Give all parameters of a model of transformers values like those of a trained one."""
    import torch

    rng = torch.Generator().manual_seed(seed)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        constants = [(name, each) for name, each in model.named_buffers() if name.endswith("layer_scalar")]
        for name, parameter in (*model.named_parameters(), *constants):
            noise = torch.randn(parameter.shape, generator=rng)
            if parameter is embedding or "embed_tokens" in name:
                parameter.copy_(0.7 * noise)
            elif name.endswith("A_log"):
                # With their initial values, most states would forget a token at once.
                parameter.copy_(0.5 * noise - 4)
            elif parameter.dim() < 2:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(noise * (2 if parameter is head else 1) * parameter.shape[-1] ** -0.5)


def drawn(kind: Any, config: Any, seed: int = 0) -> Any:
    """Return a model of transformers whose values depend on the seed alone."""
    import torch

    # `fill` moves vectors from their initial values, and those of attention sinks and routers are random. A draw that
    # changes may some day have a token with two experts that are as good, and then rounding decides between them.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind.from_config(config)
    fill(model, seed)
    return model


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

    sizes = SIZES | OWN_SIZES.get(variant.family, {}) | variant.config
    if "head_dim" not in variant.config and sizes["hidden_size"] != SIZES["hidden_size"]:
        sizes["head_dim"] = None
    model = drawn(transformers.AutoModelForCausalLM, transformers.AutoConfig.for_model(variant.family, **sizes))
    model.to(getattr(torch, variant.dtype)).save_pretrained(
        folder, max_shard_size=variant.shard, save_original_format=not variant.merged
    )
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
