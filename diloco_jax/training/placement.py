"""From NumPy to devices, also where some of the devices belong to other processes: each puts what is its own."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array, Shaped


def put_array(value: Shaped[np.ndarray, "..."], sharding: Sharding) -> Shaped[Array, "..."]:
    """Copy a whole array to the devices; returns at once.

    Args:
      value: the same on every process that has devices of the sharding; may be written to afterwards.
      sharding: how the array lies.
    """
    # Copies of our own: on CPU device_put goes on reading NumPy's memory, may_alias=False or not; steps write to it.
    if sharding.is_fully_addressable:
        placed: Shaped[Array, "..."] = jax.device_put(np.array(value), sharding)
        return placed
    # device_put would compare the values of all processes, which is a collective.
    with jax.transfer_guard("allow"):  # a transfer that was asked for, which JAX does not see
        return jax.make_array_from_callback(value.shape, sharding, lambda index: np.array(value[index]))
