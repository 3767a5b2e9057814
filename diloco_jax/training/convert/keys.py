"""The keys of a config.json: each must be known, and its value of the right kind."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from diloco_jax.training.convert.table import REFUSED

WHOLE_MAX, NAMED_MAX = 2**63, 8
KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "count": ("a whole number of at least 1", lambda value: _whole(value) and value > 0),
    "above": ("a finite number above 0", lambda value: KINDS["number"][1](value) and value > 0),
    "whole": ("a whole number of at least 0", lambda value: _whole(value) and value >= 0),
    "number": ("a finite number", lambda value: _whole(value) or (isinstance(value, float) and math.isfinite(value))),
    "switch": ("true or false", lambda value: isinstance(value, bool)),
    "text": ("a text", lambda value: isinstance(value, str)),
    "object": ("an object", lambda value: isinstance(value, dict)),
    "period": ("a whole number of at least 0, or a text", lambda value: _whole(value) or isinstance(value, str)),
    "numbers": (
        "a list of whole numbers of at least 0",
        lambda value: isinstance(value, list) and all(_whole(one) and one >= 0 for one in value),
    ),
    "factors": (
        "a list of finite numbers above 0",
        lambda value: isinstance(value, list) and all(KINDS["above"][1](one) for one in value),
    ),
    "list": ("a list of texts", lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value)),
}


def check_keys(found: Mapping[str, Any], read: Mapping[str, str], harmless: Collection[str], where: str) -> None:
    """Refuse unknown keys, values of the wrong kind, and values that the decoder does not support.

    Args:
        found: keys with their values.
        read: the keys that decide something, with the kinds of their values (keys of KINDS).
        harmless: keys that may have any value.
        where: the name of the family, and of the part of its config.json.
    """
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
