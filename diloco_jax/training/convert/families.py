"""Public families of models as options of our decoder: their config.json and the names of their tensors, both ways.

Names are those of the files on the Hub. Their matrices are [out, in], ours [in, out].
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from jaxtyping import Float

from diloco_jax.training.models.config import DECODER, MOE, ModelConfig
from diloco_jax.training.models.moe import MoeConfig, decoder_of
from diloco_jax.training.models.options import DecoderConfig


class Family(NamedTuple):
    """The choices that all models of a family share."""

    architecture: str  # class in transformers
    args: Mapping[str, Any]  # of our decoder, where they are not the default
    keys: Mapping[str, str] = {}  # our argument -> key of config.json, beside SIZES
    defaults: Mapping[str, Any] = {}  # of config.json, where a key is missing
    experts: tuple[str, ...] = ()  # prefix of the mixture in a layer, and an expert's gate, up and down; none: an MLP


_WORDS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
SIZES: dict[str, str] = _WORDS["sizes"]  # our argument -> key of config.json
ACTIVATIONS: dict[str, str] = _WORDS["activations"]
SCALINGS: dict[str, dict[str, str]] = _WORDS["scalings"]  # rope_type -> our argument -> its key
REFUSED: dict[str, Any] = _WORDS["refused"]  # key -> the only value that the decoder can do
FAMILIES = {
    name: Family(**{**family, "experts": tuple(family.get("experts", ()))})
    for name, family in _WORDS["families"].items()
}
TABLES = ("embedding", "head")  # not turned
HOW = ("attention", "scan_layers", "remat", "loss_chunk", "dtype", "routing", "capacity_factor", "balance_coefficient")
OTHER_NAMES = {"hidden_act": "hidden_activation", "num_experts": "num_local_experts"}
LAYERS_MAX = 10_000


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Return our model for a config.json of one of the `FAMILIES`; a ValueError says what the decoder cannot be."""
    name = config.get("model_type")
    if name == "gemma3" and isinstance(config.get("text_config"), Mapping):  # it sees as well
        config, name = config["text_config"], "gemma3_text"
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(f"config.json: model_type is {name!r}; the families are {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    keys = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu", **family.defaults}
    keys |= {key: value for key, value in config.items() if value is not None}
    keys |= {ours: keys[theirs] for ours, theirs in OTHER_NAMES.items() if theirs in keys}
    for key, wanted in REFUSED.items():
        if keys.get(key, wanted) != wanted:
            raise ValueError(f"config.json of {name}: {key} is {keys[key]!r}, but the decoder can do {wanted!r} only")
    try:
        keys.setdefault("num_key_value_heads", keys["num_attention_heads"])
        keys.setdefault("head_dim", keys["hidden_size"] // keys["num_attention_heads"])
        args = {**family.args, **_rope(keys), **_window(keys, name)}
        args |= {ours: keys[theirs] for ours, theirs in {**SIZES, **family.keys}.items()}
    except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"config.json of {name} lacks or misspells {error}; copy it again") from error
    activations = {theirs: ours for ours, theirs in ACTIVATIONS.items()}
    if str(keys["hidden_act"]) not in activations:
        raise ValueError(f"config.json: hidden_act is {keys['hidden_act']!r}; the decoder has {', '.join(activations)}")
    args["activation"] = activations[keys["hidden_act"]]
    usual = asdict(MoeConfig() if family.experts else DecoderConfig())
    args = {key: value for key, value in args.items() if value != usual[key]}
    model = ModelConfig(module=MOE if family.experts else DECODER, args=args)
    _decoder(model)  # checks them
    return model


