"""Public families of models as options of our decoder: their config.json and the names of their tensors, both ways.

Names are those of the files on the Hub. Their matrices are [out, in], ours [in, out].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from diloco_jax.training.models.config import DECODER, ModelConfig
from diloco_jax.training.models.moe import MOE, MoeConfig, decoder_of
from diloco_jax.training.models.options import DecoderConfig


class Family(NamedTuple):
    """The choices that all models of a family share.

    Attributes:
      architecture: class in transformers.
      args: of our decoder, where they are not the default.
      defaults: of config.json, where a key is missing.
      experts: prefix of the mixture below a layer, and names of an expert's gate, up and down; None for a plain MLP.
    """

    architecture: str
    args: Mapping[str, Any]
    defaults: Mapping[str, Any] = {}
    experts: tuple[str, str, str, str] | None = None


SILU = {"activation": "silu", "embed_scale": False}
GEMMA = {"norms": "both", "norm_offset": True, "qk_norm": "head", "rope_theta_local": 10_000.0}
GEMMA_KEYS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "hidden_activation": "gelu_pytorch_tanh",
}
QWEN_EXPERTS = ("mlp", "gate_proj", "up_proj", "down_proj")
FAMILIES = {
    "llama": Family("LlamaForCausalLM", SILU),
    "qwen2": Family("Qwen2ForCausalLM", SILU | {"qkv_bias": True}),
    "qwen3": Family("Qwen3ForCausalLM", SILU | {"qk_norm": "head"}, {"head_dim": 128}),
    "olmo2": Family("Olmo2ForCausalLM", SILU | {"norms": "post", "qk_norm": "full"}, {"rms_norm_eps": 1e-5}),
    "gemma3_text": Family("Gemma3ForCausalLM", GEMMA, GEMMA_KEYS),
    "mixtral": Family(
        "MixtralForCausalLM",
        SILU,
        {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2},
        ("block_sparse_moe", "w1", "w3", "w2"),
    ),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", SILU | {"qk_norm": "head"}, {"norm_topk_prob": False}, QWEN_EXPERTS),
}
SIZES = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_dim": "intermediate_size",
    "seq_len_max": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu", "relu2": "relu2"}  # theirs -> ours
REFUSED = {  # key -> the only value that the decoder can do
    "attention_bias": False,
    "mlp_bias": False,
    "use_bidirectional_attention": False,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "partial_rotary_factor": 1.0,
    "attn_logit_softcapping": None,  # transformers reads it and does nothing
}
TABLES = ("embedding", "head")  # not turned
HOW = ("attention", "scan_layers", "remat", "loss_chunk", "dtype", "routing", "capacity_factor", "balance_coefficient")


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Return our model for a config.json of one of the `FAMILIES`.

    Raises:
      ValueError: it is of another family, or of a kind that the decoder cannot be.
    """
    name = config.get("model_type")
    if name == "gemma3":  # with a vision tower; its text part is a model of its own
        config, name = config.get("text_config") or {}, "gemma3_text"
    if name not in FAMILIES:
        raise ValueError(f"config.json: model_type is {name!r}; the families are {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    keys = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu", **family.defaults}
    keys |= {key: value for key, value in config.items() if value is not None}
    _refuse(keys, name)
    args: dict[str, Any] = {**family.args}
    try:
        keys.setdefault("num_key_value_heads", keys["num_attention_heads"])
        keys.setdefault("head_dim", keys["hidden_size"] // keys["num_attention_heads"])
        args |= {ours: keys[theirs] for ours, theirs in SIZES.items()}
        args |= _activation(keys) | _rope(keys, name) | _window(keys, name)
        if family.experts:
            args["experts_per_token"] = keys["num_experts_per_tok"]
            args["num_experts"] = keys["num_local_experts" if "num_local_experts" in keys else "num_experts"]
            args |= {"routing": "dropless", "normalize_weights": bool(keys.get("norm_topk_prob", True))}
            args["mlp_dim"] = keys.get("moe_intermediate_size", keys["intermediate_size"])
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"config.json of {name} lacks or misspells {error}; fetch it again") from error
    if name == "gemma3_text":
        args |= {"attention_width": keys["query_pre_attn_scalar"]}
        args |= {"logit_cap": keys.get("final_logit_softcapping", 0.0)}
    usual = asdict(MoeConfig() if family.experts else DecoderConfig())
    args = {key: type(usual[key])(value) for key, value in args.items() if value != usual[key]}
    model = ModelConfig(module=MOE if family.experts else DECODER, args=args)
    decoder_of(model)  # checks them
    return model


