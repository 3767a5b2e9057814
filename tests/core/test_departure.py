"""The compiled encoding of an update against the codec in NumPy, bit for bit."""

from typing import get_args

import numpy as np
import pytest

from diloco_jax.core import codec
from diloco_jax.core.codec import Format
from diloco_jax.core.departure import Departure
from tests.core.merging import code_ties, level_ties

INTEGERS = [format for format in get_args(Format) if codec.is_integer(format)]


def in_numpy(update: np.ndarray, format: Format) -> tuple[bytes, bytes]:
    """Return the bytes for the wire, and update - decoded with a float64 product."""
    codes, scales = codec.quantize_on_cpu(update, format)
    decoded = codec.dequantize_blocks(np, codes, scales.astype(np.float64), format)
    left = (codec.to_blocks(np, update) - decoded).astype(np.float32).reshape(-1)[: update.size]
    return codec.as_bytes(scales).tobytes() + codec.as_bytes(codes).tobytes(), left.tobytes()


@pytest.mark.parametrize("format", INTEGERS)
@pytest.mark.parametrize("size", [0, 1, 127, 255, 256, 257, 1000, 2**16])
def test_bytes_and_residual_are_those_of_numpy(format: Format, size: int) -> None:
    update = np.random.default_rng(size).standard_normal(size, np.float32)
    payload, left = Departure(format).encode("x", update)
    assert (bytes(payload), left.tobytes()) == in_numpy(update, format)


@pytest.mark.parametrize("format", INTEGERS)
def test_ties_zeros_and_small_numbers_are_those_of_numpy(format: Format) -> None:
    edges = np.array([0, -0.0, 1e-31, -1e-40, 127.0, 2.5, 1.5, -0.5, 3e38], np.float32)
    for update in (np.repeat(level_ties()[0], 256), code_ties()[0].reshape(-1), edges, np.zeros(300, np.float32)):
        payload, left = Departure(format).encode("x", update)
        assert (bytes(payload), left.tobytes()) == in_numpy(update, format)


@pytest.mark.parametrize("format", INTEGERS)
@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf])
def test_an_update_that_is_not_finite_is_refused_by_name(format: Format, what: float) -> None:
    update = np.zeros(600, np.float32)
    update[599] = what
    with pytest.raises(codec.NotFinite, match=f"'x' holds NaN or infinity, which {format} cannot carry"):
        Departure(format).encode("x", update)
