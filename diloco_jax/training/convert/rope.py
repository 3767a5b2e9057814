"""Conversion of the rotary settings of a config.json to arguments of the decoder, and back.

transformers writes them as rope_parameters since version 5; earlier versions write rope_theta and rope_scaling.
"""

import math
from collections.abc import Mapping
from typing import Any

from diloco_jax.training.convert.keys import check_keys
from diloco_jax.training.convert.table import ROPE, SCALINGS, VALUES, Family
from diloco_jax.training.models.options import DecoderConfig

SLIDING, FULL = "sliding_attention", "full_attention"
USUAL_THETA = 10_000.0
LENGTH = "original_max_position_embeddings"
BETA = "llama_4_scaling_beta"
FRACTION = "partial_rotary_factor"
# Factors of yarn that differ by less are equal; transformers writes the usual one too.
ROUNDING = 1e-6


def read_rope(keys: Mapping[str, Any], family: Family, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return our arguments for the rotary settings of layers without a window, and of layers with one.

    If config.json has both forms, rope_scaling replaces rope_parameters, as in transformers. In families with separate
    settings for layers with a window, it replaces only single keys.
    """
    new, old = keys.get("rope_parameters", {}), keys.get("rope_scaling", {})
    if family.rope == "alike":
        rope = _checked(old or new, family, name)
        # Other families have this key inside the rotary settings; in transformers the outer one takes precedence.
        if LENGTH in keys:
            rope[LENGTH] = keys[LENGTH]
        settings = _arguments(rope, keys, family, name)
        return settings, settings
    if outer := sorted(key for key in new if key in ROPE and new[key] is not None):
        raise ValueError(
            f"config.json of {name}: rope_parameters has {', '.join(outer)} for all layers, where transformers does "
            f"not read them in this family; move them into {FULL} and {SLIDING}, or remove them"
        )
    check_keys(new, {FULL: "object", SLIDING: "object"}, (), f"{name}, rope_parameters")
    local = _checked(new.get(SLIDING) or {}, family, name)
    usual = keys.get("rope_full", {"rope_type": "default"}) if not new else {"rope_type": "default"}
    full = _checked({**usual, **(new.get(FULL) or {}), **old}, family, name)
    local.setdefault("rope_theta", keys["rope_local_base_freq"])
    if not (full.get("truncate", True) and local.get("truncate", True)):
        raise ValueError(
            f"config.json of {name}: yarn's truncate is false in {FULL} or {SLIDING}, where transformers does not read "
            "it; remove it for the model that transformers computes"
        )
    return _arguments(full, keys, family, name), _arguments(local, keys, family, name)


def write_rope(c: DecoderConfig, full: DecoderConfig, local: DecoderConfig, family: Family) -> dict[str, Any]:
    """Return the keys of config.json for the rotary settings.

    Args:
        c: the options of the model.
        full: the options of a layer without a window, which has rotary positions if any layer has.
        local: the same of a layer with a window.
        family: the family.
    """
    found: dict[str, Any]
    if family.rope == "each" or (family.rope == "local" and local.rope_scaling != "none" and local.window):
        each = {FULL: full, SLIDING: local}
        found = {"rope_parameters": {kind: {"rope_theta": _base(one), **_settings(one)} for kind, one in each.items()}}
        # rope_parameters takes precedence over this key, which a decoder with kinds of layers does not have.
        return found | ({"rope_local_base_freq": _base(local)} if family.rope == "local" else {})
    found = {"rope_theta": _base(full)}
    if family.rope == "local":
        found["rope_local_base_freq"] = c.rope_theta_local or _base(local)
    settings = _settings(full)
    if BETA in family.rope_keys:
        settings |= {BETA: full.query_beta, LENGTH: full.rope_length}
    if full.rope_scaling == "longrope" and LENGTH in family.defaults:
        # In transformers, this key outside of the rotary settings takes precedence over the one inside.
        found[LENGTH] = full.rope_length
    # Some families scale wavelengths if config.json has no settings.
    needed = len(settings) > 1 or "rope_parameters" in family.defaults
    return found | ({"rope_scaling": settings} if needed else {})


def _base(c: DecoderConfig) -> float:
    """Return the base; a layer without positions gets the usual one, because in transformers 0 gives NaN."""
    return c.rope_theta or USUAL_THETA


def _settings(c: DecoderConfig) -> dict[str, Any]:
    """Return the rotary settings of a layer."""
    if c.rope_scaling == "none":
        return {"rope_type": "default"}
    settings = {"rope_type": c.rope_scaling} | {key: getattr(c, ours) for ours, key in SCALINGS[c.rope_scaling].items()}
    settings = {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}
    if c.rope_scaling in ("yarn", "longrope") and c.rope_attention:
        settings["attention_factor"] = c.rope_attention
    if c.rope_scaling == "yarn" and not c.rope_truncate:
        settings["truncate"] = False
    return settings


def _checked(rope: Mapping[str, Any], family: Family, name: str) -> dict[str, Any]:
    """Return the rotary settings of one kind of layers, checked and without nulls."""
    rope = {key: value for key, value in rope.items() if value is not None}
    kind = rope.setdefault("rope_type", rope.get("type", "default"))
    # This check comes first, because each kind has different keys.
    if kind not in ("default", *SCALINGS):
        raise ValueError(f"config.json: rope_type is {kind!r:.80}; the decoder has default, {', '.join(SCALINGS)}")
    if kind not in ("default", *family.scalings):
        raise ValueError(f"config.json of {name}: rope_type is {kind!r}, which transformers does not have for {name}")
    check_keys(rope, {**ROPE, **{key: VALUES[key] for key in family.rope_keys}}, (), f"{name}, rotary settings")
    if rope.get("type", kind) != kind:
        raise ValueError(f"config.json of {name}: rope_type {kind!r} and type {rope['type']!r} differ; remove type")
    return rope


def _arguments(rope: Mapping[str, Any], keys: Mapping[str, Any], family: Family, name: str) -> dict[str, Any]:
    """Return our arguments for checked rotary settings."""
    kind = rope["rope_type"]
    settings: dict[str, Any] = {"rope_theta": rope.get("rope_theta", keys.get("rope_theta", USUAL_THETA))}
    if BETA in rope:
        settings |= {"query_beta": rope[BETA], "rope_length": rope.get(LENGTH, keys["max_position_embeddings"])}
    # Most families do not read the share of a head that is rotated, if wavelengths are not scaled.
    if FRACTION in family.known:
        settings["rope_fraction"] = rope.get(FRACTION, keys.get(FRACTION, 1.0))
    if kind == "default":
        return settings
    rope = {LENGTH: keys["max_position_embeddings"], **rope}
    settings["rope_scaling"] = kind
    if kind == "proportional":
        if rope.get("factor", 1) != 1:
            raise ValueError(f"config.json of {name}: rope is {rope}; the decoder supports only factor 1.0")
        rope.setdefault(FRACTION, 1.0)
    elif FRACTION not in family.known and rope.get(FRACTION, 1) != 1:
        raise ValueError(f"config.json: rope is {rope}; the decoder turns all of a head, partial_rotary_factor 1.0")
    if kind == "yarn":
        rope.setdefault("factor", keys["max_position_embeddings"] / rope[LENGTH])
        rope = {"beta_slow": 1, "beta_fast": 32, **rope}
        settings |= {"rope_attention": _attention_factor(rope, name), "rope_truncate": rope.get("truncate", True)}
    if kind == "longrope":
        # If the longest text did not grow, the factor is 1.
        rope.setdefault("factor", max(1.0, keys["max_position_embeddings"] / rope[LENGTH]))
        if rope.get("attention_factor", 1) <= 0:
            raise ValueError(f"config.json of {name}: attention_factor is {rope['attention_factor']}; use more than 0")
        settings["rope_attention"] = float(rope.get("attention_factor", 0.0))
    return settings | {ours: rope[theirs] for ours, theirs in SCALINGS[kind].items()}


def _attention_factor(rope: Mapping[str, Any], name: str) -> float:
    """Return yarn's factor of queries and keys as our rope_attention: 0 if it is the usual one."""

    def usual(scale: float = 1.0) -> float:
        return 0.1 * scale * math.log(max(rope["factor"], 1)) + 1

    factor = rope.get("attention_factor")
    if factor is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        factor = usual(rope["mscale"]) / usual(rope["mscale_all_dim"])
    if factor is not None and factor <= 0:
        raise ValueError(f"config.json of {name}: yarn's attention_factor is {factor}; it must be above 0")
    return 0.0 if factor is None or abs(factor - usual()) <= ROUNDING else float(factor)
