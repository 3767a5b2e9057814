"""Public families of models: conversion between their config.json and the arguments of the built-in decoder."""

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from diloco_jax.training.convert.keys import check_keys
from diloco_jax.training.convert.layers import OF_SCALING, of_layers, read_layers, write_layers
from diloco_jax.training.convert.table import ACTIVATIONS, FAMILIES, HARMLESS, REFUSED, SEEING, VALUES, Family
from diloco_jax.training.convert.tower import read_tower, write_tower
from diloco_jax.training.models.config import DECODER, MOE, SEEING_DECODER, ModelConfig
from diloco_jax.training.models.moe import MoeConfig, decoder_of
from diloco_jax.training.models.options import GLOBAL, LOCAL, WHOLE, DecoderConfig
from diloco_jax.training.models.seeing import SeeingConfig

# Arguments that change how a model is computed, but not which model it is.
HOW = (
    "attention", "scan_layers", "remat", "splash_block", "lookup", "loss_chunk", "dtype", "routing", "capacity_factor",
    "balance_coefficient",
)  # fmt: skip
# For each mixer, the arguments that matter only in layers with it.
MIXERS = {
    "attention": OF_SCALING | {
        "num_heads", "num_kv_heads", "head_dim", "rope_fraction", "query_beta", "window", "attention_width",
        "attention_cap", "attention_sinks", "attention_gate", "keys_as_values", "value_norm", "kv_from", "qk_norm",
        "qkv_bias", "out_bias",
    },
    "delta": {"delta_key_heads", "delta_value_heads", "delta_key_dim", "delta_value_dim", "delta_conv"},
}  # fmt: skip
# The arguments that matter only in layers with a mixture, beside their number of experts.
OF_MIXTURE = {"experts_per_token", "expert_dim", "normalize_weights"}
# Arguments that are 0 where config.json has null.
NULL_IF_ZERO = ("attention_cap", "logit_cap")
# Keys whose values are powers of our argument, with the exponent from theirs to ours.
INVERSE = {"attention_multiplier": -2, "logits_scaling": -1}
# The model_type of models with a vision tower, and of their text.
WITH_TOWER, TEXT_OF_TOWER = "gemma4", "gemma4_text"
# From our argument of a model with a tower to the key of config.json.
IMAGE_IDS = {"image_token": "image_token_id", "image_begin": "boi_token_id", "image_end": "eoi_token_id"}
# Arguments that only a model with a tower has.
OF_SEEING = {one.name for one in fields(SeeingConfig)} - {one.name for one in fields(DecoderConfig)}


def family_name(config: Mapping[str, Any]) -> str:
    """Return the family of a config.json, which is that of its text if the model sees as well."""
    name = outer = config.get("model_type")
    text = config.get("text_config")
    if isinstance(name, str) and name in SEEING and isinstance(text, Mapping):
        name = text.get("model_type", SEEING[name]["text"])
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(
            f"config.json: model_type is {outer!r:.80}{_text_inside(text)}; the families are {', '.join(FAMILIES)}"
        )
    return name


def _text_inside(text: Any) -> str:
    """Describe the text model inside a refused model, and how to import it.

    Args:
        text: the model's text_config; None if it has none.
    """
    kind = text.get("model_type") if isinstance(text, Mapping) else None
    if not isinstance(kind, str):
        return ""
    if kind not in FAMILIES:
        return f", with a text model of type {kind!r:.80} inside"
    return (
        f", with a text model of the family {kind} inside, which is read only from {', '.join(SEEING)}; save the text "
        f"model alone with transformers, as {FAMILIES[kind].architecture}"
    )