def to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of our model as one of the `FAMILIES`.

    Raises:
      ValueError: it is no built-in decoder, or has an option that its family lacks.
    """
    c = _decoder(model)
    name = _family_of(c)
    family = FAMILIES[name]
    theirs: dict[str, Any] = {"architectures": [family.architecture], "model_type": name, "dtype": "float32"}
    theirs |= {f"{token}_token_id": None for token in ("bos", "eos", "pad")}  # the defaults are other tokenizers'
    theirs |= {key: getattr(c, ours) for ours, key in SIZES.items()}
    activation = next(key for key, ours in ACTIVATIONS.items() if ours == c.activation)
    theirs["hidden_activation" if name == "gemma3_text" else "hidden_act"] = activation
    theirs |= {"rope_theta": c.rope_theta, "rope_scaling": _rope_scaling(c)}
    if any(c.local(layer) for layer in range(c.num_layers)):
        kinds = ["sliding_attention" if c.local(layer) else "full_attention" for layer in range(c.num_layers)]
        theirs |= {"sliding_window": c.window, "use_sliding_window": True, "layer_types": kinds}
    if name == "gemma3_text":
        theirs |= {"rope_local_base_freq": c.rope_theta_local, "sliding_window_pattern": c.global_every or 1}
        theirs |= {"query_pre_attn_scalar": c.attention_width or c.head_dim}
        theirs |= {"final_logit_softcapping": c.logit_cap or None}
    if isinstance(c, MoeConfig):
        experts = "num_local_experts" if name == "mixtral" else "num_experts"
        theirs |= {experts: c.num_experts, "num_experts_per_tok": c.experts_per_token}
        if name == "qwen3_moe":
            theirs |= {"moe_intermediate_size": c.mlp_dim, "norm_topk_prob": c.normalize_weights}
    back, ours = asdict(_decoder(from_hf(theirs))), asdict(c)
    for key in sorted(back.keys() - set(HOW)):
        if back[key] != ours[key] and not (key == "attention_width" and {back[key], ours[key]} == {0, c.head_dim}):
            raise ValueError(
                f"model.args.{key} is {ours[key]!r}, but models of {name} in transformers have {back[key]!r}; "
                "nothing there opens it"
            )
    return theirs


def _decoder(model: ModelConfig) -> DecoderConfig:
    found = decoder_of(model)
    if found is None:
        raise ValueError(
            f"model.module is '{model.module}', of which no family of transformers is known; only the built-in "
            "decoders can be converted"
        )
    return found


def _family_of(c: DecoderConfig) -> str:
    """Return the family that is nearest."""
    if isinstance(c, MoeConfig):
        return "mixtral" if c.qk_norm == "none" else "qwen3_moe"
    if c.norms != "pre":
        return "olmo2" if c.norms == "post" else "gemma3_text"
    if c.qkv_bias:
        return "qwen2"
    return "llama" if c.qk_norm == "none" else "qwen3"


def _refuse(keys: Mapping[str, Any], name: str) -> None:
    for key, wanted in REFUSED.items():
        if keys.get(key, wanted) not in (wanted, []):
            raise ValueError(f"config.json of {name}: {key} is {keys[key]!r}, and the decoder can do {wanted!r} only")


def _activation(keys: Mapping[str, Any]) -> dict[str, Any]:
    name = keys.get("hidden_activation", keys["hidden_act"])
    if name not in ACTIVATIONS:
        raise ValueError(f"config.json: the activation is {name!r}; the decoder has {', '.join(ACTIVATIONS)}")
    return {"activation": ACTIVATIONS[name]}


def _rope(keys: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Read the rotary settings: transformers writes rope_parameters since version 5, before rope_scaling."""
    rope = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
    found: dict[str, Any] = {}
    if name == "gemma3_text":
        local = rope.get("sliding_attention") or {}
        if local.get("rope_type", "default") != "default":
            raise ValueError(f"config.json: rope of the layers with a window is {local}; the decoder does not scale it")
        found["rope_theta_local"] = local.get("rope_theta", keys.get("rope_local_base_freq", 10_000.0))
        rope = rope.get("full_attention", rope)
    kind = rope.get("rope_type", rope.get("type", "default"))
    found["rope_theta"] = rope.get("rope_theta", keys.get("rope_theta", 10_000.0))
    if kind == "default":
        return found
    if kind not in ("linear", "llama3", "yarn"):
        raise ValueError(f"config.json: rope_type is {kind!r}; the decoder has default, linear, llama3 and yarn")
    found |= {"rope_scaling": kind, "rope_factor": rope["factor"]}
    if kind != "linear":
        slow, fast = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ("beta_slow", "beta_fast")
        found["rope_length"] = rope.get("original_max_position_embeddings", keys["max_position_embeddings"])
        found |= {"rope_slow": rope.get(slow) or 1, "rope_fast": rope.get(fast) or (4 if kind == "llama3" else 32)}
    usual = 0.1 * math.log(rope["factor"]) + 1
    if kind == "yarn" and (
        rope.get("mscale")
        or not rope.get("truncate", True)
        or abs(rope.get("attention_factor") or usual) - usual > 1e-6
    ):
        raise ValueError(f"config.json: rope is {rope}; of yarn's options the decoder has factor, beta_fast, beta_slow")
    return found


