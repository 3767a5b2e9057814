"""Checks for numbers that a state must not have: with them, an island's values would be excluded from every merge.

Parameters and the optimizer's arrays are finite. Single numbers and other state may be infinite, such as the best loss
so far, but not NaN.
"""

from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Shaped

from diloco_jax.training.whole_state.moving import MOMENTS, PARAMETERS

# Elements that are looked at in one go, which bounds the memory for the results.
ELEMENTS = 1 << 20


class UnusableState(ValueError):
    """A state that must be neither saved, sent nor loaded; the text names the leaf."""


def check_finite(name: str, array: Shaped[np.ndarray, "..."], rest: Callable[[], None] = lambda: None) -> None:
    """Raise UnusableState if a leaf, or a piece of one, has such numbers; call `rest` between two looks."""
    if not jax.dtypes.issubdtype(array.dtype, np.inexact):
        return
    bad = _not_finite if array.size > 1 and name.startswith((MOMENTS, PARAMETERS)) else np.isnan
    flat = array.reshape(-1)
    for start in range(0, flat.size, ELEMENTS):
        if bad(flat[start : start + ELEMENTS]).any():
            raise UnusableState(f"it is not finite in '{name}'")
        rest()


def _not_finite(values: Shaped[np.ndarray, " n"]) -> Shaped[np.ndarray, " n"]:
    return ~np.isfinite(values)