def from_hf(config: Mapping[str, Any], images: bool = False) -> ModelConfig:
    """Return our model for a config.json of one of the `FAMILIES`; ValueError names what the decoder does not support.

    A key either determines something here, or is known to have no effect, or is an error.

    Args:
        config: the content of config.json.
        images: whether to return the model with its vision tower, instead of its text alone.
    """
    if images:
        return _with_tower(config)
    name = family_name(config)
    family = FAMILIES[name]
    keys = _keys(config, family, name)
    try:
        keys.setdefault("num_key_value_heads", keys["num_attention_heads"])
        keys.setdefault("head_dim", keys["hidden_size"] // keys["num_attention_heads"])
        for ours in NULL_IF_ZERO:
            keys.setdefault(family.keys.get(ours, ours), 0.0)
        off = {each for switch, some in family.switched.items() if not keys[family.keys[switch]] for each in some}
        args = {ours: value for ours, value in family.args.items() if ours not in off}
        args |= {ours: _ours(theirs, keys[theirs]) for ours, theirs in family.names.items() if ours not in off}
        args |= read_layers(keys, args, family, name)
        activation = keys["hidden_act"]
    except KeyError as error:
        raise ValueError(f"config.json of {name} lacks {error}, or has null for it; copy it again") from error
    activations = {theirs: ours for ours, theirs in ACTIVATIONS.items()}
    if activation not in activations:
        raise ValueError(f"config.json: hidden_act is {activation!r:.80}; the decoder has {', '.join(activations)}")
    args["activation"] = activations[activation]
    usual = asdict(MoeConfig() if family.mixture else DecoderConfig())
    args = {key: value for key, value in args.items() if value != usual[key]}
    for options in args.get("kinds", {}).values():
        for key in [key for key, value in options.items() if value == args.get(key, usual[key])]:
            del options[key]
    model = ModelConfig(module=MOE if family.mixture else DECODER, args=args)
    # Building the decoder's config checks the arguments.
    _check_activation(decoder(model))
    return model


def _check_activation(c: DecoderConfig) -> None:
    """Refuse an activation that transformers lacks, or that makes another model in transformers."""
    if c.activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"model.args.activation is {c.activation!r}, which transformers does not have; use {known}")
    if c.activation != "silu" and any(layer.mixer == "delta" for layer in of_layers(c)):
        raise ValueError(
            f"model.args.activation is {c.activation!r}, but the convolution of gated DeltaNet has silu here, and the "
            "activation of the MLP (hidden_act) in transformers; only silu gives both the same model"
        )


def _with_tower(config: Mapping[str, Any]) -> ModelConfig:
    """Return our model of images and text for a config.json."""
    text, vision = from_hf(config), config.get("vision_config")
    if config["model_type"] != WITH_TOWER or not isinstance(vision, Mapping):
        raise ValueError(
            f"config.json: model_type is {config['model_type']!r}, vision_config {type(vision).__name__}; only models "
            f"of {WITH_TOWER} have a tower that can be read; import the text alone, without images"
        )
    args = {"vocab_size": decoder(text).vocab_size, **text.args, "tower": read_tower(vision)}
    args |= {ours: config[theirs] for ours, theirs in IMAGE_IDS.items() if config.get(theirs) is not None}
    args["pad_token"] = config["text_config"].get("pad_token_id") or 0
    if config["text_config"].get("use_bidirectional_attention") == "vision":
        args = _see_in_windows(args)
    model = ModelConfig(module=SEEING_DECODER, args=args)
    # Building the config checks the arguments.
    decoder(model)
    return model