def to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of our model as one of the `FAMILIES`; a ValueError says what its family lacks."""
    c = _decoder(model)
    name = _family_of(c)
    family = FAMILIES[name]
    theirs: dict[str, Any] = {"architectures": [family.architecture], "model_type": name, "dtype": "float32"}
    theirs |= {f"{token}_token_id": None for token in ("bos", "eos", "pad")}  # the defaults are other tokenizers'
    theirs |= {key: getattr(c, ours) for ours, key in {**SIZES, **family.keys}.items()}
    theirs |= {"hidden_act": ACTIVATIONS[c.activation], "rope_theta": c.rope_theta}
    if c.rope_scaling != "none":
        theirs["rope_scaling"] = {"rope_type": c.rope_scaling, "factor": c.rope_factor}
        theirs["rope_scaling"] |= {key: getattr(c, ours) for ours, key in SCALINGS[c.rope_scaling].items()}
    local = [c.local(layer) for layer in range(c.num_layers)]
    if any(local):
        kinds = ["sliding_attention" if each else "full_attention" for each in local]
        theirs |= {"sliding_window": c.window, "use_sliding_window": True, "layer_types": kinds}
    if name == "gemma3_text":
        theirs |= {"sliding_window_pattern": c.global_every or 1, "hidden_activation": theirs["hidden_act"]}
        theirs["query_pre_attn_scalar"] = c.attention_width or c.head_dim
        theirs["final_logit_softcapping"] = c.logit_cap or None
    if name == "mixtral":
        theirs["num_local_experts"] = theirs.pop("num_experts")
    back, ours = asdict(_decoder(from_hf(theirs))), asdict(c)
    ours["attention_width"] = c.attention_width or (back["attention_width"] and c.head_dim)
    for key in sorted(back.keys() - set(HOW)):
        if back[key] != ours[key]:
            raise ValueError(
                f"model.args.{key} is {ours[key]!r}, but models of {name} in transformers have {back[key]!r}"
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


def _rope(keys: dict[str, Any]) -> dict[str, Any]:
    """Read the rotary settings: transformers writes rope_parameters since version 5, before that rope_scaling."""
    rope = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
    if "full_attention" in rope:  # one for each kind of layers
        local, rope = rope["sliding_attention"], rope["full_attention"]
        if local.get("rope_type", "default") != "default":
            raise ValueError(f"config.json: layers with a window have rope {local}; the decoder does not scale theirs")
        keys["rope_local_base_freq"] = local["rope_theta"]
    rope = {key: value for key, value in rope.items() if value is not None}
    kind = rope.get("rope_type", rope.get("type", "default"))
    found = {"rope_theta": rope.get("rope_theta", keys.get("rope_theta", 10_000.0))}
    if kind == "default":
        return found
    if kind not in SCALINGS:
        raise ValueError(f"config.json: rope_type is {kind!r}; the decoder has default, {', '.join(SCALINGS)}")
    if kind == "yarn":
        usual = 0.1 * math.log(max(rope["factor"], 1)) + 1
        rope = {"attention_factor": usual, "beta_slow": 1, "beta_fast": 32, **rope}
        if rope.get("mscale") or not rope.get("truncate", True) or abs(rope["attention_factor"] - usual) > 1e-6:
            raise ValueError(f"config.json: rope is {rope}; of yarn's options the decoder has factor and beta")
    rope = {SCALINGS["yarn"]["rope_length"]: keys["max_position_embeddings"], **rope}
    found |= {"rope_scaling": kind, "rope_factor": rope["factor"]}
    return found | {ours: rope[theirs] for ours, theirs in SCALINGS[kind].items()}


def _window(keys: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Read the sliding window, and which layers have it."""
    count, window = keys["num_hidden_layers"], keys.get("sliding_window")
    if not 0 < count < LAYERS_MAX:
        raise ValueError(f"config.json: num_hidden_layers is {count}; use 1 to {LAYERS_MAX}")
    layers = range(count)
    if not window or (name.startswith("qwen") and not keys.get("use_sliding_window")):
        return {}
    if name == "gemma3_text":
        local = [(layer + 1) % keys["sliding_window_pattern"] > 0 for layer in layers]
    else:
        local = [name in ("mixtral", "qwen3_moe") or layer >= keys.get("max_window_layers", 28) for layer in layers]
    if name in ("gemma3_text", "qwen2", "qwen3") and keys.get("layer_types"):
        local = [kind == "sliding_attention" for kind in keys["layer_types"]]
    if not any(local) or name in ("llama", "olmo2"):
        return {}
    every = 0 if all(local) else local.index(False) + 1
    if local != [every == 0 or (layer + 1) % every > 0 for layer in layers]:
        raise ValueError(f"config.json of {name}: layer_types are {local} a window; the decoder has all but each n-th")
    return {"window": window, "global_every": every}


@dataclass(frozen=True)
class Mapped:
    """One parameter of ours, and the tensors of theirs that it is made of."""

    hf: tuple[str, ...]  # their names; of a stack in the order of its layers, and of their experts
    path: str
    shape: tuple[int, ...]
    hf_shape: tuple[int, ...]  # of each of their tensors

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
    """List all parameters of a model with their tensors in the files of its family."""
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
    before, after = c.norms != "post", c.norms != "pre"
    if before:
        yield "norm_attention/scale", "input_layernorm.weight", (c.dim,)
        yield "norm_mlp/scale", f"{'pre_feedforward' if after else 'post_attention'}_layernorm.weight", (c.dim,)
    if after:
        yield "norm_attention_out/scale", "post_attention_layernorm.weight", (c.dim,)
        yield "norm_mlp_out/scale", "post_feedforward_layernorm.weight", (c.dim,)
    wide, narrow = (c.dim, c.mlp_dim), (c.mlp_dim, c.dim)
    if not family.experts:
        for ours, shape in (("gate", wide), ("up", wide), ("down", narrow)):
            yield f"{ours}/kernel", f"mlp.{ours}_proj.weight", shape
        return
    assert isinstance(c, MoeConfig), "its family says so"
    prefix, *names = family.experts
    yield "router", f"{prefix}.gate.weight", (c.dim, c.num_experts)
    for ours, theirs, shape in zip(("gate", "up", "down"), names, (wide, wide, narrow), strict=True):
        yield f"experts_{ours}", f"{prefix}.experts.{{}}.{theirs}.weight", (c.num_experts, *shape)
