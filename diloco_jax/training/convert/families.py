"""Public families of models: conversion between their config.json and the arguments of the built-in decoder."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from diloco_jax.training.convert.keys import check_keys
from diloco_jax.training.convert.layers import read_layers, write_layers
from diloco_jax.training.convert.rope import read_rope, write_rope
from diloco_jax.training.convert.table import ACTIVATIONS, FAMILIES, HARMLESS, SEEING, Family
from diloco_jax.training.models.config import DECODER, MOE, ModelConfig
from diloco_jax.training.models.moe import MoeConfig, decoder_of
from diloco_jax.training.models.options import DecoderConfig

# Arguments that change how a model is computed, but not which model it is.
HOW = (
    "attention", "scan_layers", "remat", "splash_block", "lookup", "loss_chunk", "dtype", "routing", "capacity_factor",
    "balance_coefficient",
)  # fmt: skip
# Arguments that are 0 where config.json has null.
NULL_IF_ZERO = ("attention_cap", "logit_cap")


def family_name(config: Mapping[str, Any]) -> str:
    """Return the family of a config.json, which is that of its text if the model sees as well."""
    name = config.get("model_type")
    text = config.get("text_config")
    if isinstance(name, str) and name in SEEING and isinstance(text, Mapping):
        name = text.get("model_type", SEEING[name]["text"])
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(f"config.json: model_type is {name!r}; the families are {', '.join(FAMILIES)}")
    return name


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Return our model for a config.json of one of the `FAMILIES`; ValueError names what the decoder does not support.

    A key either determines something here, or is known to have no effect, or is an error.
    """
    name = family_name(config)
    family, seeing = FAMILIES[name], None
    if config["model_type"] != name:
        config, seeing = config["text_config"], config
    check_keys(config, family.known, {*HARMLESS, *family.ignored}, name)
    config = {key: value for key, value in config.items() if key not in family.ignored}
    keys = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu", **family.defaults, **config}
    if seeing is not None:
        # For such a model, transformers takes tie_word_embeddings from the outer config.
        outer = seeing["model_type"]
        check_keys(seeing, {"tie_word_embeddings": "switch"}, {*HARMLESS, *SEEING[outer]["harmless"]}, outer)
        keys["tie_word_embeddings"] = seeing.get("tie_word_embeddings", True)
        keys |= dict.fromkeys(SEEING[outer].get("ignored", ()))
    keys = {key: value for key, value in keys.items() if value is not None}
    _rename(keys, config, family, name)
    try:
        keys.setdefault("num_key_value_heads", keys["num_attention_heads"])
        keys.setdefault("head_dim", keys["hidden_size"] // keys["num_attention_heads"])
        for ours in NULL_IF_ZERO:
            keys.setdefault(family.keys.get(ours, ours), 0.0)
        args = {**family.args, **{ours: keys[theirs] for ours, theirs in family.names.items()}}
        args |= {**read_rope(keys, family, name), **read_layers(keys, family, name)}
        activation = keys["hidden_act"]
    except KeyError as error:
        raise ValueError(f"config.json of {name} lacks {error}; copy it again") from error
    activations = {theirs: ours for ours, theirs in ACTIVATIONS.items()}
    activation = family.spellings.get("hidden_act", {}).get(activation, activation)
    if activation not in activations:
        raise ValueError(f"config.json: hidden_act is {activation!r:.80}; the decoder has {', '.join(activations)}")
    args["activation"] = activations[activation]
    usual = asdict(MoeConfig() if family.mixture else DecoderConfig())
    args = {key: value for key, value in args.items() if value != usual[key]}
    model = ModelConfig(module=MOE if family.mixture else DECODER, args=args)
    # Building the decoder's config checks the arguments.
    decoder(model)
    return model


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
    c = decoder(model)
    if c.activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"model.args.activation is {c.activation!r}, which transformers does not have; use {known}")
    nearest: dict[str, tuple[Any, Any]] | None = None
    for name in sorted(FAMILIES, key=lambda each: each != family):
        if FAMILIES[name].mixture != bool(c.num_experts):
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


def _written(c: DecoderConfig, name: str) -> dict[str, Any]:
    """Return a config.json of a family that is as near to a decoder as the family can be."""
    family = FAMILIES[name]
    theirs: dict[str, Any] = {"architectures": [family.architecture], "model_type": name, "dtype": "float32"}
    # Without these keys transformers would use the ids of another tokenizer.
    theirs |= {f"{token}_token_id": None for token in ("bos", "eos", "pad")}
    theirs |= {key: _value(c, ours) for ours, key in family.names.items()}
    theirs |= {"hidden_act": ACTIVATIONS[c.activation], **write_rope(c), **write_layers(c, family)}
    for usual, key in family.renamed.items():
        theirs[key] = theirs.pop(usual)
    return theirs


def _value(c: DecoderConfig, ours: str) -> Any:
    value = getattr(c, ours)
    if ours == "attention_width":
        return int(value) or c.head_dim
    return None if ours in NULL_IF_ZERO and not value else value


def _differences(c: DecoderConfig, other: DecoderConfig) -> dict[str, tuple[Any, Any]]:
    """Return the arguments that make two decoders compute something else."""
    first, second = _resolved(c), _resolved(other)
    return {key: (first[key], second[key]) for key in first if first[key] != second[key]}


def _resolved(c: DecoderConfig) -> dict[str, Any]:
    found = {key: value for key, value in asdict(c).items() if key not in HOW}
    return found | {"attention_width": c.attention_width or c.head_dim}


def decoder(model: ModelConfig) -> DecoderConfig:
    """Return the configuration of a built-in decoder; ValueError for other models."""
    found = decoder_of(model)
    if found is None:
        raise ValueError(
            f"model.module is '{model.module}', which has no family in transformers; only the built-in decoders can "
            "be converted"
        )
    return found
