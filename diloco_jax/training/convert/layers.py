"""The kinds of layers in a config.json: which have a window, rotary positions, a mixture, separate keys, no attention.

Import describes each layer by our arguments, and then the model by as few words as possible (`_as_arguments`). Export
reads the arguments of each layer again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from diloco_jax.training.convert.keys import NAMED_MAX, check_keys
from diloco_jax.training.convert.rope import FULL, SLIDING, read_rope, write_rope
from diloco_jax.training.convert.table import Family
from diloco_jax.training.models.options import LAYERS_MAX, DecoderConfig

# The kind of layers that have gated DeltaNet instead of attention.
LINEAR = "linear_attention"
# Old names of kinds of layers that transformers still accepts.
OLD_KINDS = {"attention": FULL}
# Keys of per_layer_config with our arguments.
PER_LAYER = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}
# Arguments that do nothing if rotary wavelengths are not scaled, and the base.
OF_SCALING = {
    "rope_theta", "rope_scaling", "rope_factor", "rope_length", "rope_slow", "rope_fast", "rope_attention",
    "rope_truncate", "rope_short", "rope_long",
}  # fmt: skip
# The arguments of one layer.
Layer = dict[str, Any]


def read_layers(keys: Mapping[str, Any], args: Mapping[str, Any], family: Family, name: str) -> dict[str, Any]:
    """Return our arguments for the options that may differ between layers.

    Args:
        keys: the checked keys of config.json.
        args: our arguments that keys give to all layers.
        family: the family.
        name: its name.
    """
    window = keys.get("sliding_window")
    if "use_sliding_window" in family.known and not keys.get("use_sliding_window"):
        window = None
    local = _local(keys, window, family, name)
    # With a pattern, transformers builds a window's mask even if no layer has a window.
    needed = family.window in ("pattern", "typed") and family.positions == "all"
    if window == 0 and any(local):
        raise ValueError(
            f"config.json of {name}: sliding_window is 0, so that no token would see itself; correct it, or use null "
            "for layers without a window"
        )
    if window is None and (any(local) or needed):
        raise ValueError(
            f"config.json of {name}: sliding_window is off, but the model has layers "
            "with a window, and transformers fails; correct sliding_window, use_sliding_window or layer_types"
        )
    full_rope, local_rope = read_rope(keys, family, name)
    layers = [{**local_rope, "window": window} if each else {**full_rope, "window": 0} for each in local]
    rotated, of_one = _rotated(local, window, keys, family, name), _per_layer_config(keys, name)
    linear = _linear(keys, family, name)
    for number, layer in enumerate(layers):
        if linear[number]:
            layer["mixer"] = "delta"
        if not rotated[number]:
            layer["rope_theta"] = 0.0
        if _is_dense(number, keys, family):
            layer |= {"num_experts": 0, "shared_dim": 0, "mlp_dim": keys["intermediate_size"]}
        if not local[number]:
            layer |= _of_full_layers(keys, family)
        layer |= of_one.get(number, {})
    _share(layers, local, keys, family, name)
    usual = {**asdict(DecoderConfig()), **args}
    every = sorted({key for layer in layers for key in layer})
    layers = [{key: layer.get(key, usual[key]) for key in every} for layer in layers]
    return _as_arguments(layers, full_rope, local_rope, family)


def write_layers(c: DecoderConfig, family: Family) -> dict[str, Any]:
    """Return the keys of config.json for the options that may differ between layers."""
    layers = of_layers(c)
    # Gated DeltaNet has neither positions nor a window.
    attending = [layer for layer in layers if layer.mixer == "attention"] or layers
    windows, plain = [layer for layer in attending if layer.window], [layer for layer in attending if not layer.window]
    rotated = [layer for layer in attending if layer.rope_theta] or attending
    alike = rotated[0] if family.rope == "alike" else None
    found = write_rope(c, alike or (plain or [c])[0], alike or (windows or attending)[0], family)
    if windows:
        found["sliding_window"] = windows[0].window
        if "use_sliding_window" in family.known:
            found["use_sliding_window"] = True
    elif (family.window == "all" or family.positions == "local") and "use_sliding_window" not in family.known:
        # Without the key some of these families have a window.
        found |= {"sliding_window": None} if family.defaults.get("sliding_window") else {}
    patterned = family.window == "pattern" and "sliding_window_pattern" in family.known
    # If config.json cannot name the pattern, layers without a window are named too.
    if family.window not in ("never", "all") and (windows or (family.window in ("pattern", "typed") and not patterned)):
        found["layer_types"] = [SLIDING if layer.window else FULL for layer in layers]
    if patterned:
        found["sliding_window_pattern"] = c.global_every or 1
    if family.linear:
        found["layer_types"] = [LINEAR if layer.mixer == "delta" else FULL for layer in layers]
    if family.positions == "listed":
        found["no_rope_layers"] = [int(layer.rope_theta > 0) for layer in layers]
    dense = [number for number, layer in enumerate(layers) if not layer.num_experts]
    if "mlp_only_layers" in family.known and dense:
        found |= {"mlp_only_layers": dense, "intermediate_size": layers[dense[0]].mlp_dim}
    for ours, theirs in family.full.items():
        found[theirs] = getattr((plain or attending)[0], ours)
    if "num_kv_shared_layers" in family.known:
        shared = [layer for layer in layers if layer.kv_from]
        found["num_kv_shared_layers"] = len(shared)
        found["use_double_wide_mlp"] = any(layer.mlp_dim != layers[0].mlp_dim for layer in shared)
    return found


def of_layers(c: DecoderConfig) -> list[DecoderConfig]:
    """Return the options of each layer."""
    kinds = [c.kind(layer) for layer in range(c.num_layers)]
    options = {kind: c.of_kind(kind) for kind in {*kinds}}
    return [options[kind] for kind in kinds]


def _local(keys: Mapping[str, Any], window: int | None, family: Family, name: str) -> list[bool]:
    """Return for each layer whether it has the window: from layer_types, or by the family's rule."""
    count = keys["num_hidden_layers"]
    if count > LAYERS_MAX:
        raise ValueError(f"config.json: num_hidden_layers is {count}; use 1 to {LAYERS_MAX}")
    if family.linear:
        return [False] * count
    layers, period = range(count), keys.get("sliding_window_pattern", 0)
    usual = {
        "never": lambda: [False for _ in layers],
        "all": lambda: [window is not None for _ in layers],
        "later": lambda: [window is not None and layer >= keys["max_window_layers"] for layer in layers],
        "early": lambda: [bool(window) and layer % 2 == 0 and layer < keys["max_window_layers"] for layer in layers],
        "pattern": lambda: [(layer + 1) % period > 0 for layer in layers],
        "typed": lambda: [(layer + 1) % period > 0 for layer in layers],
        "unrotated": lambda: [window is not None and not each for each in _rotated([], window, keys, family, name)],
    }[family.window]
    if "layer_types" not in keys:
        unclear = not isinstance(period, int) or period < 1 or (family.window == "typed" and window is None)
        if family.window in ("pattern", "typed") and unclear:
            raise ValueError(
                f"config.json of {name} lacks layer_types, and sliding_window {window} with sliding_window_pattern "
                f"{period!r:.80} does not replace them; add layer_types"
            )
        local = usual()
    else:
        kinds = _layer_types(keys, SLIDING, name)
        local = [kind == SLIDING for kind in kinds]
        if family.window in ("never", "all") and local != usual():
            raise ValueError(
                f"config.json of {name}: layer_types are {_listed(kinds)}, which transformers ignores in this "
                "family; remove them"
            )
    # In such a family, transformers gives the last layer no window, whatever config.json has.
    return [*local[:-1], False] if family.last_full else local