def _rope_scaling(c: DecoderConfig) -> dict[str, Any] | None:
    if c.rope_scaling == "none":
        return None
    found = {"rope_type": c.rope_scaling, "factor": c.rope_factor}
    if c.rope_scaling != "linear":
        slow, fast = ("low_freq", "high_freq") if c.rope_scaling == "llama3" else ("beta_slow", "beta_fast")
        suffix = "_factor" if c.rope_scaling == "llama3" else ""
        found |= {f"{slow}{suffix}": c.rope_slow, f"{fast}{suffix}": c.rope_fast}
        found["original_max_position_embeddings"] = c.rope_length
    return found


def _window(keys: Mapping[str, Any], name: str) -> dict[str, Any]:
    layers = range(keys["num_hidden_layers"])
    if name == "gemma3_text":
        local = [(layer + 1) % keys["sliding_window_pattern"] > 0 for layer in layers]
    elif name in ("qwen2", "qwen3"):
        local = [
            bool(keys.get("use_sliding_window")) and layer >= keys.get("max_window_layers", 28) for layer in layers
        ]
    else:
        uses = keys.get("use_sliding_window", False) if name == "qwen3_moe" else name == "mixtral"
        local = [bool(uses and keys.get("sliding_window"))] * len(layers)
    if keys.get("layer_types") and name not in ("mixtral", "qwen3_moe"):
        local = [kind == "sliding_attention" for kind in keys["layer_types"]]
    if not any(local):
        return {}
    every = 0 if all(local) else local.index(False) + 1
    if local != [every == 0 or (layer + 1) % every > 0 for layer in layers]:
        raise ValueError(
            f"config.json of {name}: layers with a window are {[i for i in layers if local[i]]}; the decoder "
            "has the window in all layers but each n-th"
        )
    return {"window": keys["sliding_window"], "global_every": every}


