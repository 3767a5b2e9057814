"""Folders of public families with drawn configurations, each with every kind of layer that its family has.

Sizes, key heads, windows, rotary settings, biases, activations, ties, patterns, experts and the type of the files are
drawn independently, so that combinations are tried which nobody thought of.
"""

from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from tests.training.convert.variants import FULL, SLIDING, Variant, kinds

# Families by what they have.
BIASED = (
    "llama", "qwen3", "olmo2", "olmo3", "smollm3", "granite", "gemma", "gemma2", "gemma3_text", "qwen3_moe", "olmoe",
    "gpt_oss", "seed_oss", "gemma4_text", "qwen3_5_text", "qwen3_5_moe_text", "granitemoe",
)  # fmt: skip
MIXTURES = (
    "mixtral", "gpt_oss", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_5_moe_text", "qwen3_next", "gemma4_text",
    "granitemoe",
)  # fmt: skip
# torch multiplies groups of matrices only if their rows have a multiple of 16 bytes.
ROW = 4
# transformers checks in these families that the heads divide the width.
DIVIDED = ("llama", "gemma2", "gemma3_text")
MLP_BIASED = ("llama", "smollm3", "granite", "seed_oss")
WINDOW_OF_ALL = ("mistral", "ministral3", "mixtral", "phi3")
PATTERNED = ("gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text", "olmo3", "exaone4", "gpt_oss")
SWITCHED = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
LINEAR = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
DENSE_TOO = ("qwen2_moe", "qwen3_moe", "qwen3_next")
CAPPED = ("gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text")
# Families with separate rotary settings of layers with a window.
EACH = ("gemma3_text", "olmo3")
GEMMA4 = ("gemma4_text", "gemma4_unified_text")


