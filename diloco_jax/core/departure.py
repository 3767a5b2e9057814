"""The departure of an update from CPU memory: one compiled pass encodes a tensor and computes what rounding left out.

`codec.quantize_on_cpu` gives the same bits, ten times more slowly. An island needs Numba for this, so its modules
import this one only when they need it.
"""

import math

import numpy as np
from jaxtyping import Float32
from numba import types

from diloco_jax.core import codec, kernels
from diloco_jax.core.codec import Format
from diloco_jax.core.passes import KINDS, compile_once

_READ, _WRITTEN = types.Array(types.float32, 1, "C", readonly=True), types.Array(types.float32, 1, "C")
_SIGNATURE = (_READ, types.int64, types.Array(types.uint8, 1, "C"), types.UniTuple(types.int64, 2), _WRITTEN)


class Departure:
    """The encoding of updates in one integer format.

    Args:
      format: an integer format.
    """

    def __init__(self, format: Format) -> None:
        assert codec.is_integer(format), f"{format} has no codes"
        self._format: Format = format
        # Compiling takes seconds, and a round must not wait for that.
        compile_once(kernels.depart, _SIGNATURE)

    def encode(self, key: str, update: Float32[np.ndarray, "n"]) -> tuple[memoryview, Float32[np.ndarray, "n"]]:
        """Encode one tensor.

        Args:
          key: name of the tensor, for messages.

        Returns:
          Its bytes for the wire, and update - decoded (float32[n]), computed in float64.

        Raises:
          NotFinite: the update has NaN or infinity.
        """
        codes_at = math.ceil(update.size / codec.BLOCK) * codec.scale_bytes(self._format)
        payload = np.empty(codec.encoded_size([update.shape], self._format), np.uint8)
        left = np.empty(update.size, np.float32)
        source = np.ascontiguousarray(update)
        if not kernels.depart(source, KINDS[self._format], payload, (0, codes_at), left):
            raise codec.NotFinite(f"{key!r} holds NaN or infinity, which {self._format} cannot carry; drop this update")
        return payload.data, left