@dataclass(frozen=True)
class Mapped:
    """One parameter of ours, and the tensors of theirs that it is made of.

    Attributes:
      hf: their names; of a stack in the order of its layers, and of their experts.
      path: of our parameter.
      shape: of our parameter.
      hf_shape: of each of their tensors.
    """

    hf: tuple[str, ...]
    path: str
    shape: tuple[int, ...]
    hf_shape: tuple[int, ...]

    def to_ours(self, arrays: Sequence[Float[np.ndarray, "..."]]) -> Float[np.ndarray, "..."]:
        """Make our parameter from their tensors, in the order of `hf`."""
        pieces = [array.T if self._turned else array for array in arrays]
        return pieces[0] if self.shape == pieces[0].shape else np.stack(pieces).reshape(self.shape)

    def to_hf(self, array: Float[np.ndarray, "..."]) -> list[Float[np.ndarray, "..."]]:
        """Cut our parameter into their tensors, as views."""
        pieces = array.reshape(len(self.hf), *array.shape[len(array.shape) - len(self.hf_shape) :])
        return [piece.T if self._turned else piece for piece in pieces]

    @property
    def _turned(self) -> bool:
        return self.path.rpartition("/")[2] not in TABLES and len(self.hf_shape) == 2


def tensors(model: ModelConfig) -> list[Mapped]:
    """List all parameters of a model with their tensors in the files of its family.

    Raises:
      ValueError: as `to_hf`.
    """
    c, family = _decoder(model), FAMILIES[to_hf(model)["model_type"]]
    table = (c.vocab_size, c.dim)
    found = [
        Mapped(("model.embed_tokens.weight",), "embed/embedding", table, table),
        Mapped(("model.norm.weight",), "norm_final/scale", (c.dim,), (c.dim,)),
    ]
    if not c.tie_embeddings:
        found.append(Mapped(("lm_head.weight",), "head", table, table))
    stacks = [range(c.num_layers)] if c.scan_layers else [range(i, i + 1) for i in range(c.num_layers)]
    for layers in stacks:
        where, stack = ("blocks", (c.num_layers,)) if c.scan_layers else (f"blocks/{layers[0]}", ())
        for path, name, shape in _layer(c, family):
            ours = stack + shape
            count = range(shape[0] if len(shape) == 3 else 1)
            names = tuple(f"model.layers.{i}.{name.format(e)}" for i in layers for e in count)
            found.append(Mapped(names, f"{where}/{path}", ours, shape[-2:][::-1]))
    return found


def _layer(c: DecoderConfig, family: Family) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield path, name in the files and our shape of each parameter of a layer."""
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    for ours, width in (("q", queries), ("k", keys), ("v", keys)):
        yield f"{ours}/kernel", f"self_attn.{ours}_proj.weight", (c.dim, width)
        if c.qkv_bias:
            yield f"{ours}/bias", f"self_attn.{ours}_proj.bias", (width,)
        if c.qk_norm != "none" and ours != "v":
            yield f"norm_{ours}/scale", f"self_attn.{ours}_norm.weight", (width if c.qk_norm == "full" else c.head_dim,)
    yield "out/kernel", "self_attn.o_proj.weight", (queries, c.dim)
    norms = {
        "pre": ("norm_attention input", "norm_mlp post_attention"),
        "post": ("norm_attention_out post_attention", "norm_mlp_out post_feedforward"),
        "both": (
            "norm_attention input", "norm_attention_out post_attention", "norm_mlp pre_feedforward",
            "norm_mlp_out post_feedforward",
        ),
    }  # fmt: skip
    for ours, theirs in (pair.split() for pair in norms[c.norms]):
        yield f"{ours}/scale", f"{theirs}_layernorm.weight", (c.dim,)
    wide, narrow = (c.dim, c.mlp_dim), (c.mlp_dim, c.dim)
    if family.experts is None:
        for ours, shape in (("gate", wide), ("up", wide), ("down", narrow)):
            yield f"{ours}/kernel", f"mlp.{ours}_proj.weight", shape
        return
    assert isinstance(c, MoeConfig), "its family says so"
    prefix, *names = family.experts
    yield "router", f"{prefix}.gate.weight", (c.dim, c.num_experts)
    for ours, theirs, shape in zip(("gate", "up", "down"), names, (wide, wide, narrow), strict=True):
        yield f"experts_{ours}", f"{prefix}.experts.{{}}.{theirs}.weight", (c.num_experts, *shape)