def _see_in_windows(args: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with `see_images` in the layers with a window."""
    if "kinds" in args:
        kinds = {
            name: {**options, "see_images": True} if options.get("window", args.get("window", 0)) else options
            for name, options in args["kinds"].items()
        }
        return {**args, "kinds": kinds}
    # A window of all layers, or of all but every n-th, becomes two kinds of layers.
    short = {"window": args.get("window", 0), "global_every": args.get("global_every", 0)}
    rest = {name: value for name, value in args.items() if name not in (*short, "rope_theta_local")}
    if not short["window"]:
        return rest
    local = {"window": short["window"], "see_images": True}
    if theta := args.get("rope_theta_local", 0.0):
        local |= {"rope_theta": theta, "rope_scaling": "none"}
    pattern = [LOCAL] * (short["global_every"] - 1) + [GLOBAL] if short["global_every"] else [LOCAL]
    return {**rest, "pattern": pattern, "kinds": {LOCAL: local, GLOBAL: {}}}


def _keys(config: Mapping[str, Any], family: Family, name: str) -> dict[str, Any]:
    """Return the checked keys of a config.json with the family's values for missing ones, and without nulls."""
    seeing, config = (config, config["text_config"]) if config["model_type"] != name else (None, config)
    spelled = {key: value for key, value in family.spellings.items() if isinstance(config.get(key), str)}
    config = {**config, **{key: values.get(config[key], config[key]) for key, values in spelled.items()}}
    check_keys(config, family.known, {*HARMLESS, *family.ignored}, name)
    config = {key: value for key, value in config.items() if key not in family.ignored}
    keys = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu", **REFUSED, **family.defaults}
    keys |= config
    if seeing is not None:
        # For such a model, transformers takes tie_word_embeddings from the outer config.
        outer = seeing["model_type"]
        check_keys(seeing, {"tie_word_embeddings": "switch"}, {*HARMLESS, *SEEING[outer]["harmless"]}, outer)
        keys["tie_word_embeddings"] = seeing.get("tie_word_embeddings", SEEING[outer].get("tied", True))
        keys |= dict.fromkeys(SEEING[outer].get("ignored", ()))
    keys = {key: value for key, value in keys.items() if value is not None}
    _rename(keys, config, family, name)
    return keys


def _rename(keys: dict[str, Any], config: Mapping[str, Any], family: Family, name: str) -> None:
    """Give keys their usual names."""
    for usual, theirs in (*family.renamed.items(), *family.also.items()):
        if theirs in keys:
            if usual in family.known and (config.get(usual) or keys[theirs]) != keys[theirs]:
                raise ValueError(f"config.json of {name}: {usual} and {theirs} differ; remove the wrong one")
            keys[usual] = keys[theirs]


def to_hf(model: ModelConfig, family: str = "") -> dict[str, Any]:
    """Return the config.json of our model as one of the `FAMILIES`; ValueError names what the family does not have.

    Args:
        model: a model whose module is a built-in decoder.
        family: the family to prefer if it has such models. Otherwise the result is the first family of the table that
            has them.
    """
    if model.module == SEEING_DECODER:
        return _tower_to_hf(model)
    c = decoder(model)
    _check_activation(c)
    experts = any(layer.num_experts for layer in of_layers(c))
    nearest: dict[str, tuple[Any, Any]] | None = None
    for name in sorted(FAMILIES, key=lambda each: each != family):
        if (experts and "num_experts" not in FAMILIES[name].keys) or (not experts and FAMILIES[name].mixture):
            continue
        theirs = _written(c, name)
        try:
            differ = _differences(c, decoder(from_hf(theirs)))
        except ValueError as error:
            differ = {"": (error, None)} if nearest is None else nearest
        if not differ:
            return theirs
        if nearest is None or "" in nearest or len(differ) < len(nearest):
            nearest, of = differ, name
    assert nearest is not None, "there are families with experts and without"
    key, (ours, back) = min(nearest.items())
    if not key:
        raise ours
    raise ValueError(f"model.args.{key} is {ours!r}, but models of {of} in transformers have {back!r}")


def text_of(model: ModelConfig) -> ModelConfig:
    """Return the text model within a model of images and text."""
    args = {name: value for name, value in model.args.items() if name not in OF_SEEING}
    if "kinds" in args:
        args["kinds"] = {
            name: {key: value for key, value in options.items() if key not in OF_SEEING}
            for name, options in args["kinds"].items()
        }
    return ModelConfig(args={"vocab_size": decoder(model).vocab_size, **args})


def _tower_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a model of images and text."""
    c, text = decoder(model), to_hf(text_of(model), TEXT_OF_TOWER)
    assert isinstance(c, SeeingConfig), "the module is that of models with a tower"
    if text["model_type"] != TEXT_OF_TOWER:
        raise ValueError(f"the text of the model is one of {text['model_type']}, but only {WITH_TOWER} has our tower")
    layers = of_layers(c)
    sees, windows = (
        [isinstance(layer, SeeingConfig) and layer.see_images for layer in layers],
        [layer.window > 0 for layer in layers],
    )
    if any(sees) and sees != windows:
        raise ValueError(
            f"model.args.see_images is true in {sum(sees)} layers, but models of {WITH_TOWER} in transformers have it "
            f"in all {sum(windows)} layers with a window, or in none"
        )
    del text["architectures"], text["dtype"]
    text |= {"pad_token_id": c.pad_token, "use_bidirectional_attention": "vision" if any(sees) else None}
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": WITH_TOWER,
        "dtype": "float32",
        "tie_word_embeddings": c.tie_embeddings,
        "text_config": text,
        "vision_config": write_tower(c.tower_config()),
        "audio_config": None,
        **{theirs: getattr(c, ours) for ours, theirs in IMAGE_IDS.items()},
    }


def _written(c: DecoderConfig, name: str) -> dict[str, Any]:
    """Return a config.json of a family that is as near to a decoder as the family can be."""
    family, layers = FAMILIES[name], of_layers(c)
    # If layers differ, most keys describe those with a mixture, and of these, or of all, those with a window.
    layer = max(layers, key=lambda one: (one.num_experts > 0, one.window > 0))
    first_of = {mixer: next((one for one in (layer, *layers) if one.mixer == mixer), layer) for mixer in MIXERS}
    source = dict.fromkeys(WHOLE, c)
    source |= {ours: first_of[mixer] for mixer, options in MIXERS.items() for ours in options}
    theirs: dict[str, Any] = {"architectures": [family.architecture], "model_type": name, "dtype": "float32"}
    # Without these keys transformers would use the ids of another tokenizer.
    theirs |= {f"{token}_token_id": None for token in ("bos", "eos", "pad")}
    off = {each for switch, some in family.switched.items() if not getattr(layer, switch) for each in some}
    for ours, key in family.names.items():
        if ours in off:
            continue
        value = _theirs(ours, key, getattr(source.get(ours, layer), ours), first_of["attention"])
        # A value that families without the key have is written only where it is not the usual one.
        if key not in REFUSED or key in family.defaults or value != REFUSED[key]:
            theirs[key] = value
    theirs |= {"hidden_act": ACTIVATIONS[c.activation], **write_layers(c, family)}
    for usual, key in family.renamed.items():
        theirs[key] = theirs.pop(usual)
    return theirs


def _ours(key: str, value: Any) -> Any:
    """Return the value of our argument for the value of a key."""
    if key in INVERSE and value <= 0:
        raise ValueError(f"config.json: {key} is {value}; the decoder supports only numbers above 0")
    return value ** INVERSE[key] if key in INVERSE else value


def _theirs(ours: str, key: str, value: Any, layer: DecoderConfig) -> Any:
    """Return the value of a key for the value of our argument."""
    if ours == "attention_width":
        value = value or layer.head_dim
    if key in INVERSE:
        return value ** (1 / INVERSE[key])
    if ours in NULL_IF_ZERO and not value:
        return None
    return int(value) if VALUES[key] == "count" else value


def _differences(c: DecoderConfig, other: DecoderConfig) -> dict[str, tuple[Any, Any]]:
    """Return the arguments that make two decoders compute something else, with their values in the first such layer."""
    found: dict[str, tuple[Any, Any]] = {}
    for first, second in zip(_resolved(c), _resolved(other), strict=False):
        for key in first.keys() & second.keys():
            if not _equal(first[key], second[key]):
                found.setdefault(key, (first[key], second[key]))
    return found


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, float):
        return math.isclose(first, second, rel_tol=1e-9)
    return bool(first == second)


def _resolved(c: DecoderConfig) -> list[dict[str, Any]]:
    """Return what each layer computes: its options, without those that do nothing."""
    found = []
    sources: dict[str, int] = {}
    kinds: dict[str, dict[str, Any]] = {}
    for number in range(c.num_layers):
        name = c.kind(number)
        if name not in kinds:
            one = c.of_kind(name)
            unused = {*HOW, "pattern", "kinds"} | (OF_SCALING - {"rope_theta", "rope_scaling"})
            if one.rope_scaling != "none" and one.rope_theta:
                unused -= OF_SCALING
            if one.query_beta:
                unused -= {"rope_length"}
            if not one.num_experts:
                unused |= OF_MIXTURE
            unused |= {each for mixer, options in MIXERS.items() if mixer != one.mixer for each in options}
            whole = asdict(one) | {"attention_width": one.attention_width or one.head_dim}
            kinds[name] = {key: value for key, value in whole.items() if key not in unused}
        found.append({**kinds[name], "kv_from": sources.get(c.of_kind(name).kv_from, "")})
        sources[name] = number
    return found


def decoder(model: ModelConfig) -> DecoderConfig:
    """Return the configuration of a built-in decoder; ValueError for other models."""
    found = decoder_of(model)
    if found is None:
        raise ValueError(
            f"model.module is '{model.module}', which has no family in transformers; only the built-in decoders can "
            "be converted"
        )
    return found
