"""The weights below adapters: every process that computes with the model reads them from the folder `model.weights`.

They are neither exchanged nor saved. A digest of the values lets the syncer refuse an island that has others.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from diloco_jax.training.blockwise import BITS, to_blocks
from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.sharding import put_array
from diloco_jax.training.state import Variables

# Bytes that are hashed at a time.
HASH_BYTES = 1 << 24
# Characters of a digest that are compared and shown.
DIGITS = 32


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
    hashed = hashlib.sha256()
    values = {
        name: put_array(stored, blueprint.frozen[name].sharding) for name, stored in _read(blueprint, hashed.update)
    }
    return Base(values, hashed.hexdigest()[:DIGITS] if values else "")


def base_digest(blueprint: Blueprint) -> str:
    """Return the digest of the frozen variables with the memory of one tensor; raises as `read_base`."""
    hashed = hashlib.sha256()
    count = sum(1 for _ in _read(blueprint, hashed.update))
    return hashed.hexdigest()[:DIGITS] if count else ""


def _read(blueprint: Blueprint, update: Callable[[memoryview], object]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the frozen variables as the model stores them; `update` gets all their bytes."""
    if not blueprint.frozen:
        return
    # The table of public families takes long to read, and only a model with frozen variables needs it.
    from diloco_jax.training.convert.weights import Weights

    model = blueprint.model_config
    for path, value in Weights(model.weights).read(model):
        for name, stored in _as_stored(path, value, blueprint).items():
            flat = np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
            for start in range(0, flat.size, HASH_BYTES):
                update(flat[start : start + HASH_BYTES].data)
            yield name, stored


def _as_stored(path: str, value: np.ndarray, blueprint: Blueprint) -> dict[str, np.ndarray]:
    """Return a float32 array of the folder as the model stores it: in a narrower type, or as codes and scales."""
    if path in blueprint.frozen:
        return {path: value.astype(blueprint.frozen[path].dtype, copy=False)}
    codes, scales = to_blocks(value, BITS[blueprint.model_config.lora.base_dtype])
    return {f"{path}/codes": codes, f"{path}/scales": scales}
