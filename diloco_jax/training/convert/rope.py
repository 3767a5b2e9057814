"""The rotary settings of a config.json.

transformers writes them as rope_parameters since version 5, and as rope_theta and rope_scaling before.
"""

import math
from collections.abc import Mapping
from typing import Any

from diloco_jax.training.convert.keys import check_keys
from diloco_jax.training.convert.table import ROPE, SCALINGS, Family
from diloco_jax.training.models.options import DecoderConfig

SLIDING, FULL = "sliding_attention", "full_attention"
USUAL_THETA = 10_000.0


def read_rope(keys: Mapping[str, Any], family: Family, name: str) -> dict[str, Any]:
    """Return our arguments for the rotary settings.

    If config.json has both forms, rope_scaling replaces rope_parameters, as in transformers; in families with settings
    for each kind of layers it replaces only single keys.
    """
    new, old = keys.get("rope_parameters", {}), keys.get("rope_scaling", {})
    if family.rope == "alike":
        rope = _checked(old or new, family, name)
        # Other families have this key inside the rotary settings; in transformers the outer one takes precedence.
        if "original_max_position_embeddings" in keys:
            rope["original_max_position_embeddings"] = keys["original_max_position_embeddings"]
        # Most families do not read this key for unscaled wavelengths.
        fraction = rope.get("partial_rotary_factor", keys.get("partial_rotary_factor", 1))
        if "partial_rotary_factor" in family.known and fraction != 1:
            raise ValueError(
                f"config.json of {name}: partial_rotary_factor is {fraction}; the decoder turns all of a head"
            )
        return _arguments(rope, keys)
    check_keys(new, {FULL: "object", SLIDING: "object"}, (), f"{name}, rope_parameters")
    local = _checked(new.get(SLIDING) or {}, family, name)
    if local["rope_type"] != "default":
        raise ValueError(f"config.json: layers with a window have rope {local}; the decoder does not scale theirs")
    rope = _checked({"rope_type": "default", **(new.get(FULL) or {}), **old}, family, name)
    return {"rope_theta_local": local.get("rope_theta", keys["rope_local_base_freq"]), **_arguments(rope, keys)}


def write_rope(c: DecoderConfig) -> dict[str, Any]:
    """Return the keys of config.json for a decoder's rotary settings, as transformers 4 writes them."""
    found: dict[str, Any] = {"rope_theta": c.rope_theta}
    if c.rope_scaling != "none":
        scaling = {key: getattr(c, ours) for ours, key in SCALINGS[c.rope_scaling].items()}
        found["rope_scaling"] = {"rope_type": c.rope_scaling, "factor": c.rope_factor, **scaling}
    return found


def _checked(rope: Mapping[str, Any], family: Family, name: str) -> dict[str, Any]:
    """Return the rotary settings of one kind of layers, checked and without nulls."""
    rope = {key: value for key, value in rope.items() if value is not None}
    kind = rope.setdefault("rope_type", rope.get("type", "default"))
    # This check comes first, because each kind has different keys.
    if kind not in ("default", *SCALINGS):
        raise ValueError(f"config.json: rope_type is {kind!r:.80}; the decoder has default, {', '.join(SCALINGS)}")
    if kind not in ("default", *family.scalings):
        raise ValueError(f"config.json of {name}: rope_type is {kind!r}, which transformers does not have for {name}")
    check_keys(rope, ROPE, (), f"{name}, rotary settings")
    if rope.get("type", kind) != kind:
        raise ValueError(f"config.json of {name}: rope_type {kind!r} and type {rope['type']!r} differ; remove type")
    return rope


def _arguments(rope: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return our arguments for checked rotary settings."""
    kind = rope["rope_type"]
    found: dict[str, Any] = {"rope_theta": rope.get("rope_theta", keys.get("rope_theta", USUAL_THETA))}
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
