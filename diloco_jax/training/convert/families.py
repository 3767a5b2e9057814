"""Public families of models: which tensors of theirs make which parameters of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from diloco_jax.training.models.config import ModelConfig


class Mapped(NamedTuple):
    """One parameter of ours, made of one or several tensors of theirs."""

    hf: tuple[str, ...]
    path: str
    shape: tuple[int, ...]
    to_ours: Callable[[Sequence[np.ndarray]], np.ndarray]
    to_hf: Callable[[np.ndarray], list[np.ndarray]]


def from_hf(config_json: Mapping[str, Any]) -> ModelConfig:
    c = config_json
    if c.get("model_type") != "llama":
        raise ValueError(f"config.json has model_type {c.get('model_type')!r}; choose from llama")
    args = dict(vocab_size=c["vocab_size"], dim=c["hidden_size"], num_layers=c["num_hidden_layers"])
    args |= dict(
        num_heads=c["num_attention_heads"], num_kv_heads=c["num_key_value_heads"], mlp_dim=c["intermediate_size"]
    )
    args |= dict(head_dim=c["head_dim"], activation="silu", seq_len_max=c["max_position_embeddings"])
    return ModelConfig(args=args)


def to_hf(model: ModelConfig) -> dict[str, Any]:
    a = model.args
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": a["vocab_size"],
        "hidden_size": a["dim"],
        "num_hidden_layers": a["num_layers"],
        "num_attention_heads": a["num_heads"],
        "num_key_value_heads": a["num_kv_heads"],
        "intermediate_size": a["mlp_dim"],
        "head_dim": a["head_dim"],
        "hidden_act": "silu",
        "max_position_embeddings": a.get("seq_len_max", 2048),
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }


def tensors(model: ModelConfig) -> Sequence[Mapped]:
    if model.module != "diloco_jax.training.models.decoder:Decoder":
        raise ValueError(f"model.module '{model.module}' is of no public family")
    a, same = model.args, (lambda v: v[0], lambda v: [v])
    d, f, n, k = a["dim"], a["mlp_dim"], a["num_heads"] * a["head_dim"], a["num_kv_heads"] * a["head_dim"]
    turned = (lambda v: v[0].T, lambda v: [v.T])
    found = [Mapped(("model.embed_tokens.weight",), "embed/embedding", (a["vocab_size"], d), *same)]
    found.append(Mapped(("model.norm.weight",), "norm_final/scale", (d,), *same))
    for i in range(a["num_layers"]):
        b, t = f"blocks/{i}/", f"model.layers.{i}."
        for ours, theirs, shape in (
            ("q", "self_attn.q_proj", (d, n)),
            ("k", "self_attn.k_proj", (d, k)),
            ("v", "self_attn.v_proj", (d, k)),
            ("out", "self_attn.o_proj", (n, d)),
            ("gate", "mlp.gate_proj", (d, f)),
            ("up", "mlp.up_proj", (d, f)),
            ("down", "mlp.down_proj", (f, d)),
        ):
            found.append(Mapped((f"{t}{theirs}.weight",), f"{b}{ours}/kernel", shape, *turned))
        found.append(Mapped((f"{t}input_layernorm.weight",), f"{b}norm_attention/scale", (d,), *same))
        found.append(Mapped((f"{t}post_attention_layernorm.weight",), f"{b}norm_mlp/scale", (d,), *same))
    return found
