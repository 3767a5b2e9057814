"""The layers of a config.json that have a sliding window."""

from collections.abc import Mapping, Sequence
from typing import Any

from diloco_jax.training.convert.keys import NAMED_MAX
from diloco_jax.training.convert.rope import FULL, SLIDING
from diloco_jax.training.convert.table import Family
from diloco_jax.training.models.options import LOCAL, DecoderConfig

# Old names of kinds of layers that transformers still accepts.
OLD_KINDS = {"attention": FULL}
LAYERS_MAX = 10_000


def read_layers(keys: Mapping[str, Any], family: Family, name: str) -> dict[str, Any]:
    """Return our arguments for the sliding window and for the layers that have it."""
    window = keys.get("sliding_window")
    if "use_sliding_window" in family.known and not keys.get("use_sliding_window"):
        window = None
    local = _local(keys, window, family, name)
    # With a pattern, transformers builds a window's mask even if no layer has a window.
    if not window and (any(local) or (window is None and family.window == "pattern")):
        raise ValueError(
            f"config.json of {name}: sliding_window is {'off' if window is None else window}, but the model has layers "
            "with a window, and transformers fails; correct sliding_window, use_sliding_window or layer_types"
        )
    if not any(local):
        return {}
    every = 0 if all(local) else local.index(False) + 1
    if local != [every == 0 or (layer + 1) % every > 0 for layer in range(len(local))]:
        words = _listed([SLIDING if each else FULL for each in local])
        raise ValueError(
            f"config.json of {name}: layer_types are {words}; the decoder can give the window to all layers, or to all "
            "except every n-th"
        )
    return {"window": window, "global_every": every}


def write_layers(c: DecoderConfig, family: Family) -> dict[str, Any]:
    """Return the keys of config.json for the layers with a window."""
    found: dict[str, Any] = {}
    local = [c.kind(layer) == LOCAL for layer in range(c.num_layers)]
    if any(local):
        found["sliding_window"] = c.window
        if "use_sliding_window" in family.known:
            found["use_sliding_window"] = True
    elif family.window == "all" and "use_sliding_window" not in family.known:
        # Without the key some of these families have a window.
        found |= {"sliding_window": None} if family.defaults.get("sliding_window") else {}
    patterned = "sliding_window_pattern" in family.known
    # With a pattern that config.json cannot name, layers without a window are named too.
    if family.window in ("later", "pattern") and (any(local) or (family.window == "pattern" and not patterned)):
        found["layer_types"] = [SLIDING if each else FULL for each in local]
    if patterned:
        found["sliding_window_pattern"] = c.global_every or 1
    return found


def _local(keys: Mapping[str, Any], window: int | None, family: Family, name: str) -> list[bool]:
    """Return for each layer whether it has the window: from layer_types, or by the family's rule."""
    count = keys["num_hidden_layers"]
    if count > LAYERS_MAX:
        raise ValueError(f"config.json: num_hidden_layers is {count}; use 1 to {LAYERS_MAX}")
    layers = range(count)
    usual = {
        "never": lambda: [False for _ in layers],
        "all": lambda: [window is not None for _ in layers],
        "later": lambda: [window is not None and layer >= keys["max_window_layers"] for layer in layers],
        "pattern": lambda: [(layer + 1) % keys["sliding_window_pattern"] > 0 for layer in layers],
    }[family.window]
    if "layer_types" not in keys:
        return usual()
    kinds = [OLD_KINDS.get(kind, kind) for kind in keys["layer_types"]]
    if len(kinds) != count or not {SLIDING, FULL}.issuperset(kinds):
        raise ValueError(
            f"config.json of {name}: layer_types are {_listed(kinds)}; there must be {count}, each {FULL} or {SLIDING}"
        )
    local = [kind == SLIDING for kind in kinds]
    if family.window in ("never", "all") and local != usual():
        raise ValueError(
            f"config.json of {name}: layer_types are {_listed(kinds)}, which transformers ignores in this family; "
            "remove them"
        )
    return local


def _listed(kinds: Sequence[str]) -> str:
    more = f" and {len(kinds) - NAMED_MAX} more" if len(kinds) > NAMED_MAX else ""
    return f"{', '.join(ascii(kind)[1:-1][:40] for kind in kinds[:NAMED_MAX])}{more}"
