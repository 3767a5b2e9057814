"""The arithmetic of the exchange in NumPy; the results have the same bits as those of XLA's programs on CPUs.

XLA computes a product and a sum in one operation that rounds once. Here float64 holds the product exactly, so that the
conversion of the sum to float32 is the only rounding. One exception remains: XLA's quotients are off by one unit in the
last place at times, so a code of int8 or int4 halfway between two whole numbers may be rounded to the other one. That
happens with updates of few digits, as of parameters in 16 bits; the residual then has the difference.
"""

from typing import Any

import numpy as np
from jaxtyping import Float32, Shaped

from diloco_jax.core import codec

DType = np.dtype[Any]
Floats = Float32[np.ndarray, "..."]
Flat = Float32[np.ndarray, "n"]


def as_held(value: Floats, dtype: DType) -> Floats:
    """Round a global value to the parameters' type, and return it as float32."""
    if dtype == np.float32:
        return value
    with np.errstate(over="ignore"):
        return value.astype(dtype).astype(np.float32)


def as_float32(local: Shaped[np.ndarray, "..."]) -> Floats:
    """Return parameters as float32; out of range they become infinite."""
    with np.errstate(over="ignore"):
        return local.astype(np.float32, copy=False)


def blended(local: Shaped[np.ndarray, "..."], value: Floats, alpha: float) -> Shaped[np.ndarray, "..."]:
    """Compute alpha local + (1 - alpha) value in the type of `local`, rounded towards the value.

    The rule is that of training/exchange/exchange.py:_blended: in 16 bits, rounding to the nearest would keep a
    difference of one unit in the last place forever.

    Args:
      local: local parameters.
      value: the global value, as `as_held` returns it.
      alpha: share of the local parameters, above 0 and below 1.
    """
    # NumPy returns scalars for arrays without axes, so the arithmetic is on flat arrays.
    shape, dtype, local, value = local.shape, local.dtype, local.reshape(-1), value.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        difference = (as_float32(local) - value).astype(np.float64)
        exact = (value + np.float64(np.float32(alpha)) * difference).astype(np.float32)
        near = exact.astype(dtype)
        if dtype.itemsize < exact.dtype.itemsize:
            beyond = np.abs(near.astype(np.float32) - value) > np.abs(exact - value)
            near = np.where(beyond, np.nextafter(near, value.astype(dtype)), near)
    return near.reshape(shape)


def rebased(local: Shaped[np.ndarray, "..."], value: Floats, sent: Floats) -> Shaped[np.ndarray, "..."]:
    """Compute value + (local - sent) in the type of `local`; `sent` are the local parameters when they were sent."""
    with np.errstate(over="ignore", invalid="ignore"):
        moved = as_float32(local.reshape(-1)) - sent.reshape(-1)
        return (value.reshape(-1) + moved).astype(local.dtype).reshape(local.shape)


def rounded(update: Flat, format: codec.Format) -> tuple[memoryview, Flat | None]:
    """Encode one tensor's update in a format without codes; integer formats are those of core/departure.py.

    Returns:
      The bytes for the wire, and what rounding left out; None if nothing is rounded.
    """
    rounded = codec.round_elements(np, update, format)
    if format == "float32":
        return codec.as_bytes(rounded), None
    with np.errstate(invalid="ignore"):
        left = update - rounded.astype(np.float32)
    # NaN and infinity are sent unchanged, so nothing is left out.
    return codec.as_bytes(rounded), np.where(np.isfinite(update), left, np.float32(0))