def _linear(keys: Mapping[str, Any], family: Family, name: str) -> list[bool]:
    """Return for each layer whether it has gated DeltaNet instead of attention."""
    layers = range(keys["num_hidden_layers"])
    if not family.linear:
        return [False for _ in layers]
    if "layer_types" in keys:
        return [kind == LINEAR for kind in _layer_types(keys, LINEAR, name)]
    return [(layer + 1) % keys["full_attention_interval"] > 0 for layer in layers]


def _layer_types(keys: Mapping[str, Any], other: str, name: str) -> list[str]:
    """Return the kind of each layer from layer_types: full attention, or the other one that the family has."""
    count, kinds = keys["num_hidden_layers"], [OLD_KINDS.get(kind, kind) for kind in keys["layer_types"]]
    if len(kinds) != count or not {other, FULL}.issuperset(kinds):
        raise ValueError(
            f"config.json of {name}: layer_types are {_listed(kinds)}; there must be {count}, each {FULL} or {other}"
        )
    return kinds


def _rotated(
    local: Sequence[bool], window: int | None, keys: Mapping[str, Any], family: Family, name: str
) -> list[bool]:
    """Return for each layer whether it has rotary positions."""
    count = keys["num_hidden_layers"]
    if family.positions == "local":
        return [window is None or each for each in local]
    if family.positions == "all":
        return [True] * count
    listed = keys.get("no_rope_layers", [(layer + 1) % keys["no_rope_layer_interval"] for layer in range(count)])
    if len(listed) < count:
        raise ValueError(f"config.json of {name}: no_rope_layers has {len(listed)} layers; there must be {count}")
    return [bool(each) for each in listed[:count]]


def _is_dense(layer: int, keys: Mapping[str, Any], family: Family) -> bool:
    """Return whether a layer of a model with mixtures has an MLP instead."""
    if "mlp_only_layers" not in family.known:
        return False
    return layer in keys.get("mlp_only_layers", []) or (layer + 1) % keys.get("decoder_sparse_step", 1) > 0


def _per_layer_config(keys: Mapping[str, Any], name: str) -> dict[int, Layer]:
    """Return the arguments that per_layer_config gives to single layers, by their numbers."""
    found, where = keys.get("per_layer_config", {}), f"{name}, per_layer_config"
    # transformers writes the numbers with leading zeros.
    check_keys(found, {key: "object" for key in found if str(key).isdecimal()}, (), where)
    for options in found.values():
        check_keys(options, dict.fromkeys(PER_LAYER, "count"), (), where)
    return {int(key): {PER_LAYER[theirs]: options[theirs] for theirs in options} for key, options in found.items()}


