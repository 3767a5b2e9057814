"""The weights below adapters: every process that computes with the model reads them from the folder `model.weights`.

They are neither exchanged nor saved. A digest of the values lets the syncer refuse an island that has others.
"""

import hashlib
from typing import NamedTuple

import numpy as np

from diloco_jax.training.blockwise import BITS, to_blocks
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.sharding import put_array
from diloco_jax.training.state import Variables

# Bytes that are hashed at a time.
HASH_BYTES = 1 << 24


class Base(NamedTuple):
    """The frozen variables of a model, on its devices."""

    values: Variables
    # A digest of the values as they are stored; "" without frozen variables.
    digest: str


def read_base(blueprint: Blueprint) -> Base:
    """Read the frozen variables of a model, one tensor at a time; nothing is read for a model without any.

    Raises:
      ValueError: the folder is damaged, or belongs to another model.
    """
    model = blueprint.model_config
    if not blueprint.frozen:
        return Base({}, "")
    # The table of public families takes long to read, and only a model with frozen variables needs it.
    from diloco_jax.training.convert.weights import Weights

    values: Variables = {}
    hashed = hashlib.sha256()
    for path, value in Weights(model.weights).read(model):
        for name, stored in _as_stored(path, value, blueprint).items():
            flat = np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
            for start in range(0, flat.size, HASH_BYTES):
                hashed.update(flat[start : start + HASH_BYTES].data)
            values[name] = put_array(stored, blueprint.frozen[name].sharding)
    return Base(values, hashed.hexdigest()[:32])


def _as_stored(path: str, value: np.ndarray, blueprint: Blueprint) -> dict[str, np.ndarray]:
    """Return a float32 array of the folder as the model stores it: in a narrower type, or as codes and scales."""
    if path in blueprint.frozen:
        return {path: value.astype(blueprint.frozen[path].dtype, copy=False)}
    codes, scales = to_blocks(value, BITS[blueprint.model_config.lora.base_dtype])
    return {f"{path}/codes": codes, f"{path}/scales": scales}
