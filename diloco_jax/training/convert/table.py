"""The table of public families (families.yaml): the row of a family describes its import and its export.

In this package, "ours" is a name of the built-in decoder, and "theirs" a name of the public family.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

_WORDS = yaml.safe_load(Path(__file__).with_name("families.yaml").read_text("utf-8"))
# From our argument to the key of config.json.
SIZES: dict[str, str] = _WORDS["sizes"]
# From our name of an activation to theirs.
ACTIVATIONS: dict[str, str] = _WORDS["activations"]
# For each rope_type, from our argument to its key.
SCALINGS: dict[str, dict[str, str]] = _WORDS["scalings"]
# For each key that is read, the kind of its value (a key of keys.KINDS).
VALUES: dict[str, str] = {key: kind for kind, keys in _WORDS["values"].items() for key in keys}
# The rotary settings' keys with the kinds of their values.
ROPE = {key: VALUES[key] for key in _WORDS["rope"]}
# Keys with the only value that the decoder supports.
REFUSED: dict[str, Any] = _WORDS["refused"]
HARMLESS = frozenset(key for line in _WORDS["harmless"] for key in line)
# From our parameter outside of layers to the name of its tensor.
OUTSIDE: dict[str, str] = _WORDS["outside"]
# The prefix of names in a layer.
LAYER: str = _WORDS["layer"]
# As Family.layer, for files with all experts of a layer in one tensor although the family usually has one for each.
MERGED: dict[str, Any] = _WORDS["merged"]
# For each model_type with a text model inside: the usual family of the text, and the harmless keys beside it.
SEEING: dict[str, dict[str, Any]] = _WORDS["seeing"]


class Family(NamedTuple):
    """The description of a family: how its config.json and its tensors correspond to the decoder."""

    # For the table in docs/models.md: the models of the family, the name of one on the Hub, and what is refused.
    models: str
    example: str
    without: str
    # The class in transformers.
    architecture: str
    # Arguments of our decoder that differ from its defaults.
    args: Mapping[str, Any]
    # From our argument to the key of config.json, in addition to SIZES.
    keys: Mapping[str, str] = {}
    # Further keys that are read.
    read: Sequence[str] = ()
    # From the usual name of a key to the name in this family; `also` has names that are accepted beside the usual one.
    renamed: Mapping[str, str] = {}
    also: Mapping[str, str] = {}
    # For each key, old values and the values that transformers uses instead.
    spellings: Mapping[str, Mapping[str, str]] = {}
    # The values of keys that are missing in config.json.
    defaults: Mapping[str, Any] = {}
    # Keys that transformers does not read in this family.
    ignored: Sequence[str] = ()
    # The layers with sliding_window if config.json has no layer_types: never; all; later (from max_window_layers on);
    # early (below max_window_layers); pattern or typed (all except every n-th); unrotated (without rotary positions).
    window: str = "never"
    # Whether layers may have linear_attention, which is gated DeltaNet. Without layer_types, all layers have it except
    # every full_attention_interval-th.
    linear: bool = False
    # Whether transformers takes the window from the last layer.
    last_full: bool = False
    # From our argument to the key of config.json, in layers without a window.
    full: Mapping[str, str] = {}
    # The layers with rotary positions: all; local (with a window, if any layer has one); listed (no_rope_layers).
    positions: str = "all"
    # The rotary settings: alike (one for all layers); each (one for layers with a window, one for those without);
    # local (as each, but the base of layers with a window is written as rope_local_base_freq).
    rope: str = "alike"
    # Rotary settings of this family only.
    rope_keys: Sequence[str] = ()
    # For one of our arguments that is true or false, those that exist only if it is true.
    switched: Mapping[str, Sequence[str]] = {}
    # The scalings of rotary wavelengths that transformers has for this family.
    scalings: Sequence[str] = tuple(SCALINGS)
    # Whether files may have experts in MXFP4.
    packed: bool = False
    # Names of tensors that differ from the usual ones.
    tensors: Mapping[str, Any] = {}

    @property
    def mixture(self) -> bool:
        """Return whether all models of the family have experts."""
        return "num_experts" in self.keys and not self.switched

    @property
    def names(self) -> dict[str, str]:
        """Return the key of config.json for each of our arguments that has one."""
        return {**SIZES, **self.keys}

    @property
    def known(self) -> dict[str, str]:
        """Return all keys of config.json that decide something, with the kinds of their values."""
        keys = (*SIZES.values(), *_WORDS["read"], *self.keys.values(), *self.renamed.values(), *self.also.values())
        return {key: VALUES[key] for key in (*keys, *self.full.values(), *self.read) if key not in self.ignored}

    @property
    def layer(self) -> dict[str, Any]:
        """Return the tensor's name for each of our parameters in a layer."""
        return {**_WORDS["tensors"], **self.tensors}


FAMILIES = {name: Family(**row) for name, row in _WORDS["families"].items()}