def _of_full_layers(keys: Mapping[str, Any], family: Family) -> Layer:
    """Return the arguments that only layers without a window have."""
    found = {ours: keys[theirs] for ours, theirs in family.full.items() if theirs in keys}
    if not found.get("keys_as_values"):
        # Only if values are keys, transformers reads their number.
        found.pop("num_kv_heads", None)
    # These keys are read from per_layer_config if it is there.
    return {ours: found[ours] for ours in found if "per_layer_config" not in keys or ours not in PER_LAYER.values()}


def _share(layers: list[Layer], local: Sequence[bool], keys: Mapping[str, Any], family: Family, name: str) -> None:
    """Give the last num_kv_shared_layers layers the number of the layer whose keys and values they use."""
    if "num_kv_shared_layers" not in family.known:
        return
    first = len(layers) - keys.get("num_kv_shared_layers", 0)
    latest = {local[number]: number for number in range(first)}
    for number in range(max(first, 0), len(layers)):
        if local[number] not in latest:
            raise ValueError(
                f"config.json of {name}: num_kv_shared_layers is {len(layers) - first}, so that layer {number} has "
                "no earlier layer of its kind"
            )
        layers[number]["kv_from"] = latest[local[number]]
        if keys.get("use_double_wide_mlp"):
            layers[number]["mlp_dim"] = 2 * keys["intermediate_size"]


def _as_arguments(layers: list[Layer], full_rope: Layer, local_rope: Layer, family: Family) -> dict[str, Any]:
    """Return the model's arguments for its layers: one set of options, a window with global_every, or kinds."""
    same = {key: value for key, value in layers[0].items() if all(layer[key] == value for layer in layers)}
    local = [layer["window"] > 0 for layer in layers]
    full, windowed = layers[local.index(False) if False in local else 0], layers[local.index(True) if any(local) else 0]
    period = local.index(False) + 1 if False in local and any(local) else 0
    differ = {key for key in full if windowed[key] != full[key]} - {"window"}
    if all(layer == (windowed if each else full) for layer, each in zip(layers, local, strict=True)) and (
        local == [period > 0 and (layer + 1) % period > 0 for layer in range(len(layers))] or len(same) == len(full)
    ):
        # Layers with a window may have another base, but no scaling.
        unscaled = (
            local_rope.get("rope_scaling", "none") == "none" and local_rope["rope_theta"] > 0 < full["rope_theta"]
        )
        if unscaled and differ <= OF_SCALING and (differ or family.rope == "local"):
            theta = {"rope_theta_local": local_rope["rope_theta"]}
            return {**full, **full_rope, **theta, "window": windowed["window"], "global_every": period}
        if not differ:
            return {**full, "rope_theta_local": 0.0, "window": windowed["window"], "global_every": period}
    # Each kind of layers has its own window, and all of its rotary settings, because these are checked together.
    own = {"window"} if same.get("window") else set[str]()
    own |= OF_SCALING if not OF_SCALING & full.keys() <= same.keys() else set()
    same = {key: value for key, value in same.items() if key not in own}
    return {**same, "rope_theta_local": 0.0, **_as_kinds(layers, same)}


def _as_kinds(layers: list[Layer], same: Layer) -> dict[str, Any]:
    """Return the arguments `pattern` and `kinds` of layers that differ."""
    differ = [{key: value for key, value in layer.items() if key not in same} for layer in layers]

    def name_of(layer: Layer) -> str:
        words = []
        if "mixer" in layer:
            words.append(layer["mixer"])
        if "window" in layer:
            words.append("local" if layer["window"] else "global")
        if "rope_theta" in layer and any(other.get("rope_theta") == 0 for other in differ):
            words.append("rope" if layer["rope_theta"] else "nope")
        if "num_experts" in layer:
            words.append("sparse" if layer["num_experts"] else "dense")
        if layer.get("kv_from", "") != "":
            words.append("shared")
        return "_".join(words) or "layer"

    kinds: dict[str, Layer] = {}
    pattern = []
    for layer in differ:
        options = {**layer, "kv_from": name_of(differ[layer["kv_from"]])} if layer.get("kv_from", "") != "" else layer
        name, number = name_of(layer), 2
        while kinds.setdefault(name, options) != options:
            name, number = f"{name_of(layer)}_{number}", number + 1
        pattern.append(name)
    period = next(
        p for p in range(1, len(pattern) + 1) if all(pattern[i] == pattern[i % p] for i in range(len(pattern)))
    )
    return {"pattern": pattern[:period], "kinds": kinds}


def _listed(kinds: Sequence[str]) -> str:
    more = f" and {len(kinds) - NAMED_MAX} more" if len(kinds) > NAMED_MAX else ""
    return f"{', '.join(ascii(kind)[1:-1][:40] for kind in kinds[:NAMED_MAX])}{more}"
