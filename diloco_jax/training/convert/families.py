"""Public families of models: conversion between their config.json and tensors and those of the built-in decoder.

The names of tensors are those of files on the Hub. Matrices in these files are [out, in], in this package [in, out]. In
this module, "ours" is the built-in decoder and "theirs" the public family.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from jaxtyping import Float

from diloco_jax.training.models.config import DECODER, MOE, ModelConfig
from diloco_jax.training.models.moe import MoeConfig, decoder_of
from diloco_jax.training.models.options import LOCAL, DecoderConfig


class Family(NamedTuple):
    """The choices that all models of a family share."""

    # The class in transformers.
    architecture: str
    # Arguments of our decoder that differ from its defaults.
    args: Mapping[str, Any]
    # Keys of config.json with the kinds of their values, in addition to READ.
    read: Mapping[str, str]
    # From our argument to the key of config.json, in addition to SIZES.
    keys: Mapping[str, str] = {}
    # The values of keys that are missing in config.json.
    defaults: Mapping[str, Any] = {}
    # Keys that transformers does not read in this family.
    ignored: Sequence[str] = ()
    # The prefix of the mixture in a layer, then the names of an expert's gate, up and down; empty for an MLP.
    experts: tuple[str, ...] = ()
    # The layers with sliding_window if config.json has no layer_types: never, all, later or pattern (see `_window`).
    window: str = "never"


_WORDS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
# From our argument to the key of config.json.
SIZES: dict[str, str] = _WORDS["sizes"]
ACTIVATIONS: dict[str, str] = _WORDS["activations"]
# For each rope_type, from our argument to its key.
SCALINGS: dict[str, dict[str, str]] = _WORDS["scalings"]
# Keys of config.json, and keys within the rotary settings, with the kinds of their values (keys of KINDS).
READ: dict[str, str] = _WORDS["read"]
ROPE: dict[str, str] = _WORDS["rope"]
# Keys with the only value that the decoder supports.
REFUSED: dict[str, Any] = _WORDS["refused"]
HARMLESS = frozenset(key for line in _WORDS["harmless"] for key in line)
SEEING: list[str] = _WORDS["seeing"]
FAMILIES = {
    name: Family(**{**family, "experts": tuple(family.get("experts", ()))})
    for name, family in _WORDS["families"].items()
}
KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "count": ("a whole number of at least 1", lambda value: _whole(value) and value > 0),
    "whole": ("a whole number of at least 0", lambda value: _whole(value) and value >= 0),
    "number": ("a finite number", lambda value: _whole(value) or (isinstance(value, float) and math.isfinite(value))),
    "switch": ("true or false", lambda value: isinstance(value, bool)),
    "text": ("a text", lambda value: isinstance(value, str)),
    "object": ("an object", lambda value: isinstance(value, dict)),
    "list": ("a list of texts", lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value)),
}
# Tables have the same axes in both formats, so they are not transposed.
TABLES = ("embedding", "head")
HOW = ("attention", "scan_layers", "remat", "loss_chunk", "dtype", "routing", "capacity_factor", "balance_coefficient")
OTHER_NAMES = {"hidden_act": "hidden_activation", "num_experts": "num_local_experts"}
SLIDING, FULL = "sliding_attention", "full_attention"
# Old names of kinds of layers that transformers still accepts.
OLD_KINDS = {"attention": FULL}
LAYERS_MAX, WHOLE_MAX, NAMED_MAX = 10_000, 2**63, 8


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Return our model for a config.json of one of the `FAMILIES`; ValueError names what the decoder does not support.

    A key either determines something here, or is known to have no effect, or is an error.
    """
    name, seeing = config.get("model_type"), None
    if name == "gemma3" and isinstance(config.get("text_config"), Mapping):
        config, name, seeing = config["text_config"], "gemma3_text", config
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(f"config.json: model_type is {name!r}; the families are {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    _check_keys(config, {**READ, **family.read}, {*HARMLESS, *family.ignored}, name)
    keys = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu", **family.defaults, **config}
    if seeing is not None:
        # For such a model, transformers takes tie_word_embeddings from the outer config, and caps no logits.
        _check_keys(seeing, {"tie_word_embeddings": "switch"}, {*HARMLESS, *SEEING}, "gemma3")
        keys |= {"tie_word_embeddings": seeing.get("tie_word_embeddings", True), "final_logit_softcapping": None}
    keys = {key: value for key, value in keys.items() if value is not None}
    for ours, theirs in OTHER_NAMES.items():
        if theirs in family.read and theirs in keys:
            if ours in family.read and (config.get(ours) or keys[theirs]) != keys[theirs]:
                raise ValueError(f"config.json of {name}: {ours} and {theirs} differ; remove the wrong one")
            keys[ours] = keys[theirs]
    try:
        keys.setdefault("num_key_value_heads", keys["num_attention_heads"])
        keys.setdefault("head_dim", keys["hidden_size"] // keys["num_attention_heads"])
        keys.setdefault("final_logit_softcapping", 0.0)
        args = {**family.args, **{ours: keys[theirs] for ours, theirs in {**SIZES, **family.keys}.items()}}
        args |= {**_rope(keys, family, name), **_window(keys, family, name)}
        activation = keys["hidden_act"]
    except KeyError as error:
        raise ValueError(f"config.json of {name} lacks {error}; copy it again") from error
    activations = {theirs: ours for ours, theirs in ACTIVATIONS.items()}
    if activation not in activations:
        raise ValueError(f"config.json: hidden_act is {activation!r:.80}; the decoder has {', '.join(activations)}")
    args["activation"] = activations[activation]
    usual = asdict(MoeConfig() if family.experts else DecoderConfig())
    args = {key: value for key, value in args.items() if value != usual[key]}
    model = ModelConfig(module=MOE if family.experts else DECODER, args=args)
    # Building the decoder's config checks the arguments.
    _decoder(model)
    return model


def _check_keys(found: Mapping[str, Any], read: Mapping[str, str], harmless: Collection[str], where: str) -> None:
    """Refuse unknown keys, values of the wrong kind, and values that the decoder does not support."""
    # A null counts as a missing key, except for is_causal, which transformers then takes as false.
    unknown = [key for key, value in found.items() if value is not None and key not in {*read, *harmless, *REFUSED}]
    if unknown:
        more = f" and {len(unknown) - NAMED_MAX} more" if len(unknown) > NAMED_MAX else ""
        names = ", ".join(ascii(key)[1:-1][:80] for key in sorted(unknown)[:NAMED_MAX])
        raise ValueError(
            f"config.json of {where} has unknown keys: {names}{more}; remove them if the model computes the same "
            "without them"
        )
    for key, wanted in REFUSED.items():
        value = found.get(key, wanted)
        if key not in read and value != wanted and (wanted or value is not None):
            raise ValueError(f"config.json of {where}: {key} is {value!r}, but the decoder supports only {wanted!r}")
    for key, kind in read.items():
        words, fits = KINDS[kind]
        if found.get(key) is not None and not fits(found[key]):
            raise ValueError(f"config.json of {where}: {key} is {found[key]!r:.80}; it must be {words}")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < WHOLE_MAX


def to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of our model as one of the `FAMILIES`; ValueError names what the family does not have."""
    c = _decoder(model)
    name = _family_of(c)
    family = FAMILIES[name]
    if c.activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"model.args.activation is {c.activation!r}, which transformers does not have; use {known}")
    theirs: dict[str, Any] = {"architectures": [family.architecture], "model_type": name, "dtype": "float32"}
    # Without these keys transformers would use the ids of another tokenizer.
    theirs |= {f"{token}_token_id": None for token in ("bos", "eos", "pad")}
    theirs |= {key: getattr(c, ours) for ours, key in {**SIZES, **family.keys}.items()}
    theirs |= {"hidden_act": ACTIVATIONS[c.activation], "rope_theta": c.rope_theta}
    if c.rope_scaling != "none":
        theirs["rope_scaling"] = {"rope_type": c.rope_scaling, "factor": c.rope_factor}
        theirs["rope_scaling"] |= {key: getattr(c, ours) for ours, key in SCALINGS[c.rope_scaling].items()}
    local = [c.kind(layer) == LOCAL for layer in range(c.num_layers)]
    if any(local):
        theirs["sliding_window"] = c.window
        if "use_sliding_window" in family.read:
            theirs["use_sliding_window"] = True
        if family.window in ("later", "pattern"):
            theirs["layer_types"] = [SLIDING if each else FULL for each in local]
    if name == "gemma3_text":
        theirs |= {"sliding_window_pattern": c.global_every or 1, "hidden_activation": theirs.pop("hidden_act")}
        theirs["query_pre_attn_scalar"] = int(c.attention_width) or c.head_dim
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
            f"model.module is '{model.module}', which has no family in transformers; only the built-in decoders can "
            "be converted"
        )
    return found


def _family_of(c: DecoderConfig) -> str:
    """Return the name of the family nearest to a decoder."""
    if c.num_experts:
        return "mixtral" if c.qk_norm == "none" else "qwen3_moe"
    if c.norms != "pre":
        return "olmo2" if c.norms == "post" else "gemma3_text"
    if c.qkv_bias:
        return "qwen2"
    return "llama" if c.qk_norm == "none" else "qwen3"


def _rope(keys: Mapping[str, Any], family: Family, name: str) -> dict[str, Any]:
    """Return our arguments for the rotary settings of a config.json.

    transformers writes them as rope_parameters since version 5, and as rope_scaling before. If both are there,
    rope_scaling replaces rope_parameters, as in transformers; in Gemma 3 it replaces only single keys.
    """
    new, old = keys.get("rope_parameters", {}), keys.get("rope_scaling", {})
    found: dict[str, Any] = {}
    if family.window == "pattern":
        # Each kind of layers has its own rotary settings.
        _check_keys(new, {FULL: "object", SLIDING: "object"}, (), f"{name}, rope_parameters")
        local = _rope_keys(new.get(SLIDING) or {}, name)
        if local["rope_type"] != "default":
            raise ValueError(f"config.json: layers with a window have rope {local}; the decoder does not scale theirs")
        found["rope_theta_local"] = local.get("rope_theta", keys["rope_local_base_freq"])
        rope = _rope_keys({"rope_type": "default", **(new.get(FULL) or {}), **old}, name)
    else:
        rope = _rope_keys(old or new, name)
        # Other families have this key inside the rotary settings; in transformers the outer one takes precedence.
        if "original_max_position_embeddings" in keys:
            rope["original_max_position_embeddings"] = keys["original_max_position_embeddings"]
    kind = rope["rope_type"]
    found["rope_theta"] = rope.get("rope_theta", keys.get("rope_theta", 10_000.0))
    if kind == "default":
        return found
    rope = {SCALINGS["yarn"]["rope_length"]: keys["max_position_embeddings"], **rope}
    if kind == "yarn":
        rope.setdefault("factor", keys["max_position_embeddings"] / rope["original_max_position_embeddings"])
        usual = 0.1 * math.log(max(rope["factor"], 1)) + 1
        rope = {"attention_factor": usual, "beta_slow": 1, "beta_fast": 32, **rope}
        if rope.get("mscale") or not rope.get("truncate", True) or abs(rope["attention_factor"] - usual) > 1e-6:
            raise ValueError(f"config.json: rope is {rope}; of yarn's options the decoder has factor and beta")
    if rope.get("partial_rotary_factor", 1) != 1:
        raise ValueError(f"config.json: rope is {rope}; the decoder turns all of a head, partial_rotary_factor 1.0")
    found |= {"rope_scaling": kind, "rope_factor": rope["factor"]}
    return found | {ours: rope[theirs] for ours, theirs in SCALINGS[kind].items()}


def _rope_keys(rope: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the rotary settings of one kind of layers, checked and without nulls."""
    rope = {key: value for key, value in rope.items() if value is not None}
    kind = rope.setdefault("rope_type", rope.get("type", "default"))
    # This check comes first, because each kind has different keys.
    if kind not in ("default", *SCALINGS):
        raise ValueError(f"config.json: rope_type is {kind!r:.80}; the decoder has default, {', '.join(SCALINGS)}")
    _check_keys(rope, ROPE, (), f"{name}, rotary settings")
    if rope.get("type", kind) != kind:
        raise ValueError(f"config.json of {name}: rope_type {kind!r} and type {rope['type']!r} differ; remove type")
    return rope


def _window(keys: Mapping[str, Any], family: Family, name: str) -> dict[str, Any]:
    """Return our arguments for the sliding window and for the layers that have it."""
    count, window = keys["num_hidden_layers"], keys.get("sliding_window")
    if count > LAYERS_MAX:
        raise ValueError(f"config.json: num_hidden_layers is {count}; use 1 to {LAYERS_MAX}")
    if "use_sliding_window" in family.read and not keys.get("use_sliding_window"):
        window = None
    layers = range(count)
    usual = {
        "never": lambda: [False for _ in layers],
        "all": lambda: [window is not None for _ in layers],
        "later": lambda: [window is not None and layer >= keys["max_window_layers"] for layer in layers],
        "pattern": lambda: [(layer + 1) % keys["sliding_window_pattern"] > 0 for layer in layers],
    }
    if "layer_types" not in keys:
        local = usual[family.window]()
    else:
        kinds = [OLD_KINDS.get(kind, kind) for kind in keys["layer_types"]]
        if len(kinds) != count or not {SLIDING, FULL}.issuperset(kinds):
            raise ValueError(
                f"config.json of {name}: layer_types are {_listed(kinds)}; there must be {count}, each "
                f"{FULL} or {SLIDING}"
            )
        local = [kind == SLIDING for kind in kinds]
        if family.window in ("never", "all") and local != usual[family.window]():
            raise ValueError(
                f"config.json of {name}: layer_types are {_listed(kinds)}, which transformers ignores in this "
                "family; remove them"
            )
    # For Gemma 3, transformers builds a window's mask even if no layer has a window.
    if not window and (any(local) or (window is None and family.window == "pattern")):
        raise ValueError(
            f"config.json of {name}: sliding_window is {'off' if window is None else window}, but the model has layers "
            "with a window, and transformers fails; correct sliding_window, use_sliding_window or layer_types"
        )
    if not any(local):
        return {}
    every = 0 if all(local) else local.index(False) + 1
    if local != [every == 0 or (layer + 1) % every > 0 for layer in layers]:
        words = _listed([SLIDING if each else FULL for each in local])
        raise ValueError(
            f"config.json of {name}: layer_types are {words}; the decoder can give the window to all layers, or to all "
            "except every n-th"
        )
    return {"window": window, "global_every": every}


def _listed(kinds: Sequence[str]) -> str:
    more = f" and {len(kinds) - NAMED_MAX} more" if len(kinds) > NAMED_MAX else ""
    return f"{', '.join(ascii(kind)[1:-1][:40] for kind in kinds[:NAMED_MAX])}{more}"


@dataclass(frozen=True)
class Mapped:
    """One of our parameters with the tensors of a public family that it corresponds to."""

    # The names of their tensors; for a stack in the order of its layers and, within a layer, of its experts.
    hf: tuple[str, ...]
    path: str
    shape: tuple[int, ...]
    # The shape of each tensor in `hf`.
    hf_shape: tuple[int, ...]

    def to_ours(self, arrays: Sequence[Float[np.ndarray, "..."]]) -> Float[np.ndarray, "..."]:
        """Build our parameter from their tensors, which are in the order of `hf`."""
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
    """List all parameters of a model with the corresponding tensors in the files of its family."""
    c, family = _decoder(model), FAMILIES[to_hf(model)["model_type"]]
    table = (c.vocab_size, c.dim)
    found = [
        Mapped(("model.embed_tokens.weight",), "embed/embedding", table, table),
        Mapped(("model.norm.weight",), "norm_final/scale", (c.dim,), (c.dim,)),
    ]
    if not c.tie_embeddings:
        found.append(Mapped(("lm_head.weight",), "head", table, table))
    for stack in c.stacks():
        for path, name, shape in _layer(c, family):
            ours = (len(stack.layers), *shape) if stack.stacked else shape
            count = range(shape[0] if len(shape) == 3 else 1)
            names = tuple(f"model.layers.{i}.{name.format(e)}" for i in stack.layers for e in count)
            found.append(Mapped(names, f"{stack.path}/{path}", ours, shape[-2:][::-1]))
    return found


def _layer(c: DecoderConfig, family: Family) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield path, name in the files and shape of each of our parameters in a layer."""
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
    prefix, *names = family.experts
    yield "router", f"{prefix}.gate.weight", (c.dim, c.num_experts)
    for ours, theirs, shape in zip(("gate", "up", "down"), names, (wide, wide, narrow), strict=True):
        yield f"experts_{ours}", f"{prefix}.experts.{{}}.{theirs}.weight", (c.num_experts, *shape)