class Draw(NamedTuple):
    """A source of random choices."""

    rng: np.random.Generator

    def pick(self, *choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def flag(self) -> bool:
        return bool(self.rng.integers(2))

    def whole(self, least: int, most: int) -> int:
        return int(self.rng.integers(least, most + 1))

    def between(self, least: float, most: float) -> float:
        return round(float(self.rng.uniform(least, most)), 3)

    def letters(self, some: str, count: int) -> str:
        """A text of these letters that has each of them."""
        while {*(found := "".join(self.pick(*some) for _ in range(count)))} != {*some}:
            pass
        return found


def drawn_variant(family: str, seed: int) -> Variant:
    """Draw a folder of a family."""
    draw = Draw(np.random.default_rng([seed, crc32(family.encode())]))
    count, kv_heads, heads_each = draw.whole(3, 5), draw.whole(1, 3), draw.pick(1, 2, 3, 5)
    head_dim = {**dict.fromkeys(LINEAR, 8), "olmoe": ROW}.get(family, 2) * draw.whole(2, 6)
    width = draw.whole(25, 97)
    if family in MIXTURES:
        width -= width % ROW
    if family in DIVIDED:
        width -= width % (kv_heads * heads_each)
    if family in ("phi3", "olmoe"):
        # These families have no separate width of heads.
        width = kv_heads * heads_each * head_dim
    config: dict[str, Any] = {
        "vocab_size": draw.whole(331, 400), "hidden_size": width, "intermediate_size": ROW * draw.whole(5, 27),
        "num_hidden_layers": count, "num_attention_heads": kv_heads * heads_each,
        "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "rms_norm_eps": 1e-2 if family in LINEAR else draw.pick(1e-6, 1e-5, 1e-3), "tie_word_embeddings": draw.flag(),
    }  # fmt: skip
    # Gated DeltaNet is read with silu only.
    act = "silu" if family in LINEAR else draw.pick("silu", "gelu_pytorch_tanh", "relu2")
    if family.startswith("gemma"):
        config |= {"hidden_act": "gelu_pytorch_tanh"} if family == "gemma" else {"hidden_activation": act}
    elif family != "gpt_oss":
        config["hidden_act"] = act
    if family in BIASED:
        config["attention_bias"] = draw.flag()
    if family in MLP_BIASED:
        config["mlp_bias"] = draw.flag()
    config |= _layers(draw, family, count) | _mixture(draw, family, count) | _own(draw, family)
    config |= _gemma4(draw, family, config) if family in GEMMA4 else _rope(draw, family, config["head_dim"])
    dtype = draw.pick("float32", "bfloat16", "float16")
    return Variant(f"{family}-{seed}", family, config, dtype=dtype, shard=draw.pick("50GB", "200KB"))


def _layers(draw: Draw, family: str, count: int) -> dict[str, Any]:
    """Return the kinds of layers: with and without a window, without rotary positions, or with gated DeltaNet."""
    window = draw.whole(5, 100)
    if family in WINDOW_OF_ALL:
        return {"sliding_window": draw.pick(window, None)}
    if family in GEMMA4:
        # Their last layer has no window, and every window has a layer before it.
        return {"sliding_window": window, **kinds(draw.letters("sf", count - 1) + "f")}
    if family in PATTERNED:
        return {"sliding_window": window, **kinds(draw.letters("sf", count))}
    if family in SWITCHED:
        used = {"use_sliding_window": draw.flag(), "sliding_window": window}
        return used | ({"max_window_layers": draw.whole(1, count - 1)} if family != "qwen3_moe" else {})
    if family == "smollm3":
        rotated = [int(letter) for letter in draw.letters("01", count)]
        return {"no_rope_layers": rotated, "use_sliding_window": draw.flag(), "sliding_window": window}
    if family in LINEAR:
        key_heads = draw.whole(1, 3)
        return kinds(draw.letters("lf", count)) | {
            "linear_num_key_heads": key_heads, "linear_num_value_heads": key_heads * draw.whole(1, 3),
            "linear_key_head_dim": draw.whole(5, 16), "linear_value_head_dim": draw.whole(5, 20),
            "linear_conv_kernel_dim": draw.whole(2, 5),
        }  # fmt: skip
    return {}


def _mixture(draw: Draw, family: str, count: int) -> dict[str, Any]:
    """Return the experts, and for families that have them layers with an MLP beside layers with a mixture."""
    experts = draw.whole(2, 9)
    found: dict[str, Any] = {"num_experts_per_tok": draw.whole(1, experts)}
    if family in ("mixtral", "gpt_oss", "granitemoe"):
        return found | {"num_local_experts": experts}
    found["num_experts"] = experts
    if family == "olmoe":
        return found | {"norm_topk_prob": draw.flag()}
    if family not in ("qwen2_moe", "qwen3_moe", "qwen3_5_moe_text", "qwen3_next"):
        return {}
    found["moe_intermediate_size"] = ROW * draw.whole(3, 15)
    if family != "qwen3_moe":
        found["shared_expert_intermediate_size"] = ROW * draw.whole(3, 15)
    if family in DENSE_TOO:
        found["norm_topk_prob"] = draw.flag()
        dense = [number for number, letter in enumerate(draw.letters("ds", count)) if letter == "d"]
        found |= draw.pick({"decoder_sparse_step": 2}, {"mlp_only_layers": dense})
    return found


def _own(draw: Draw, family: str) -> dict[str, Any]:
    """Return what only single families have."""
    found: dict[str, Any] = {}
    if family in CAPPED:
        found["final_logit_softcapping"] = draw.pick(None, draw.between(3, 8))
    if family in ("gemma2", "gemma3_text"):
        found["query_pre_attn_scalar"] = draw.whole(8, 40)
    if family == "gemma2":
        found["attn_logit_softcapping"] = draw.pick(None, draw.between(2, 6))
    if family in ("granite", "granitemoe"):
        found |= {"embedding_multiplier": draw.between(0.5, 12), "residual_multiplier": draw.between(0.2, 1.2)}
        found |= {"attention_multiplier": draw.between(0.1, 0.4), "logits_scaling": draw.between(0.3, 1.5)}
    if family == "seed_oss":
        found["attention_out_bias"] = draw.flag()
    if family == "qwen2_moe":
        found["qkv_bias"] = draw.flag()
    if family == "gpt_oss":
        found["swiglu_limit"] = draw.between(0.5, 7)
    return found


def _gemma4(draw: Draw, family: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the options of Gemma 4: wide layers, per-layer vectors, shared keys, a mixture beside the MLP."""
    heads, letters = config["num_attention_heads"], [kind[0] for kind in config["layer_types"]]
    found = {
        "global_head_dim": 8 * draw.whole(2, 5), "attention_k_eq_v": draw.flag(), "hidden_size_per_layer_input": 0,
        "num_global_key_value_heads": draw.pick(*(one for one in range(1, heads + 1) if heads % one == 0)),
    }  # fmt: skip
    if draw.flag():
        full = _scaled(draw, found["global_head_dim"], ("linear", "default"))
        local = _scaled(draw, config["head_dim"], ("linear", "default"))
        found["rope_parameters"] = {FULL: full, SLIDING: local}
    if family == "gemma4_unified_text":
        return found
    vectors = {"hidden_size_per_layer_input": draw.whole(5, 20), "vocab_size_per_layer_input": config["vocab_size"]}
    found |= draw.pick({}, vectors)
    # Layers that share keys need an earlier layer of their kind.
    shared = max(n for n in range(len(letters)) if {*letters[len(letters) - n :]} <= {*letters[: len(letters) - n]})
    if shared and draw.flag():
        # transformers 5.23 fails without vectors here.
        found |= vectors | {
            "num_kv_shared_layers": shared,
            "use_double_wide_mlp": draw.flag(),
            "attention_k_eq_v": False,
        }
    elif draw.flag():
        experts = draw.whole(2, 8)
        found |= {"enable_moe_block": True, "num_experts": experts, "top_k_experts": draw.whole(1, experts)}
        found["moe_intermediate_size"] = ROW * draw.whole(3, 15)
    return found


def _rope(draw: Draw, family: str, head_dim: int) -> dict[str, Any]:
    """Return the rotary settings."""
    scalings = ("default", "linear", "llama3", "yarn", "longrope")
    if family in EACH:
        full, local = _scaled(draw, head_dim, scalings), _scaled(draw, head_dim, scalings)
        return {"rope_parameters": {FULL: full, SLIDING: local}}
    if family == "phi3":
        # Half of a head has a whole number of pairs.
        share = 0.5 if head_dim % 4 == 0 and draw.flag() else 1.0
        found = _scaled(draw, int(head_dim * share), ("default", "longrope")) | {"partial_rotary_factor": share}
        # transformers reads this length outside of the rotary settings.
        length = found.pop("original_max_position_embeddings", 64)
        return {"rope_parameters": found, "original_max_position_embeddings": length}
    if family in LINEAR:
        share = draw.pick(0.25, 0.5, 1.0)
        scaled = _scaled(draw, int(head_dim * share), ("default", "yarn", "longrope"))
        return {"rope_parameters": scaled | {"partial_rotary_factor": share}}
    found = _scaled(draw, head_dim, scalings)
    if found["rope_type"] == "yarn":
        found["truncate"] = draw.flag()
    if family == "ministral3":
        found |= {"llama_4_scaling_beta": draw.between(0, 0.6)}
        found.setdefault("original_max_position_embeddings", draw.pick(50, 256))
    return {"rope_parameters": found}


def _scaled(draw: Draw, rotated: int, scalings: tuple[str, ...]) -> dict[str, Any]:
    """Return the rotary settings of layers whose heads have so many rotated numbers."""
    kind = draw.pick(*scalings)
    found: dict[str, Any] = {"rope_type": kind, "rope_theta": draw.pick(1e4, 2.5e5, 1e6)}
    length, factor = {"original_max_position_embeddings": draw.pick(64, 256)}, {"factor": draw.between(1.5, 8)}
    if kind == "linear":
        found |= factor
    if kind == "llama3":
        found |= factor | length | {"low_freq_factor": 1.0, "high_freq_factor": draw.between(2, 5)}
    if kind == "yarn":
        found |= factor | length
        found |= draw.pick({}, {"beta_fast": 16.0, "beta_slow": 2.0}, {"attention_factor": draw.between(0.8, 1.3)})
    if kind == "longrope":
        short = [draw.between(1, 2) for _ in range(rotated // 2)]
        found |= length | {"short_factor": short, "long_factor": [draw.between(2, 9) for _ in short]}
    return found
